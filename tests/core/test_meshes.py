"""Replicas of shards, as threads: the numbers of plain torch, the same bits on every replica, and one more sum for each reduction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import accounts_of
from tests.support.models import WIDTH, mlp, step
from tests.support.ranks import OrdersDiffer, ThreadMesh, run_mesh
from tests.support.reference import (
    TOLERANCE,
    Turn,
    as_one_layer,
    assert_close,
    check_parity,
    full_gradients,
    full_parameters,
    in_place,
    in_sequence,
    nested,
    spoil,
)
from zero3.comm.log import Entry

MESHES = pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (3, 2), (2, 1), (2, 3)])
SHAPE = (2, 2)


def batch(rank: int, number: int) -> Tensor:
    return Turn(rank, number, 0).tensor(3, WIDTH)


def loss_of(model: nn.Module, mesh: ThreadMesh, number: int) -> Tensor:
    loss: Tensor = model(batch(mesh.rank, number)).pow(2).sum()
    return loss


def expected(numbers: range, world_size: int = 4) -> dict[str, Tensor]:
    """The mean over ranks of the sum over micro-batches, by plain torch."""
    model = mlp()
    for rank in range(world_size):
        for number in numbers:
            (model(batch(rank, number)).pow(2).sum() / world_size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model: nn.Module, mesh: ThreadMesh, wanted: dict[str, Tensor]) -> None:
    assert_close(full_gradients(model, mesh.row), wanted, TOLERANCE, "gradients")


def on_mesh(body: Callable[[Any, ThreadMesh], Any], shape: tuple[int, int] = SHAPE, shard: Any = in_sequence, **policy: Any) -> list[Any]:
    """`body(model, mesh)` on every rank. Only rank 0's model has the values that win."""
    models = [mlp() for _ in range(shape[0] * shape[1])]
    for model in models[1:]:
        spoil(model)
    return run_mesh(*shape, lambda mesh: body(shard(models[mesh.rank], mesh, zero3.ShardingPolicy(**policy)), mesh))


def chunks_of(model: nn.Module) -> list[Tensor]:
    return [chunk.detach().clone() for chunk in model.parameters()]


def count(mesh: ThreadMesh, kind: str) -> int:
    return sum(entry.kind == kind for entry in mesh.log)


# -- numbers


@MESHES
@pytest.mark.parametrize("shard", [in_sequence, in_place, nested, as_one_layer])
def test_a_mesh_trains_as_one_process(replicas: int, shards: int, shard: Any) -> None:
    check_parity(mlp, step, world_size=replicas * shards, replicas=replicas, shard=shard)


@pytest.mark.parametrize("policy", [
    {"gradient_reduction": "sum"}, {"stage": 2}, {"prefetch_depth": 0}, {"prefetch_depth": 3}, {"dynamic": True},
    {"reshard_after_forward": False}, {"separate_backup_group": True}, {"transactional": True}, {"compare_every": 1},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("parts", [False, True])
def test_every_policy_on_a_mesh(policy: dict[str, Any], parts: bool) -> None:
    chosen = zero3.ShardingPolicy(**policy)
    check_parity(mlp, step, world_size=4, replicas=2, policy=chosen, parts=parts)


def test_ranks_that_begin_transfers_of_two_groups_in_different_orders_are_found_out() -> None:
    """By the test double: its collectives are late, so ranks whose orders make a circle would not wait for each other for ever."""
    row_first = (True, False, False, True)

    def body(mesh: ThreadMesh) -> None:
        groups = [mesh.row, mesh.column] if row_first[mesh.rank] else [mesh.column, mesh.row]
        for pending in [group.all_gather(torch.empty(4), torch.empty(2)) for group in groups]:
            pending.wait()

    with pytest.raises(OrdersDiffer, match="ranks begin the collectives of their groups in different orders: rank"):
        run_mesh(2, 2, body)
    row_first = (True,) * 4
    run_mesh(2, 2, body)


def test_fp16_sums_over_a_mesh_do_not_overflow_where_the_mean_does_not() -> None:
    def body(model: Any, mesh: ThreadMesh) -> float:
        model(torch.full((1, WIDTH), 1.0, dtype=torch.float16)).sum().backward()
        return max(chunk.grad.as_subclass(Tensor).abs().max().item() for chunk in zero3.get_trainable_chunk(model))

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)).half()
        nn.init.zeros_(model[0].weight)
        return nn.Sequential(Scaled(model))

    models = [build() for _ in range(4)]
    found = run_mesh(2, 2, lambda mesh: body(in_sequence(models[mesh.rank], mesh, zero3.ShardingPolicy()), mesh))
    assert found == [30000.0] * 4  # three of these are beyond 65504


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 30000.0


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
@MESHES
def test_replicas_have_the_same_bits_after_every_step(replicas: int, shards: int, policy: dict[str, Any]) -> None:
    def body(model: Any, mesh: ThreadMesh) -> list[list[Tensor]]:
        optimizer, seen = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1), [chunks_of(model)]
        for number in range(3):
            model(batch(mesh.rank, number).to(policy.get("param_dtype", torch.float64))).pow(2).mean().backward()
            zero3.clip_grad_norm_(model, 0.1)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(chunks_of(model))
        return seen

    found = on_mesh(body, (replicas, shards), **policy)
    for rank in range(replicas * shards):
        for mine, first in zip(found[rank], found[rank % shards], strict=True):
            assert all(map(torch.equal, mine, first)), rank


