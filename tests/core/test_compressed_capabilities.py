"""Compressed transfers beside every other capability. With a block for each element a format has no errors but of the last bits, so plain
torch is the judge."""

from __future__ import annotations

import os
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.compressed import BOTH, WIDTH, build, flat_of, in_slices, rounded, sharded, train
from tests.support.inside import reduce_now, states_of
from tests.support.live import LonelyCommunicator
from tests.support.models import Checkpointed, mlp, seeded, step
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
from tests.support.reference import Turn, as_one_layer, check_parity, in_place, in_sequence, nested
from tests.support.uneven import Plan, assert_same, joined_threads, plain, tell_sharded
from zero3 import MXFP4, NF4, Float8, Int8, ShardingPolicy

FINE = {"gather_format": Int8(block_size=1), "reduce_format": Int8(block_size=1)}
TOLERANCE = 1e-5

# -- what is refused


@pytest.mark.parametrize("field", ["gather_format", "reduce_format"])
@pytest.mark.parametrize("kind", [NF4(), MXFP4()], ids=str)
def test_four_bits_are_refused_for_what_trains(field: str, kind: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be zero3.Int8\(\).* found {type(kind).__name__}"):
        ShardingPolicy(**{field: kind})


@pytest.mark.parametrize(("policy", "error", "text"), [
    ({"reduce_format": Float8()}, ValueError, "reduce_format must be zero3.Int8"),
    ({"gather_format": Int8(stochastic=True)}, ValueError, "gather_format=.*stochastic=True is for reduce_format alone"),
    ({"quantize": Int8(stochastic=True)}, ValueError, "quantize=.*stochastic=True is for reduce_format alone"),
    ({"gather_format": Int8(select=lambda name, info: True)}, ValueError, "gather_format=.*select= is for quantize alone"),
    ({"reduce_format": Int8(select=lambda name, info: True)}, ValueError, "reduce_format=.*select= is for quantize alone"),
    ({"gather_format": "int8"}, TypeError, "gather_format must be zero3.Int8.*found 'int8'"),
    ({"reduce_format": Int8}, TypeError, "reduce_format must be zero3.Int8"),
], ids=str)  # fmt: skip
def test_a_wrong_choice_is_refused_when_the_policy_is_made(policy: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ShardingPolicy(**policy)


def test_stochastic_rounding_is_refused_for_a_tensor_alone() -> None:
    with pytest.raises(ValueError, match="stochastic=True is for ShardingPolicy"):
        Int8(stochastic=True).quantize(torch.ones(3))
    with pytest.raises(TypeError, match="seed must be an integer, found"):
        Int8(seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stochastic must be True or False, found 1"):
        Int8(stochastic=1)  # type: ignore[arg-type]


def test_ranks_with_different_formats_get_one_error() -> None:
    def body(group: ThreadCommunicator) -> None:
        policy = ShardingPolicy(gather_format=Int8(block_size=64 + group.rank))
        with pytest.raises(ValueError, match=r"rank 0: policy .*Int8\(block_size=64(.|\n)*rank 1: policy .*Int8\(block_size=65"):
            zero3.Zero3Layer(nn.Linear(2, 2), policy=policy, process_group=group)

    run_ranks(2, body)


def test_a_group_that_can_not_swap_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Poor(LonelyCommunicator):
        exchange = lambda self, payload, device: [payload] * self.world_size  # noqa: E731

    group: Any = Poor(2)
    monkeypatch.delattr(LonelyCommunicator, "all_to_all")
    with pytest.raises(ValueError, match=r"reduce_format=Int8.* needs an all_to_all, which Poor does not have"):
        zero3.Zero3Layer(nn.Linear(2, 2), policy=BOTH, process_group=group)


# -- every capability, beside plain torch


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("shard", [in_sequence, as_one_layer, in_place, nested])
def test_every_way_to_wrap(shard: Any, parts: bool) -> None:
    check_parity(mlp, step, world_size=3, shard=shard, policy=ShardingPolicy(**FINE), tolerance=TOLERANCE, parts=parts)


@pytest.mark.parametrize(("replicas", "world_size"), [(2, 4), (3, 6)])
def test_meshes(replicas: int, world_size: int) -> None:
    check_parity(mlp, step, world_size=world_size, replicas=replicas, policy=ShardingPolicy(**FINE), tolerance=TOLERANCE)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_inside_layers(use_reentrant: bool) -> None:
    def model() -> nn.Module:
        return seeded(*[lambda: Checkpointed(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), use_reentrant)] * 2)

    def program(model: nn.Module, turn: Turn) -> Tensor:
        loss: Tensor = model(turn.tensor(3, 16, requires_grad=True)).pow(2).mean()
        loss.backward()
        return loss

    check_parity(model, program, policy=ShardingPolicy(**FINE), tolerance=TOLERANCE)


def test_parameters_of_any_size_and_kind() -> None:
    """Fewer elements than ranks, complex ones, which travel as they are, and a frozen layer."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.turn = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3, dtype=torch.complex128))
            self.empty, self.shift = nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale + self.shift.sum() + 0.1 * torch.view_as_real(self.turn).pow(2).sum() + self.empty.sum()

    check_parity(lambda: seeded(Odd, Odd), step, world_size=3, policy=ShardingPolicy(**FINE), tolerance=TOLERANCE)


@pytest.mark.parametrize("plan", [
    Plan(), Plan(clip=0.5, by_all=True), Plan(batches=((1, 1, 1), (2, 1), ())), Plan(tokens=True),
], ids=str)  # fmt: skip
def test_uneven_inputs(plan: Plan) -> None:
    plan = Plan(**{**vars(plan), "policy": ShardingPolicy(**FINE)})
    models = [plain(plan) for _ in plan.batches]

    def body(group: ThreadCommunicator) -> Any:
        return tell_sharded(plan, models[group.rank], group.rank, partial(joined_threads, group, by_all=plan.by_all), group)

    assert_same(run_ranks(len(plan.batches), body), plan, TOLERANCE)


def test_a_failed_micro_batch_leaves_nothing_under_a_step_guard() -> None:
    def gradients(group: ThreadCommunicator, fails: bool) -> list[Tensor]:
        model = sharded(group, BOTH)

        def fail(*_: Any) -> None:
            raise ArithmeticError("as told")

        for number in range(3):
            failing = fails and number == 1
            if fails or number != 1:
                with zero3.step_guard(model) as guarded:
                    handle = model[1].register_forward_pre_hook(fail) if failing and group.rank == 1 else None
                    if handle is not None:
                        handle_of = handle
                    try:
                        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * number + group.rank))
                        model(x).pow(2).sum().backward()
                    finally:
                        if handle is not None:
                            handle_of.remove()
                assert bool(guarded.failed) == failing
        return [chunk.grad.as_subclass(Tensor).clone() for chunk in model.get_trainable_chunk()]

    expected = run_ranks(2, lambda group: gradients(group, False))
    found = run_ranks(2, lambda group: gradients(group, True))
    assert all(a.equal(b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))


def test_clipping_sees_the_gradients_that_the_optimizer_sees() -> None:
    def body(group: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        model = sharded(group, BOTH)
        model(torch.ones(5, WIDTH) * group.rank).pow(2).sum().backward()
        own = torch.stack([chunk.grad.as_subclass(Tensor).norm() for chunk in model.get_trainable_chunk()])
        return own, zero3.clip_grad_norm_(model, 1.0)

    found = run_ranks(2, body)
    expected = torch.cat([own for own, _ in found]).norm()
    assert all(torch.isclose(norm, expected) for _, norm in found)


# -- chunks that are cut anew


def test_whole_parameters_travel_in_the_slices_of_their_owners() -> None:
    """Slices of different lengths: each is quantised from its own first element on."""

    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, ShardingPolicy(gather_format=Int8(block_size=7), reduce_format=Int8(block_size=5)))
        groups = zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 2})
        state = states_of(model)[1]
        chunk = state.chunks[0]
        assert type(chunk.wire).__name__ == "Coded" and chunk.layout.bounds is not None
        layout = chunk.layout
        with zero3.full_params(model):
            masters = torch.cat([dict(model[1].module.named_parameters())[slot.name].detach().reshape(-1).clone() for slot in layout.slots])
        slices = [masters[slice(*layout.chunk_range(rank))] for rank in range(2)]
        state.fetch()
        assert chunk.full.tensor.equal(torch.cat([rounded(each, Int8(7)) for each in slices]))
        state.release()
        gradient = {slot.name: torch.randn(slot.shape, generator=torch.Generator().manual_seed(group.rank)) for slot in layout.slots}
        everyone = [
            torch.cat([torch.randn(slot.shape, generator=torch.Generator().manual_seed(rank)).reshape(-1) for slot in layout.slots])
            for rank in range(2)
        ]
        account = state.gradients.accounts[chunk]
        for index, slot in enumerate(layout.slots):
            account.add(index, gradient[slot.name])
        reduce_now(state, chunk)
        mine = slice(*layout.chunk_range(group.rank))
        expected = (rounded(everyone[0][mine], Int8(5)) + rounded(everyone[1][mine], Int8(5))) / 2
        for part in [part for part in chunk.parts if part.start < part.stop]:
            assert part.parameter.grad is not None
            assert part.parameter.grad.as_subclass(Tensor).reshape(-1).equal(expected[part.start : part.stop])
        assert groups

    run_ranks(2, body, parts=True)


def test_what_trains_at_the_moment_travels_in_a_format() -> None:
    def shown(model: nn.Module) -> Tensor:
        with zero3.resident(model):
            return model[1].module[0].weight.detach().clone()  # type: ignore[operator, index, union-attr]

    def body(group: ThreadCommunicator) -> None:
        exact = build()[1]
        rough = torch.cat([rounded(each, Int8()) for each in in_slices(flat_of(exact), 2)])[: WIDTH * WIDTH].view(WIDTH, WIDTH)
        model = sharded(group, BOTH)
        assert shown(model).equal(rough)
        zero3.set_trainable(model, lambda name, info: name.startswith("0.") and name.endswith("bias"))
        assert shown(model).equal(exact[0].weight)
        zero3.set_trainable(model, lambda name, info: True)
        assert shown(model).equal(rough)
        for chunk in model[1].parameters():
            chunk.requires_grad_(False)
        assert shown(model).equal(exact[0].weight)

    run_ranks(2, body)


def test_checkpoints_hold_masters(tmp_path: Any) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, BOTH)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk())
        loss_and_step(model, optimizer, group.rank)
        zero3.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
        other = sharded(group, ShardingPolicy())
        theirs = torch.optim.AdamW(other.get_trainable_chunk())
        zero3.load_checkpoint(tmp_path / "checkpoint", other, theirs)
        for a, b in zip(model.get_trainable_chunk(), other.get_trainable_chunk(), strict=True):
            assert a.equal(b)

    run_ranks(2, body)


def loss_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(torch.ones(5, WIDTH) * (rank + 1)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_fp16_gradients_on_a_mesh_without_shards_are_divided_once() -> None:
    policy = ShardingPolicy(param_dtype=torch.float16)

    def body(mesh: ThreadMesh) -> Tensor:
        layer = zero3.Zero3Layer(nn.Linear(4, 1, bias=False), policy=policy, process_group=mesh)  # type: ignore[arg-type]
        layer(torch.full((1, 4), float(mesh.rank + 1))).sum().backward()
        gradient: Tensor = layer.get_trainable_chunk()[0].grad
        return gradient.as_subclass(Tensor)

    for found in run_mesh(4, 1, body):
        assert found.tolist() == [2.5] * 4


# -- processes


def of_processes(rank: Rank, way: str) -> tuple[list[Tensor], list[Tensor]]:
    from types import SimpleNamespace

    with mock.patch.dict(os.environ, {"ZERO3_HOST_MEMORY": "0" if way == "sockets" else "1"}):
        group: Any = SimpleNamespace(rank=rank.number)
        with mock.patch("tests.support.compressed.sharded", lambda _, policy: sharded(None, policy)):
            return train(group, BOTH, 2)


@pytest.mark.parametrize("way", ["memory", "sockets"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_have_the_bits_of_threads(world_size: int, way: str) -> None:
    expected = run_ranks(world_size, lambda group: train(group, BOTH, 2), parts=True)
    for (found, losses), (masters, wanted) in zip(on_ranks(world_size, of_processes, way), expected, strict=True):
        assert all(a.equal(b) for a, b in zip([*found, *losses], [*masters, *wanted], strict=True))
