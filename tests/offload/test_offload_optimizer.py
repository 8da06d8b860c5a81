"""`offload_optimizer`: the same bits, stepped chunk by chunk, with the state in files beside the chunks."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, WORLDS, linear, mlp, step
from tests.support.offloaded import MAKES, backward, groups_of, in_files, odd, same, same_bits, small, state_of, trained, values_of, wrapped
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
from tests.support.reference import Turn, check_parity, in_sequence
from zero3.offload.one_by_one import try_out


@pytest.mark.slow
@pytest.mark.parametrize("how", ["chunks", "groups", "whole"])
@pytest.mark.parametrize("name", MAKES)
@WORLDS
def test_same_bits_as_without(world_size: int, name: str, how: str, tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model = wrapped(group, place)
        optimizer = MAKES[name](groups_of(model, how))
        assert zero3.offload_optimizer(optimizer) is optimizer
        trained(model, optimizer, group)
        assert place is None or not state_of(optimizer) or in_files(state_of(optimizer))
        return [*values_of(model), *state_of(optimizer)]

    same_bits(world_size, run, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("policy", [{}, {"stage": 2}, {"transactional": True}, {"prefetch_depth": 0}], ids=str)
def test_two_forwards_of_one_backward_are_one_step(policy: dict[str, Any]) -> None:
    """torch hands over the sum of both gradients, in the backward of the first forward."""

    def run(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for number in range(3):
            xs = [torch.full((2, WIDTH), 0.1 * number + other, dtype=torch.float64) for other in (1, 2)]
            (model(xs[0]).pow(2).mean() + model(xs[1]).pow(2).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def sharded(group: ThreadCommunicator) -> list[Tensor]:
        model = wrapped(group, None, mlp(), **policy)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.5)
        run(model, zero3.offload_optimizer(optimizer, in_backward=True))
        with zero3.full_params(model):
            return [p.detach().clone() for p in model.parameters()]

    plain = mlp()
    run(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5))
    for found in run_ranks(2, sharded):
        assert all(torch.allclose(mine, theirs, rtol=1e-12) for mine, theirs in zip(found, plain.parameters(), strict=True))


@pytest.mark.parametrize(
    "policy",
    [
        {"stage": 1}, {"stage": 2}, {"transactional": True}, {"dynamic": True}, {"prefetch_depth": 0}, {"prefetch_depth": 2},
        {"reshard_after_forward": False}, {"param_dtype": torch.float32, "reduce_dtype": torch.float64}, {"grad_dtype": torch.float64},
        {"gradient_reduction": "sum"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("in_backward", [False, True])
def test_every_policy(in_backward: bool, policy: dict[str, Any], tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model = wrapped(group, place, mlp(), **policy)
        optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)), in_backward=in_backward)
        trained(model, optimizer, group, clip=not in_backward)
        return [*values_of(model), *state_of(optimizer)]

    def refused(group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match="in_backward=True with stage=1"):
            run(group, tmp_path)

    run_ranks(2, refused) if in_backward and policy == {"stage": 1} else same_bits(2, run, tmp_path)


@pytest.mark.parametrize("in_backward", [False, True])
def test_on_a_mesh(in_backward: bool, tmp_path: Path) -> None:
    def body(mesh: ThreadMesh) -> None:
        found = []
        for rest in (None, tmp_path):
            model = in_sequence(odd(), mesh, zero3.ShardingPolicy(offload=rest))
            optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)), in_backward=in_backward)
            for number in range(3):
                with zero3.no_sync(model, replicas_only=True):
                    step(model, Turn(mesh.rank, 2 * number, 4))
                step(model, Turn(mesh.rank, 2 * number + 1, 4))
                optimizer.step()
                optimizer.zero_grad()
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_mesh(2, 2, body)


@pytest.mark.parametrize("in_backward", [False, True])
def test_step_guard_takes_a_failed_micro_batch_back(in_backward: bool, tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, rest: Path | None) -> list[Tensor]:
        model = wrapped(group, rest, mlp(), transactional=True)
        optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)), in_backward=in_backward)
        for number in range(3):
            with zero3.step_guard(model) as guarded:
                step(model, Turn(group.rank, number, group.world_size))
                if number == 1 and group.rank == 0:
                    raise ArithmeticError("as told")
            if not guarded.failed:
                optimizer.step()
            optimizer.zero_grad()
        return [*values_of(model), *state_of(optimizer)]

    same_bits(2, run, tmp_path)


@pytest.mark.parametrize("in_backward", [False, True])
@WORLDS
def test_as_an_unsharded_model_trains(world_size: int, in_backward: bool, tmp_path: Path) -> None:
    """Plain torch's own AdamW is the judge. (With `in_backward` gradients are gone when the judge would look.)"""
    model, losses = mlp(), []
    plain = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        plain.zero_grad()
        losses.append(sum(step(model, Turn(rank, number, world_size)).item() for rank in range(world_size)))
        for parameter in model.parameters():
            parameter.grad /= world_size
        plain.step()

    def body(group: ThreadCommunicator) -> list[float]:
        sharded = wrapped(group, tmp_path, mlp())
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(sharded), lr=0.1), in_backward=in_backward)
        found = []
        for number in range(3):
            optimizer.zero_grad()
            found.append(step(sharded, Turn(group.rank, number, group.world_size)).item())
            optimizer.step()
        with zero3.full_params(sharded):
            for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
        return found

    summed = [sum(each) for each in zip(*run_ranks(world_size, body), strict=True)]
    assert summed == pytest.approx(losses, rel=1e-12)


