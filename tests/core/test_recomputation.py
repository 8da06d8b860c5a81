"""Activation checkpointing of both kinds, inside layers, around them, around several, around the model, and nested."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import WIDTH, WORLDS, Calls, calls, linear, mlp, seeded
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Program, Shard, Turn, as_one_layer, check_parity, in_place, nested
from zero3 import ShardingPolicy, Zero3Layer

KINDS = pytest.mark.parametrize("use_reentrant", [False, True])


class Checkpointed(nn.Sequential):
    """Calls its children in runs of `run`, each run checkpointed. `run=0`: no checkpoint, for shard's own use."""

    def __init__(self, *modules: nn.Module, run: int, use_reentrant: bool) -> None:
        super().__init__(*modules)
        self.run, self.use_reentrant = run, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        children = list(self.children())
        for start in range(0, len(children), self.run):
            part = nn.Sequential(*children[start : start + self.run])
            x = checkpoint(part, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x


def program_of(output: Callable[[nn.Module, Tensor], Tensor]) -> Program:
    def program(model: nn.Module, turn: Turn) -> Any:
        x = turn.tensor(3, WIDTH, requires_grad=True)
        loss = output(model, x).pow(2).mean()
        loss.backward()
        return loss, x.grad

    return program


with_input_gradient = program_of(lambda model, x: model(x))


def checkpointed(use_reentrant: bool) -> Program:
    return program_of(lambda model, x: checkpoint(model, x, use_reentrant=use_reentrant, preserve_rng_state=False))


@WORLDS
@KINDS
@pytest.mark.parametrize("shard", [in_place, nested, as_one_layer])
@pytest.mark.parametrize("run", [1, 2, 4])
def test_checkpoints_around_layers(world_size: int, use_reentrant: bool, shard: Shard, run: int) -> None:
    def build() -> nn.Module:
        return Checkpointed(*mlp(4), run=run, use_reentrant=use_reentrant)

    check_parity(build, with_input_gradient, world_size=world_size, shard=shard)


class Around(nn.Module):
    """Computes with parameters of its own, and then calls an inner layer, all of it checkpointed."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.own, self.inner, self.use_reentrant = linear(), linear(), use_reentrant

    def compute(self, x: Tensor) -> Tensor:
        return self.inner(self.own(x).tanh()).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)


def around_inner_layers(model: Any, group: Any, policy: ShardingPolicy) -> nn.Module:
    for child in model:
        child.inner = Zero3Layer(child.inner, policy=policy, process_group=group)
    return in_place(model, group, policy)


@KINDS
@pytest.mark.parametrize("policy", [ShardingPolicy(reshard_after_forward=False), ShardingPolicy(stage=2), ShardingPolicy()], ids=str)
def test_a_layer_kept_for_its_backward_stays_shown_during_a_recomputation(use_reentrant: bool, policy: ShardingPolicy) -> None:
    """To hide it would give its parameters new versions, and the graph that the recomputation has just begun holds the present ones."""
    check_parity(
        lambda: seeded(*[lambda: Around(use_reentrant)] * 2), with_input_gradient, shard=around_inner_layers, policy=policy, steps=3
    )


@WORLDS
@KINDS
def test_checkpoints_inside_layers(world_size: int, use_reentrant: bool) -> None:
    def block(module: Calls, x: Tensor) -> Tensor:
        once = checkpoint(lambda y: module.a(y).tanh(), x, use_reentrant=use_reentrant, preserve_rng_state=False)
        twice = checkpoint(lambda y: module.b(module.a(y)).tanh(), once, use_reentrant=use_reentrant, preserve_rng_state=False)
        return twice + x

    check_parity(lambda: seeded(*[calls(block)] * 3), with_input_gradient, world_size=world_size)


@WORLDS
@KINDS
def test_a_checkpoint_around_the_model(world_size: int, use_reentrant: bool) -> None:
    check_parity(mlp, checkpointed(use_reentrant), world_size=world_size)


@WORLDS
@KINDS
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the inner checkpoint runs without gradients first
@pytest.mark.parametrize("shard", [in_place, nested])
def test_checkpoints_in_checkpoints(world_size: int, use_reentrant: bool, shard: Shard) -> None:
    def build() -> nn.Module:
        return Checkpointed(*mlp(4), run=2, use_reentrant=use_reentrant)

    check_parity(build, checkpointed(use_reentrant), world_size=world_size, shard=shard)


@WORLDS
@KINDS
@pytest.mark.parametrize("shard", [in_place, nested])
def test_two_forwards_through_checkpoints_before_a_backward(world_size: int, use_reentrant: bool, shard: Shard) -> None:
    def build() -> nn.Module:
        return Checkpointed(*mlp(3), run=1, use_reentrant=use_reentrant)

    twice = program_of(lambda model, x: torch.cat([model(x), model(x * 2)]))
    check_parity(build, twice, world_size=world_size, shard=shard)


Use = tuple[str, bool | None]  # the numbers of blocks, and the kind of checkpoint around them (None: there is none)


class Uses(nn.Sequential):
    """Calls its children as often as `uses` says, in and out of checkpoints of both kinds."""

    def __init__(self, *modules: nn.Module, uses: list[Use]) -> None:
        super().__init__(*modules)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        for numbers, use_reentrant in self.uses:
            part = nn.Sequential(*[self[int(number)] for number in numbers])
            x = (
                x
                + (part(x) if use_reentrant is None else checkpoint(part, x, use_reentrant=use_reentrant, preserve_rng_state=False)).tanh()
            )
        return x


def drawn_uses(seed: int) -> list[Use]:
    draw = random.Random(seed)
    kinds = [True, True, False, None]
    return [("".join(draw.choices("012", k=draw.choice([1, 1, 2, 3]))), draw.choice(kinds)) for _ in range(draw.randint(2, 6))]


USES: dict[str, list[Use]] = {
    "again after it": [("0", True), ("1", True), ("2", None), ("0", None), ("2", None), ("1", None)],
    "before it": [("0", None), ("1", None), ("01", True), ("2", None)],
    "in both kinds": [("01", True), ("10", False), ("2", None), ("12", True)],
    "twice in one": [("00", True), ("0", None), ("0", False)],
    **{f"drawn {seed}": drawn_uses(seed) for seed in range(8)},
}
POLICIES = [
    ShardingPolicy(),
    ShardingPolicy(prefetch_depth=0),
    ShardingPolicy(reshard_after_forward=False),
    ShardingPolicy(stage=2),
]


@WORLDS
@pytest.mark.parametrize("name", USES)
def test_layers_are_called_in_reentrant_checkpoints_and_outside_of_them(world_size: int, name: str) -> None:
    number = list(USES).index(name)
    for policy in (POLICIES[(number + world_size) % len(POLICIES)], ShardingPolicy(transactional=True, prefetch_depth=2)):
        check_parity(
            lambda: Uses(*mlp(3), uses=USES[name]),
            with_input_gradient,
            world_size=world_size,
            shard=[in_place, nested][number % 2],
            policy=policy,
            same_bits_on_one_rank=False,  # each checkpoint's gradients are summed first
        )


@pytest.mark.parametrize("name", USES)
def test_micro_batches_of_stage_1_through_reentrant_checkpoints_and_plain_calls(name: str) -> None:
    def two(model: nn.Module, turn: Turn) -> Any:
        losses = [with_input_gradient(model, Turn(turn.rank, 10 * turn.step + number, turn.world_size)) for number in range(2)]
        assert not any(p.grad.is_sparse for p in model.parameters() if p.grad is not None)  # a look, which reduces
        return losses

    check_parity(lambda: Uses(*mlp(3), uses=USES[name]), two, shard=nested, policy=ShardingPolicy(stage=1))


class Pairs(nn.Module):
    """Modules outside of the layers hold two each, and are recomputed: they enter the root's own layer anew."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.pairs, self.use_reentrant = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3)), use_reentrant
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = checkpoint(pair, x * self.scale, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x


def by_linears(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
    return zero3.shard(model, nn.Linear, process_group=group, policy=policy)


@KINDS
@pytest.mark.parametrize("policy", POLICIES)
def test_the_root_s_own_gradients_are_reduced_once_whatever_is_recomputed(use_reentrant: bool, policy: ShardingPolicy) -> None:
    def reductions(group: ThreadCommunicator) -> int:
        model = by_linears(seeded(lambda: Pairs(use_reentrant)), group, policy)
        before = len(group.log)
        model(torch.rand(2, WIDTH, dtype=torch.float64)).sum().backward()
        return sum(each.kind == "reduce_scatter" for each in group.log[before:])

    assert run_ranks(2, reductions) == [7, 7]  # of six layers, and the root
    check_parity(lambda: seeded(lambda: Pairs(use_reentrant)), with_input_gradient, shard=by_linears, policy=policy)
