"""What is cut otherwise on a mesh, and what is read and written there."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.core.test_meshes import MESHES, batch, expected, loss_of, on_mesh
from tests.support.footprint import BYTES, LAYERS, WIDTHS, Block, Formula
from tests.support.live import LiveBytes, lonely
from tests.support.models import WIDTH, mlp
from tests.support.optimizers import Lamb
from tests.support.ranks import ThreadMesh, run_mesh
from tests.support.reference import TOLERANCE, assert_at_rest, assert_close, full_parameters, in_sequence


@MESHES
def test_param_groups_have_one_owner_in_each_replica(replicas: int, shards: int) -> None:
    def body(model: Any, mesh: ThreadMesh) -> int:
        groups = zero3.param_groups(model, lambda name, info: {"whole": True})
        optimizer = Lamb(groups, lr=0.1)
        zero3.check_optimizer(model, optimizer)
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, mesh, number).backward()
            optimizer.step()
        assert_close(full_parameters(model), wanted, TOLERANCE, "parameters")
        return sum(p.numel() > 0 for group in groups for p in group["params"])

    plain = mlp()
    optimizer = Lamb(plain.parameters(), lr=0.1)
    for number in range(2):
        optimizer.zero_grad()
        for rank in range(replicas * shards):
            (plain(batch(rank, number)).pow(2).sum() / (replicas * shards)).backward()
        optimizer.step()
    wanted = {name: p.detach() for name, p in plain.named_parameters()}
    owned = on_mesh(body, (replicas, shards))
    assert [sum(owned[first : first + shards]) for first in range(0, len(owned), shards)] == [6] * replicas


def test_set_trainable_and_gradients_by_name_on_a_mesh() -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        zero3.set_trainable(model, lambda name, info: name.startswith("1."))
        loss_of(model, mesh, 0).backward()
        with zero3.full_gradients(model, writeback=True) as gradients:
            assert_close(gradients, {n: g for n, g in wanted.items() if n.startswith("1.")}, TOLERANCE, "gradients")
            for gradient in gradients.values():
                gradient.fill_(mesh.rank + 5)
        assert {value.item() for gradient in zero3.named_gradients(model).values() for value in gradient} <= {5.0}

    wanted = expected(range(1))
    on_mesh(body)


@MESHES
def test_full_params_and_loads_take_the_values_of_rank_0_of_the_mesh(replicas: int, shards: int) -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        assert_close(full_parameters(model), start, 0, "rank 0 wins")
        with zero3.full_params(model):
            for parameter in model.parameters():
                parameter.data.fill_(mesh.rank)
        assert_close(full_parameters(model), start, 0, "changes are lost")
        with zero3.full_params(model, writeback=True):
            for parameter in model.parameters():
                parameter.data.fill_(mesh.rank + 3)
        assert_close(full_parameters(model), {name: torch.full_like(p, 3) for name, p in start.items()}, 0, "rank 0 wins")
        found = zero3.full_state_dict(model)
        assert (found == {}) == (mesh.rank > 0)
        zero3.load_full_state_dict(model, start if mesh.rank == 0 else {})
        assert_close(full_parameters(model), start, 0, "rank 0's dict")
        assert_at_rest(model)

    start = {name: p.detach().clone() for name, p in mlp().named_parameters()}
    on_mesh(body, (replicas, shards))


def test_materialize_on_a_mesh_draws_the_numbers_of_one_process() -> None:
    def body(mesh: ThreadMesh) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        zero3.shard(model, layers=nn.Linear, device="cpu", process_group=mesh)
        zero3.materialize(model, init=draw)
        return full_parameters(model)

    def draw(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data.copy_(torch.arange(parameter.numel()).view(parameter.shape))

    for found in run_mesh(2, 2, body):
        assert all(torch.equal(value.view(-1), torch.arange(value.numel(), dtype=value.dtype)) for value in found.values())


@pytest.mark.parametrize("rank_and_size", [(True, 2), (False, 4)])
def test_rank_and_world_size_are_those_of_the_sharding_dimension(rank_and_size: tuple[bool, int]) -> None:
    right, world_size = rank_and_size

    def body(mesh: ThreadMesh) -> None:
        rank = mesh.shard_rank if right else mesh.rank
        with nullcontext() if right else pytest.raises(ValueError, match=r"(world_size=4|rank=\d), but the process group says"):
            zero3.Zero3Layer(models[mesh.rank], rank, world_size, process_group=mesh)

    models = [mlp(1) for _ in range(4)]
    run_mesh(2, 2, body)


def test_check_report_and_profile_on_a_mesh() -> None:
    def body(mesh: ThreadMesh) -> None:
        found = zero3.check(models[mesh.rank], batch(mesh.rank, 0), process_group=mesh, wrap=lambda model: in_sequence(model, mesh, policy))
        assert found.first is None, str(found)
        model = in_sequence(models[mesh.rank], mesh, policy)
        report = zero3.report(model)
        assert (report.rank, report.world_size, report.shards) == (mesh.rank, 4, 2)
        assert f"rank {mesh.rank} of 4 (2 replicas of 2 shards)" in str(report)
        loss_of(model, mesh, 0).backward()
        with zero3.profile(model) as profile:
            loss_of(model, mesh, 1).backward()
        chunks = zero3.get_trainable_chunk(model)
        backups = [transfer.nbytes for transfer in profile.transfers if transfer.kind == "backup"]
        assert sorted(backups) == sorted(2 * [chunk.nbytes for chunk in chunks]), "a reduction, and a sum over two replicas, of S each"

    models, policy = [mlp() for _ in range(4)], zero3.ShardingPolicy()
    run_mesh(2, 2, body)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_memory_of_a_mesh(depth: int) -> None:
    """Sums over replicas are the gradients to come: they take more only where gradients are there already, `S` a layer at most."""

    def layers(mesh: bool) -> zero3.Zero3Sequential:
        group = lonely(2, 2) if mesh else lonely(2)
        policy = zero3.ShardingPolicy(prefetch_depth=depth)
        return zero3.Zero3Sequential([zero3.Zero3Layer(Block(n, lambda name: None), process_group=group, policy=policy) for n in LAYERS])

    formula, peaks = Formula(2, depth), {}
    for mesh in (False, True):
        with LiveBytes() as live:
            model = layers(mesh)
            first, second = (live.peak_of(lambda: model(torch.empty(0, WIDTHS[0])).sum().backward()) for _ in range(2))  # noqa: B023
            peaks[mesh] = first, second
            assert live.now == formula.chunks + sum(formula.G)
            model.zero_grad()
            for _ in range(2):
                with zero3.no_sync(model, replicas_only=True):
                    model(torch.empty(0, WIDTHS[0])).sum().backward()
                awaited = len(LAYERS) * BYTES * mesh  # what stands for the gradients meanwhile: one element each
                assert live.now == formula.chunks + sum(formula.G) + awaited
    assert peaks[True][0] == peaks[False][0]
    assert peaks[False][1] <= peaks[True][1] <= peaks[False][1] + sum(formula.G)
