"""Values and graphs of models whose chunks are divided by options: what is read, written and kept from before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero3
from tests.support.inside import chunks_of, owned_by
from tests.support.param_groups import WORLDS, Options, all_whole, as_layers, build, by_name, info_of, make, matrices_whole, steps
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.training import loss_of, sentences


@WORLDS
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
        assert all(owned_by(model)[id(p)].chunk.shard.untyped_storage()._cdata == p.untyped_storage()._cdata for p in filled)

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
            [(piece, _)] = owned_by(model)[id(part)].pieces()
            name = f"{owned_by(model)[id(part)].state.label.split(chr(39))[1]}.{piece.slot.name}"
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


@WORLDS
@pytest.mark.parametrize("options", [by_name, matrices_whole])
@pytest.mark.parametrize("where", ["in memory", "in files", "whole from step to step"])
def test_other_data_may_take_the_place_of_values_for_a_while(world_size: int, options: Options, where: str, tmp_path: Path) -> None:
    """As averages of weights do to evaluate: they keep `part.data`, and give it back."""

    def body(group: ThreadCommunicator) -> None:
        policy: dict[str, Any] = {"in files": {"offload": str(tmp_path)}, "whole from step to step": {"stage": 2}}.get(where, {})
        model = as_layers(group, models[group.rank], **policy)
        zero3.param_groups(model, options)
        with torch.no_grad():
            before = model(sentences(0))
        for mode in (torch.no_grad, torch.inference_mode):
            kept = [(part, part.data) for part in model.get_trainable_chunk()]
            for part, values in kept:
                part.data = torch.zeros_like(values)
            with mode():
                assert torch.equal(model(sentences(0)), nothing)
            for part, values in kept:
                part.data = values
            with torch.no_grad():
                assert torch.equal(model(sentences(0)), before)
        for chunk in chunks_of(model):  # nobody holds the memory of before
            parts = {part.parameter.untyped_storage()._cdata for part in chunk.parts}
            assert parts == {chunk.shard.untyped_storage()._cdata}
        loss_of(model, sentences(0)).backward()  # what was made in inference mode trains, too
        torch.optim.SGD(model.get_trainable_chunk(), 0.1).step()
        with torch.no_grad():
            assert not torch.equal(model(sentences(0)), before)

    plain = nn.Sequential(*build())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if parameter.requires_grad and options(name, info_of(name, parameter)) is not None:
                parameter.zero_()
        nothing = plain(sentences(0))
    models = [build() for _ in range(world_size)]
    run_ranks(world_size, body)


LOADS: dict[str, Callable[[nn.Module, Path, dict[str, Any]], object]] = {
    "load_pretrained": lambda model, path, values: zero3.load_pretrained(model, path),
    "load_checkpoint": lambda model, path, values: zero3.load_checkpoint(path / "saved", model),
    "load_full_state_dict": lambda model, path, values: zero3.load_full_state_dict(model, values),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_loaded_takes_the_place_of_other_data(load: str, world_size: int, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        zero3.param_groups(model, by_name)
        zero3.save_checkpoint(tmp_path / "saved", model)
        for part in model.get_trainable_chunk():
            part.data = torch.zeros_like(part.data)
        LOADS[load](model, tmp_path, values)
        found = zero3.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(found[name], value) for name, value in values.items())

    values = nn.Sequential(*build()).state_dict()
    save_file({name: value.clone() for name, value in values.items()}, tmp_path / "model.safetensors")
    models = [build() for _ in range(world_size)]
    run_ranks(world_size, body)
