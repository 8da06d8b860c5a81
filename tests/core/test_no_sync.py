"""no_sync: backwards without reductions, whose gradients join the next one that reduces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.footprint import BYTES, LAYERS, WIDTHS, Formula, make
from tests.support.live import LiveBytes
from tests.support.models import WORLDS, Fuse, mlp
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import (
    TOLERANCE,
    Turn,
    assert_close,
    by_shard,
    check_parity,
    full_gradients,
    in_place,
    in_sequence,
    nested,
    on_ranks,
)
from tests.support.stacks import stack, train
from zero3 import Zero3Layer

MICRO_BATCHES = 3


def batch(turn: Turn, number: int) -> Tensor:
    return Turn(turn.rank, 10 * turn.step + number, turn.world_size).tensor(3, 5)


def expected(world_size: int, numbers: range, build: Callable[[], nn.Module] = mlp) -> dict[str, Tensor]:
    """The mean over ranks of the sum over micro-batches, by plain torch in one process."""
    model = build()
    for rank in range(world_size):
        for number in numbers:
            (model(batch(Turn(rank, 0, world_size), number)).pow(2).sum() / world_size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model: nn.Module, group: ThreadCommunicator, wanted: dict[str, Tensor]) -> None:
    assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")


def backwards(model: nn.Module, turn: Turn, numbers: range, covered: Any = None) -> None:
    """All but the last without communication."""
    for number in numbers[:-1]:
        with zero3.no_sync(model if covered is None else covered):
            model(batch(turn, number)).pow(2).sum().backward()
    model(batch(turn, numbers[-1])).pow(2).sum().backward()


def reductions(group: ThreadCommunicator) -> int:
    return sum(entry.kind == "reduce_scatter" for entry in group.log)


@pytest.mark.parametrize("shard", [in_sequence, in_place, nested])
@WORLDS
def test_the_same_gradients_for_one_reduction_a_layer(world_size: int, shard: Any) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        turn = Turn(group.rank, 0, world_size)
        for _ in range(2):
            before = reductions(group)
            backwards(model, turn, range(MICRO_BATCHES))
            if world_size > 1:
                assert reductions(group) - before == len(zero3.get_trainable_chunk(model))
            check(model, group, wanted)
            model.zero_grad()

    wanted = expected(world_size, range(MICRO_BATCHES))
    on_ranks(world_size, mlp, body, shard)


def test_it_covers_a_part_of_a_model_and_nests() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        turn = Turn(group.rank, 0, 2)
        before = reductions(group)
        with zero3.no_sync(model[1]), zero3.no_sync(model[1]):
            model(batch(turn, 0)).pow(2).sum().backward()
        assert reductions(group) - before == 2
        model(batch(turn, 1)).pow(2).sum().backward()
        check(model, group, wanted[2])

    wanted = {n: expected(2, range(n)) for n in (2, 3)}
    on_ranks(2, mlp, body)


def test_gradients_from_before_are_kept_too() -> None:
    """Synchronised, not, synchronised."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        turn = Turn(group.rank, 0, 2)
        model(batch(turn, 0)).pow(2).sum().backward()
        with zero3.no_sync(model):
            model(batch(turn, 1)).pow(2).sum().backward()
        model(batch(turn, 2)).pow(2).sum().backward()
        check(model, group, wanted[3])

    wanted = {n: expected(2, range(n)) for n in (2, 3)}
    on_ranks(2, mlp, body)