def test_parity_of_gradients_and_parameters(tmp_path: Path) -> None:
    make: Any = lambda parameters: zero3.offload_optimizer(torch.optim.AdamW(parameters, lr=0.1))  # noqa: E731
    check_parity(mlp, step, policy=zero3.ShardingPolicy(offload=tmp_path), optimizer=make, tolerance=1e-10, same_bits_on_one_rank=False)


@pytest.mark.parametrize("place", [None, "cpu"])
def test_without_files_nothing_changes(place: str | None) -> None:
    model = zero3.Zero3Layer(linear(), policy=zero3.ShardingPolicy(offload=place))
    optimizer = torch.optim.AdamW(model.parameters())
    assert zero3.offload_optimizer(optimizer) is optimizer
    assert "step" not in vars(optimizer)
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert zero3.offload_optimizer(plain, in_backward=True) is plain
    assert "step" not in vars(plain)


def test_scheduler_closure_and_hooks(tmp_path: Path) -> None:
    """As torch has them: a hook is called once a step, and so is a closure."""
    found = []
    for place in (None, tmp_path):
        model, calls = small(place), []
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
        optimizer.register_step_pre_hook(lambda *given, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *given, calls=calls: calls.append("after"))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (number + 1))
        for _ in range(3):

            def closure(model: nn.Module = model, optimizer: Any = optimizer, calls: list[str] = calls) -> float:
                calls.append("closure")
                optimizer.zero_grad()
                backward(model)
                return 7.0

            assert optimizer.step(closure) == 7.0
            schedule.step()
        found.append([*values_of(model), torch.tensor([group["lr"] for group in optimizer.param_groups])])
        assert calls == ["before", "closure", "after"] * 3
    assert same(*found)


@pytest.mark.parametrize("fused", [False, True])
@WORLDS
def test_grad_scaler(world_size: int, fused: bool, tmp_path: Path) -> None:
    """One step is skipped by all ranks, as without offload: its loss is infinite on rank 0."""

    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model = wrapped(group, place, mlp())
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1, fused=fused))
        scaler = zero3.GradScaler("cpu", init_scale=4.0)
        for number in range(3):
            optimizer.zero_grad()
            loss = model(Turn(group.rank, number, group.world_size).tensor(3, WIDTH)).pow(2).mean()
            scaler.scale(loss * (float("inf") if number == 1 and group.rank == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [*values_of(model), torch.tensor(scaler.get_scale())]

    same_bits(world_size, run, tmp_path)


def test_twice_is_once_and_a_deleted_optimizer_is_gone(tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1), in_backward=True)
    stands = vars(optimizer)["step"]
    assert zero3.offload_optimizer(optimizer) is optimizer and vars(optimizer)["step"] is stands
    reference = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer, stands
        assert reference() is None
    finally:
        gc.enable()
    backward(model)  # hooks of what is gone do nothing
    assert all(type(chunk.grad) is Tensor for chunk in zero3.get_trainable_chunk(model))


def on_gloo(rank: Rank, in_backward: bool) -> tuple[bool, list[float]]:
    """AdamW on real processes, with files and without: whether all bits are the same, and the losses."""
    found, losses = [], []
    for place in (None, rank.scratch):
        model = in_sequence(odd(), None, zero3.ShardingPolicy(offload=place))
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1), in_backward=in_backward)
        losses = []
        for number in range(4):
            losses.append(step(model, Turn(rank.number, number, rank.world_size)).item())
            if not in_backward:
                zero3.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append([*values_of(model), *state_of(optimizer), torch.tensor(losses)])
    assert in_files(state_of(optimizer))
    return same(*found), losses


@pytest.mark.parametrize("in_backward", [False, True])
def test_on_processes(in_backward: bool) -> None:
    assert all(equal for equal, _ in on_ranks(2, on_gloo, in_backward))


def test_add_param_group_of_a_model_in_another_directory(tmp_path: Path) -> None:
    def trained(*places: Path | None) -> list[Tensor]:
        def body(group: ThreadCommunicator) -> list[Tensor]:
            models = [wrapped(group, place) for place in places]
            optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(models[0]), lr=0.1, momentum=0.9))
            optimizer.add_param_group({"params": zero3.get_trainable_chunk(models[1])})
            for number in range(2):
                for model in models:
                    model(Turn(0, number, 1).tensor(2, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return [chunk.detach().clone() for model in models for chunk in zero3.get_trainable_chunk(model)]

        return run_ranks(1, body)[0]  # type: ignore[no-any-return]

    places = tmp_path / "one", tmp_path / "other"
    for place in places:
        place.mkdir()
    for found, expected in zip(trained(*places), trained(None, None), strict=True):
        assert torch.equal(found, expected)


def test_complex_parameters_are_tried_out_without_a_warning() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert try_out(optimizer, optimizer.param_groups[0], parameter) == [torch.complex64]
