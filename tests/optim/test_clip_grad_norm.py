"""clip_grad_norm_ against torch's own on the unsharded model: every kind of norm, over chunks, parts and whole parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import owned_by
from tests.support.param_groups import Options, all_whole, as_layers, build, by_name, matrices_whole
from tests.support.ranks import Collective, ThreadCommunicator, run_ranks
from tests.support.training import loss_of, sentences

INF = float("inf")
WAYS: dict[str, Options | None] = {
    "chunks": None,
    "parts": lambda name, info: {"bias": "bias" in name},
    "left out": by_name,
    "some whole": matrices_whole,
    "whole": all_whole,
}
NORMS = [1.0, 2.0, 3.0, 0.5, INF]


def with_gradients(group: ThreadCommunicator, modules: list[nn.Module], options: Options | None) -> nn.Module:
    model = as_layers(group, modules)
    if options is not None:
        zero3.param_groups(model, options)
    loss_of(model, sentences(0)[group.rank :: group.world_size]).backward()
    return model


def plain_with_gradients(dtype: torch.dtype, options: Options | None) -> nn.Module:
    model = nn.Sequential(*build()).to(dtype)
    loss_of(model, sentences(0)).backward()
    if options is by_name:
        for name, parameter in model.named_parameters():
            parameter.grad = None if "norm" in name else parameter.grad
    return model


def gradients_of(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """This rank's pieces, flat, by where they are in the model."""
    found = {}
    for each in owned_by(model).values():
        for piece, place in each.pieces():
            if each.part.parameter.grad is not None:
                flat = each.part.parameter.grad.as_subclass(Tensor).reshape(-1)
                found[f"{each.state.label} {piece.slot.name} {piece.start}"] = flat[place].clone()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_clip_grad_norm_has_torchs_norm_and_scale(world_size: int, way: str, dtype: torch.dtype) -> None:
    def body(group: ThreadCommunicator) -> list[float]:
        model, rows = with_gradients(group, models[group.rank], WAYS[way]), []
        kept = [(p, p.grad.as_subclass(Tensor).clone()) for p in model.get_trainable_chunk() if p.grad is not None]
        for norm in NORMS:
            before, at = gradients_of(model, group.rank), len(group.log)
            total = zero3.clip_grad_norm_(model, INF, norm)
            assert all(torch.equal(a, b) for a, b in zip(before.values(), gradients_of(model, group.rank).values(), strict=True))
            again = zero3.clip_grad_norm_(model, total.item() / 2, norm)
            kind = torch.int64 if math.isinf(norm) else torch.float64
            assert group.log[at:] == ([Collective("all_reduce", 1, kind)] * 2 if group.world_size > 1 else [])
            assert again == total and total.dtype == dtype and total.shape == ()
            after = gradients_of(model, group.rank)
            ratios = [(after[key].norm() / before[key].norm()).item() for key in before if before[key].any()]
            assert all(ratio == pytest.approx(0.5, rel=1e-5) for ratio in ratios)
            rows.append(total.item())
            for part, gradient in kept:
                part.grad.copy_(gradient)
        return rows

    models = [[module.to(dtype) for module in build(rank)] for rank in range(world_size)]
    found = run_ranks(world_size, body)
    assert found == [found[0]] * world_size, "not the same bits on all ranks"
    plain = plain_with_gradients(dtype, WAYS[way])
    for norm, total in zip(NORMS, found[0], strict=True):
        filled = [p for p in plain.parameters() if p.numel()]  # torch's inf norm does not take empty ones
        assert total == pytest.approx(torch.nn.utils.clip_grad_norm_(filled, INF, norm).item(), rel=1e-6), norm


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", NORMS)
def test_clip_grad_norm_on_one_rank_has_torchs_bits(way: str, norm: float) -> None:
    """The norm of norms of parameters, in the model's order: norms of whole chunks would round otherwise."""
    plain = plain_with_gradients(torch.float32, WAYS[way])
    expected = torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.numel()], INF, norm)
    models = [[module.to(torch.float32) for module in build(0)]]

    def body(group: ThreadCommunicator) -> Tensor:
        return zero3.clip_grad_norm_(with_gradients(group, models[0], WAYS[way]), INF, norm)

    assert torch.equal(run_ranks(1, body)[0], expected)


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("at", [0, 2])
def test_clip_grad_norm_error_if_nonfinite_on_one_rank_is_everybodys(at: int, bad: float, norm: float, way: str) -> None:
    def body(group: ThreadCommunicator) -> float:
        model = with_gradients(group, models[group.rank], WAYS[way])
        held = [p.grad for p in model.get_trainable_chunk() if p.grad is not None and p.grad.numel()]
        if group.rank == at:
            held[-1].view(-1)[0] = bad
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            zero3.clip_grad_norm_(model, 1.0, norm, error_if_nonfinite=True)
        return zero3.clip_grad_norm_(model, 1.0, norm).item()

    models = [build(rank) for rank in range(3)]
    for total in run_ranks(3, body):
        assert math.isnan(total) if math.isnan(bad) else total == INF


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("options", [None, all_whole])
def test_clip_grad_norm_on_ranks_with_nothing_but_padding(options: Options | None, norm: float) -> None:
    def body(group: ThreadCommunicator) -> float:
        model = zero3.Zero3Layer(models[group.rank], process_group=group)
        zero3.param_groups(model, options) if options is not None else None
        model(torch.ones(2, 1, dtype=torch.float64)).sum().backward()
        return zero3.clip_grad_norm_(model, INF, norm).item()

    models = [nn.Linear(1, 2).double() for _ in range(7)]
    plain = nn.Linear(1, 2).double()
    plain(torch.ones(2, 1, dtype=torch.float64)).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), INF, norm).item()
    assert run_ranks(7, body) == [pytest.approx(expected, rel=1e-6)] * 7


def test_clip_grad_norm_without_gradients_is_zero() -> None:
    def body(group: ThreadCommunicator) -> float:
        return zero3.clip_grad_norm_(as_layers(group, models[group.rank]), 1.0).item()

    models = [build(rank) for rank in range(2)]
    assert run_ranks(2, body) == [0.0, 0.0]


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "norm_type 0": lambda model: zero3.clip_grad_norm_(model, 1.0, 0),
    "norm_type nan": lambda model: zero3.clip_grad_norm_(model, 1.0, float("nan")),
    "max_norm -1": lambda model: zero3.clip_grad_norm_(model, -1.0),
    "max_norm nan": lambda model: zero3.clip_grad_norm_(model, float("nan")),
    "nothing sharded": lambda model: zero3.clip_grad_norm_(nn.Linear(1, 1), 1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_clip_grad_norm_refuses_wrong_arguments(name: str) -> None:
    with pytest.raises(ValueError, match=r"norm_type must be positive and max_norm at least 0, found|is sharded"):
        REFUSED[name](zero3.Zero3Layer(nn.Linear(1, 1)))
