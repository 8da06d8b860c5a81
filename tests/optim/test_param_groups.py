"""Options by parameter on flat chunks, and whole parameters on one rank each: plain torch with the same groups is the judge."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.training import loss_of, odd_model, sentences
from zero3 import ParamInfo
from zero3.access import states_of
from zero3.optim.check_optimizer import owned_by

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3, 4])
TOLERANCE = 1e-12

Options = Callable[[str, ParamInfo], dict[str, Any] | None]


def build(seed: int = 0) -> list[nn.Module]:
    """An embedding, blocks and a readout with something odd each: a tied, an empty, a frozen parameter."""
    modules = odd_model(torch.float64, seed)
    modules[1].again = modules[1].norm
    modules[2].register_parameter("empty", nn.Parameter(torch.empty(3, 0, dtype=torch.float64)))
    modules[3].up.bias.requires_grad_(False)
    return modules


def as_layers(group: ThreadCommunicator, modules: list[nn.Module] | None = None) -> zero3.Zero3Sequential:
    process_group = group if group.world_size > 1 else None
    return zero3.Zero3Sequential([zero3.Zero3Layer(module, process_group=process_group) for module in modules or build(group.rank)])


def info_of(name: str, p: Tensor) -> ParamInfo:
    return ParamInfo(name, tuple(p.shape), p.numel(), p.dtype, p.ndim)


def plain_groups(model: nn.Module, options: Options) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for name, p in model.named_parameters():
        answer = options(name, info_of(name, p)) if p.requires_grad else None
        if answer is None:
            continue
        same = next((group for group in groups if {k: v for k, v in group.items() if k != "params"} == answer), None)
        if same is None:
            groups.append(same := {**answer, "params": []})
        same["params"].append(p)
    return groups


def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int, numbers: range = range(4)) -> list[float]:
    losses = []
    for step in numbers:
        loss = loss_of(model, sentences(step)[rank::world_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_plain(*programs: Options) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = nn.Sequential(*build()), []
    for turn, options in enumerate(programs):
        losses += steps(model, make(plain_groups(model, options)), 0, 1, range(4 * turn, 4 * turn + 4))
        model.zero_grad()  # also of what no optimizer holds
    return losses, model.state_dict()


def mean(losses: list[list[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*losses, strict=True)]


def assert_same(found: list[tuple[list[float], dict[str, Tensor]]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert mean([losses for losses, _ in found]) == pytest.approx(expected[0], rel=1e-9)
    for _, state in found:
        assert state.keys() == expected[1].keys()
        for name, value in expected[1].items():
            assert torch.allclose(state[name], value, rtol=0, atol=TOLERANCE), name


def by_name(name: str, info: ParamInfo) -> dict[str, Any] | None:
    assert info.name == name and info.numel == torch.Size(info.shape).numel() and info.ndim == len(info.shape)
    if "norm" in name:
        return None
    return {"weight_decay": 0.1 if info.ndim > 1 else 0.0, "lr": 0.1 if "bias" in name else 0.3}


def matrices_whole(name: str, info: ParamInfo) -> dict[str, Any]:
    return {"whole": True, "lr": 0.1, "kind": "a"} if info.ndim == 2 else {"kind": "b"}


def all_whole(name: str, info: ParamInfo) -> dict[str, Any]:
    return {"whole": True}


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
        for state in states_of(model):
            for chunk in state.chunks:
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
        names, found = [], owned_by(states_of(model))
        for parameter in groups[0]["params"]:
            [(piece, place)] = found[id(parameter)].pieces()
            assert (place.start, place.stop) == (piece.start, piece.stop) == (0, parameter.numel())
            assert parameter.shape == piece.slot.shape and found[id(parameter)].part.whole
            names.append(f"{found[id(parameter)].state.identity} {piece.slot.name}")
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


# -- graphs


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_graph_that_lives_through_a_division_is_right_or_stale(world_size: int) -> None:
    """Where chunks stay as they are cut, its backward is right; where they are cut anew, it raises torch's own error."""

    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        loss = loss_of(model, sentences(0))
        zero3.param_groups(model, by_name)
        loss.backward()
        kept = [p.grad.norm() for name, p in plain.named_parameters() if p.grad is not None and "norm" not in name]
        assert zero3.clip_grad_norm_(model, float("inf")).item() == pytest.approx(torch.stack(kept).norm().item(), rel=1e-6)
        model.zero_grad()
        loss = loss_of(model, sentences(0))
        zero3.param_groups(model, matrices_whole)
        if group.world_size == 1:
            loss.backward()
            return
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        loss_of(model, sentences(0)).backward()

    plain = nn.Sequential(*build())
    loss_of(plain, sentences(0)).backward()
    models = [build(rank) for rank in range(world_size)]
    run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("options", [by_name, all_whole])