class Skipping(nn.Module):
    """Rank-dependent use inside a layer, and a layer that the last micro-batch does without."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

    def forward(self, x: Tensor, deep: bool = True) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(x) if deep else x


def test_a_layer_that_the_last_micro_batch_skips_is_reduced_by_it() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        turn = Turn(group.rank, 0, 2)
        with zero3.no_sync(model):
            model(batch(turn, 0)).pow(2).sum().backward()
        model(batch(turn, 1), deep=False).pow(2).sum().backward()
        check(model, group, {n: p.grad for n, p in plain.named_parameters() if p.grad is not None})

    plain = Skipping()
    for rank in range(2):
        for number in range(2):
            (plain(batch(Turn(rank, 0, 2), number), deep=number == 0).pow(2).sum() / 2).backward()
    on_ranks(2, Skipping, body, nested)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("earlier", [True, False])
def test_zero_grad_drops_what_was_kept(set_to_none: bool, earlier: bool) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        turn = Turn(group.rank, 0, 2)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        if earlier:
            model(batch(turn, 7)).pow(2).sum().backward()
        with zero3.no_sync(model):
            model(batch(turn, 8)).pow(2).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        backwards(model, turn, range(2))
        check(model, group, wanted[2])

    wanted = {n: expected(2, range(n)) for n in (2, 3)}
    on_ranks(2, mlp, body)


def test_zero_grad_gives_the_memory_back_at_the_next_forward() -> None:
    with LiveBytes() as live:
        model = make(2)
        with zero3.no_sync(model):
            model(torch.empty(0, WIDTHS[0])).sum().backward()
        model.zero_grad()
        with torch.no_grad():
            model(torch.empty(0, WIDTHS[0]))
        assert live.now == Formula(2, 1).chunks


@pytest.mark.parametrize("make_optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_that_comes_too_early_is_an_error(make_optimizer: Any, foreach: bool) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        turn = Turn(group.rank, 0, 2)
        chunks = zero3.get_trainable_chunk(model)
        optimizer = make_optimizer(chunks, lr=0.1, foreach=foreach)
        values = [chunk.detach().clone() for chunk in chunks]
        with zero3.no_sync(model):
            model(batch(turn, 0)).pow(2).sum().backward()
        for use in (optimizer.step, lambda: zero3.clip_grad_norm_(model, 1.0), lambda: torch.nn.utils.clip_grad_norm_(chunks, 1.0)):
            with pytest.raises(RuntimeError, match=r"inside zero3\.no_sync"):
                use()
        assert all(torch.equal(chunk, value) for chunk, value in zip(chunks, values, strict=True))
        assert chunks[0].grad.shape == chunks[0].shape
        model(batch(turn, 1)).pow(2).sum().backward()
        check(model, group, wanted[2])

    wanted = {n: expected(2, range(n)) for n in (2, 3)}
    on_ranks(2, mlp, body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_is_too_early_beside_gradients_that_are_reduced_already(set_to_none: bool) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        turn, optimizer = Turn(group.rank, 0, 2), torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        model(batch(turn, 0)).pow(2).sum().backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch(turn, 0)).pow(2).sum().backward()
        with zero3.no_sync(model):
            model(batch(turn, 1)).pow(2).sum().backward()
        for use in (optimizer.step, lambda: zero3.clip_grad_norm_(model, 1.0)):
            with pytest.raises(RuntimeError, match=r"inside zero3\.no_sync"):
                use()
        model(batch(turn, 2)).pow(2).sum().backward()
        check(model, group, wanted[3])

    wanted = {3: expected(2, range(3))}
    on_ranks(2, mlp, body)


def test_autograd_grad_leaves_what_is_kept_alone() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        turn = Turn(group.rank, 0, 2)
        with zero3.no_sync(model):
            model(batch(turn, 0)).pow(2).sum().backward()
        x = batch(turn, 1).requires_grad_()
        before = reductions(group)
        torch.autograd.grad(model(x).sum(), x)
        assert reductions(group) == before
        model(batch(turn, 1)).pow(2).sum().backward()
        check(model, group, wanted[2])

    wanted = {n: expected(2, range(n)) for n in (2, 3)}
    on_ranks(2, mlp, body)


def test_a_backward_that_breaks_drops_all_and_a_forward_that_breaks_drops_nothing() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        turn = Turn(group.rank, 0, 2)

        def refuse(_: Tensor) -> None:
            raise KeyError("broken")

        with zero3.no_sync(model):
            model(batch(turn, 0)).pow(2).sum().backward()
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 4))
        model(batch(turn, 1)).pow(2).sum().backward()
        check(model, group, wanted[2])
        model.zero_grad()
        with zero3.no_sync(model):
            model(batch(turn, 7)).pow(2).sum().backward()
            x = batch(turn, 8).requires_grad_()
            x.register_hook(refuse)
            with pytest.raises(KeyError):
                model(x).pow(2).sum().backward()
        backwards(model, turn, range(2))
        check(model, group, wanted[2])

    wanted = {n: expected(2, range(n)) for n in (2, 3)}
    on_ranks(2, mlp, body)


def test_a_backward_that_breaks_drops_what_a_rank_without_elements_has_kept() -> None:
    """The caller's parts of the third rank are empty, so there nobody can see that kept gradients were dropped."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Affine() for _ in range(2)))

    def body(model: Any, group: ThreadCommunicator) -> None:
        zero3.param_groups(model, lambda name, info: {"lr": float("bias" in name)})
        assert group.rank < 2 or not sum(part.numel() for part in zero3.get_trainable_chunk(model))
        turn, last = Turn(group.rank, 0, 3), model[-1].module
        with zero3.no_sync(model):
            model(batch(turn, 7)).pow(2).sum().backward()
        last.blows = ("backward", KeyError)
        with pytest.raises(KeyError):
            model(batch(turn, 8)).pow(2).sum().backward()
        last.blows = None
        backwards(model, turn, range(2))
        with zero3.full_gradients(model) as found:
            assert_close(found, wanted, TOLERANCE, "gradients")

    wanted = expected(3, range(2), build)
    on_ranks(3, build, body)


