"""ZeroRedundancyOptimizer with optimizers whose step() ignores its closure, demands one, takes none, or takes keywords."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import zero3
from tests.support.models import WORLDS
from tests.zero1.test_zero_redundancy_optimizer import assert_same_bits, give_gradients, on_threads, values_of


class NewKey(optim.SGD):
    def step(self, closure: Any = None) -> None:  # ignores it
        super().step()
        self.param_groups[0]["new_key"] = 0.1


class NoClosure(optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        super().step()


class DemandsClosure(optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


class TakesKeyword(optim.SGD):
    def step(self, closure: Any = None, kwarg: Any = None) -> None:
        super().step()
        kwarg.append(5)


class Scaled(optim.SGD):
    """Judged without the keyword it is elementwise; with it, it is not."""

    def step(self, closure: Any = None, *, by_norm: bool = False) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if by_norm and parameter.grad is not None:
                    parameter.grad = parameter.grad / parameter.grad.norm()
        super().step()


class Twice(optim.SGD):
    """As sharpness-aware ones do."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        super().step()
        return closure()


class TwiceLater(DemandsClosure):
    """Once on the small tensors that it is tried out on, twice on large ones."""

    def step(self, closure: Any) -> Any:
        loss = super().step(closure)
        return closure() if self.param_groups[0]["params"][0].numel() > 10**4 else loss


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (3,), (257, 257))]


def trained(optimizer: Any, given: list[nn.Parameter], **keywords: Any) -> list[Tensor]:
    """By closures, but where the optimizer takes none."""
    for step in range(3):

        def closure(step: int = step) -> float:
            give_gradients(given, step)
            return float(step)

        if isinstance(optimizer, zero3.ZeroRedundancyOptimizer | DemandsClosure):
            assert optimizer.step(closure, **keywords) == step
        else:
            closure()
            optimizer.step(**keywords)
    return values_of(given)


@pytest.mark.parametrize("kind", [NewKey, NoClosure, DemandsClosure, TakesKeyword])
@WORLDS
def test_closures_and_keywords_of_step_as_with_the_plain_optimizer(kind: Any, world_size: int) -> None:
    def keywords() -> dict[str, Any]:
        return {"kwarg": []} if kind is TakesKeyword else {}

    plain, plainly = parameters(), keywords()
    expected = trained(kind(plain, lr=0.1, momentum=0.9), plain, **plainly)

    def body(group: Any) -> None:
        mine, given = parameters(), keywords()
        ours = zero3.ZeroRedundancyOptimizer(mine, kind, group, lr=0.1, momentum=0.9)
        assert_same_bits(trained(ours, mine, **given), expected)
        assert given == plainly, "what was tried out has had a copy"
        if kind is NewKey:
            assert [g["new_key"] for g in ours.param_groups] == [0.1]
        ours.add_param_group({"params": [extra := nn.Parameter(torch.ones(4))]})
        extra.grad = torch.ones(4)
        ours.step(lambda: 0.0, **given)
        assert not torch.equal(extra, torch.ones(4))

    on_threads(world_size, body)


@pytest.mark.parametrize("kind", [optim.LBFGS, Twice])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("whole", [False, True])
def test_a_closure_that_is_evaluated_several_times_is_refused(kind: Any, world_size: int, whole: bool) -> None:
    def body(group: Any) -> None:
        with pytest.raises(ValueError, match=rf"{kind.__name__} can't be spread over ranks: its step\(\) evaluates the closure several"):
            zero3.ZeroRedundancyOptimizer(parameters(), kind, group, lr=0.1, whole=whole)

    on_threads(world_size, body)


def test_a_closure_that_is_evaluated_again_later_is_refused_then() -> None:
    def body(group: Any) -> None:
        mine = [nn.Parameter(torch.ones(200, 200))]
        ours = zero3.ZeroRedundancyOptimizer(mine, TwiceLater, group, lr=0.1)
        give_gradients(mine, 0)
        with pytest.raises(RuntimeError, match="evaluates its closure several times in a step"):
            ours.step(lambda: 0.0)

    on_threads(2, body)


def test_keywords_of_step_are_judged_at_the_first_step_on_every_rank() -> None:
    def body(group: Any) -> None:
        mine = parameters()
        before = values_of(mine)
        ours = zero3.ZeroRedundancyOptimizer(mine, Scaled, group, lr=0.1)
        give_gradients(mine, 0)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^rank 0: Scaled can't be spread over ranks, which each know a part.*whole=True"):
                ours.step(by_norm=True)
        assert_same_bits(values_of(mine), before)
        ours.step(by_norm=False)
        assert not torch.equal(mine[0], before[0])
        unclear = zero3.ZeroRedundancyOptimizer(parameters(), TakesKeyword, group, lr=0.1)
        with pytest.raises(ValueError, match=r"^rank 0: TakesKeyword can't be .* tried out .*'NoneType' object has no attribute 'append'"):
            unclear.step()
        with pytest.raises(ValueError, match=r"^rank 0: TakesKeyword can't be .* tried out .*cannot pickle"):
            unclear.step(kwarg=threading.Lock())
        with pytest.raises(ValueError, match=r"TakesKeyword can't be spread over ranks: it can't be tried out"):
            zero3.ZeroRedundancyOptimizer(parameters(), TakesKeyword, group, overlap_with_ddp=True, lr=0.1)

    on_threads(2, body)
