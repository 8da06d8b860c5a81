"""Norms by parameter against those of the unsharded model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.optim.test_clip_grad_norm import INF, NORMS, WAYS, plain_with_gradients, with_gradients
from tests.support.models import WORLDS
from tests.support.param_groups import build
from tests.support.ranks import Collective, ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
from tests.support.reference import Turn
from tests.support.stacks import loss_of, stack


@WORLDS
@pytest.mark.parametrize("way", WAYS)
def test_norms_are_those_of_the_unsharded_model(world_size: int, way: str) -> None:
    def body(group: ThreadCommunicator) -> list[dict[str, dict[str, float]]]:
        model, found = with_gradients(group, models[group.rank], WAYS[way]), []
        for norm in NORMS:
            at = len(group.log)
            norms = {of: zero3.parameter_norms(model, of, norm) for of in ("grad", "param")}
            kind = torch.int64 if math.isinf(norm) else torch.float64
            if group.world_size > 1:
                assert group.log[at:] == [Collective("all_reduce", len(norms["param"]), kind)] * 2
            assert all(value.shape == () for values in norms.values() for value in values.values())
            found.append({of: {name: value.item() for name, value in values.items()} for of, values in norms.items()})
        return found

    models = [build(rank) for rank in range(world_size)]
    runs = run_ranks(world_size, body)
    assert runs == [runs[0]] * world_size
    plain = plain_with_gradients(torch.float64, WAYS[way])
    for norm, found in zip(NORMS, runs[0], strict=True):
        for of, values in found.items():
            expected = {n: (p.grad if of == "grad" else p) for n, p in plain.named_parameters() if of == "param" or p.requires_grad}
            assert list(values) == list(expected)
            for name, value in expected.items():
                empty = value is None or not value.numel()
                assert values[name] == pytest.approx(0 if empty else value.detach().norm(norm).item(), rel=1e-9), (name, norm)


@pytest.mark.parametrize("bad", [float("nan"), INF])
@pytest.mark.parametrize("norm", NORMS)
def test_what_is_not_finite_stays_with_its_parameter(bad: float, norm: float) -> None:
    def body(group: ThreadCommunicator) -> dict[str, float]:
        model = with_gradients(group, models[group.rank], None)
        if group.rank == 2:
            model[4].get_trainable_chunk()[0].grad[0] = bad
        return {name: value.item() for name, value in zero3.parameter_norms(model, norm_type=norm).items()}

    models = [build(rank) for rank in range(3)]
    for found in run_ranks(3, body):
        wrong = [name for name, value in found.items() if not math.isfinite(value)]
        assert len(wrong) == 1 and wrong[0].startswith("4.")
        assert math.isnan(found[wrong[0]]) == math.isnan(bad)


KINDS = {
    "integers": torch.arange(-5, 6),
    "bool": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "8 bits": torch.tensor([1.0, -2.0, 0.5]).to(torch.float8_e4m3fn),
    "complex": torch.tensor([3.0 + 4.0j, -1.0j, 2.0]),
    "empty": torch.zeros(0, dtype=torch.int64),
}


@pytest.mark.parametrize("kind", KINDS)
@WORLDS
def test_norms_of_parameters_that_are_no_ordinary_floats(kind: str, world_size: int) -> None:
    """Frozen ones: quantised weights, masks, numbers of positions."""
    values = KINDS[kind]

    def body(group: ThreadCommunicator) -> None:
        module = nn.Linear(3, 3)
        module.register_parameter("odd", nn.Parameter(values.clone(), requires_grad=False))
        model = zero3.Zero3Layer(module, process_group=group if world_size > 1 else None)
        for norm in NORMS:
            found = zero3.parameter_norms(model, "param", norm)["odd"].item()
            wide = values.abs().double() if values.is_complex() else values.double()
            expected = torch.linalg.vector_norm(wide, norm).item() if wide.numel() else 0.0
            assert found == pytest.approx(expected, rel=1e-6), norm
        assert "odd" not in zero3.parameter_norms(model)

    run_ranks(world_size, body)


@pytest.mark.parametrize("guarded", [False, True])
def test_norms_of_parameters_need_no_gradients(guarded: bool) -> None:
    """Under no_sync, and in a guard, there are none to be had."""

    def body(group: ThreadCommunicator) -> None:
        model: Any = zero3.shard(models[group.rank], process_group=group)
        expected = zero3.parameter_norms(model, "param")
        with zero3.step_guard(model) if guarded else zero3.no_sync(model):
            loss_of(model, Turn(group.rank, 0, 2)).backward()
            assert zero3.parameter_norms(model, "param") == expected
        assert zero3.parameter_norms(model, "param") == expected

    models = [stack() for _ in range(2)]
    run_ranks(2, body)


def test_a_wrong_norm_type_is_refused() -> None:
    layer = zero3.Zero3Layer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="norm_type must be positive"):
        zero3.parameter_norms(layer, norm_type=0)
    with pytest.raises(ValueError, match="of must be"):
        zero3.parameter_norms(layer, of="gradient")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is sharded"):
        zero3.parameter_norms(nn.Linear(2, 2))


FORMATS = [zero3.NF4(), zero3.NF4(double_quant=False), zero3.Int8(block_size=8), zero3.Float8(block=(4, 4)), zero3.MXFP4()]


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_parameter_norms_of_quantised_parameters_are_those_of_their_values(kind: Any, shape: tuple[int, int]) -> None:
    """Beside others, and wherever the layer's own parameters are shown at that time."""

    def build() -> nn.Sequential:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 3))
        model[0].requires_grad_(False)
        model[1].weight.requires_grad_(False)
        return model

    models = [build() for _ in range(shape[0] * shape[1])]

    def body(mesh: ThreadMesh) -> list[dict[str, float]]:
        model = zero3.shard(models[mesh.rank], nn.Linear, policy=zero3.ShardingPolicy(quantize=kind), process_group=mesh)
        found = [zero3.parameter_norms(model, "param", norm) for norm in (1.0, 2.0, INF)]
        with zero3.resident(model):
            found.append(zero3.parameter_norms(model, "param"))
        with zero3.full_params(model):
            found.append(zero3.parameter_norms(model, "param"))
        model(torch.ones(2, 32)).sum().backward()
        assert list(zero3.parameter_norms(model)) == ["1.bias", "2.weight", "2.bias"]
        found.append(zero3.parameter_norms(model, "param"))
        return [{name: value.item() for name, value in each.items()} for each in found]

    plain = build()
    for name in ("0.weight", "1.weight"):
        weight = plain.get_parameter(name)
        weight.data = kind.dequantize(kind.quantize(weight.data), weight.dtype)
    for found in run_mesh(*shape, body):
        for norms, norm in zip(found, (1.0, 2.0, INF, 2.0, 2.0, 2.0), strict=True):
            expected = {name: torch.linalg.vector_norm(value.detach(), norm).item() for name, value in plain.named_parameters()}
            assert norms == pytest.approx(expected, rel=1e-5)
            assert list(norms) == list(expected)


def test_parameter_norms_of_quantised_parameters_are_asked_alike() -> None:
    """A rank that asks for other norms would not take part in the gather."""
    models = [nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], nn.Linear, policy=zero3.ShardingPolicy(quantize=zero3.NF4()), process_group=group)
        with pytest.raises(ValueError, match="of='grad'"):
            zero3.parameter_norms(model, "grad" if group.rank else "param")
        with pytest.raises(ValueError, match='rank 1: of must be "grad" or "param"'):
            zero3.parameter_norms(model, "parameter" if group.rank else "param")  # type: ignore[arg-type]

    run_ranks(2, body)
