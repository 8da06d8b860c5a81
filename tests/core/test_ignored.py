"""ShardingPolicy(ignored=...): parameters that are left alone, beside those that are sharded."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero3
from tests.support import processes
from tests.support.checkpoints import assert_same
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_close, process_group, spoil
from tests.support.stacks import Stack, loss_of, stack, train
from tests.support.uneven import joined_threads
from zero3 import ParamInfo, ShardingPolicy

LEFT = ["blocks.1.up.weight", "norm.weight", "norm.bias"]


def left_alone(name: str, info: ParamInfo) -> bool:
    return name == "blocks.1.up.weight" or (info.ndim == 1 and name.startswith("norm"))


POLICY = ShardingPolicy(ignored=left_alone)


@WORLDS
@pytest.mark.parametrize("tied", [False, True])
def test_ignored_parameters_are_left_to_the_user(world_size: int, tied: bool) -> None:
    """Each rank has a gradient of its own for them, and averages it by itself: then training is that of one process."""
    models, plain = [stack(tied=tied) for _ in range(world_size)], stack(tied=tied)
    alone = [
        {name: parameter.grad for name, parameter in _trained(stack(tied=tied), rank).named_parameters()} for rank in range(world_size)
    ]
    for rank in range(world_size):
        (loss_of(plain, Turn(rank, 0, world_size)) / world_size).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model: Stack = zero3.shard(models[group.rank], process_group=process_group(group), policy=POLICY)
        own = {name: parameter for name, parameter in model.named_parameters() if "chunk" not in name}
        assert sorted(own) == sorted(LEFT)
        assert not [p for p in own.values() if any(p is chunk for chunk in zero3.get_trainable_chunk(model))]
        train(model, Turn(group.rank, 0, world_size))
        found = {name: parameter.grad.clone() for name, parameter in own.items() if parameter.grad is not None}
        for parameter in own.values():
            group.all_reduce(parameter.grad)
            parameter.grad /= world_size
        with zero3.full_gradients(model) as reduced:
            torch.optim.SGD([*zero3.get_trainable_chunk(model), *own.values()], lr=0.1).step()
            return found, dict(reduced), zero3.full_state_dict(model, rank0_only=False)

    for rank, (found, reduced, values) in enumerate(run_ranks(world_size, body)):
        assert_close(found, {name: alone[rank][name] for name in LEFT}, TOLERANCE, "gradients of one rank alone")
        assert_close(reduced, {name: value for name, value in gradients.items() if name not in LEFT}, TOLERANCE, "reduced gradients")
        assert_close(values, plain.state_dict(), TOLERANCE, "after a step")


def _trained(model: Any, rank: int) -> Any:
    train(model, Turn(rank, 0, 1))
    return model


def test_ignored_parameters_are_neither_broadcast_nor_moved() -> None:
    models = [stack() for _ in range(2)]
    spoil(models[1])
    before = [[model.get_parameter(name) for name in LEFT] for model in models]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group, policy=POLICY)
        train(model, Turn(0, 0, 1))
        with zero3.full_params(model):
            assert all(model.get_parameter(name) is parameter for name, parameter in zip(LEFT, before[group.rank], strict=True))
            assert set(dict(model.named_parameters())) == set(dict(stack().named_parameters()))
        assert (before[group.rank][0] == 7).all() == bool(group.rank)

    run_ranks(2, body)


@WORLDS
def test_ignored_parameters_in_state_dicts_and_materialize(world_size: int) -> None:
    values = {name: torch.rand_like(value) for name, value in stack().state_dict().items()}
    models = [stack() for _ in range(world_size)]
    with torch.device("meta"):
        empty = [stack() for _ in range(world_size)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        plain = stack()
        for module in plain.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        torch.manual_seed(3)

        def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            model = zero3.shard(models[group.rank], process_group=process_group(group), policy=POLICY)
            zero3.load_full_state_dict(model, values if group.rank == 0 else None)
            new = zero3.shard(empty[group.rank], process_group=process_group(group), policy=POLICY, device="cpu")
            zero3.materialize(new)
            return zero3.full_state_dict(model, rank0_only=False), zero3.full_state_dict(new, rank0_only=False)

        for loaded, drawn in run_ranks(world_size, body):
            assert_close(loaded, values, 0, "load_full_state_dict")
            assert_close(drawn, plain.state_dict(), 0, "materialize")


class Whole(nn.Parameter):
    """A subclass, which can't be sharded."""


