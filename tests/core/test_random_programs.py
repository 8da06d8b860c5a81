"""Models, wrappings, policies and steps drawn at random: the same numbers as plain torch, the same collectives on all ranks.

What single tests show one by one meets here in one model: nesting, reuse, frozen parts, both kinds of checkpoint around
and inside layers, ranks that leave parameters unused, several forwards before a backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.reference import Turn, check_parity

WIDTH = 5
Reentrant = bool | None  # None: no checkpoint


@dataclass(frozen=True)
class Node:
    """A block, or a group of them around a block of its own."""

    inner: tuple[Node, ...] = ()
    own: bool = True  # has parameters of its own
    bias: bool = True
    frozen: bool = False
    times: int = 1  # it computes
    inside: Reentrant = None  # checkpoint around what it computes
    around: Reentrant = None  # checkpoint around it
    unused_by: frozenset[int] = frozenset()  # ranks


class Block(nn.Module):
    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        if node.own:
            self.linear = nn.Linear(WIDTH, WIDTH, bias=node.bias).requires_grad_(not node.frozen)
        self.inner = nn.ModuleList(Block(inner) for inner in node.inner)
        self.rank = 0

    def compute(self, x: Tensor) -> Tensor:
        for _ in range(self.node.times):
            if self.node.own and self.rank not in self.node.unused_by:
                x = torch.tanh(self.linear(x))
            for child in self.inner:
                x = through(child, self.node.inner[list(self.inner).index(child)].around, x)
        return x * 1.5

    def forward(self, x: Tensor) -> Tensor:
        return through(self.compute, self.node.inside, x)


class Model(nn.Module):
    def __init__(self, nodes: tuple[Node, ...]) -> None:
        super().__init__()
        self.nodes = nodes
        self.blocks = nn.ModuleList(Block(node) for node in nodes)

    def forward(self, x: Tensor) -> Tensor:
        for node, block in zip(self.nodes, self.blocks, strict=True):
            x = through(block, node.around, x)
        return x


def through(module: Any, reentrant: Reentrant, x: Tensor) -> Tensor:
    if reentrant is None or not torch.is_grad_enabled():
        return module(x)
    return checkpoint(module, x, use_reentrant=reentrant)


def build(nodes: tuple[Node, ...]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model(nodes).double()


def wrap(module: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    """Every block becomes a layer, inner ones first."""
    for each in [module] if isinstance(module, Block) else []:
        each.inner = nn.ModuleList(wrap(inner, group, policy) for inner in each.inner)
    return zero3.Zero3Layer(module, policy=policy, process_group=group)


def in_place(model: Any, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    model.blocks = nn.ModuleList(wrap(block, group, policy) for block in model.blocks)
    return model


def as_layers(model: Any, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    return wrap(in_place(model, group, policy), group, policy)


def with_shard(model: Any, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    return zero3.shard(model, Block, policy=policy, process_group=group)


def set_rank(model: nn.Module, rank: int) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            module.rank = rank


def one(model: nn.Module, turn: Turn) -> Any:
    set_rank(model, turn.rank)
    loss = model(turn.tensor(2, WIDTH, requires_grad=True)).pow(2).mean()
    loss.backward()
    return loss


def micro_batches(model: nn.Module, turn: Turn) -> Any:
    return [one(model, turn), one(model, replace_rank_seed(turn))]


def replace_rank_seed(turn: Turn) -> Turn:
    return turn._replace(step=turn.step + 100)


def two_forwards(model: nn.Module, turn: Turn) -> Any:
    set_rank(model, turn.rank)
    first = model(turn.tensor(2, WIDTH, requires_grad=True))
    second = model(turn.tensor(3, WIDTH, requires_grad=True))
    loss = first.pow(2).mean() + second.mean()
    loss.backward()
    return loss


def evaluation_between(model: nn.Module, turn: Turn) -> Any:
    set_rank(model, turn.rank)
    with torch.no_grad():
        found = model(turn.tensor(2, WIDTH))
    return found, one(model, turn)


def forward_for_nothing(model: nn.Module, turn: Turn) -> Any:
    set_rank(model, turn.rank)
    model(turn.tensor(2, WIDTH, requires_grad=True))
    return one(model, turn)


reentrants = st.sampled_from([None, None, False, True])


def used_alike(node: Node) -> Node:
    """A recomputation of several layers ends where it has all it needs: on a rank that needs less, before layers that
    the others gather once more. So what is checkpointed together is used alike."""
    if node.inside is None and node.around is None:
        return node
    return replace(node, unused_by=frozenset(), inner=tuple(replace(inner, unused_by=frozenset()) for inner in node.inner))


def nodes_over(inner: st.SearchStrategy[tuple[Node, ...]]) -> st.SearchStrategy[Node]:
    return st.builds(
        Node,
        inner=inner,
        own=st.sampled_from([True, True, True, False]),
        bias=st.booleans(),
        frozen=st.sampled_from([False, False, True]),
        times=st.sampled_from([1, 1, 1, 2]),
        inside=reentrants,
        around=reentrants,
        unused_by=st.frozensets(st.integers(0, 2), max_size=3),
    )


leaves = nodes_over(st.just(()))
groups = nodes_over(st.lists(leaves, max_size=2).map(tuple)).map(used_alike)
models = st.lists(leaves | groups, min_size=1, max_size=4).map(lambda nodes: (*nodes, Node()))  # the last one trains
policies = st.builds(
    zero3.ShardingPolicy,
    gradient_reduction=st.sampled_from(["mean", "sum"]),
    reshard_after_forward=st.booleans(),
    prefetch_depth=st.integers(0, 3),
)


@given(
    nodes=models,
    policy=policies,
    world_size=st.sampled_from([1, 2, 2, 3]),
    shard=st.sampled_from([in_place, as_layers, with_shard]),
    program=st.sampled_from([one, micro_batches, two_forwards, evaluation_between, forward_for_nothing]),
)
def test_any_model_in_any_wrapping_trains_as_plain_torch(
    nodes: tuple[Node, ...], policy: zero3.ShardingPolicy, world_size: int, shard: Any, program: Any
) -> None:
    note(f"{shard.__name__}, {program.__name__}, W={world_size}")
    check_parity(lambda: build(nodes), program, world_size=world_size, shard=shard, policy=policy)
