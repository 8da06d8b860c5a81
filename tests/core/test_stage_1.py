"""Stage 1, where gradients stay whole until somebody looks: what `zero_grad`, `no_sync`, clipping and scalers make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero3
from tests.core.test_stages import gradients_of_two_ranks, program, sharded
from tests.support.models import mlp
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import TOLERANCE, Turn, assert_close, full_gradients, full_parameters, on_ranks


@pytest.mark.parametrize("set_to_none", [True, False])
def test_stage_1_forgets_gradients_after_zero_grad(set_to_none: bool) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        program(model, Turn(group.rank, 5, 2))
        optimizer.zero_grad(set_to_none=set_to_none)
        program(model, Turn(group.rank, 0, 2))
        zero3.clip_grad_norm_(model, float("inf"))
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")

    wanted = gradients_of_two_ranks()
    on_ranks(2, mlp, body, sharded(1))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_stage_1_adds_to_gradients_that_are_there(set_to_none: bool) -> None:
    """A look, a step, zeros: whatever made a gradient real, what comes later joins it before the next look."""
    plain = mlp()
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    norms, values = [], []
    for step in range(2):
        for number in range(2):
            for rank in range(2):
                (plain(Turn(rank, 10 * step + number, 2).tensor(3, 5)).pow(2).sum() / 2).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        expected.step()
        expected.zero_grad(set_to_none=set_to_none)
        values.append({name: p.detach().clone() for name, p in plain.named_parameters()})

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9)
        found = []
        for step in range(2):
            for number in range(2):
                program(model, Turn(group.rank, 10 * step + number, 2))
                found.append(zero3.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert_close(full_parameters(model), values[step], TOLERANCE, f"parameters after step {step}")
        assert found == pytest.approx(norms, rel=1e-12)

    on_ranks(2, mlp, body, sharded(1))


@pytest.mark.parametrize("forwards", [0, 1])
def test_stage_1_steps_by_zeros_after_zero_grad_without_set_to_none(forwards: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        chunks = zero3.get_trainable_chunk(model)
        optimizer, before = torch.optim.SGD(chunks, lr=0.1), full_parameters(model)
        program(model, Turn(group.rank, 0, 2))
        optimizer.zero_grad(set_to_none=False)
        for _ in range(forwards):
            model(torch.ones(1, 5, dtype=torch.float64))
        optimizer.step()
        assert_close(full_parameters(model), before, 0, "parameters")
        assert all(chunk.grad is not None and not chunk.grad.any() for chunk in chunks)
        with pytest.raises(RuntimeError, match="clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(chunks, 1.0)
        program(model, Turn(group.rank, 0, 2))
        zero3.clip_grad_norm_(model, float("inf"))
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")

    wanted = gradients_of_two_ranks()
    on_ranks(2, mlp, body, sharded(1))


def test_stage_1_under_no_sync_still_says_that_a_step_is_too_early() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        with zero3.no_sync(model):
            program(model, Turn(group.rank, 5, 2))
            with pytest.raises(RuntimeError, match="no_sync"):
                optimizer.step()
        optimizer.step()  # outside nothing keeps them

    on_ranks(2, mlp, body, sharded(1))


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, zero3.GradScaler])
def test_stage_1_with_a_gradscaler_and_with_torchs_clip_grad_norm_refused(kind: Any) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        chunks = zero3.get_trainable_chunk(model)
        optimizer = torch.optim.SGD(chunks, lr=0.1)
        scaler = kind("cpu", init_scale=8.0)
        scaler.scale(model(Turn(group.rank, 0, 2).tensor(3, 5)).pow(2).sum()).backward()
        scaler.unscale_(optimizer)
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")
        with pytest.raises(RuntimeError, match="clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(chunks, 1.0)

    wanted = gradients_of_two_ranks()
    on_ranks(2, mlp, body, sharded(1))
