"""step_guard where chunks have replicas: a rank that failed makes the rest of its transfers, in both of its groups, where others do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.resilience.test_step_guard import LAYERS_OF_MODEL, batch, expected, loss_of, sharded
from tests.support.models import Broken, fused
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadMesh, run_mesh
from tests.support.reference import TOLERANCE, assert_at_rest, assert_close, full_gradients, in_sequence


class Failure(NamedTuple):
    rank: int
    where: int | str  # in a layer, before all of them, between forward and backward, or after them
    phase: str = ""


def failures(ranks: int) -> list[Failure]:
    layers = [Failure(*each) for each in product(range(ranks), range(LAYERS_OF_MODEL), ("forward", "backward"))]
    return layers + [Failure(*each) for each in product(range(ranks), ("before", "between", "after"))]


def micro_batch(model: Any, rank: int, number: int, failure: Failure | None) -> None:
    """One that fails, if this rank has a `failure`."""

    def fail(here: str) -> None:
        if failure is not None and failure.where == here:
            raise Broken("the fuse")

    fail("before")
    for layer in model:
        layer.module.blows = None
    if failure is not None and isinstance(failure.where, int):
        model[failure.where].module.blows = (failure.phase, Broken)
    loss = loss_of(model, rank, number)
    fail("between")
    loss.backward()
    fail("after")


def check(model: nn.Module, mesh: ThreadMesh, wanted: dict[str, Tensor]) -> None:
    assert_close(full_gradients(model, mesh.row), wanted, TOLERANCE, "gradients")


Around = Callable[[nn.Module], AbstractContextManager[Any]]
WAYS: dict[str, Around] = {
    "accumulate": lambda model: nullcontext(),
    "no_sync": zero3.no_sync,
    "replicas_only": partial(zero3.no_sync, replicas_only=True),
}


def fail_everywhere(shape: tuple[int, int], way: str, **policy: Any) -> None:
    """Each step has two micro-batches, the first one under `way`. In every step one of them fails on one rank."""
    steps: list[Failure | None] = [None, *failures(shape[0] * shape[1]), None]
    dropped = {2 * step + step % 2 for step, failure in enumerate(steps) if failure is not None}

    def body(mesh: ThreadMesh) -> Any:
        model = sharded(mesh, **policy)
        made = len(mesh.row.log), len(mesh.column.log)
        for number in range(2 * len(steps)):
            failure = steps[number // 2] if number in dropped else None
            with nullcontext() if number % 2 else WAYS[way](model), zero3.step_guard(model) as guarded:
                micro_batch(model, mesh.rank, number, failure if failure is not None and failure.rank == mesh.rank else None)
            assert guarded.errors == ({failure.rank: "Broken: the fuse"} if failure is not None else {}), number
            assert_at_rest(model)
        log = mesh.row.log[made[0] :], mesh.column.log[made[1] :]
        check(model, mesh, wanted)
        return log

    wanted = expected(shape[0] * shape[1], [number for number in range(2 * len(steps)) if number not in dropped])
    logs = run_mesh(*shape, body, timeout=20)
    assert all(log == logs[0] for log in logs)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (1, 3)])
def test_step_guard_on_a_mesh_drops_what_fails_on_any_rank_at_any_place(shape: tuple[int, int], depth: int) -> None:
    fail_everywhere(shape, "accumulate", prefetch_depth=depth)


@pytest.mark.parametrize("shape", [(2, 2), (3, 1)])
@pytest.mark.parametrize("way", ["no_sync", "replicas_only"])
def test_step_guard_on_a_mesh_with_gradients_that_are_kept(way: str, shape: tuple[int, int]) -> None:
    fail_everywhere(shape, way, prefetch_depth=2)


@pytest.mark.parametrize("policy", [
    {"transactional": True}, {"separate_backup_group": True}, {"reshard_after_forward": False}, {"reduce_dtype": torch.float64},
], ids=str)  # fmt: skip
def test_step_guard_on_a_mesh_with_other_policies(policy: dict[str, Any]) -> None:
    fail_everywhere((3, 1), "replicas_only", **policy)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_step_guard_on_two_replicas_of_three_shards(way: str, depth: int) -> None:
    fail_everywhere((2, 3), way, prefetch_depth=depth)


def fail_in_processes(rank: Rank) -> list[bool]:
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = in_sequence(fused(), mesh, zero3.ShardingPolicy(prefetch_depth=2))
    failing, dropped = [None, Failure(2, 2, "forward"), Failure(0, 1, "backward"), None], []
    for number, failure in enumerate(failing):
        with zero3.step_guard(model) as guarded:
            micro_batch(model, rank.number, number, failure if failure is not None and failure.rank == rank.number else None)
        dropped.append(guarded.failed)
    with zero3.full_gradients(model) as gradients:
        assert_close(dict(gradients), expected(3, [0, 3]), TOLERANCE, "gradients")
    return dropped


@pytest.mark.slow
def test_step_guard_on_three_replicas_that_are_processes() -> None:
    assert on_ranks(3, fail_in_processes) == [[False, True, True, False]] * 3


def test_step_guard_on_a_mesh_in_a_whole_training() -> None:
    """Means over tokens, clipping and AdamW; every rank fails once, and two of them together."""
    failing = {3: [Failure(0, 1, "backward")], 5: [Failure(3, 2, "forward"), Failure(1, 0, "backward")], 6: [Failure(2, "between")]}

    def tokens(rank: int, number: int) -> int:
        return 1 + (rank + number) % 3

    def body(mesh: ThreadMesh) -> None:
        model = sharded(mesh, prefetch_depth=2)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=0.01, eps=0.01)
        for number in range(8):
            mine = next((failure for failure in failing.get(number, ()) if failure.rank == mesh.rank), None)
            for layer in model:
                layer.module.blows = None
            if mine is not None and isinstance(mine.where, int):
                model[mine.where].module.blows = (mine.phase, Broken)
            with zero3.step_guard(model) as guarded:
                loss = model(batch(mesh.rank, number)).pow(2).sum()
                if mine is not None and mine.where == "between":
                    raise Broken
                zero3.backward(loss, tokens(mesh.rank, number), model)
            assert sorted(guarded.errors) == sorted(failure.rank for failure in failing.get(number, ()))
            if number % 2:
                zero3.clip_grad_norm_(model, 0.5)
                optimizer.step()
                optimizer.zero_grad()
        assert_close(
            zero3.full_state_dict(model, rank0_only=False),
            parameters,
            TOLERANCE,
            "parameters",
        )

    plain = fused()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=0.01)
    for first in range(0, 8, 2):
        numbers = [number for number in (first, first + 1) if number not in failing]
        total = sum(tokens(rank, number) for rank in range(4) for number in numbers)
        for rank, number in product(range(4), numbers):
            (plain(batch(rank, number)).pow(2).sum() / total).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: value.detach() for name, value in plain.named_parameters()}
    run_mesh(2, 2, body, timeout=20)
