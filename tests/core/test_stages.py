"""Stages 1 and 2: what stays whole is gathered and reduced less often, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.footprint import BYTES, LAYERS, WIDTHS, Formula, make
from tests.support.live import LiveBytes
from tests.support.models import WORLDS, mlp
from tests.support.ordering import EchoCommunicator, FakeDevice
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_close, check_parity, full_gradients, in_place, in_sequence, nested, on_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

stages = pytest.mark.parametrize("stage", [1, 2])
DEPTH = 3
whole = {stage: ShardingPolicy(stage=stage) for stage in (1, 2, 3)}


def sharded(stage: int) -> Any:
    return lambda model, group, policy: in_sequence(model, group, whole[stage])


def program(model: nn.Module, turn: Turn) -> Tensor:
    output = model(turn.tensor(3, 5))
    output.pow(2).sum().backward()
    return output


def program_with_a_look(model: nn.Module, turn: Turn) -> Tensor:
    output = program(model, turn)
    assert not any(p.grad.is_sparse for p in model.parameters() if p.grad is not None)  # as every optimizer asks
    return output


@stages
@WORLDS
@pytest.mark.parametrize("shard", [in_sequence, in_place, nested])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_trains_as_plain_torch(stage: Any, world_size: int, shard: Any, optimizer: Any) -> None:
    check_parity(
        mlp,
        program_with_a_look,
        world_size=world_size,
        steps=4,
        shard=shard,
        policy=whole[stage],
        optimizer=lambda ps: optimizer(ps, lr=0.1),
    )


@stages
@pytest.mark.parametrize("world_size", [1, 2])
def test_stages_1_and_2_compute_with_new_values_in_param_dtype(stage: Any, world_size: int) -> None:
    """On one rank too, where the cast is the full buffer."""

    def losses(chosen: Any) -> list[list[Tensor]]:
        models = [mlp().float() for _ in range(world_size)]

        def body(group: ThreadCommunicator) -> list[Tensor]:
            policy = ShardingPolicy(stage=chosen, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            model = in_sequence(models[group.rank], group if world_size > 1 else None, policy)
            optimizer, found = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.5), []
            for step in range(3):
                loss = model(Turn(group.rank, step, 2).tensor(3, 5).float()).pow(2).sum()
                loss.backward()
                found.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            return found

        return run_ranks(world_size, body)

    for found, expected in zip(losses(stage), losses(3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def gradients_of_two_ranks() -> dict[str, Tensor]:
    """Of step 0, by plain torch."""
    plain = mlp()
    for rank in range(2):
        (plain(Turn(rank, 0, 2).tensor(3, 5)).pow(2).sum() / 2).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def counted(group: ThreadCommunicator) -> Counter[str]:
    found = Counter(entry.kind for entry in group.log)
    group.log.clear()
    return found


@pytest.mark.parametrize(
    ("stage", "gathers", "reductions"),
    [(3, 2 * (2 * DEPTH - 1), 2 * DEPTH), (2, DEPTH, 2 * DEPTH), (1, DEPTH, DEPTH)],
)
def test_transfers_of_a_step_of_two_micro_batches(stage: int, gathers: int, reductions: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        for step in range(3):
            group.log.clear()
            for number in range(2):
                program(model, Turn(group.rank, 10 * step + number, 2))
            zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found = counted(group)
            assert (found["all_gather"], found["reduce_scatter"]) == (gathers, reductions)
            with torch.no_grad():
                for _ in range(2):
                    model(torch.zeros(1, 5, dtype=torch.float64))
            assert counted(group)["all_gather"] == (2 * DEPTH if stage == 3 else DEPTH)
            gathers_now = gathers if stage == 3 else 0  # the next step finds what evaluation gathered
            program(model, Turn(group.rank, 77, 2))
            optimizer.zero_grad()
            assert counted(group)["all_gather"] == gathers_now // 2
            optimizer.param_groups[0]["lr"] = 0.1
            for chunk in zero3.get_trainable_chunk(model):
                chunk.data.add_(1e-3)  # unseen by version counters

    on_ranks(2, lambda: mlp(DEPTH), body, sharded(stage))


@stages
@pytest.mark.parametrize("change", ["fused by hand", "load", "writeback", "one rank alone"])
def test_stages_1_and_2_see_changed_chunks_by_writeback_or_anyhow(stage: int, change: str) -> None:
    x = torch.ones(2, 5, dtype=torch.float64)

    def body(model: Any, group: ThreadCommunicator) -> None:
        chunks = zero3.get_trainable_chunk(model)
        with torch.no_grad():
            before = model(x)
            if change == "fused by hand":
                for chunk in chunks:
                    chunk.data.mul_(0)
            elif change == "load":
                state = zero3.full_state_dict(model)
                zero3.load_full_state_dict(model, {name: value * 0 for name, value in state.items()})
            elif change == "writeback":
                with zero3.full_params(model, writeback=True):
                    for parameter in model.parameters():
                        parameter.data.mul_(0)
            elif group.rank == 1:
                chunks[-1].data.add_(1.0)
            after = model(x)
        assert not torch.equal(before, after)
        if change != "one rank alone":
            assert not after.any()

    on_ranks(2, mlp, body, sharded(stage))


@stages
def test_a_root_without_parameters_of_its_own(stage: int) -> None:
    def shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        return zero3.shard(model, nn.Linear, process_group=group, policy=policy)

    def two_micro_batches(model: nn.Module, turn: Turn) -> Tensor:
        program(model, turn)  # reading parameters, as the comparison does, would release what the next one finds
        return program_with_a_look(model, turn)

    check_parity(mlp, two_micro_batches, shard=shard, policy=whole[stage])


@pytest.mark.parametrize("policy", [whole[1], whole[2], ShardingPolicy(dynamic=True)], ids=["stage 1", "stage 2", "dynamic"])
def test_resident_leaves_ranks_at_their_own_pace(policy: ShardingPolicy) -> None:
    x = torch.ones(2, 5, dtype=torch.float64)

    def body(model: Any, group: ThreadCommunicator) -> None:
        program(model, Turn(group.rank, 0, 2))
        group.log.clear()
        with torch.no_grad(), zero3.resident(model):
            entered = len(group.log)
            for _ in range(1 + group.rank):
                model(x)
            if group.rank == 1:
                with pytest.raises(RuntimeError, match="shapes"):
                    model(x[:, :2])
            assert len(group.log) == entered
        program(model, Turn(group.rank, 1, 2))

    on_ranks(2, mlp, body, lambda model, group, _: in_sequence(model, group, policy), timeout=5.0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_of_each_stage(world_size: int, stage: int) -> None:
    """docs/stages.md, to the byte: chunks, what stays whole, and gradients before and after the optimizer has looked."""
    formula = Formula(world_size, 1)
    full, kept, landed = sum(formula.F), sum(formula.FG), sum(formula.G)
    with LiveBytes() as live:
        model = make(world_size, stage=stage)
        optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
        for _ in range(2):
            model(torch.empty(0, WIDTHS[0])).sum().backward()
            parameters = formula.chunks + (full if stage < 3 else 0)
            awaited = len(LAYERS) * BYTES
            assert live.now == parameters + (kept + awaited if stage == 1 else landed)
            optimizer.step()
            assert live.now == parameters + landed
            optimizer.zero_grad()
            assert live.now == parameters
    report = zero3.report(model)
    assert report.full_parameters == (full if stage < 3 else sum(sorted(formula.F)[-2:]))


@stages
def test_an_exception_leaves_a_model_that_trains_right(stage: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 4))
        x = torch.ones(3, 5, dtype=torch.float64, requires_grad=True)

        def refuse(_: Tensor) -> None:
            raise KeyError("broken")

        x.register_hook(refuse)
        with pytest.raises(KeyError):
            model(x).sum().backward()
        program(model, Turn(group.rank, 0, 2))
        zero3.clip_grad_norm_(model, float("inf"))
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")

    wanted = gradients_of_two_ranks()
    on_ranks(2, mlp, body, sharded(stage))


@stages
def test_on_a_device_nothing_races(fake_device: FakeDevice, stage: Any) -> None:
    group = EchoCommunicator()
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    policy = ShardingPolicy(stage=stage, param_dtype=torch.bfloat16)
    model = Zero3Sequential([Zero3Layer(block, policy=policy, process_group=group) for block in blocks])
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1, momentum=0.9)
    for _ in range(3):
        for _ in range(2):
            model(torch.ones(2, 4)).float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    fake_device.notice_freed()
    assert fake_device.races == []
    assert fake_device.allocations_on_lanes == []


@pytest.mark.parametrize("stage", [0, 4, "3", True, None])
def test_other_stages_are_refused(stage: Any) -> None:
    with pytest.raises(ValueError, match="stage must be 1, 2 or 3, found"):
        ShardingPolicy(stage=stage)


class Scaled(nn.Sequential):
    """Parameters of its own around others'."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


@stages
def test_a_root_with_parameters_of_its_own_sees_its_changed_chunks(stage: int) -> None:
    def shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        return zero3.shard(model, layers=list(model), policy=policy, process_group=group)

    check_parity(Scaled, program_with_a_look, steps=4, shard=shard, policy=whole[stage])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_that_casts_computes_with_the_values_after_the_step(stage: int) -> None:
    """One rank without a cast has no full buffer; with one it has, and that buffer must not outlive a step."""
    policy = ShardingPolicy(stage=stage, param_dtype=torch.bfloat16)  # type: ignore[arg-type]
    model = in_sequence(mlp(), None, policy)
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=1.0)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(2, 5)).float().pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert len(set(losses)) == 3, losses
