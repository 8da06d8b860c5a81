"""What lives of models are made of: a model that can break, leave out blocks and recompute, the policies to draw, and what to look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.crew import Member
from tests.support.inside import states_of
from tests.support.models import WIDTH, Fuse, seeded
from tests.support.reference import assert_at_rest, full_parameters, in_place, in_sequence, nested

BLOCKS = 3


class Block(nn.Module):
    def __init__(self, number: int, reentrant: bool | None, times: int) -> None:
        super().__init__()
        self.number = number
        self.a, self.b = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH, bias=False)
        self.reentrant, self.times = reentrant, times
        self.blows: tuple[str, type[BaseException]] | None = None
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            recomputed = self.reentrant is not None and torch.is_grad_enabled()
            x = checkpoint(self.compute, x, use_reentrant=self.reentrant) if recomputed else self.compute(x)
        return x

    def compute(self, x: Tensor) -> Tensor:
        x = Fuse.apply(x, self)
        return x * 0.9 if self.skips else x + self.b(torch.tanh(self.a(x)))


class Stack(nn.Sequential):
    """Leaves out the blocks that it is told to."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.omits: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self):
            x = x if number in self.omits else block(x)
        return x


@dataclass(frozen=True)
class Plan:
    reentrant: tuple[bool | None, ...]
    times: tuple[int, ...]
    frozen: int | None  # a block that never trains

    def build(self, seed: int = 0) -> Stack:
        parts = enumerate(zip(self.reentrant, self.times, strict=True))
        model = Stack(*seeded(*[lambda i=i, r=r, t=t: Block(i, r, t) for i, (r, t) in parts], seed=seed))
        if self.frozen is not None:
            model[self.frozen].requires_grad_(False)
        return model


def with_shard(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    return zero3.shard(model, Block, policy=policy, process_group=group)


def with_layers_together(model: Any, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    """The outer blocks are one layer."""
    return zero3.shard(model, [model[1], (model[0], model[2])], policy=policy, process_group=group)


plans = st.builds(
    Plan,
    reentrant=st.tuples(*[st.sampled_from([None, None, False, True])] * BLOCKS),
    times=st.tuples(*[st.sampled_from([1, 1, 2])] * BLOCKS),
    frozen=st.sampled_from([None, None, 0, 1]),
)


@st.composite
def drawn_policies(draw: Callable[[Any], Any]) -> zero3.ShardingPolicy:
    stage = draw(st.sampled_from([3, 3, 3, 2, 1]))
    return zero3.ShardingPolicy(
        param_dtype=draw(st.sampled_from([None, None, torch.float32, torch.bfloat16])),
        reduce_dtype=draw(st.sampled_from([None, None, torch.float32, torch.float64])),
        stage=stage,
        dynamic=draw(st.sampled_from([False, False, True])),
        gradient_reduction=draw(st.sampled_from(["mean", "sum"])),
        reshard_after_forward=draw(st.booleans()),
        prefetch_depth=draw(st.integers(0, 2)),
        transactional=stage > 1 and draw(st.booleans()),
        compare_every=draw(st.sampled_from([1000, 3, 1])),
    )


policies = drawn_policies()
worlds = st.sampled_from([1, 2, 2, 3])
shards = [in_sequence, in_place, nested, with_shard, with_layers_together]
dynamic_shards = [
    in_sequence,
    with_shard,
    with_layers_together,
]  # others can't know which layers are left out
blocks = st.integers(0, BLOCKS - 1)
phases = st.sampled_from(["forward", "backward"])
rows = st.lists(st.integers(0, 3), min_size=3, max_size=3)  # a rank


def look(me: Member, at_gradients: bool, releases: bool) -> tuple[Any, Any, Any]:
    """Parameters, gradients if they are known, and the log so far. `releases`: layers that stayed whole are released on the way."""
    values = full_parameters(me.model) if releases else whole(me, me.model.parameters())
    for state in states_of(me.model):
        for sharded in state.parameters:
            with torch._C.DisableTorchFunctionSubclass():
                assert sharded.sites.parameter.grad is None, "a stray gradient"
                assert len(sharded.sites.parameter._post_accumulate_grad_hooks or ()) <= 1, "a stray hook"
    for block in me.blocks:
        assert not block._forward_hooks and not block._backward_hooks
    if releases:
        assert_at_rest(me.model)
    if at_gradients and (chunks := [chunk for chunk in zero3.get_trainable_chunk(me.model) if chunk.grad is not None]):
        chunks[-1].grad.isnan()  # type: ignore[union-attr]
    known = not any(type(chunk.grad).__name__ == "DeferredGradient" for chunk in me.model.parameters())
    gradients = whole(me, zero3.get_trainable_chunk(me.model), of_gradients=True) if known else {}
    log = list(me.group.log)
    me.group.log.clear()
    return on_host(values), on_host(gradients), log


def on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def whole(me: Member, chunks: Iterable[nn.Parameter], of_gradients: bool = False) -> dict[str, Tensor]:
    """The values of chunks, or of their gradients, by the names of parameters; layers are left as they are."""
    wanted, found = {id(chunk) for chunk in chunks}, {}
    for state in states_of(me.model):
        for chunk in [chunk for chunk in state.chunks if id(chunk.shard) in wanted]:
            mine = chunk.shard.detach()
            if of_gradients:
                mine = torch.zeros_like(mine) if chunk.shard.grad is None else chunk.shard.grad.as_subclass(Tensor)
            full = torch.empty(chunk.layout.padded_numel, dtype=mine.dtype, device=mine.device)
            me.group.all_gather(full, mine).wait()
            assert not full[chunk.layout.numel :].any(), f"padding of {state.label}: {full}"
            for sharded in [sharded for sharded in state.parameters if sharded.chunk is chunk]:
                slot = chunk.layout.slots[sharded.index]
                found[me.names[id(sharded.sites.parameter)]] = full[slot.offset : slot.stop].reshape(slot.shape)
    return found
