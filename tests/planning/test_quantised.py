"""Plans for a base in four bits: one slice that is decoded stands for all, and what seventy billion parameters take on two GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import states_of
from zero3.planning.trace import Trace
from zero3.planning.work import Work
from zero3.quantized.codec import SLICE_NUMEL


class Wide(nn.Module):
    """A matrix has two slices and a half."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 1300), nn.Linear(1300, 2048)) for _ in range(3))
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("0.bias"))
        assert 2 * SLICE_NUMEL < 2048 * 1300

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def traced(one_slice: bool, kind: Any) -> Trace:
    with torch.device("meta"):
        model = Wide()

    def loss(model: nn.Module, batch: int, sequence: int) -> Tensor:
        return model(torch.empty(batch, sequence, 2048, device="meta")).sum()  # type: ignore[no-any-return]

    policy = zero3.ShardingPolicy(quantize=kind)
    trace = Trace(model, ranks=2, policy=policy, device="cuda", optimizer=torch.optim.SGD, loss=loss)
    if not one_slice:
        for codec in {p.sites.known.codec for s in states_of(trace.model) for p in s.parameters if p.chunk.read_only}:  # type: ignore[attr-defined]
            codec.choose_slices(iter)
    return trace


@pytest.mark.parametrize("kind", [zero3.NF4(), zero3.Float8(), zero3.MXFP4(), zero3.Int8()], ids=lambda kind: kind.name)
def test_one_slice_that_is_decoded_stands_for_all(kind: Any) -> None:
    short, full = traced(True, kind), traced(False, kind)
    assert [(m.name, m.peak, m.by_cause) for m in short.measure(1, 16)] == [(m.name, m.peak, m.by_cause) for m in full.measure(1, 16)]
    found, expected = short.events(1, 16), full.events(1, 16)

    def total(events: list[Any], what: str) -> int:
        return sum(getattr(event, what) for event in events if isinstance(event, Work))

    assert total(found, "flops") == total(expected, "flops")
    assert total(found, "nbytes") == pytest.approx(total(expected, "nbytes"), rel=0.02)
    assert total(found, "kernels") == pytest.approx(total(expected, "kernels"), rel=0.2)  # the half slice has as many as a whole one
    assert [event for event in found if not isinstance(event, Work)] == [event for event in expected if not isinstance(event, Work)]


@pytest.mark.slow
def test_seventy_billion_parameters_fit_on_two_gpus_of_24_gib() -> None:
    """As the page says, by cause: the base in NF4, adapters, one sequence of 2048 tokens, checkpoints."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from benchmarks.quantised.dry_run import GIB, planned, row

    plan = planned(2, prefetch_depth=0)
    assert plan.peak_bytes <= 23.5 * GIB
    page = (Path(__file__).parents[2] / "docs" / "quantised.md").read_text()
    assert f"| {' | '.join(row(plan, 2, prefetch_depth=0))} |" in page
