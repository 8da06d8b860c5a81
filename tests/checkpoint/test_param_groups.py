"""Checkpoints of optimizers over parts of chunks: named groups, and parameters that lie whole on one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import zero3
from tests.support.checkpoints import assert_same, odd, on_ranks, resumed, train
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_close, process_group

Options = Callable[[str, Any], dict[str, Any]]


def by_decay(name: str, info: Any) -> dict[str, Any]:
    return {"weight_decay": 0.1 if info.ndim > 1 else 0.0}


def whole(name: str, info: Any) -> dict[str, Any]:
    return {**by_decay(name, info), "whole": info.ndim > 1}


def all_whole(name: str, info: Any) -> dict[str, Any]:
    return {**by_decay(name, info), "whole": True}


def apart(name: str, info: Any) -> dict[str, Any]:
    return {**by_decay(name, info), "mark": name}


def plain_groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in trained if (p.ndim > 1) == wide], "weight_decay": 0.1 if wide else 0.0} for wide in (True, False)]


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    values = zero3.full_state_dict(model, rank0_only=False)
    return {"model": values, "state": {name: state for name, state in found["state"].items() if values[name].numel()}}


def adamw(model: Any, options: Options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(zero3.param_groups(model, options), lr=0.05)


@pytest.mark.parametrize(("world_size", "to"), [(1, 3), (2, 2), (3, 2), (2, 4)])
@pytest.mark.parametrize(("first", "second"), [(by_decay, whole), (whole, by_decay), (all_whole, apart)])
def test_load_checkpoint_between_pieces_and_whole_parameters(
    first: Options, second: Options, world_size: int, to: int, tmp_path: Path
) -> None:
    reference = odd()
    optimizer = torch.optim.AdamW(plain_groups(reference), lr=0.05)
    train(reference, optimizer, range(5))

    def save(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Any]:
        optimizer = adamw(model, first)
        train(model, optimizer, range(3))
        zero3.save_checkpoint(tmp_path, model, optimizer)
        return snapshot(model, optimizer)

    def load(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> tuple[dict[str, Any], dict[str, Any]]:
        optimizer = adamw(model, second)
        zero3.load_checkpoint(tmp_path, model, optimizer)
        loaded = snapshot(model, optimizer)
        train(model, optimizer, range(3, 5))
        return loaded, snapshot(model, optimizer)

    saved = on_ranks(world_size, save)[0]
    for loaded, after in on_ranks(to, load):
        assert_same(loaded, saved)
        assert_close(after["model"], reference.state_dict(), 1e-12, "five steps of plain torch")


class Factored(torch.optim.Optimizer):
    """Keeps what belongs to no single element: a mean for each row, as Adafactor does; and a number and a text."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel():
                    state = self.state[parameter]
                    state["rows"] = state.get("rows", 0) + parameter.grad.reshape(len(parameter) if parameter.ndim else 1, -1).abs().mean(1)
                    state["count"], state["name"] = state.get("count", 0) + 1, "factored"
                    parameter.data.sub_(group["lr"] * parameter.grad)


def test_state_in_another_shape_goes_with_whole_parameters(tmp_path: Path) -> None:
    def save(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Any]:
        flat = Factored(zero3.get_trainable_chunk(model))
        for parameter in flat.param_groups[0]["params"]:
            flat.state[parameter] = {"rows": torch.zeros(2, 2)}
        with pytest.raises(TypeError, match=r"Factored's 'rows' of .* for flat slices .*aligned or whole parameters \(param_groups"):
            zero3.save_checkpoint(tmp_path / "flat", model, flat)
        optimizer = Factored(zero3.param_groups(model, lambda name, info: {"whole": True}))
        train(model, optimizer, range(2))
        zero3.save_checkpoint(tmp_path / "whole", model, optimizer)
        return snapshot(model, optimizer)

    def load(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Any]:
        with pytest.raises(ValueError, match=r"rows of .* expected .*: state of another shape needs a parameter that is whole or aligned"):
            zero3.load_checkpoint(tmp_path / "whole", model, Factored(zero3.get_trainable_chunk(model)))
        optimizer = Factored(zero3.param_groups(model, lambda name, info: {"whole": True}))
        zero3.load_checkpoint(tmp_path / "whole", model, optimizer)
        return snapshot(model, optimizer)

    saved = on_ranks(2, save)[0]
    assert saved["state"]["blocks.0.linear.weight"]["rows"].shape == (5,)
    assert saved["state"]["blocks.0.linear.weight"]["count"] == 2
    for loaded in on_ranks(3, load):
        assert_same(loaded, saved)


def test_muon(tmp_path: Path) -> None:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6, bias=False), nn.Linear(6, 7, bias=False))

    def muon(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.05)

    reference = build()
    optimizer = muon(reference.parameters())
    train(reference, optimizer, range(5))

    def shard(model: nn.Module, group: ThreadCommunicator) -> Any:
        zero3.shard(model, nn.Linear, process_group=process_group(group))
        return model, muon(zero3.param_groups(model, lambda name, info: {"whole": True}))

    assert_close(resumed(tmp_path, build, shard, train), reference.state_dict(), 1e-5, "five steps")


class Row(nn.Module):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        for number, parameter in enumerate(parameters):
            self.register_parameter(f"p{number}", parameter)


def bag(layers: list[list[tuple[list[int], bool]]]) -> nn.Module:
    """Parameters of any shapes, some frozen, in a few layers; the same at every call."""
    generator = torch.Generator().manual_seed(0)
    rows = [[nn.Parameter(torch.randn(shape, generator=generator), requires_grad=trains) for shape, trains in layer] for layer in layers]
    return nn.Sequential(*map(Row, rows))


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.lists(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=3), st.booleans()), max_size=5), min_size=1, max_size=3),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    ways=st.tuples(st.sampled_from([None, by_decay, all_whole]), st.sampled_from([None, by_decay, all_whole])),
)
def test_any_shapes_between_any_numbers_of_ranks(
    layers: Any, worlds: tuple[int, int], ways: tuple[Options | None, Options | None], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The state is invented: a different number for every element of every parameter."""
    path = tmp_path_factory.mktemp("shapes")

    def sharded(model: nn.Module, group: Any, way: Options | None) -> tuple[Any, torch.optim.Optimizer]:
        model = zero3.shard(model, Row, process_group=process_group(group))
        parameters = zero3.get_trainable_chunk(model) if way is None else zero3.param_groups(model, way)
        return model, torch.optim.AdamW(parameters or [nn.Parameter(torch.empty(0))], weight_decay=0.0)

    def save(group: ThreadCommunicator) -> dict[str, Any]:
        model, optimizer = sharded(models[group.rank], group, ways[0])
        for number, parameter in enumerate(p for options in optimizer.param_groups for p in options["params"]):
            generator = torch.Generator().manual_seed(100 * group.rank + number)
            moments = {key: torch.randn(parameter.shape, generator=generator) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}
        for options in optimizer.param_groups:
            options["weight_decay"] = 0.0
        zero3.save_checkpoint(path, model, optimizer)
        return snapshot(model, optimizer)

    def load(group: ThreadCommunicator) -> dict[str, Any]:
        model, optimizer = sharded(models[group.rank], group, ways[1])
        zero3.load_checkpoint(path, model, optimizer)
        return snapshot(model, optimizer)

    models = [bag(layers) for _ in range(worlds[0])]
    saved = run_ranks(worlds[0], save)[0]
    models = [bag(layers) for _ in range(worlds[1])]
    for loaded in run_ranks(worlds[1], load):
        assert_same(loaded, saved)
