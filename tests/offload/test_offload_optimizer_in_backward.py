"""`offload_optimizer(in_backward=True)`: each chunk is stepped as soon as its gradient has landed."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zero3
from tests.support.models import WIDTH, WORLDS, linear, mlp, seeded, step
from tests.support.offloaded import MAKES, backward, groups_of, in_files, same, same_bits, small, state_of, trained, values_of, wrapped
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_close


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("how", ["chunks", "groups"])
@pytest.mark.parametrize("place", ["cpu", "files"])
@WORLDS
def test_in_backward_same_bits(world_size: int, place: str, how: str, accumulation: int, tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, rest: object) -> list[Tensor]:
        model = wrapped(group, rest)
        optimizer = zero3.offload_optimizer(MAKES["adamw"](groups_of(model, how)), in_backward=True)
        trained(model, optimizer, group, accumulation, clip=False)
        return [*values_of(model), *state_of(optimizer)]

    same_bits(world_size, run, "cpu" if place == "cpu" else tmp_path)


@pytest.mark.parametrize("loads", ["load_checkpoint", "load_full_optimizer_state_dict", "load_state_dict"])
@pytest.mark.parametrize("resets", [False, True])
@WORLDS
def test_in_backward_goes_on_from_a_checkpoint_after_a_backward_that_raised(
    world_size: int, resets: bool, loads: str, tmp_path: Path
) -> None:
    """Also what had not landed when it raised steps nothing any more."""

    def fail(_: Tensor) -> None:
        raise ArithmeticError("as told")

    def body(group: ThreadCommunicator) -> None:
        found, saved = [], list[Tensor]()
        for place in (None, tmp_path):
            model = wrapped(group, place, seeded(*[linear] * 4), prefetch_depth=2)
            optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9)
            zero3.offload_optimizer(optimizer, in_backward=place is not None)
            step(model, Turn(group.rank, 0, world_size))
            optimizer.step()
            optimizer.zero_grad()
            zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
            saved = values_of(model)
            states = copy.deepcopy(optimizer.state_dict()), zero3.full_optimizer_state_dict(model, optimizer)
            hook = model[0].register_forward_hook(lambda module, given, output: output.register_hook(fail) and None)
            with pytest.raises(ArithmeticError):
                step(model, Turn(group.rank, 1, world_size))
            hook.remove()
            if place is not None:
                assert not same(values_of(model), saved)  # some chunks were stepped
            if resets:
                zero3.reset(model)
            zero3.load_checkpoint(tmp_path / "saved", model, optimizer if loads == "load_checkpoint" else None)
            if loads == "load_state_dict":
                optimizer.load_state_dict(states[0])
            elif loads == "load_full_optimizer_state_dict":
                zero3.load_full_optimizer_state_dict(model, optimizer, states[1])
            with torch.no_grad():
                model(Turn(group.rank, 2, world_size).tensor(3, WIDTH))
            assert same(values_of(model), saved)
            optimizer.zero_grad()
            step(model, Turn(group.rank, 2, world_size))
            optimizer.step()
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


def test_gradients_are_few_in_backward(tmp_path: Path) -> None:
    """Each is gone before the next layer's lands."""
    model = small(tmp_path)
    chunks = zero3.get_trainable_chunk(model)
    optimizer = zero3.offload_optimizer(torch.optim.SGD(chunks, lr=0.1), in_backward=True)
    before, counts = values_of(model), []
    for chunk in chunks:
        chunk.register_post_accumulate_grad_hook(lambda _: counts.append(sum(type(c.grad) is Tensor for c in chunks)))
    backward(model)
    assert counts and max(counts) == 0  # ours was first
    assert not any(torch.equal(mine, theirs) for mine, theirs in zip(values_of(model), before, strict=True))
    stepped = values_of(model)
    optimizer.step()
    assert same(values_of(model), stepped)
    assert all(chunk.grad is None for chunk in chunks)


