"""ShardingPolicy(dynamic=True): ranks leave out different layers, and get the numbers of plain torch, or one error on all."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import TOLERANCE, Turn, assert_at_rest, by_shard, check_parity, in_sequence, on_ranks
from tests.support.stacks import WIDTH, built
from zero3 import ShardingPolicy

DEPTH = 4
DYNAMIC = ShardingPolicy(dynamic=True)
Choose = Callable[[Turn], list[int]]


class Skipping(nn.Module):
    """Calls the blocks that it is told to, in the order that it is told."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 7 + i), nn.Tanh(), nn.Linear(7 + i, WIDTH)) for i in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.recompute = recompute

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.embed(x) * self.scale
        for number in chosen:
            block = self.blocks[number]
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def drawn(turn: Turn) -> list[int]:
    chance = random.Random(100 * turn.step + turn.rank)
    return [number for number in range(DEPTH) if chance.random() < 0.5]


def program_of(choose: Choose) -> Any:
    def program(model: nn.Module, turn: Turn) -> Tensor:
        output = model(turn.tensor(3, WIDTH), choose(turn))
        output.pow(2).sum().backward()
        return output

    return program


CHOICES: dict[str, Choose] = {
    "layer drop": drawn,
    "early exit": lambda turn: list(range(1 + (turn.rank + turn.step) % DEPTH)),
    "one rank skips all": lambda turn: [] if turn.rank == turn.step % turn.world_size else list(range(DEPTH)),
    "each its own expert": lambda turn: [(turn.rank + turn.step) % DEPTH],
    "all the same": lambda turn: [0, 2] if turn.step % 2 else [1, 3],
    "all": lambda turn: list(range(DEPTH)),
}


@WORLDS
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_layers_left_out_by_some_ranks(choose: Choose, world_size: int) -> None:
    check_parity(
        lambda: built(Skipping), program_of(choose), world_size=world_size, steps=5, shard=by_shard, policy=DYNAMIC, tolerance=1e-11
    )


@pytest.mark.parametrize(
    "policy",
    [
        ShardingPolicy(dynamic=True, prefetch_depth=0),
        ShardingPolicy(dynamic=True, prefetch_depth=3),
        ShardingPolicy(dynamic=True, reshard_after_forward=False),
        ShardingPolicy(dynamic=True, stage=2),
    ],
    ids=["depth 0", "depth 3", "kept", "stage 2"],
)
def test_under_other_policies(policy: ShardingPolicy) -> None:
    check_parity(lambda: built(Skipping), program_of(drawn), steps=4, shard=by_shard, policy=policy, tolerance=1e-11)


def test_with_checkpointing() -> None:
    check_parity(
        lambda: built(lambda: Skipping(recompute=True)), program_of(drawn), steps=4, shard=by_shard, policy=DYNAMIC, tolerance=1e-11
    )


