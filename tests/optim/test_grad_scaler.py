"""zero3.GradScaler against torch's own on one process that sees all of the batch: the same scales, the same skipped steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.param_groups import Options, all_whole, as_layers, matrices_whole, plain_groups
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.training import loss_of, odd_model, sentences

WAYS: dict[str, Options | None] = {
    "chunks": None,
    "parts": lambda name, info: {"lr": 0.01 if "bias" in name else 0.03},
    "some whole": matrices_whole,
    "whole": all_whole,
}
BAD = 2  # the step with an infinite loss


def train(model: nn.Module, groups: Any, scaler: torch.amp.GradScaler, way: str, turn: Any, bad_here: bool, unscale: bool) -> Any:
    optimizer = torch.optim.AdamW(groups, lr=0.02, **({"foreach": False} if way == "loop" else {way: True}))
    stepped, scales, rank, world_size = [], [], *turn
    optimizer.register_step_post_hook(lambda *_: stepped.append(step))
    for step in range(5):
        loss = loss_of(model, sentences(step)[rank::world_size]) * (float("inf") if bad_here and step == BAD else 1.0)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return stepped, scales


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("way", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("bad_on", [None, 0, 2])
def test_gradscaler_skips_the_same_steps_on_all_ranks(kind: str, way: str, bad_on: int | None, unscale: bool) -> None:
    options = WAYS[kind]

    def body(group: ThreadCommunicator) -> tuple[Any, dict[str, Tensor]]:
        model = as_layers(group, models[group.rank])
        groups = zero3.param_groups(model, options) if options else zero3.get_trainable_chunk(model)
        scaler = zero3.GradScaler("cpu", 1024.0, growth_interval=3)
        ran = train(model, groups, scaler, way, (group.rank, 3), group.rank == bad_on, unscale)
        reduced = [entry for entry in group.log if entry.kind == "all_reduce"]
        assert [entry.numel for entry in reduced] == [1] * 5
        return ran[1], zero3.full_state_dict(model, rank0_only=False)

    models = [odd_model(torch.float32, rank) for rank in range(3)]
    found = run_ranks(3, body)
    plain = nn.Sequential(*odd_model())
    groups = plain_groups(plain, options) if options else plain.parameters()
    _, scales = train(plain, groups, torch.amp.GradScaler("cpu", 1024.0, growth_interval=3), way, (0, 1), bad_on is not None, unscale)
    for found_scales, state in found:
        assert found_scales == scales
        assert all(torch.allclose(state[name], value, rtol=1e-4, atol=1e-5) for name, value in plain.state_dict().items())


def test_gradscaler_on_a_rank_without_any_parameter() -> None:
    def body(group: ThreadCommunicator) -> list[float]:
        model = zero3.Zero3Layer(models[group.rank], process_group=group)
        groups = zero3.param_groups(model, lambda name, info: {"whole": True} if name == "weight" else None)
        held.append(sum(p.numel() for p in groups[0]["params"]))
        optimizer, scaler, scales = torch.optim.SGD(groups, lr=0.1), zero3.GradScaler("cpu", 64.0), []
        for step in range(3):
            scaler.scale(model(torch.ones(2, 3)).sum() * (float("inf") if step == 1 and group.rank == 2 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    held: list[int] = []
    models = [nn.Linear(3, 2) for _ in range(3)]
    assert run_ranks(3, body) == [[64.0, 32.0, 32.0]] * 3
    assert sorted(held) == [0, 0, 6]


def test_gradscaler_that_is_off_scales_nothing() -> None:
    layer = zero3.Zero3Layer(nn.Linear(3, 2))
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=0.1), zero3.GradScaler("cpu", enabled=False)
    loss = layer(torch.ones(2, 3)).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    before = [p.detach().clone() for p in layer.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_gradscaler_serves_plain_models_as_torchs_does() -> None:
    model = nn.Linear(3, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), zero3.GradScaler("cpu", 64.0)
    scaler.scale(model(torch.ones(2, 3)).sum() * float("inf")).backward()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("options", [matrices_whole, WAYS["parts"]])
def test_torchs_gradscaler_is_refused_on_parts(options: Options) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        optimizer, scaler = torch.optim.SGD(zero3.param_groups(model, options), lr=0.1), torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model, sentences(0))).backward()
        with pytest.raises(RuntimeError, match=r"zero3\.GradScaler"):
            scaler.step(optimizer)

    models = [odd_model(torch.float32, rank) for rank in range(2)]
    run_ranks(2, body)


def in_a_process(rank: Rank, infinite_on: int) -> tuple[list[float], float]:
    model = zero3.Zero3Sequential([zero3.Zero3Layer(module) for module in odd_model(torch.float32, rank.number)])
    groups = zero3.param_groups(model, matrices_whole)
    _, scales = train(
        model, groups, zero3.GradScaler("cpu", 1024.0), "foreach", (rank.number, rank.world_size), rank.number == infinite_on, False
    )
    loss_of(model, sentences(9)[rank.number :: rank.world_size]).backward()
    return scales, zero3.clip_grad_norm_(model, 0.1).item()


@pytest.mark.parametrize("infinite_on", [0, 1])
def test_gradscaler_of_processes_agrees(infinite_on: int) -> None:
    first, second = on_ranks(2, in_a_process, infinite_on)
    assert first == second and first[0][BAD] == 512.0
