"""Compressed transfers (`gather_format`, `reduce_format`), against a simulation in one process that is written here, number by number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.compressed import (
    BOTH,
    EACH_FORMAT,
    EACH_SIZE,
    RATE,
    WIDTH,
    build,
    flat_of,
    in_slices,
    loss_of,
    ordered,
    put,
    rounded,
    sharded,
    simulated,
    train,
)
from tests.support.inside import reduce_now, states_of
from tests.support.live import LiveBytes, LonelyCommunicator
from tests.support.models import Checkpointed
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from zero3 import Int8, ShardingPolicy


def check(world_size: int, policy: ShardingPolicy, steps: int = 3, *, parts: bool = True, micro_batches: int = 1) -> None:
    expected, losses = simulated(world_size, policy, steps, micro_batches)
    for rank, (found, own) in enumerate(run_ranks(world_size, lambda group: train(group, policy, steps, micro_batches), parts=parts)):
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert a.equal(b), f"rank {rank}, layer {number}: off by {(a - b).abs().max()}"
        mine = [losses[(step * world_size + rank) * micro_batches + m] for step in range(steps) for m in range(micro_batches)]
        assert torch.stack(own).equal(torch.stack(mine)), f"losses of rank {rank}"


@EACH_FORMAT
@EACH_SIZE
def test_gather_format_has_the_bits_of_a_simulation(kind: Any, world_size: int) -> None:
    check(world_size, ShardingPolicy(gather_format=kind))


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("kind", [Int8(), Int8(block_size=7), Int8(10**4)], ids=str)
@EACH_SIZE
def test_reduce_format_has_the_bits_of_a_simulation(kind: Any, world_size: int, parts: bool) -> None:
    check(world_size, ShardingPolicy(reduce_format=kind), parts=parts)


@pytest.mark.parametrize("options", [
    {"stage": 1}, {"stage": 2}, {"reshard_after_forward": False}, {"prefetch_depth": 0}, {"prefetch_depth": 2}, {"dynamic": True},
    {"transactional": True}, {"compare_every": 1}, {"separate_backup_group": True}, {"grad_dtype": torch.float32},
    {"param_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
], ids=str)  # fmt: skip
def test_no_other_choice_changes_a_bit_of_what_the_simulation_says(options: dict[str, Any]) -> None:
    check(3, replace(BOTH, **options), steps=2)


@pytest.mark.parametrize("options", [{}, {"stage": 1}, {"transactional": True}], ids=str)
def test_gradients_of_micro_batches_are_quantised_once_under_no_sync(options: dict[str, Any]) -> None:
    check(2, replace(BOTH, **options), micro_batches=3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_has_the_same_weights(reentrant: bool) -> None:
    expected, _ = simulated(2, BOTH, 2)

    def body(group: ThreadCommunicator) -> list[Tensor]:
        layers = [zero3.Zero3Layer(layer, policy=BOTH, process_group=group) for layer in build()]
        model = nn.Sequential(*(Checkpointed(layer, reentrant) for layer in layers))
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=RATE)
        for step in range(2):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + group.rank)).requires_grad_()
            model(x).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with zero3.full_params(model):
            return [flat_of(layer.module) for layer in layers]

    for found in run_ranks(2, body):
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))


def test_on_a_mesh_sums_over_replicas_are_exact() -> None:
    """Each replica is a group of its own, and the sum of both is made of what their owners have added."""
    steps, policy = 2, replace(BOTH, gradient_reduction="sum")
    model, masters = build(), [flat_of(layer) for layer in build()]
    for step in range(steps):
        for layer, master in zip(model, masters, strict=True):
            put(torch.cat([rounded(each, Int8()) for each in in_slices(master, 2)]), layer)
        sums = []
        for replica in range(2):
            own: list[Tensor] = []
            for rank in (2 * replica, 2 * replica + 1):
                model.zero_grad()
                loss_of(model, rank, step).backward()
                sent = [torch.cat([rounded(each, Int8(32)) for each in in_slices(gradient_of(layer), 2)]) for layer in model]
                own = [a + b for a, b in zip(own, sent, strict=True)] if own else sent
            sums.append(own)
        for number, (first, second) in enumerate(zip(*sums, strict=True)):
            masters[number] = torch.add(masters[number], (first + second)[: masters[number].numel()], alpha=-RATE)
    for parts in (False, True):
        for found, _ in run_mesh(2, 2, lambda mesh: train(mesh, policy, steps), parts=parts):
            assert all(a.equal(b) for a, b in zip(found, masters, strict=True))


def test_where_chunks_are_not_cut_nothing_is_quantised() -> None:
    exact = run_mesh(2, 1, lambda mesh: train(mesh, ShardingPolicy(), 2))
    found = run_mesh(2, 1, lambda mesh: train(mesh, BOTH, 2))
    assert all(a.equal(b) for (mine, _), (theirs, _) in zip(found, exact, strict=True) for a, b in zip(mine, theirs, strict=True))

    def alone(policy: ShardingPolicy) -> Tensor:
        model = zero3.Zero3Sequential([zero3.Zero3Layer(layer, policy=policy) for layer in build()])
        loss_of(model, 0, 0).backward()
        return torch.cat([chunk.grad for chunk in model.get_trainable_chunk()])

    assert alone(BOTH).equal(alone(ShardingPolicy()))


def gradient_of(layer: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in ordered(layer)])


# -- what is shown, and what travels


def test_full_params_and_state_dicts_show_the_masters_and_resident_what_computes() -> None:
    def body(group: ThreadCommunicator) -> None:
        model, plain = sharded(group, BOTH), build()
        expected = {name: value.clone() for name, value in plain.state_dict().items()}
        with zero3.resident(model):
            shown = {name: p.detach().clone() for name, p in model.named_parameters()}
        for layer in plain:
            put(torch.cat([rounded(each, Int8()) for each in in_slices(flat_of(layer), group.world_size)]), layer)
        computing = dict(plain.named_parameters())
        assert all(value.equal(computing[name]) for name, value in shown.items())
        assert not shown["0.0.weight"].equal(expected["0.0.weight"])
        with zero3.full_params(model):
            assert all(p.equal(expected[name]) for name, p in model.named_parameters())
            with pytest.raises(RuntimeError, match="gather_format=Int8"):
                model(torch.ones(1, WIDTH))
        state = zero3.full_state_dict(model, rank0_only=False)
        assert all(value.equal(expected[name]) for name, value in state.items())
        zero3.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
        with zero3.full_params(model, writeback=True), torch.no_grad():
            assert model[0].module[0].weight.equal(2 * expected["0.0.weight"])
            model[0].module[0].weight.mul_(2)
        assert zero3.full_state_dict(model, rank0_only=False)["0.0.weight"].equal(4 * expected["0.0.weight"])

    run_ranks(2, body)


def test_what_travels_are_codes_and_scales() -> None:
    """Twice a gather of a byte an element, and a reduction; frozen parameters go as they are."""

    def body(group: ThreadCommunicator) -> list[Any]:
        model = build()
        model[0].requires_grad_(False)
        layers = [zero3.Zero3Layer(layer, policy=BOTH, process_group=group) for layer in model]
        sequential = zero3.Zero3Sequential(layers)
        loss_of(sequential, group.rank, 0).backward()
        group.log.clear()
        loss_of(sequential, group.rank, 1).backward()
        return [entry for entry in group.log if entry.kind != "exchange"]

    numel = WIDTH * WIDTH + WIDTH
    gathered = Int8().nbytes((numel // 2,)) * 2
    reduced = (Int8(32).nbytes((numel // 2,)) + 64) * 2  # and a byte for each slot behind each row, rounded up
    expected = [
        ("all_gather", numel, torch.float32),
        *[("all_gather", gathered, torch.uint8)] * 3,
        *[("all_to_all", reduced, torch.uint8)] * 2,
    ]
    for log in run_ranks(2, body):
        assert sorted(log, key=str) == sorted(expected, key=str)


def test_a_rank_holds_no_second_buffer_of_full_size() -> None:
    """Bytes that travel come and go, and a bounded piece to work on: not one float32 more for each element."""
    numel, world_size = 1 << 21, 4

    def peaks(policy: ShardingPolicy) -> tuple[int, int]:
        group: Any = LonelyCommunicator(world_size)
        with LiveBytes() as live:
            layer = zero3.Zero3Layer(nn.Linear(1 << 10, numel >> 10, bias=False), policy=policy, process_group=group)
            state = states_of(layer)[0]
            weight = layer.module.weight
            fetched = live.peak_of(lambda: (state.fetch(), state.release()))
            state.gradients.accounts[state.chunks[0]].add(0, torch.ones(weight.shape))
            reduced = live.peak_of(lambda: reduce_now(state, state.chunks[0]))
        return fetched, reduced

    exact, found = peaks(ShardingPolicy()), peaks(BOTH)
    travels, piece = Int8(32).nbytes((numel,)), 4 * (1 << 18) * 1.1
    assert exact[0] < found[0] <= exact[0] + travels + piece
    assert found[1] <= exact[1] + 2 * travels + piece


# -- non-finite numbers, randomness


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_overflow_is_found_by_the_scaler(value: float) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, BOTH)
        chunks = model.get_trainable_chunk()
        before = [chunk.detach().clone() for chunk in chunks]
        optimizer, scaler = torch.optim.SGD(chunks, lr=RATE), zero3.GradScaler("cpu", init_scale=4.0)
        loss = loss_of(model, group.rank, 0) * (value if group.rank == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert all(a.equal(b) for a, b in zip(chunks, before, strict=True))

    run_ranks(2, body)


def gradients(kind: Int8, steps: int) -> list[Tensor]:
    """Rank 0's gradients of the first layer, step after step, from the same weights and data."""

    def body(group: ThreadCommunicator) -> list[Tensor]:
        model, found = sharded(group, ShardingPolicy(reduce_format=kind)), []
        chunk = model.get_trainable_chunk()[0]
        for _ in range(steps):
            loss_of(model, group.rank, 0).backward()
            found.append(chunk.grad.as_subclass(Tensor).clone())
            model.zero_grad()
        return found

    found: list[Tensor] = run_ranks(2, body)[0]
    return found


@pytest.mark.slow
def test_stochastic_rounding_is_reproducible_and_has_no_bias() -> None:
    exact, nearest = run_exact(), gradients(Int8(), 1)[0]
    kind = Int8(stochastic=True, seed=3)
    found = gradients(kind, 400)
    assert all(a.equal(b) for a, b in zip(found[:5], gradients(kind, 5), strict=True))
    assert not found[0].equal(found[1])
    assert not found[0].equal(gradients(Int8(stochastic=True, seed=4), 1)[0])
    errors = [(torch.stack(found[:count]).mean(0) - exact).norm().item() for count in (1, 16, 400)]
    assert errors[1] < 0.5 * errors[0]
    assert errors[2] < 0.12 * errors[0]  # 1 / 20 is expected
    assert errors[2] < 0.3 * (nearest - exact).norm().item()


def run_exact() -> Tensor:
    def body(group: ThreadCommunicator) -> Tensor:
        model = sharded(group, ShardingPolicy())
        loss_of(model, group.rank, 0).backward()
        found: Tensor = model.get_trainable_chunk()[0].grad
        return found.as_subclass(Tensor)

    exact: Tensor = run_ranks(2, body)[0]
    return exact