class Routed(nn.Module):
    """Blocks whose experts are layers of their own; a rank's data decides which of them it calls, and whether the block at all."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(WIDTH, WIDTH)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.after = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, expert: int | None) -> Tensor:
            x = torch.tanh(self.before(x))
            if expert is not None:
                x = x + self.experts[expert](x)
            return self.after(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed.Block() for _ in range(3))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for number, block in enumerate(self.blocks):
            choice = chosen[number % len(chosen)] if chosen else 3
            if choice < 4:
                x = x + block(x, choice if choice < 3 else None)
        return x


def routed(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
    experts = [expert for block in model.blocks for expert in block.experts]  # type: ignore[union-attr]
    return zero3.shard(model, [Routed.Block, *experts], policy=policy, process_group=group)


@pytest.mark.parametrize("world_size", [2, 3])
def test_experts_inside_blocks(world_size: int) -> None:
    def choose(turn: Turn) -> list[int]:
        chance = random.Random(7 * turn.step + turn.rank)
        return [chance.randrange(4) for _ in range(3)]

    check_parity(lambda: built(Routed), program_of(choose), world_size=world_size, steps=5, shard=routed, policy=DYNAMIC, tolerance=1e-11)


# -- what can't be right


@pytest.mark.parametrize("chosen", [[2, 1], [1, 1]], ids=["out of order", "twice"])
@pytest.mark.parametrize("guilty", [0, 1])
def test_another_order_is_an_error_on_every_rank(chosen: list[int], guilty: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> str:
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        for _ in range(2):
            with pytest.raises((ValueError, RuntimeError)) as caught:
                model(x, chosen if group.rank == guilty else [0, 2, 3])
            model(x, [group.rank]).sum().backward()  # and on it goes
        assert_at_rest(model)
        return str(caught.value)

    texts = on_ranks(2, lambda: built(Skipping), body, lambda model, group, policy: by_shard(model, group, DYNAMIC))
    assert all(f"'blocks.{chosen[1]}'" in text and "each at most once" in text for text in texts)
    assert f"rank {guilty}" in texts[1 - guilty]


def test_an_exception_in_one_ranks_forward_reaches_all() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        x = torch.ones(2, WIDTH, dtype=torch.float64)

        def refuse(*_: object) -> None:
            raise KeyError("no such word")

        hook = model.blocks[1].register_forward_pre_hook(refuse) if group.rank == 1 else None
        expected, text = (KeyError, "no such word") if group.rank == 1 else (RuntimeError, r"rank 1: .*KeyError: 'no such word'")
        with pytest.raises(expected, match=text):
            model(x, [0, 1, 2])
        if hook is not None:
            hook.remove()
        model(x, [group.rank, 3]).sum().backward()
        assert_at_rest(model)

    on_ranks(2, lambda: built(Skipping), body, lambda model, group, policy: by_shard(model, group, DYNAMIC))


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("where", range(DEPTH))
@pytest.mark.parametrize("policy", [{}, {"prefetch_depth": 0}, {"prefetch_depth": 3}, {"stage": 2}, {"transactional": True}], ids=str)
def test_dynamic_goes_on_after_a_backward_that_raised_on_all_ranks(policy: dict[str, Any], where: int, resets: bool) -> None:
    """Each of them has left out other layers, and so has made other transfers by then."""

    def body(model: Any, group: ThreadCommunicator) -> tuple[list[Tensor], Any]:
        chunks = zero3.get_trainable_chunk(model)
        for step, fails in enumerate([False, True, False]):
            loss = loss_that(model, group.rank, step, where if fails else None)
            with pytest.raises(KeyError, match="as told") if fails else contextlib.nullcontext():
                loss.backward()
            if fails and resets:
                zero3.reset(model)
        return [chunk.grad for chunk in chunks], group.log

    def once(model: Any, group: ThreadCommunicator) -> list[Tensor]:
        for step in (0, 2) if "transactional" in policy else (2,):
            loss_that(model, group.rank, step, None).backward()
        return [chunk.grad for chunk in zero3.get_trainable_chunk(model)]

    chosen = ShardingPolicy(dynamic=True, **policy)
    found = on_ranks(2, lambda: built(Skipping), body, lambda model, group, policy: by_shard(model, group, chosen))
    wanted = on_ranks(2, lambda: built(Skipping), once, lambda model, group, policy: by_shard(model, group, chosen))
    for (gradients, log), expected in zip(found, wanted, strict=True):
        assert log == found[0][1]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("kept", [(1,), (0, 1), (2,), (0, 1, 2)], ids=str)
def test_the_rest_of_a_backward_that_raised_goes_as_far_as_the_backward_did(kept: tuple[int, ...], transactional: bool) -> None:
    """Step 1 raises before the last block that a rank has called: there ranks differ. The caller may have left its `no_sync` by
    then, or may enter one before the rest is made.
    """

    def run(model: Any, group: ThreadCommunicator, steps: tuple[int, ...]) -> tuple[list[Tensor], Any]:
        for step in steps:
            with zero3.no_sync(model) if step in kept else contextlib.nullcontext():
                loss = loss_that(model, group.rank, step, 0 if step == 1 else None)
                with pytest.raises(KeyError, match="as told") if step == 1 else contextlib.nullcontext():
                    loss.backward()
        return [chunk.grad for chunk in zero3.get_trainable_chunk(model)], group.log

    def sharded(model: Any, group: Any, policy: ShardingPolicy) -> nn.Module:
        return by_shard(model, group, ShardingPolicy(dynamic=True, transactional=transactional))

    steps = (0, 2, 3) if transactional else (2, 3)
    found = on_ranks(2, lambda: built(Skipping), lambda model, group: run(model, group, (0, 1, 2, 3)), sharded)
    wanted = on_ranks(2, lambda: built(Skipping), lambda model, group: run(model, group, steps), sharded)
    for (gradients, log), (expected, _) in zip(found, wanted, strict=True):
        assert log == found[0][1]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, expected, strict=True))


def test_the_rest_of_a_backward_for_some_layers_is_for_these() -> None:
    def body(model: Any, group: ThreadCommunicator) -> Any:
        embed = zero3.get_trainable_chunk(model.embed)
        loss_that(model, group.rank, 0, None).backward()
        loss = loss_that(model, group.rank, 1, 0)
        with pytest.raises(KeyError, match="as told"):
            loss.backward(inputs=embed)
        loss_that(model, group.rank, 2, None).backward()
        return group.log

    one, other = on_ranks(2, lambda: built(Skipping), body, lambda model, group, policy: by_shard(model, group, DYNAMIC))
    assert one == other


def loss_that(model: Any, rank: int, step: int, where: int | None) -> Tensor:
    """Leaves out a block. Its backward fails before that of the block `where`, or of those before it, begins."""
    chosen = [number for number in range(DEPTH) if number != (rank + step) % DEPTH]
    fuse = None if where is None else next((model.blocks[n] for n in chosen if n >= where), model.blocks[chosen[-1]])

    def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(fail)

    with fuse.register_forward_hook(hook) if fuse is not None else contextlib.nullcontext():
        loss: Tensor = model(Turn(rank, step, 0).tensor(3, WIDTH), chosen).pow(2).sum()
    return loss


def fail(*_: object) -> None:
    raise KeyError("as told")


def test_dynamic_tells_all_ranks_of_a_backward_that_raised_on_one() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        loss = loss_that(model, group.rank, 0, 1 if group.rank else None)
        with pytest.raises(KeyError, match="as told") if group.rank else contextlib.nullcontext():
            loss.backward()
        with pytest.raises(ValueError, match=r"ranks differ in the end of a forward: rank 0: \d+ transfers"):
            loss_that(model, group.rank, 1, None)

    on_ranks(2, lambda: built(Skipping), body, lambda model, group, policy: by_shard(model, group, DYNAMIC))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_that_failed_leaves_its_tensors_to_nobody(world_size: int) -> None:
    """Not to a cycle either: memory that waits for the cycle collector is memory that is out."""

    def body(model: Any, group: ThreadCommunicator) -> bool:
        made: list[weakref.ref[Tensor]] = []

        def watch(module: nn.Module, args: Any, output: Tensor) -> None:
            made.append(weakref.ref(output))
            if group.rank == world_size - 1:
                raise KeyError("no such word")

        hook = model.blocks[1].register_forward_hook(watch)
        for _ in range(2):
            with contextlib.suppress(KeyError, RuntimeError):
                model(torch.ones(2, WIDTH, dtype=torch.float64), [0, 1])
        zero3.reset(model)
        hook.remove()
        return len(made) == 2 and all(reference() is None for reference in made)

    gc.collect()
    gc.disable()
    try:
        assert all(on_ranks(world_size, lambda: built(Skipping), body, lambda model, group, policy: by_shard(model, group, DYNAMIC)))
    finally:
        gc.enable()


def test_an_exception_in_one_ranks_forward_with_compare_every() -> None:
    """The others come to the comparison, in the middle of the forward, and the rank that failed does not."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        for number in range(4):
            with pytest.raises(RuntimeError, match="shapes" if group.rank == 1 else "rank 1: .*shapes"):
                model(x if group.rank == 0 else x[:, : number % 2])
            model(x).sum().backward()

    def in_layers(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        return in_sequence(model, group, ShardingPolicy(dynamic=True, compare_every=3))

    on_ranks(2, lambda: built(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))), body, in_layers, timeout=5.0)


