"""A backward that raises: gradients that were on their way land later, for nothing. The caller's hooks on chunks do not see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS, linear, seeded, step
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence, process_group

Recover = Callable[[nn.Module, Turn], object]
WAYS: dict[str, Recover] = {
    "reset": lambda model, turn: zero3.reset(model),
    "the next forward": lambda model, turn: model(turn.tensor(2, 5)),
    "the next backward": step,
}


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ArithmeticError("in backward")


class MayRaise(nn.Module):
    """A layer whose backward raises, with the gradients of the layers behind it under way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.raises = linear(), False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return Raises.apply(result) if self.raises else result  # type: ignore[no-any-return, no-untyped-call]


def stepping(chunk: nn.Parameter, fired: list[str]) -> None:
    """The optimizer in a hook: what lands is used up at once."""

    def take(leaf: Tensor) -> None:
        fired.append("stepped")
        if leaf.grad is not None:
            with torch.no_grad():
                leaf.sub_(leaf.grad, alpha=0.1)
        leaf.grad = None

    chunk.register_hook(lambda gradient: fired.append("hook"))
    chunk.register_post_accumulate_grad_hook(take)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("policy", [{}, {"transactional": True}, {"prefetch_depth": 3}, {"offload": "cpu"}], ids=str)
@WORLDS
def test_hooks_run_for_nothing_that_lands_after_a_failure(world_size: int, policy: dict[str, Any], how: str) -> None:
    def body(group: ThreadCommunicator) -> int:
        model = in_sequence(seeded(linear, MayRaise, linear, linear), process_group(group), zero3.ShardingPolicy(**policy))
        may_raise = next(module for module in model.modules() if isinstance(module, MayRaise))
        chunks, fired = zero3.get_trainable_chunk(model), list[str]()
        for chunk in chunks:
            stepping(chunk, fired)
        step(model, Turn(group.rank, 0, world_size))
        assert fired.count("stepped") == fired.count("hook") == len(chunks)
        may_raise.raises = True
        with pytest.raises(ArithmeticError, match="in backward"):
            step(model, Turn(group.rank, 1, world_size))
        before, values = len(fired), [chunk.detach().clone() for chunk in chunks]
        may_raise.raises = False
        WAYS[how](model, Turn(group.rank, 2, world_size))
        if how == "the next backward":
            assert len(fired) == before + 2 * len(chunks)
        else:
            assert len(fired) == before and all(map(torch.equal, chunks, values)) and all(chunk.grad is None for chunk in chunks)
        return before

    assert len(set(run_ranks(world_size, body))) == 1


@WORLDS
def test_hooks_see_everything_again_afterwards(world_size: int) -> None:
    """The same bits as a model that never failed, from the values that the failure has left."""

    def body(group: ThreadCommunicator) -> None:
        found = []
        failed: list[Tensor] = []
        for fails in (True, False):
            model = in_sequence(seeded(linear, MayRaise, linear), process_group(group), zero3.ShardingPolicy())
            may_raise = next(module for module in model.modules() if isinstance(module, MayRaise))
            chunks = zero3.get_trainable_chunk(model)
            for chunk in chunks:
                stepping(chunk, [])
            if fails:
                may_raise.raises = True
                with pytest.raises(ArithmeticError):
                    step(model, Turn(group.rank, 0, world_size))
                may_raise.raises = False
                failed = [chunk.detach().clone() for chunk in chunks]
            else:
                with torch.no_grad():
                    for chunk, value in zip(chunks, failed, strict=True):
                        chunk.copy_(value)
            for number in range(1, 3):
                step(model, Turn(group.rank, number, world_size))
            found.append([chunk.detach().clone() for chunk in chunks])
        assert all(map(torch.equal, *found))

    run_ranks(world_size, body)
