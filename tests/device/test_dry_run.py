"""Steps of models that no machine here could hold: bytes equal to docs/memory.md, rounded as CUDA rounds; the host never waits."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.support.footprint import Formula

SCALAR = 512  # bytes that the allocator gives to one element
SEEDS = 2 * SCALAR  # of a block's attention: flash saves its generator's seed and offset, dropout or not
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("size", "ranks", "depth"),
    [("tiny", 2, 0), ("tiny", 3, 1), ("tiny", 64, 2), ("tiny", 64, 3), slow("7b", 64, 1), slow("70b", 1024, 1)],
)
def test_dry_run(size: str, ranks: int, depth: int) -> None:
    from tests.device.dry_run import SIZES, DryRun, alone

    with alone(ranks):
        run = DryRun(SIZES[size], ranks, depth)
        formula, count = run.formula, len(run.layers)
        assert run.now == formula.chunks
        run.step(0)
        empty, steady = run.step(0, may_wait=False), run.step(1, may_wait=False)
        del run
    told = formula.unit.of(16 * ranks, 1)  # what ranks have told each other, from the beginning of a forward to clipping
    held, landed = formula.chunks + 2 * sum(formula.S), sum(formula.G)
    during = held + told
    points = {
        **{f"forward of {i}": during + formula.forward_of(i) + (i - 1) * SEEDS for i in range(1, count - 1)},
        "between": during + formula.between() + SCALAR + (count - 2) * SEEDS,  # and the loss
        **{f"backward of {i}": during + formula.backward_of(i, accumulating=False) + 2 * SCALAR + i * SEEDS for i in range(1, count - 1)},
        "after backward": during + landed,
        "after the step": held + landed,
        "after zero_grad": held,
    }
    assert {name: empty.points[name] for name in points} == points
    peak = max(formula.peak_of_backward_of(i, accumulating=False) + min(i, count - 2) * SEEDS for i in range(count))
    norm = formula.unit.of(SIZES[size].shape.hidden, 4)  # torch's RMSNorm sums its weight's gradient in fp32
    # by then the loss's gradient may be used up, or the block's own seeds
    allowed = {more - less for more in (0, norm) for less in (0, SCALAR, SEEDS)}
    assert empty.peak_of_backward - (during + peak + 2 * SCALAR) in allowed
    for point in ("after backward", "after the step", "after zero_grad"):
        assert steady.points[point] == points[point]
    assert steady.transfers == {"all_gather": 2 * count - 2, "reduce_scatter": count}
    sent = Formula(ranks, depth, sizes=formula.sizes, unit=formula.unit._replace(rounded_to=1))
    assert steady.moved == {"all_gather": 2 * sum(sent.F) - sent.F[-1] - sent.F[0], "reduce_scatter": sum(sent.FG)}
    assert not steady.waits
    if size != "tiny":
        figures = [held, during + landed, max(v for k, v in points.items() if k.startswith("forward")), empty.peak_of_backward]
        page = (Path(__file__).parents[2] / "docs/memory.md").read_text()
        assert not [figure for figure in figures if f"| {figure / 1e9:.3f} GB " not in page]
        assert not [kind for kind, moved in steady.moved.items() if f"| {steady.transfers[kind]}, {moved / 1e9:.2f} GB " not in page]