def test_a_graph_from_before_a_step_on_parts_is_stale(world_size: int, options: Options) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        optimizer = make(zero3.param_groups(model, options))
        old = loss_of(model, sentences(0))
        steps(model, optimizer, group.rank, group.world_size, range(1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()

    models = [build(rank) for rank in range(world_size)]
    run_ranks(world_size, body)


# -- values from outside


@WORLDS
@pytest.mark.parametrize("options", [by_name, matrices_whole, all_whole])
def test_states_are_read_and_written_as_before(world_size: int, options: Options) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        zero3.param_groups(model, options)
        found = zero3.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in values.items()) and found.keys() == values.keys()
        zero3.load_full_state_dict(model, others)
        found = zero3.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in others.items())
        with zero3.full_params(model, writeback=True), torch.no_grad():
            assert {name for name, _ in model.named_parameters()} == {name for name, _ in nn.Sequential(*build()).named_parameters()}
            for parameter in model.parameters():
                parameter.mul_(2)
        found = zero3.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(found[name], 2 * value) for name, value in others.items())
        for part in model.get_trainable_chunk():
            part.data = torch.ones_like(part)  # other memory
        found = zero3.full_state_dict(model, rank0_only=False)
        for name, parameter in nn.Sequential(*build()).named_parameters():
            left_out = not parameter.requires_grad or options(name, info_of(name, parameter)) is None
            assert torch.equal(found[name], 2 * others[name] if left_out else torch.ones_like(others[name])), name
        filled = [p for p in model.parameters() if p.numel()]
        assert all(owned_by(states_of(model))[id(p)].chunk.shard.untyped_storage()._cdata == p.untyped_storage()._cdata for p in filled)

    models = [build(rank) for rank in range(world_size)]
    values, others = (nn.Sequential(*build(seed)).state_dict() for seed in (0, 1))
    run_ranks(world_size, body)


def test_values_that_come_later_go_to_whole_parameters() -> None:
    def body(group: ThreadCommunicator) -> None:
        with torch.device("meta"):
            modules = [nn.Linear(5, 3), nn.Linear(3, 2)]
        model = as_layers(group, modules)
        zero3.param_groups(model, matrices_whole)
        with pytest.raises(RuntimeError, match="no values yet"):
            model(torch.ones(2, 5))
        zero3.load_full_state_dict(model, values)
        assert torch.equal(model(torch.ones(2, 5)), plain(torch.ones(2, 5)))

    plain = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))
    values = plain.state_dict()
    run_ranks(2, body)


# -- gradients of parts know what they are


def test_a_norm_of_a_part_is_refused_and_of_a_whole_parameter_is_right() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        groups = zero3.param_groups(model, matrices_whole)
        loss_of(model, sentences(0)).backward()
        whole, flat = ([p for p in g["params"] if p.grad is not None and p.numel()] for g in groups)
        for part in flat:
            with pytest.raises(RuntimeError, match=r"zero3\.clip_grad_norm_"):
                part.grad.norm()
        for part in whole:
            [(piece, _)] = owned_by(states_of(model))[id(part)].pieces()
            name = f"{owned_by(states_of(model))[id(part)].state.label.split(chr(39))[1]}.{piece.slot.name}"
            expected = plain.get_parameter(name).grad
            assert part.grad.norm().item() == pytest.approx(expected.norm().item(), rel=1e-9)
            assert torch.linalg.vector_norm(part.grad).item() == pytest.approx(expected.norm().item(), rel=1e-9)
        for foreach in (None, True, False):
            with pytest.raises(RuntimeError, match=r"zero3\.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(whole, 1.0, foreach=foreach)

    plain = nn.Sequential(*build())
    loss_of(plain, sentences(0)).backward()
    models = [build(rank) for rank in range(2)]
    run_ranks(2, body)


def test_a_part_that_is_given_other_data_is_computed_with() -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(modules[group.rank], process_group=group)
        for parameters in zero3.param_groups(layer, by_name):
            for part in parameters["params"]:
                part.data = torch.full_like(part.data, 2.0)
        assert layer(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]

    modules = [nn.Linear(2, 2) for _ in range(2)]
    run_ranks(2, body)