def test_ignored_parameters_may_be_what_can_not_be_sharded() -> None:
    model = stack()
    model.norm.weight = Whole(model.norm.weight.data)
    with pytest.raises(ValueError, match="Whole"):
        zero3.shard(model)
    train(zero3.shard(model, policy=POLICY), Turn(0, 0, 1))
    layer = zero3.Zero3Layer(nn.Linear(2, 2), policy=ShardingPolicy(ignored=lambda name, info: name == "bias"))
    assert [name for name, _ in layer.named_parameters()] == ["trainable_chunk", "bias"]


def different(rank: int) -> ShardingPolicy:
    return ShardingPolicy(ignored=lambda name, info: name == f"blocks.{rank}.up.weight")


def failing(rank: int) -> ShardingPolicy:
    return ShardingPolicy(ignored=lambda name, info: {}[name] if rank else False)


def odd(rank: int) -> ShardingPolicy:
    return ShardingPolicy(ignored=lambda name, info: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("policy_of", "kind", "says"),
    [
        (different, ValueError, "ranks differ in what becomes a layer"),
        (failing, ValueError, r"rank 1: ignored\('.*'\) of the policy has raised KeyError"),
        (odd, TypeError, r"ignored\('.*'\) of the policy returned None"),
    ],
    ids=["different", "raises", "no bool"],
)
def test_ignored_is_the_same_on_all_ranks(policy_of: Any, kind: type[Exception], says: str) -> None:
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        with pytest.raises(kind, match=says):
            zero3.shard(models[group.rank], process_group=group, policy=policy_of(group.rank))
        assert len(list(models[group.rank].parameters())) == len(list(stack().parameters())), "nothing has changed"

    run_ranks(2, body)


def test_ignored_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="ignored must be a function"):
        ShardingPolicy(ignored="norm")  # type: ignore[arg-type]


