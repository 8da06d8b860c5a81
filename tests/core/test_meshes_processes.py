"""Meshes of real processes on gloo: the numbers of plain torch and of FSDP2's HSDP, and what `process_group=` takes for a mesh."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero3
from tests.core.test_meshes import chunks_of
from tests.sequences import texts
from tests.support.experts import made
from tests.support.fsdp2 import whole
from tests.support.processes import PROMPT, Rank, on_ranks, try_on_ranks
from tests.support.training import SGD, Run, difference, difference_by_tensor, loss_of, odd_model, sentences, train_plain

pytestmark = pytest.mark.slow

NAMES = ("dp_replicate", "dp_shard")


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES)


def sharded(rank: Rank, mesh: Any, dtype: torch.dtype = torch.float64, gain: tuple[int, ...] = (), **policy: Any) -> zero3.Zero3Sequential:
    chosen = zero3.ShardingPolicy(**policy)
    modules = odd_model(dtype, seed=rank.number, gain=gain)  # rank 0's values win
    return zero3.Zero3Sequential([zero3.Zero3Layer(module, policy=chosen, process_group=mesh) for module in modules])


def train(rank: Rank, model: nn.Module, accumulate: int = 1) -> tuple[Run, list[list[Tensor]]]:
    """Ten steps of a few micro-batches, and this rank's chunks after each."""
    run, seen = Run(), []
    optimizer = SGD.build(zero3.get_trainable_chunk(model))
    for step in range(10):
        mine = sentences(step)[rank.number :: rank.world_size].chunk(accumulate)
        with zero3.no_sync(model, replicas_only=True):
            losses = [loss_of(model, words) / accumulate for words in mine[:-1]]
            for loss in losses:
                loss.backward()
        losses.append(loss_of(model, mine[-1]) / accumulate)
        losses[-1].backward()
        run.losses.append(sum(loss.item() for loss in losses))
        with zero3.full_gradients(model) as gradients:
            run.gradients.append({name: gradient.clone() for name, gradient in gradients.items()})
        optimizer.step()
        optimizer.zero_grad()
        seen.append(chunks_of(model))
    run.parameters = zero3.full_state_dict(model, rank0_only=False)
    return run, seen


def on_mesh(rank: Rank, shape: tuple[int, int], dtype: torch.dtype, accumulate: int, gain: tuple[int, ...] = ()) -> Any:
    return train(rank, sharded(rank, mesh_of(*shape), dtype, gain), accumulate)


def mean_of(found: list[Any], shards: int) -> Run:
    """The ranks' runs as one. Replicas have the same bits after every step, and all ranks the same whole gradients."""
    for number, (run, chunks) in enumerate(found):
        for mine, first in zip(chunks, found[number % shards][1], strict=True):
            assert all(map(torch.equal, mine, first)), f"rank {number}"
        for mine, first in zip([*run.gradients, run.parameters], [*found[0][0].gradients, found[0][0].parameters], strict=True):
            assert all(torch.equal(mine[name], first[name]) for name in first), f"rank {number}"
    one: Run = found[0][0]
    one.losses = [sum(losses) / len(found) for losses in zip(*(run.losses for run, _ in found), strict=True)]
    return one


@pytest.mark.parametrize(("shape", "dtype", "accumulate"), [
    ((2, 2), torch.float64, 1), ((2, 2), torch.float64, 3), ((2, 1), torch.float64, 3), ((3, 1), torch.float32, 2)
], ids=str)  # fmt: skip
def test_ten_steps_on_a_mesh_equal_plain_torch(shape: tuple[int, int], dtype: torch.dtype, accumulate: int) -> None:
    found = mean_of(on_ranks(shape[0] * shape[1], on_mesh, shape, dtype, accumulate), shape[1])
    expected = train_plain(odd_model(dtype), SGD)
    assert difference(found, expected) <= {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    if dtype == torch.float64:
        assert difference_by_tensor(found, expected) <= 1e-12


def through_sockets(rank: Rank) -> Any:
    os.environ["ZERO3_HOST_MEMORY"] = "0"
    return on_mesh(rank, (2, 2), torch.float64, 1), on_mesh_again(rank)


def on_mesh_again(rank: Rank) -> Any:
    mesh = DeviceMesh("cpu", [[0], [1], [2], [3]], mesh_dim_names=NAMES)  # four replicas: sums in two steps
    return train(rank, sharded(rank, mesh))


def test_meshes_through_sockets() -> None:
    found = on_ranks(4, through_sockets, fresh=True)
    expected = train_plain(odd_model(torch.float64), SGD)
    for runs, shards in (([one for one, _ in found], 2), ([four for _, four in found], 1)):
        assert difference(mean_of(runs, shards), expected) <= 1e-12


def train_fsdp2(rank: Rank, accumulate: int) -> Run:
    mesh = mesh_of(2, 2)
    model, run = nn.Sequential(*odd_model(gain=(1,))), Run()
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, group = SGD.build(model.parameters()), mesh.get_group("dp_shard")
    warnings.simplefilter("ignore")  # FSDP2 warns of views that are modified in place: none is here
    for step in range(10):
        total = 0.0
        for number, words in enumerate(sentences(step)[rank.number :: rank.world_size].chunk(accumulate)):
            model.set_requires_all_reduce(number == accumulate - 1)
            loss = loss_of(model, words) / accumulate
            loss.backward()
            total += loss.item()
        run.losses.append(total)
        run.gradients.append({name: whole(p.grad, group) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: whole(p, group) for name, p in model.named_parameters()}
    return run


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ten_steps_on_a_mesh_equal_fsdp2s_hsdp(accumulate: int) -> None:
    theirs = on_ranks(4, train_fsdp2, accumulate, debug="OFF")
    losses = [sum(losses) / 4 for losses in zip(*(run.losses for run in theirs), strict=True)]
    expected = Run(losses, theirs[0].gradients, theirs[0].parameters)
    found = mean_of(on_ranks(4, on_mesh, (2, 2), torch.float32, accumulate, (1,)), 2)
    assert difference(found, expected) <= 1e-6


# -- what process_group= takes


def refused(rank: Rank) -> list[str]:
    names = ("replicate", "shard")
    meshes = {
        "other names": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=names),
        "the wrong way around": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES[::-1]),
        "no names": lambda: init_device_mesh("cpu", (2, 2)),
        "three dimensions": lambda: init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", *NAMES)),
        "ranks that fall": lambda: DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=NAMES),
        "replicas that fall": lambda: DeviceMesh("cpu", [[[2], [3]], [[0], [1]]], mesh_dim_names=(*NAMES, "sp")),
        "replicas that cross": lambda: DeviceMesh("cpu", [[[0], [3]], [[1], [2]]], mesh_dim_names=(*NAMES, "sp")),
    }
    module, told = nn.Linear(2, 2), []
    weight = module.weight
    for make in meshes.values():
        mesh = make()
        with pytest.raises(ValueError, match="process_group is a mesh") as caught:
            zero3.Zero3Layer(module, process_group=mesh)
        told.append(str(caught.value))
        with pytest.raises(ValueError, match="process_group is a mesh") as caught:
            zero3.shard(Root(module), process_group=mesh)
        told.append(str(caught.value))
        with pytest.raises(ValueError, match="process_group is a mesh") as caught:
            zero3.ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, process_group=mesh, lr=0.1)
        told.append(str(caught.value))
        assert module.weight is weight
    with pytest.raises(TypeError, match="there are no replicas here") as wrong:
        zero3.ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, process_group=mesh_of(2, 2), lr=0.1)
    return [*told, str(wrong.value)]


