"""Options by parameter on flat chunks, and whole parameters on one rank each: plain torch with the same groups is the judge."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import chunks_of, owned_by
from tests.support.param_groups import (
    WORLDS,
    Options,
    all_whole,
    as_layers,
    assert_same,
    build,
    by_name,
    make,
    matrices_whole,
    plain_groups,
    run_plain,
    steps,
)
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.training import loss_of, odd_model, sentences
from zero3 import ParamInfo


def mixed(seed: int) -> Options:
    choices = [{"lr": 0.1}, {"lr": 0.2, "momentum": 0.5}, {"whole": True}, {"whole": True, "lr": 0.05}, None]

    def options(name: str, info: ParamInfo) -> dict[str, Any] | None:
        return random.Random(f"{seed} {name}").choice(choices)

    return options


PROGRAMS: dict[str, tuple[Options, ...]] = {
    "by name": (by_name,),
    "matrices whole": (matrices_whole,),
    "all whole": (all_whole,),
    "by name, then matrices whole, then by name": (by_name, matrices_whole, by_name),
    "all whole, then matrices whole": (all_whole, matrices_whole),
} | {f"mixed {seed}": (mixed(seed), mixed(seed + 100)) for seed in range(4)}


@WORLDS
@pytest.mark.parametrize("name", PROGRAMS)
def test_groups_by_paraminfo_train_as_they_do_unsharded(world_size: int, name: str) -> None:
    programs = PROGRAMS[name]

    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]]:
        model, losses = as_layers(group, models[group.rank]), []
        for turn, options in enumerate(programs):
            optimizer = make(zero3.param_groups(model, options))
            losses += steps(model, optimizer, group.rank, group.world_size, range(4 * turn, 4 * turn + 4))
        return losses, zero3.full_state_dict(model, rank0_only=False)

    models = [build(rank) for rank in range(world_size)]
    assert_same(run_ranks(world_size, body), run_plain(*programs))


@WORLDS
def test_parts_are_the_chunks_memory_and_stand_in_their_place_in_get_trainable_chunk(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> list[tuple[str, ...]]:
        model = as_layers(group, models[group.rank])
        groups = zero3.param_groups(model, lambda name, info: {"extra": "bias" in name, "betas": (0.9, 0.99)})
        assert [(g["extra"], g["betas"]) for g in groups] == [(False, (0.9, 0.99)), (True, (0.9, 0.99))]
        held = {id(p) for g in groups for p in g["params"] if p.numel()}
        assert held == {id(p) for p in model.get_trainable_chunk() if p.numel()}
        assert {id(p) for p in model.parameters()} >= held
        loss_of(model, sentences(group.rank)).backward()
        for chunk in chunks_of(model):
            storages = {part.parameter.untyped_storage().data_ptr() for part in chunk.parts if part.parameter.numel()}
            assert len(storages) <= 1
            gradients = {p.parameter.grad.untyped_storage().data_ptr() for p in chunk.parts if p.parameter.grad is not None}
            assert len(gradients) <= (1 if chunk.parts[0].parameter.numel() else 0)
            choices = ["bias" in piece.slot.name for piece in chunk.layout.pieces(group.rank)]
            runs = sum(a != b for a, b in zip(choices, [None, *choices][:-1], strict=True))
            whole_chunk = len({"bias" in slot.name for slot in chunk.layout.slots}) == 1 or not chunk.shard.requires_grad
            empty = sum(not slot.numel for slot in chunk.layout.slots) if group.rank == chunk.layout.first_holder else 0
            assert len(chunk.parts) == (1 if whole_chunk else max(1, runs + empty)), "neighbours of one group are one part"
            assert (chunk.parts[0].parameter is chunk.shard) == whole_chunk
        return [tuple(f"{k}={v}" for k, v in g.items() if k != "params") for g in groups]

    models = [build(rank) for rank in range(world_size)]
    found = run_ranks(world_size, body)
    assert found == [found[0]] * world_size


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_each_whole_parameter_lies_on_one_rank_and_ranks_hold_about_as_much(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> tuple[list[str], int]:
        model = as_layers(group, models[group.rank])
        before = sum(g["params"][0].numel() for g in [{"params": model.get_trainable_chunk()}])
        assert before
        groups = zero3.param_groups(model, lambda name, info: {"whole": True})
        names, found = [], owned_by(model)
        for parameter in groups[0]["params"]:
            [(piece, place)] = found[id(parameter)].pieces()
            assert (place.start, place.stop) == (piece.start, piece.stop) == (0, parameter.numel())
            assert parameter.shape == piece.slot.shape and found[id(parameter)].part.whole
            names.append(f"{found[id(parameter)].state.chunks.identity} {piece.slot.name}")
        return names, sum(p.numel() for p in groups[0]["params"])

    models = [odd_model(torch.float64, rank) for rank in range(world_size)]
    found = run_ranks(world_size, body)
    names = [name for names, _ in found for name in names]
    sizes = [p.numel() for module in odd_model() for p in module.parameters()]
    assert len(names) == len(set(names)) == len(sizes)
    assert sum(size for _, size in found) == sum(sizes)
    assert max(size for _, size in found) <= min(size for _, size in found) + max(sizes)


def test_options_may_hold_tensors_and_objects() -> None:
    def body(group: ThreadCommunicator) -> int:
        model, rate, schedule = as_layers(group, models[group.rank]), torch.tensor(0.1), object()
        groups = zero3.param_groups(
            model, lambda name, info: {"lr": rate, "f": schedule if info.ndim == 2 else torch.relu, "betas": [0.9, {"a": 1}]}
        )
        assert all(g["lr"] is rate for g in groups) and groups[0]["f"] is schedule
        return len(groups)

    models = [build(rank) for rank in range(2)]
    assert run_ranks(2, body) == [2, 2]


def test_two_optimizers_share_one_division() -> None:
    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]]:
        model = as_layers(group, models[group.rank])
        groups = zero3.param_groups(model, matrices_whole)
        first, second = (make([g for g in groups if g["kind"] == kind]) for kind in ("a", "b"))
        second.register_step_post_hook(lambda *_: first.step())
        losses = []
        for step in range(4):
            losses += steps(model, second, group.rank, group.world_size, range(step, step + 1))
            first.zero_grad()
        return losses, zero3.full_state_dict(model, rank0_only=False)

    models = [build(rank) for rank in range(2)]
    assert_same(run_ranks(2, body), run_plain(matrices_whole))


@WORLDS
def test_a_part_frozen_later_keeps_its_value_and_the_ranks_stay_together(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> tuple[Any, list[float], dict[str, Tensor]]:
        model = as_layers(group, models[group.rank])
        groups = zero3.param_groups(model, lambda name, info: {"bias": "bias" in name})
        optimizer = make(groups)
        losses = steps(model, optimizer, group.rank, group.world_size)
        for parameter in groups[1]["params"]:
            parameter.requires_grad_(False)
        losses += steps(model, optimizer, group.rank, group.world_size, range(4, 8))
        assert all(p.grad is None for p in groups[1]["params"])
        state = zero3.full_state_dict(model, rank0_only=False)
        return group.log, losses, state

    models = [build(rank) for rank in range(world_size)]
    plain = nn.Sequential(*build())
    groups = plain_groups(plain, lambda name, info: {"bias": "bias" in name})
    optimizer = make(groups)
    expected = steps(plain, optimizer, 0, 1)
    for parameter in groups[1]["params"]:
        parameter.requires_grad_(False)
    expected += steps(plain, optimizer, 0, 1, range(4, 8))
    found = run_ranks(world_size, body)
    assert_same([(losses, state) for _, losses, state in found], (expected, plain.state_dict()))
    assert all(log == found[0][0] for log, _, _ in found)


# -- what the wire carries


def traffic(options: Options | None, world_size: int) -> tuple[int, int]:
    """Collectives of one step, and elements of full buffers that they moved."""

    def body(group: ThreadCommunicator) -> tuple[int, int]:
        model = as_layers(group, models[group.rank])
        optimizer = make(zero3.param_groups(model, options) if options else [{"params": model.get_trainable_chunk()}])
        steps(model, optimizer, group.rank, world_size, range(1))
        before = len(group.log)
        steps(model, optimizer, group.rank, world_size, range(1, 2))
        moved = [entry for entry in group.log[before:] if entry.kind in ("all_gather", "reduce_scatter")]
        assert len(moved) == len(group.log) - before
        return len(moved), sum(entry.numel for entry in moved)

    models = [odd_model(torch.float64, rank) for rank in range(world_size)]
    found = run_ranks(world_size, body)
    assert found == [found[0]] * world_size
    return found[0]


def test_whole_parameters_cost_no_message_and_no_element_more() -> None:
    even, all_on_one = traffic(None, 3), traffic(all_whole, 3)
    assert all_on_one[0] == even[0]
    assert all_on_one[1] < even[1], "there is no padding"
    assert traffic(lambda name, info: {"decay": info.ndim > 1}, 3) == even
    some = traffic(matrices_whole, 3)
    assert even[0] < some[0] <= 2 * even[0], "a second chunk where vectors are more than a sixteenth"
    assert some[1] <= even[1] + 2 * 3 * some[0]