def test_a_reduction_costs_one_sum_over_replicas() -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        chunks = len(zero3.get_trainable_chunk(model))
        for number in range(2):
            loss_of(model, mesh, number).backward()
            assert count(mesh, "reduce_scatter") == count(mesh, "all_reduce_later") == (number + 1) * chunks
        sums = [entry.numel for entry in mesh.log if entry.kind == "all_reduce_later"]
        accounts = accounts_of(model)
        chunks_and_trailers = [each.chunk.shard.numel() + len(each.chunk.layout.slots) for each in reversed(accounts)]
        assert sums == chunks_and_trailers * 2

    on_mesh(body)


def test_sums_over_replicas_wait_for_the_end_of_the_backward_alone() -> None:
    """The sum of a layer begins when the next layer is backed up, and nobody waits for it before the backward ends."""
    order: list[str] = []

    def body(model: Any, mesh: ThreadMesh) -> None:
        if mesh.rank == 0:
            mesh.row.before = order.append
            start = mesh.column.all_reduce_later

            def sum_later(tensor: Tensor) -> Any:
                late = start(tensor)
                arrive, late._arrive = late._arrive, lambda: (order.append("sum is over"), arrive())
                return late

            mesh.column.before = order.append
            mesh.column.all_reduce_later = sum_later
        order.clear()
        loss_of(model, mesh, 0).backward()

    on_mesh(body)
    begun = ["reduce_scatter", "all_reduce_later"] * 3
    assert [each for each in order if each != "all_gather"] == [*begun, *["sum is over"] * 3]


# -- what belongs to a step


@MESHES
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_grad_norm_and_parameter_norms_count_each_replica_once(replicas: int, shards: int, norm_type: float) -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        loss_of(model, mesh, 0).backward()
        for name, norm in zero3.parameter_norms(model, norm_type=norm_type).items():
            torch.testing.assert_close(norm, torch.linalg.vector_norm(wanted[name], norm_type))
        torch.testing.assert_close(zero3.clip_grad_norm_(model, 0.5, norm_type), total)
        check(model, mesh, clipped)

    wanted, plain = expected(range(1), replicas * shards), mlp()
    for name, parameter in plain.named_parameters():
        parameter.grad = wanted[name].clone()
    total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    clipped = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    on_mesh(body, (replicas, shards))


@pytest.mark.parametrize("culprit", range(4))
def test_a_mistake_of_one_rank_is_raised_on_all_ranks_of_a_mesh(culprit: int) -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        loss_of(model, mesh, 0).backward()
        with pytest.raises(ValueError, match=f"^rank {culprit}: norm_type must be positive"):
            zero3.clip_grad_norm_(model, 1.0, -1.0 if mesh.rank == culprit else 2.0)
        with pytest.raises(ValueError, match=f"^rank {culprit}: of must be"):
            zero3.parameter_norms(model, of="nothing" if mesh.rank == culprit else "grad")
        context = zero3.full_params(model, writeback=mesh.rank == culprit)
        with pytest.raises(ValueError, match=f"rank {culprit}: .*full_params.writeback=True"), context:
            pass

    on_mesh(body)


@pytest.mark.parametrize("culprit", range(4))
def test_grad_scaler_skips_the_step_on_all_ranks_of_a_mesh(culprit: int) -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        optimizer, scaler = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1), zero3.GradScaler("cpu", init_scale=4.0)
        before = full_parameters(model)
        (scaler.scale(loss_of(model, mesh, 0)) * (float("inf") if mesh.rank == culprit else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert_close(full_parameters(model), before, 0, "parameters")

    on_mesh(body)


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("replicas_only", [False, True])
def test_step_guard_drops_a_micro_batch_on_all_ranks_of_a_mesh(culprit: int, phase: str, replicas_only: bool) -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        def fail(*_: Any) -> None:
            raise ArithmeticError("as told")

        for number in range(6):
            last = number % 3 == 2
            fails = number in (4, 5) and mesh.rank == culprit
            with nullcontext() if last else zero3.no_sync(model, replicas_only=replicas_only), zero3.step_guard(model) as guarded:
                handle = model[1].module.register_forward_pre_hook(fail) if fails and phase == "forward" else None
                try:
                    out = model[1](model[0](batch(mesh.rank, number)))
                finally:
                    if handle is not None:
                        handle.remove()
                if fails and phase == "backward":
                    out.register_hook(fail)
                model[2](out).pow(2).sum().backward()
            assert guarded.errors == ({culprit: "ArithmeticError: as told"} if number in (4, 5) else {})
            if number == 2:
                check(model, mesh, wanted)
                model.zero_grad()
        loss_of(model, mesh, 6).backward()  # joins what micro-batch 3 has left
        check(model, mesh, left)

    wanted = expected(range(3))
    left = {name: value + expected(range(3, 4))[name] for name, value in expected(range(6, 7)).items()}
    on_mesh(body, shard=in_place)


def test_ranks_of_a_mesh_that_call_other_layers_are_told() -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        with pytest.raises(ValueError, match=r"ranks differ in the layer called as number 1 .*ranks 0, 1: .*; ranks 2, 3: "):
            model[1 if mesh.replica else 0](batch(0, 0))

    on_mesh(body, shard=in_place)


def test_transfers_of_one_replica_alone_are_told_to_all_ranks() -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        if mesh.replica:
            model[0]._state.log.entries.append(Entry("gathering", model[1]._state.subject, 77))
        loss_of(model, mesh, 0).backward()
        with pytest.raises(ValueError, match=r"ranks differ in the transfers made before forward pass 1: rank 0: .*; rank 3: "):
            zero3.clip_grad_norm_(model, 1.0)

    on_mesh(body)