@pytest.mark.parametrize("in_backward", [True, False])
@WORLDS
def test_in_backward_puts_no_gradient_into_a_file(world_size: int, in_backward: bool, tmp_path: Path) -> None:
    """Each is read before the next one lands. Without it all are in files until the step."""

    def body(group: ThreadCommunicator) -> None:
        model, seen = wrapped(group, tmp_path), list[bool]()
        for chunk in zero3.get_trainable_chunk(model):
            chunk.register_post_accumulate_grad_hook(lambda leaf: seen.append(in_files([leaf.grad.as_subclass(Tensor)])))
        made = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        optimizer = zero3.offload_optimizer(made, in_backward=in_backward)
        for number in range(2):
            step(model, Turn(group.rank, number, world_size))
            optimizer.step()
            optimizer.zero_grad()
        assert seen == [not in_backward] * len(seen) and seen

    run_ranks(world_size, body)


@pytest.mark.parametrize("policy", [{}, {"stage": 2}, {"reshard_after_forward": False}, {"prefetch_depth": 2}], ids=str)
@WORLDS
def test_in_backward_trains_through_two_forwards_if_each_chunk_lands_once(
    world_size: int, policy: dict[str, object], tmp_path: Path
) -> None:
    """autograd hands over the sum of both. What the first walk through the layers brings is nothing, and steps nothing."""
    plain = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        turns = [Turn(rank, number, 0) for rank in range(world_size) for number in range(2)]
        (sum(plain(turn.tensor(3, WIDTH)).pow(2).sum() for turn in turns) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = wrapped(group, tmp_path, mlp(), **policy)
        made = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, weight_decay=0.1)
        optimizer = zero3.offload_optimizer(made, in_backward=True)
        for _ in range(2):
            first, second = (model(Turn(group.rank, number, 0).tensor(3, WIDTH)).pow(2).sum() for number in range(2))
            (first + second).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(world_size, body):
        assert_close(values, plain.state_dict(), TOLERANCE, "parameters")


@WORLDS
def test_in_backward_refuses_what_reads_gradients(world_size: int, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = wrapped(group, tmp_path, mlp())
        optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1), in_backward=True)
        step(model, Turn(group.rank, 0, group.world_size))
        scalers = [kind("cpu") for kind in (zero3.GradScaler, torch.amp.GradScaler)]
        for scaler in scalers:
            scaler.scale(torch.ones(()))
        for read in (
            lambda: zero3.clip_grad_norm_(model, 1.0),
            lambda: zero3.parameter_norms(model),
            *(partial(scaler.unscale_, optimizer) for scaler in scalers),
            lambda: [chunk.grad + 1 for chunk in zero3.get_trainable_chunk(model)],
        ):
            with pytest.raises(RuntimeError, match=r"used up.*in_backward=True"):
                read()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        step(model, Turn(group.rank, 1, group.world_size))
        with pytest.raises(RuntimeError, match=r"layer .* got a second gradient before optimizer\.step"):
            step(model, Turn(group.rank, 2, group.world_size))

    run_ranks(world_size, body)


@WORLDS
def test_in_backward_refuses_the_backward_of_a_forward_before_the_step(world_size: int, tmp_path: Path) -> None:
    """Its graph holds values that the first backward has stepped. The error comes before anything is computed with the new ones."""

    def body(group: ThreadCommunicator) -> None:
        model = wrapped(group, tmp_path, mlp())
        made = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        optimizer = zero3.offload_optimizer(made, in_backward=True)
        first, second = (model(Turn(group.rank, number, world_size).tensor(3, WIDTH)).pow(2).sum() for number in range(2))
        first.backward()
        stepped = values_of(model)
        with pytest.raises(RuntimeError, match=r"layer .* got a second gradient before optimizer\.step.*no_sync"):
            second.backward()
        assert same(values_of(model), stepped)
        optimizer.step()

    run_ranks(world_size, body)
