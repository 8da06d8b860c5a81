"""The example with moments in eight bits: `make finetune ARGS="--optimizer adamw_8bit"`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.test_finetune import SMALL, run_in_two_processes

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make low-bit")


@pytest.mark.slow
def test_moments_in_eight_bits_learn_as_well_in_a_quarter_of_the_memory(tmp_path: Path) -> None:
    found = run_in_two_processes(
        tmp_path, {name: [*SMALL, "--steps", 20, "--device", "cpu", "--optimizer", name] for name in ("adamw", "adamw_8bit")}
    )
    plain, low = (found[name].summary for name in ("adamw", "adamw_8bit"))
    assert low["losses"][0] == plain["losses"][0] and low["losses"] != plain["losses"]
    assert low["held_out_loss_after"] == pytest.approx(plain["held_out_loss_after"], abs=0.05)
    assert low["held_out_loss_after"] < low["held_out_loss_before"] - 0.5
    held, whole = (sum(memory["optimizer"] for memory in each["memory_per_rank"]) for each in (low, plain))
    assert held < 0.35 * whole