def on_a_process(rank: processes.Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = zero3.shard(stack(), policy=POLICY)
    own = [parameter for name, parameter in model.named_parameters() if "chunk" not in name]
    optimizer = torch.optim.AdamW([*zero3.get_trainable_chunk(model), *own])
    train(model, Turn(0, 0, 1))
    optimizer.step()
    path = str(rank.scratch / "checkpoint")
    zero3.save_checkpoint(path, model)
    saved = zero3.full_state_dict(model, rank0_only=False)
    for parameter in model.parameters():
        parameter.data.zero_()
    zero3.load_checkpoint(path, model)
    assert Path(path).is_dir()
    return saved, zero3.full_state_dict(model, rank0_only=False)


def test_ignored_parameters_on_processes_and_in_checkpoints() -> None:
    plain = stack()
    train(plain, Turn(0, 0, 1))
    torch.optim.AdamW(plain.parameters()).step()
    for saved, loaded in processes.on_ranks(2, on_a_process):
        assert_close(saved, plain.state_dict(), TOLERANCE, "after a step")
        assert_close(loaded, saved, 0, "from the checkpoint")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("worlds", [(1, 3), (2, 3), (3, 2)])
@pytest.mark.parametrize("policies", [(POLICY, ShardingPolicy()), (ShardingPolicy(), POLICY)], ids=["ignored first", "ignored later"])
def test_a_checkpoint_is_resumed_with_other_ignored_parameters(policies: Any, worlds: tuple[int, int], tied: bool, tmp_path: Path) -> None:
    """On other numbers of ranks: the same bits, also of the optimizer's state, and then the steps of plain torch."""

    def steps(model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            train(model, Turn(0, number, 1))  # all ranks the same, so that what is ignored has the mean
            optimizer.step()

    def on(world: int, policy: ShardingPolicy, numbers: range, loads: bool) -> list[Any]:
        models = [stack(tied=tied) for _ in range(world)]

        def body(group: ThreadCommunicator) -> Any:
            model = zero3.shard(models[group.rank], process_group=process_group(group), policy=policy)
            optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
            if loads:
                spoil(model)
                zero3.load_checkpoint(tmp_path, model, optimizer)
            found = [_all_of(model, optimizer)]
            steps(model, optimizer, numbers)
            if not loads:
                zero3.save_checkpoint(tmp_path, model, optimizer)
            return [*found, _all_of(model, optimizer)]

        return run_ranks(world, body)

    plain = stack(tied=tied)
    steps(plain, torch.optim.AdamW(plain.parameters()), range(5))
    saved = on(worlds[0], policies[0], range(3), loads=False)[0][1]
    for loaded, after in on(worlds[1], policies[1], range(3, 5), loads=True):
        assert_same(loaded, saved)
        assert_close(after[0], plain.state_dict(), TOLERANCE, "after five steps")


def _all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return zero3.full_state_dict(model, rank0_only=False), zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"]


# -- what scales, clips, drops or takes back gradients

RANKS = 2


def tokens_of(rank: int, number: int) -> int:
    return 1 + rank + 2 * number


def summed_loss(model: nn.Module, rank: int, number: int) -> Tensor:
    return loss_of(model, Turn(rank, number, RANKS)) * tokens_of(rank, number)


def gradients_by_plain(weight: Callable[[int, int], float], numbers: tuple[int, ...] = (0, 1, 2)) -> dict[str, Tensor]:
    """The sum over ranks and micro-batches of each loss, multiplied by its weight."""
    plain = stack()
    for rank in range(RANKS):
        for number in numbers:
            (loss_of(plain, Turn(rank, number, RANKS)) * weight(rank, number)).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


def by_ranks(body: Callable[[Stack, Any], Any], shape: tuple[int, int] = (1, RANKS), **fields: Any) -> list[Any]:
    models = [stack() for _ in range(RANKS)]
    policy = ShardingPolicy(ignored=left_alone, **fields)
    return run_mesh(*shape, lambda mesh: body(zero3.shard(models[mesh.rank], process_group=mesh, policy=policy), mesh))


def all_gradients(model: Stack, mesh: ThreadMesh) -> dict[str, Tensor]:
    """Those of chunks, and the mean over ranks of those that are left alone."""
    zero3.clip_grad_norm_(model, float("inf"))  # reduces what is deferred
    with zero3.full_gradients(model) as gradients:
        found = {name: gradient.clone() for name, gradient in gradients.items()}
    for name in LEFT:
        own = model.get_parameter(name).grad
        if own is not None:
            found[name] = own.clone()
            mesh.all_reduce(found[name])
            found[name] /= RANKS
    return found


WAYS = [
    ("", {}), ("", {"stage": 1}), ("", {"transactional": True}), ("guard", {}), ("guard", {"transactional": True}),
    ("no_sync", {}), ("no_sync guard", {}), ("replicas_only", {}), ("", {"gradient_reduction": "sum"}),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize(("inside", "fields"), WAYS, ids=str)
def test_ignored_parameters_have_the_mean_over_tokens(inside: str, fields: dict[str, Any], shape: tuple[int, int]) -> None:
    def body(model: Stack, mesh: ThreadMesh) -> dict[str, Tensor]:
        for number in range(3):
            with ExitStack() as contexts:
                if number < 2 and "guard" not in inside and inside:
                    contexts.enter_context(zero3.no_sync(model, replicas_only=inside == "replicas_only"))
                if "guard" in inside:
                    contexts.enter_context(zero3.step_guard(model))
                zero3.backward(summed_loss(model, mesh.rank, number), tokens_of(mesh.rank, number), model)
        return all_gradients(model, mesh)

    total = sum(tokens_of(rank, number) for rank in range(RANKS) for number in range(3))
    wanted = gradients_by_plain(lambda rank, number: tokens_of(rank, number) / total)
    if fields.get("gradient_reduction") == "sum":
        wanted |= {name: wanted[name] / RANKS for name in LEFT}  # their sum over ranks is the gradient
    for found in by_ranks(body, shape, **fields):
        assert_close(found, wanted, TOLERANCE, "gradients")


class Fault(Exception):
    pass


def fail_at(model: Stack, place: str, number: int) -> None:
    """From now on forward number `number`, or its backward, raises: there all parameters but one that are left alone have gradients."""
    calls = iter(range(99))

    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if next(calls) == number:
            if place == "forward":
                raise Fault
            output.register_hook(fault)

    model.blocks[1].register_forward_hook(hook)


def fault(gradient: Tensor) -> None:
    raise Fault


@pytest.mark.parametrize("place", ["forward", "backward", "afterwards"])
@pytest.mark.parametrize("inside", ["guard", "no_sync guard"])
@pytest.mark.parametrize("transactional", [False, True])
def test_ignored_parameters_lose_what_a_step_guard_drops(inside: str, place: str, transactional: bool) -> None:
    """On the rank that failed, and on the others."""

    def body(model: Stack, mesh: ThreadMesh) -> tuple[dict[str, Tensor], list[bool]]:
        if mesh.rank == 1 and place != "afterwards":
            fail_at(model, place, 2)
        dropped = []
        for number in range(4):
            with ExitStack() as contexts:
                if "no_sync" in inside and number < 3:
                    contexts.enter_context(zero3.no_sync(model))
                guarded = contexts.enter_context(zero3.step_guard(model))
                train(model, Turn(mesh.rank, number, RANKS))
                if mesh.rank == 1 and place == "afterwards" and number == 2:
                    raise Fault
            dropped.append(guarded.failed)
        return all_gradients(model, mesh), dropped

    wanted = gradients_by_plain(lambda rank, number: 1 / RANKS, (0, 1, 3))
    for found, dropped in by_ranks(body, transactional=transactional):
        assert dropped == [False, False, True, False]
        assert_close(found, wanted, TOLERANCE, "gradients")


@pytest.mark.parametrize("fields", [{}, {"transactional": True}, {"stage": 1}, {"stage": 2, "transactional": True}], ids=str)
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_ignored_parameters_after_a_backward_that_raised(fields: dict[str, Any], place: str) -> None:
    """Its gradients are dropped, and those of before too, unless the policy is transactional. What comes after is right."""

    def body(model: Stack, mesh: ThreadMesh) -> dict[str, Tensor]:
        fail_at(model, place, 1)
        for number in range(3):
            with suppress(Fault):
                train(model, Turn(mesh.rank, number, RANKS))
            if number == 1:
                zero3.reset(model)
                kept = place == "forward" or "transactional" in fields
                assert [model.get_parameter(name).grad is not None for name in LEFT] == [kept] * len(LEFT)
        return all_gradients(model, mesh)

    kept = (0, 2) if place == "forward" or "transactional" in fields else (2,)
    wanted = gradients_by_plain(lambda rank, number: 1 / RANKS, kept)
    for found in by_ranks(body, **fields):
        assert_close(found, wanted, TOLERANCE, "gradients")


@pytest.mark.parametrize("fields", [{}, {"transactional": True}], ids=str)
@pytest.mark.parametrize("place", ["loss", "backward"])
def test_ignored_parameters_after_a_token_mean_that_raised(fields: dict[str, Any], place: str) -> None:
    """The earlier mean stays as it was, if the policy is transactional, or nothing stays; also when the model goes on."""

    def body(model: Stack, mesh: ThreadMesh) -> dict[str, Tensor]:
        if place == "backward":
            fail_at(model, place, 1)
        for number in range(3):
            loss = summed_loss(model, mesh.rank, number)
            if place == "loss" and number == 1:
                loss.register_hook(fault)
            with pytest.raises(Fault) if number == 1 else nullcontext():
                zero3.backward(loss, tokens_of(mesh.rank, number), model)
        return all_gradients(model, mesh)

    kept = (0, 2) if fields else (2,)
    total = sum(tokens_of(rank, number) for rank in range(RANKS) for number in kept)
    wanted = gradients_by_plain(lambda rank, number: tokens_of(rank, number) / total, kept)
    for found in by_ranks(body, **fields):
        assert_close(found, wanted, TOLERANCE, "gradients")


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("averaged", [False, True])
def test_ignored_parameters_are_clipped_and_measured_as_all_others(averaged: bool, norm_type: float, shape: tuple[int, int]) -> None:
    plain, wanted = stack(), gradients_by_plain(lambda rank, number: 1 / RANKS)
    for name, parameter in plain.named_parameters():
        parameter.grad = wanted[name].clone()
    norms = {name: torch.linalg.vector_norm(gradient, norm_type) for name, gradient in wanted.items()}
    values = {name: torch.linalg.vector_norm(value.detach(), norm_type) for name, value in plain.named_parameters()}
    total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    clipped = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def body(model: Stack, mesh: ThreadMesh) -> tuple[Any, ...]:
        for number in range(3):
            train(model, Turn(mesh.rank, number, RANKS))
        for name in LEFT if averaged else ():
            gradient = model.get_parameter(name).grad
            mesh.all_reduce(gradient)
            gradient /= RANKS
        found = [zero3.parameter_norms(model, "grad", norm_type), zero3.parameter_norms(model, "param", norm_type)]
        return *found, zero3.clip_grad_norm_(model, 0.1, norm_type), all_gradients(model, mesh)

    for gradients, parameters, norm, found in by_ranks(body, shape):
        assert list(gradients) == list(norms) == list(parameters)
        assert_close(gradients, norms, TOLERANCE, "norms of gradients")
        assert_close(parameters, values, TOLERANCE, "norms of parameters")
        assert_close([norm], [total], TOLERANCE, "the whole norm")
        assert_close(found, clipped, TOLERANCE, "gradients")


def test_ignored_parameters_on_one_rank_are_clipped_to_the_bit() -> None:
    plain, model = stack(), zero3.shard(stack(), policy=POLICY)
    train(plain, Turn(0, 0, 1)), train(model, Turn(0, 0, 1))
    found, wanted = zero3.clip_grad_norm_(model, 0.1), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert found == wanted
    assert all(torch.equal(model.get_parameter(name).grad, plain.get_parameter(name).grad) for name in LEFT)


def test_gradscaler_agrees_on_ignored_parameters() -> None:
    """Also in an optimizer that holds no others: a rank that found inf there would leave out a step that the others make."""

    def body(model: Stack, mesh: ThreadMesh) -> tuple[list[Tensor], float]:
        own = [model.get_parameter(name) for name in LEFT]
        scaler, optimizer = zero3.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(own, lr=1.0)
        scaler.scale(loss_of(model, Turn(mesh.rank, 0, RANKS))).backward()
        if mesh.rank == 1:
            own[0].grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        return [each.detach().clone() for each in own], scaler.get_scale()

    for values, scale in by_ranks(body):
        assert scale == 2.0
        assert_close(values, [stack().get_parameter(name).detach() for name in LEFT], 0, "values")


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("tokens", [True, False])
def test_ignored_parameters_with_ranks_that_are_out_of_data(tokens: bool, by_all: bool) -> None:
    """Their mean over all ranks, also those without data, is the gradient."""
    batches = (1, 3)
    seen: list[dict[str, Tensor]] = []

    def body(model: Stack, mesh: ThreadMesh) -> None:
        def step() -> None:
            found = {}
            for name in LEFT:
                parameter = model.get_parameter(name)
                found[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                mesh.all_reduce(found[name])
                found[name] /= RANKS
            seen.append(found) if mesh.rank == 0 else None
            model.zero_grad()

        with joined_threads(mesh, model, step, by_all) as stepper:
            for number in range(batches[mesh.rank]):
                for micro in range(2):
                    loss = summed_loss(model, mesh.rank, 2 * number + micro)
                    count = tokens_of(mesh.rank, 2 * number + micro)
                    zero3.backward(loss, count, model) if tokens else (loss / count).backward()
                stepper.step()

    by_ranks(body)
    for number, found in enumerate(seen):
        ranks = [rank for rank in range(RANKS) if number < batches[rank]]
        plain, total = stack(), sum(tokens_of(rank, 2 * number + micro) for rank in ranks for micro in range(2))
        for rank in ranks:
            for micro in range(2):
                weight = tokens_of(rank, 2 * number + micro) / total if tokens else 1 / (RANKS if by_all else len(ranks))
                (loss_of(plain, Turn(rank, 2 * number + micro, RANKS)) * weight).backward()
        assert_close(found, {name: plain.get_parameter(name).grad for name in LEFT}, TOLERANCE, f"step {number}")
    assert len(seen) == max(batches)


def test_ignored_parameters_alone_can_not_count_tokens() -> None:
    model = zero3.shard(stack().requires_grad_(False), policy=POLICY)
    model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="nothing trains but parameters that the policy's `ignored` leaves alone"):
        zero3.backward(loss_of(model, Turn(0, 0, 1)), 3, model)


def test_ignored_parameters_are_pickled_without_marks() -> None:
    weight = zero3.shard(stack(), policy=POLICY).norm.weight
    assert set(vars(pickle.loads(pickle.dumps(weight)))) == set()


@pytest.mark.parametrize("way", ["materialize", "load_pretrained", "load_full_state_dict", "load_checkpoint"])
def test_an_ignored_parameter_that_gets_its_values_later_is_known_as_before(way: str, tmp_path: Path) -> None:
    """Its values come in another object, whose gradient is clipped, scaled and dropped with the others."""
    values = stack().state_dict()

    def filled(group: ThreadCommunicator) -> nn.Module:
        model = zero3.shard(models[group.rank], device="cpu", process_group=group, policy=POLICY)
        if way == "materialize":
            zero3.materialize(model, lambda module: [p.data.copy_(torch.ones_like(p)) for p in module.parameters(recurse=False)])
        elif way == "load_pretrained":
            zero3.load_pretrained(model, tmp_path)
        elif way == "load_full_state_dict":
            zero3.load_full_state_dict(model, values)
        else:
            zero3.load_checkpoint(tmp_path / "saved", model)
        return model

    def body(group: ThreadCommunicator) -> None:
        model = filled(group)
        train(model, Turn(group.rank, 0, 2))
        own = [p for name, p in model.named_parameters() if "chunk" not in name]
        assert len(own) == len(LEFT) and not any(p.is_meta for p in own)
        for p in own:
            group.all_reduce(p.grad)
            p.grad /= 2
        with zero3.full_gradients(model) as gradients:
            squares = sum(
                gradient.double().square().sum() for gradient in [*gradients.values(), *(p.grad for p in own if p.grad is not None)]
            )
        before = [p.grad.clone() for p in own]
        norm = zero3.clip_grad_norm_(model, 1e-3)
        assert torch.allclose(norm.double(), squares.sqrt(), rtol=1e-6)
        assert all(torch.allclose(p.grad, old * 1e-3 / norm, rtol=1e-3) for p, old in zip(own, before, strict=True))

    if way == "load_pretrained":
        save_file(values, tmp_path / "model.safetensors")
    if way == "load_checkpoint":
        zero3.save_checkpoint(tmp_path / "saved", zero3.shard(stack(), policy=POLICY))
    with torch.device("meta"):
        models = [stack() for _ in range(2)]
    run_ranks(2, body)


def test_ignored_parameters_of_models_whose_reductions_differ_are_measured_as_each_says() -> None:
    plain = nn.ModuleList([stack(), stack()])
    for rank in range(RANKS):
        for each, share in zip(plain, (1, RANKS), strict=True):
            (loss_of(each, Turn(rank, 0, RANKS)) / share).backward()
    wanted = {name: torch.linalg.vector_norm(p.grad) for name, p in plain.named_parameters() if p.grad is not None}
    total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    models = [nn.ModuleList([stack(), stack()]) for _ in range(RANKS)]

    def body(group: ThreadCommunicator) -> tuple[Any, ...]:
        both = models[group.rank]
        for each, reduction in zip(both, ("sum", "mean"), strict=True):
            policy = ShardingPolicy(ignored=left_alone, gradient_reduction=reduction)  # type: ignore[arg-type]
            zero3.shard(each, process_group=group, policy=policy)
            loss_of(each, Turn(group.rank, 0, RANKS)).backward()
        return zero3.parameter_norms(both), zero3.clip_grad_norm_(both, 1e9)

    for norms, norm in run_ranks(RANKS, body):
        assert_close(norms, wanted, TOLERANCE, "norms")
        assert_close([norm], [total], TOLERANCE, "the whole norm")