def test_zero_grad_drops_what_a_rank_without_elements_of_a_layer_has_kept() -> None:
    """The third rank's optimizer has none of the first layer's elements to zero: the layer follows the others."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Affine(), nn.Linear(5, 5, dtype=torch.float64))

    def body(model: Any, group: ThreadCommunicator) -> None:
        groups = zero3.param_groups(model, lambda name, info: {"lr": float("bias" in name)})
        optimizer, turn = torch.optim.SGD(groups), Turn(group.rank, 0, 3)
        with zero3.no_sync(model):
            model(batch(turn, 7)).pow(2).sum().backward()
        optimizer.zero_grad()
        backwards(model, turn, range(2))
        with zero3.full_gradients(model) as found:
            assert_close(found, wanted, TOLERANCE, "gradients")

    wanted = expected(3, range(2), build)
    on_ranks(3, build, body)


class Affine(nn.Module):
    """Two elements, behind a fuse: its backward may break before a gradient has come."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.rand(1, dtype=torch.float64)) for _ in range(2))
        self.blows: tuple[str, type[Exception]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return Fuse.apply(x * self.weight + self.bias, self)


def test_ranks_of_which_one_alone_is_inside_are_told_so() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        loss = model(batch(Turn(group.rank, 0, 2), 0)).pow(2).sum()
        with (
            nullcontext() if group.rank else zero3.no_sync(model),
            pytest.raises(ValueError, match=r"rank 0: .*gradients kept \(as under no_sync\); rank 1"),
        ):
            loss.backward()

    on_ranks(2, mlp, body)


def test_ranks_of_which_one_alone_has_frozen_a_layer_are_told_so() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        zero3.get_trainable_chunk(model)[-1].requires_grad_(group.rank == 0)
        loss = model(batch(Turn(group.rank, 0, 2), 0)).pow(2).sum()
        with pytest.raises(ValueError, match=r"rank 0: .*gradients reduced; rank 1: .*frozen"):
            loss.backward()

    on_ranks(2, mlp, body)


@WORLDS
def test_what_it_costs(world_size: int) -> None:
    """docs/memory.md: every layer's full gradient from its backward on, in place of its chunk's."""
    formula = Formula(world_size, 1)
    with LiveBytes() as live:
        model = make(world_size)
        with zero3.no_sync(model):
            model(torch.empty(0, WIDTHS[0])).sum().backward()
        awaited = len(LAYERS) * BYTES  # what stands for the gradients meanwhile: one element each
        kept = sum(formula.FG) + awaited if world_size > 1 else sum(formula.G)
        assert live.now == formula.chunks + kept
        model(torch.empty(0, WIDTHS[0])).sum().backward()
        assert live.now == formula.chunks + sum(formula.G)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@WORLDS
def test_a_gradient_that_a_caller_holds_is_the_one_that_is_added_to(world_size: int, dtype: torch.dtype) -> None:
    """Also one that was not reduced yet when the caller took it. What the caller does to it counts for what comes later, as in plain torch.
    In float32 sums have a dtype of their own, `reduce_dtype`, and are rounded.
    """
    plain = mlp().to(dtype)
    for number in range(3):
        for rank in range(world_size):
            (plain(batch(Turn(rank, 0, world_size), number).to(dtype)).pow(2).sum() / world_size).backward()
        for parameter in plain.parameters() if number else ():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    def body(model: Any, group: ThreadCommunicator) -> None:
        turn, chunks, held = Turn(group.rank, 0, world_size), zero3.get_trainable_chunk(model), list[Any]()
        for number in range(3):
            with nullcontext() if number else zero3.no_sync(model):
                model(batch(turn, number).to(dtype)).pow(2).sum().backward()
            held = held or [chunk.grad for chunk in chunks]
            assert all(chunk.grad is mine for chunk, mine in zip(chunks, held, strict=True))
            for gradient in held if number else ():
                gradient.mul_(0.5)
        assert_close(full_gradients(model, group), wanted, 1e-5 if dtype == torch.float32 else TOLERANCE, "gradients")

    def shard(model: nn.Module, group: Any, policy: Any) -> nn.Module:
        return in_sequence(model, group, zero3.ShardingPolicy(reduce_dtype=torch.float64))

    on_ranks(world_size, lambda: mlp().to(dtype), body, shard)


def test_nothing_sharded_is_an_error() -> None:
    with pytest.raises(ValueError, match="is sharded"), zero3.no_sync(nn.Linear(2, 2)):
        pass


def test_in_the_dtype_of_the_reduction() -> None:
    """What is kept adds up in it: 1 + 64 * 2^-10 would be 1 in bf16."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        scales = [1.0, *[2.0**-10] * 64]
        policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layer = Zero3Layer(nn.Linear(1, 2, bias=False), policy=policy, process_group=group)
        for scale in scales[:-1]:
            with zero3.no_sync(layer):
                layer(torch.full((1, 1), scale)).sum().backward()
        layer(torch.full((1, 1), scales[-1])).sum().backward()
        (chunk,) = layer.get_trainable_chunk()
        assert chunk.grad is not None
        assert chunk.grad.tolist() == [sum(scales)]

    on_ranks(2, mlp, body)


@pytest.mark.parametrize("then", ["backward", "reduce_gradients", "step"])
@pytest.mark.parametrize("frozen", ["blocks.1", "norm", ""])  # a layer, what the root has left of one, all
@pytest.mark.parametrize("stage", [3, 1])
def test_chunks_that_are_frozen_get_what_was_kept_before(stage: Any, frozen: str, then: str) -> None:
    """As parameters of plain torch: gradients stay where they are frozen, and are stepped."""

    def program(model: nn.Module, turn: Turn) -> Tensor:
        sharded = zero3.is_sharded(model)
        inside = frozen if frozen != "norm" or not sharded else ""  # the root's own chunk is the model's
        chosen = dict(model.get_submodule(inside).named_parameters(recurse=frozen != "norm"))
        for number in range(2):
            with zero3.no_sync(model) if sharded and number else nullcontext():
                loss = train(model, Turn(turn.rank, 10 * turn.step + number, turn.world_size))
        for parameter in chosen.values():
            parameter.requires_grad_(False)
        if then == "backward" and frozen:
            train(model, Turn(turn.rank, 10 * turn.step + 2, turn.world_size))
        elif sharded and (then != "step" or stage == 3):
            zero3.reduce_gradients(model)
        assert not any(p.grad.is_sparse for p in chosen.values() if p.grad is not None)  # as optimizers ask
        for parameter in chosen.values():
            parameter.requires_grad_(True)
        return loss

    check_parity(stack, program, shard=by_shard, policy=zero3.ShardingPolicy(stage=stage))
