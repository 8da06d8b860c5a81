"""Quantised parameters in checkpoints and files, with first values from `materialize`, and where they can't be what is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import chunks_of
from tests.support.quantised_bases import WIDTH, Adapted, Kind, blocks, seeded, sharded_losses
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from zero3 import NF4, Float8, Int8, ShardingPolicy
from zero3.__main__ import main

KIND = NF4()


def sharded(model: nn.Module, group: Any = None, kind: Kind | None = KIND) -> Any:
    return zero3.shard(model, Adapted, device="cpu", policy=ShardingPolicy(quantize=kind), process_group=group)


def original() -> nn.Module:
    return seeded(blocks, KIND, lambda *_: False)()


def bytes_of(model: nn.Module) -> Tensor:
    return torch.cat([chunk.data for chunk in model.parameters() if chunk.dtype == torch.uint8])


def on(world_size: int, make: Callable[[], nn.Module], body: Callable[[nn.Module, Any, int], Any]) -> list[Any]:
    models = [make() for _ in range(world_size)]

    def rank(group: ThreadCommunicator) -> Any:
        return body(models[group.rank], process_group(group), group.rank)

    return run_ranks(world_size, rank)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 3), (3, 1)])
def test_save_checkpoint_of_a_quantized_base_on_any_number_of_ranks(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    """Its bytes are saved, and come back as they were."""

    def save(model: nn.Module, group: Any, rank: int) -> dict[str, Tensor]:
        model = sharded(model, group)
        sharded_losses(model)
        zero3.save_checkpoint(tmp_path / "here", model)
        return zero3.full_state_dict(model, rank0_only=False)

    def load(model: nn.Module, group: Any, rank: int) -> dict[str, Tensor]:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(rank + 3)
        model = sharded(model, group)
        zero3.load_checkpoint(tmp_path / "here", model)
        sharded_losses(model)
        zero3.load_checkpoint(tmp_path / "here", model)
        return zero3.full_state_dict(model, rank0_only=False)

    expected = on(saved_by, original, save)[0]
    for found in on(loaded_by, original, load):
        assert found.keys() == expected.keys()
        assert all(found[name].equal(values) for name, values in expected.items())


@pytest.mark.parametrize("kind", [Int8(), NF4(double_quant=False), Float8(), None], ids=lambda kind: kind.name if kind else "none")
def test_load_checkpoint_refuses_another_format(tmp_path: Path, kind: Kind | None) -> None:
    zero3.save_checkpoint(tmp_path / "here", sharded(original()))
    model = sharded(original(), kind=kind)
    before = {name: value.clone() for name, value in zero3.full_state_dict(model).items()}
    text = r"nothing was loaded. other formats: 0.up.weight has nf4\(64, double\) of \[40, 24\], expected .*ShardingPolicy\(quantize=\)"
    with pytest.raises(ValueError, match=text) as raised:
        zero3.load_checkpoint(tmp_path / "here", model)
    assert "other shapes" not in str(raised.value) and "other dtypes" not in str(raised.value), "they follow from the format"
    assert all(value.equal(before[name]) for name, value in zero3.full_state_dict(model).items())


def test_export_and_convert_refuse_codes(tmp_path: Path) -> None:
    zero3.save_checkpoint(tmp_path / "here", sharded(original()))
    assert main(["inspect", str(tmp_path / "here")]) == 0
    for command in ("export", "convert"):
        assert main([command, str(tmp_path / "here"), str(tmp_path / command)]) == 1
        assert not (tmp_path / command).exists()


def test_save_pretrained_refuses_codes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"would write codes for 0.up.weight, .*zero3.save_merged"):
        zero3.save_pretrained(sharded(original()), tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_set_trainable_refuses_quantized_parameters() -> None:
    def body(model: nn.Module, group: Any, rank: int) -> None:
        model = sharded(model, group)
        with pytest.raises(
            ValueError, match=r"select\('1.up.weight'\) returned True, but the parameter is quantised \(nf4\(64, double\)\)"
        ):
            zero3.set_trainable(model, lambda name, info: name == "1.up.weight")
        zero3.set_trainable(model, lambda name, info: name == "1.first")
        model(torch.randn(2, 5, WIDTH, dtype=torch.float64)).sum().backward()
        with zero3.full_gradients(model) as full:
            assert list(full) == ["1.first"]

    on(2, original, body)


class Drawn(Adapted):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.first)
        nn.init.normal_(self.second)


def drawn() -> nn.Module:
    """As one process draws it: in the order of modules."""
    model = nn.Sequential(*[Drawn() for _ in range(3)])
    torch.manual_seed(7)
    for module in model.modules():
        if isinstance(module, (Drawn, nn.Linear)):
            module.reset_parameters()
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*[Drawn() for _ in range(3)])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("loaded", [True, False], ids=["loaded before", "drawn"])
def test_materialize_a_quantized_model(world_size: int, loaded: bool) -> None:
    """What is drawn is quantised. A base that has been loaded keeps its bytes while its adapters are drawn."""
    with torch.random.fork_rng(devices=[]):
        expected, given = drawn(), nn.Sequential(*[Drawn() for _ in range(3)])
    for name, parameter in expected.named_parameters() if loaded else ():
        if not parameter.requires_grad:
            parameter.data.copy_(given.get_parameter(name))
    quantized = zero3.shard(expected, Drawn, policy=ShardingPolicy(quantize=KIND))
    values, raw = zero3.full_state_dict(quantized), bytes_of(quantized)

    def body(model: nn.Module, group: Any, rank: int) -> Tensor:
        model = zero3.shard(model, Drawn, device="cpu", policy=ShardingPolicy(quantize=KIND), process_group=group)
        with pytest.raises(RuntimeError, match=r"has no values yet for: .*up.weight"):
            model(torch.zeros(2, 5, WIDTH, dtype=torch.float64))
        if loaded:
            zero3.load_full_state_dict(model, given.state_dict() if rank == 0 else None)
            for chunk in (chunk for chunk in chunks_of(model) if chunk.shard.requires_grad):
                chunk.unloaded = set(range(len(chunk.layout.slots)))  # as a loader leaves them that finds no adapters
        if rank == 0:
            torch.manual_seed(7)
        zero3.materialize(model)
        found = zero3.full_state_dict(model, rank0_only=False)
        assert all(found[name].equal(value) for name, value in values.items())
        return bytes_of(model)

    found = on(world_size, on_meta, body)
    if world_size == 1:
        assert found[0].equal(raw)


@pytest.mark.parametrize("world_size", [1, 2])
def test_values_that_full_params_has_shown_are_gone_afterwards(world_size: int) -> None:
    """Otherwise the values of one layer after another would stay, until all are there at once."""

    def body(model: nn.Module, group: Any, rank: int) -> None:
        model = sharded(model, group)
        chunks = [chunk for chunk in chunks_of(model) if chunk.read_only]
        for _ in range(2):
            with zero3.full_params(model):
                values = [weakref.ref(view) for chunk in chunks for view in chunk.views]
                assert values
                assert all(ref() is not None for ref in values)
            assert all(ref() is None for ref in values)
            sharded_losses(model)

    on(world_size, original, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_params_inside_inference_mode_shows_values_that_autograd_takes(world_size: int) -> None:
    """As it does with parameters that are not quantised."""

    def body(model: nn.Module, group: Any, rank: int) -> None:
        model = sharded(model, group)
        with torch.inference_mode(), zero3.full_params(model), torch.inference_mode(False):
            for parameter in model.parameters():
                one = torch.ones((), dtype=parameter.dtype, requires_grad=True)
                (gradient,) = torch.autograd.grad((parameter.detach() * one).sum(), one)
                torch.testing.assert_close(gradient, parameter.detach().sum())

    on(world_size, original, body)
