"""What seventy billion parameters in four bits take on two GPUs, by plan."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")
def test_seventy_billion_parameters_fit_on_two_gpus_of_24_gib() -> None:
    """As the page says, by cause: the base in NF4, adapters, one sequence of 2048 tokens, checkpoints."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from benchmarks.quantised.dry_run import GIB, planned, row

    plan = planned(2, prefetch_depth=0)
    assert plan.peak_bytes <= 23.5 * GIB
    page = (Path(__file__).parents[2] / "docs" / "quantised.md").read_text()
    assert f"| {' | '.join(row(plan, 2, prefetch_depth=0))} |" in page
