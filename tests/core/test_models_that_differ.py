"""Models that rank 0 and rank 1 each build, and that differ: the same named error on every rank, with nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.core.test_disagreement import Refused, refused
from tests.support.processes import PROMPT, Rank, on_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential


class Named(nn.Module):
    def __init__(self, *names: str, shape: tuple[int, ...] = (3,), dtype: torch.dtype = torch.float32, frozen: bool = False) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=not frozen))


def _buffered(size: int) -> nn.Module:
    module = Named("a")
    module.register_buffer("seen", torch.zeros(size))
    return module


def _tied(tie: bool) -> nn.Module:
    module = Named("a", "b")
    if tie:
        module.b = module.a
    return module


DIFFERENCES: dict[str, tuple[Callable[[], object], Callable[[], object], tuple[str, ...]]] = {
    "name": (lambda: Zero3Layer(Named("a")), lambda: Zero3Layer(Named("b")), ("parameter a", "parameter b")),
    "order of names": (lambda: Zero3Layer(Named("a", "b")), lambda: Zero3Layer(Named("b", "a")), ("parameter a", "parameter b")),
    "number": (lambda: Zero3Layer(Named("a", "b")), lambda: Zero3Layer(Named("a")), ("rank 0: parameter b", "rank 1: nothing")),
    "shape of equal size": (
        lambda: Zero3Layer(Named("a", shape=(2, 3))),
        lambda: Zero3Layer(Named("a", shape=(3, 2))),
        (r"rank 0: parameter a: shape \(2, 3\)", r"rank 1: parameter a: shape \(3, 2\)"),
    ),
    "dtype": (lambda: Zero3Layer(Named("a")), lambda: Zero3Layer(Named("a", dtype=torch.float64)), ("float32", "float64")),
    "requires_grad": (
        lambda: Zero3Layer(Named("a")),
        lambda: Zero3Layer(Named("a", frozen=True)),
        ("rank 0: .*requires_grad=True", "rank 1: .*requires_grad=False"),
    ),
    "policy": (
        lambda: Zero3Layer(Named("a")),
        lambda: Zero3Layer(Named("a"), policy=ShardingPolicy(prefetch_depth=2)),
        ("rank 0: policy .*'prefetch_depth': 1", "rank 1: policy .*'prefetch_depth': 2"),
    ),
    "buffer": (lambda: Zero3Layer(_buffered(1)), lambda: Zero3Layer(_buffered(2)), (r"buffer seen: shape \(1,\)", r"shape \(2,\)")),
    "ties": (lambda: Zero3Layer(_tied(True)), lambda: Zero3Layer(_tied(False)), ("rank 0: nothing", "rank 1: parameter b")),
    "kind of module": (lambda: Zero3Layer(Named("a")), lambda: Zero3Layer(nn.Linear(1, 1)), ("Named", "Linear")),
    "number of layers": (
        lambda: Zero3Sequential([Zero3Layer(Named("a")) for _ in range(3)]),
        lambda: Zero3Sequential([Zero3Layer(Named("a")) for _ in range(2)]),
        ("rank 0: a new layer", "rank 1: a Zero3Sequential of 2 layers"),
    ),
    "order of layers": (
        lambda: Zero3Sequential([Zero3Layer(Named("a")), Zero3Layer(Named("a"))]),
        lambda: Zero3Sequential([Zero3Layer(Named("a")), Zero3Layer(Named("a"))][::-1]),
        ("rank 0: Named, wrapped as #", "rank 1: Named, wrapped as #"),
    ),
}


def differ(rank: Rank, name: str) -> Refused | None:
    return refused(rank, lambda _, rank, module: DIFFERENCES[name][rank.number](), True)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_models_that_differ_are_the_same_error_on_every_rank(name: str) -> None:
    first, second = on_ranks(2, differ, name)
    assert first is not None, "nothing was refused"
    assert second is not None
    assert (first.kind, first.text) == (second.kind, second.text)
    assert first.kind == "ValueError"
    for pattern in (*DIFFERENCES[name][2], "All ranks must"):
        assert re.search(pattern, first.text), first.text
    assert max(first.seconds, second.seconds) < PROMPT