class Root(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([module])


def test_other_meshes_are_refused_on_all_ranks() -> None:
    first, *others = on_ranks(4, refused)
    assert others == [first] * 3
    assert len(first) == 22
    for text in first[:12]:
        assert re.match(
            r"rank 0: process_group is a mesh of shape \(.*Expected is a mesh of one dimension.*'dp_replicate', 'dp_shard'", text
        )
    assert all("ranks that rise along each dimension" in text for text in first[12:21])
    assert "there are no replicas here" in first[21]


DEALT, PARTS = ("dp_shard", "ep"), ("dp_shard", "sp")
Named = tuple[tuple[str, ...], tuple[int, ...]]


def with_another_mesh(rank: Rank, *given: Named | None) -> None:
    meshes = [init_device_mesh("cpu", each[1], mesh_dim_names=each[0]) if each else None for each in given]
    dealt = given[0] is not None and given[0][0] == DEALT
    zero3.shard(
        made() if dealt else texts.made(), process_group=meshes[rank.number // 2], policy=zero3.ShardingPolicy(expert_parallel=dealt)
    )


@pytest.mark.parametrize(("one", "other", "told"), [
    ((DEALT, (2, 2)), (DEALT, (1, 4)), "an 'ep' of size 2; ranks 2, 3: .* an 'ep' of size 4"),
    ((DEALT, (2, 2)), None, "an 'ep' of size 2; ranks 2, 3: a group"),
    ((PARTS, (2, 2)), None, "an 'sp' of size 2; ranks 2, 3: a group"),
    ((NAMES, (2, 2)), ((*NAMES, "sp"), (2, 2, 1)), r"2 x 2 of .*2 x 2 x 1 \('dp_replicate', 'dp_shard', 'sp'\)"),
])  # fmt: skip
def test_meshes_that_divide_experts_or_sequences_otherwise_on_some_ranks_are_told(one: Named, other: Named | None, told: str) -> None:
    outcomes = try_on_ranks(4, with_another_mesh, one, other)
    for outcome in outcomes:
        assert outcome.error == "ValueError", outcome
        assert re.match(rf"ranks differ in process_group: ranks 0, 1: a mesh .*{told}", outcome.text), outcome.text
        assert outcome.text == outcomes[0].text
        assert outcome.seconds < PROMPT


def right(rank: Rank) -> None:
    batch = torch.ones(2, 7)
    one = zero3.Zero3Layer(nn.Linear(7, 7), rank.number, 4, process_group=init_device_mesh("cpu", (4,)))
    alone = zero3.Zero3Layer(nn.Linear(7, 7), rank.number, 4, process_group=mesh_of(1, 4))
    for layer in (one, alone):  # no replicas: no sums, and no other restriction
        assert type(layer._state.communicator).__name__ == "GlooCommunicator"
        with zero3.no_sync(layer, replicas_only=True):
            layer(batch).sum().backward()
        assert zero3.clip_grad_norm_(layer, 1.0) > 0
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", *NAMES))
    half = zero3.Zero3Layer(nn.Linear(7, 7), 0, 1, process_group=cube[NAMES])
    half(torch.full((1, 7), float(rank.number))).sum().backward()
    pair = rank.number // 2 * 2
    expected = torch.full((7, 7), pair + 0.5)
    with zero3.full_gradients(half) as gradients:
        assert torch.equal(gradients["weight"], expected)
    apart = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NAMES)  # shards on different hosts, say
    far = zero3.Zero3Layer(nn.Linear(7, 7), process_group=apart)
    far(torch.full((1, 7), float(rank.number))).sum().backward()
    with zero3.full_gradients(far) as gradients:
        assert torch.equal(gradients["weight"], torch.full((7, 7), 1.5))


def test_meshes_of_one_dimension_of_one_replica_and_slices_of_larger_ones() -> None:
    on_ranks(4, right)
