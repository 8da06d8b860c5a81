"""The soak itself, for a few seconds: every kind of fault is survived, and what would be a leak is called one."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from tests import soak
from tests.support.processes import Rank, on_ranks
from tests.support.soak_faults import FAULTS, MICRO_BATCH, STEP
from tests.support.soak_nights import DAMAGED, FULL, KILLED, STUCK, nights

STEPS = 1 + len(MICRO_BATCH)


def one_of_each(rank: Rank) -> dict[str, Any]:
    """Every kind of fault: once in the first micro-batch of a step and once in the second, whose failure must not take the first's."""
    trainer = soak.Trainer(rank, 0)
    kinds = {tuple(MICRO_BATCH): iter([fault for kind in [*MICRO_BATCH] * 2 for fault in (kind, None)]), STEP: iter(STEP)}
    trainer._draw = lambda these, chance: next(kinds[these], None)  # type: ignore[method-assign]
    for _ in range(STEPS):
        trainer.step()
    usage = soak.used()
    return {
        "losses": trainer.losses,
        "counts": trainer.counts,
        "again": trainer.again,
        "usage": {"warm": usage, "end": usage},
        "seconds": 1,
    }


@pytest.mark.slow
def test_every_kind_of_fault_is_survived_and_the_losses_are_those_of_an_undisturbed_run() -> None:
    disturbed = on_ranks(2, one_of_each, debug="OFF")
    calm = on_ranks(2, soak.train, None, 0.0, STEPS, debug="OFF")
    report, well = soak.verdict(disturbed, calm)
    assert well, report
    assert f"| together | {2 * len(MICRO_BATCH) + len(STEP)} | {2 * len(MICRO_BATCH) + len(STEP)} |" in report
    assert all(f"| {kind} | " in report for kind in FAULTS)


@pytest.mark.slow
def test_a_run_of_bad_nights_ends_with_the_losses_of_an_undisturbed_run() -> None:
    report, well = nights(0.0, 0)
    assert well, report
    assert all(f"| {how} | 1 |" in report for how in (KILLED, STUCK, FULL)) and f"| {DAMAGED} | " in report


def run(**changes: Any) -> list[dict[str, Any]]:
    usage = {"resident kB": 1000, "objects": 50, "tensors": 3, "file descriptors": 4, "kB for other ranks": 9}
    end = {name: usage[name] + changes.get(name, 0) for name in usage}
    counts = {f"{what}: {FAULTS[0]}": 1 for what in ("injected", "survived")} | changes.get("counts", {})
    losses = array("d", [3.0, changes.get("loss", 2.0)])
    return [{"losses": losses, "counts": counts, "again": 1, "usage": {"warm": usage, "end": end}, "seconds": 1.0}]


def test_what_must_not_pass() -> None:
    assert soak.verdict(run(), run())[1]
    assert soak.verdict(run(**{"resident kB": 3999, "objects": 99, "kB for other ranks": 200}), run())[1]
    for leak in ({"resident kB": 4001}, {"objects": 101}, {"tensors": 1}, {"file descriptors": 1}, {"kB for other ranks": 201}):
        report, well = soak.verdict(run(**leak), run())
        assert not well
        assert f"Grown: rank 0: {next(iter(leak))}." in report
    assert not soak.verdict(run(loss=2.0 + 1e-15), run())[1]
    assert not soak.verdict(run(counts={f"survived: {FAULTS[0]}": 0}), run())[1]