def test_evaluation_may_leave_layers_out_too() -> None:
    def body(model: Any, group: ThreadCommunicator) -> Tensor:
        with torch.no_grad():
            return model(torch.ones(2, WIDTH, dtype=torch.float64), list(range(group.rank)))

    found = on_ranks(3, lambda: built(Skipping), body, lambda model, group, policy: by_shard(model, group, DYNAMIC))
    plain = built(Skipping)
    for rank, output in enumerate(found):
        assert torch.allclose(output, plain(torch.ones(2, WIDTH, dtype=torch.float64), list(range(rank))), rtol=0, atol=TOLERANCE)


class Recomputed(Skipping):
    """What follows a block saves tensors, too: its recomputation begins before a gradient has come to the layer, on some ranks alone."""

    def __init__(self, together: int) -> None:
        super().__init__()
        self.together = together

    def run(self, x: Tensor, numbers: list[int]) -> Tensor:
        for number in numbers:
            x = x + self.blocks[number](x)
        return x * self.scale

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.embed(x)
        for first in range(0, len(chosen), self.together):
            x = checkpoint(self.run, x, chosen[first : first + self.together], use_reentrant=False)  # type: ignore[assignment]
        return x


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_recomputation_may_begin_before_gradients_come(depth: int) -> None:
    policy = ShardingPolicy(dynamic=True, prefetch_depth=depth)
    check_parity(lambda: built(lambda: Recomputed(1)), program_of(drawn), steps=4, shard=by_shard, policy=policy, tolerance=1e-11)


def test_two_layers_in_a_checkpoint_are_an_error_on_all_ranks_and_the_next_step_is_right() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        with pytest.raises((ValueError, RuntimeError), match=r"'blocks\.1'.* is called in one checkpoint with another layer"):
            model(x, [0, 1] if group.rank else [1])
        with torch.no_grad():
            model(x, [0, 1])  # nothing is recomputed
        model(x, [1]).sum().backward()
        assert_at_rest(model)

    on_ranks(2, lambda: built(lambda: Recomputed(2)), body, lambda model, group, policy: by_shard(model, group, DYNAMIC))


def test_loose_layers_are_refused() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        x = model[0](torch.ones(2, 5, dtype=torch.float64, requires_grad=True))
        with pytest.raises(ValueError, match="Zero3Sequential"):
            model[1](x)

    def loose(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        return nn.Sequential(*(zero3.Zero3Layer(child, policy=DYNAMIC, process_group=group) for child in model))  # type: ignore[union-attr]

    on_ranks(2, lambda: built(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))), body, loose)


def test_reentrant_checkpoints_are_refused() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        class Around(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return checkpoint(lambda y: model(y, [0]), x, use_reentrant=True)  # type: ignore[no-any-return]

        loss = Around()(torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            loss.backward()

    on_ranks(1, lambda: built(Skipping), body, lambda model, group, policy: by_shard(model, group, DYNAMIC))
