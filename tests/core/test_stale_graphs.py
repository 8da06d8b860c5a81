"""Graphs that a step made stale raise, as in plain torch; and what else of a graph is refused, or kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero3
from tests.core.test_exceptions import X, loss_of, parameters_after
from tests.support.models import WIDTH, WORLDS, Calls, mlp, seeded
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import assert_at_rest, full_parameters, on_ranks, sgd


@WORLDS
@pytest.mark.parametrize("walked", [False, True])
def test_retain_graph_over_an_optimizer_step_raises_as_in_plain_torch(world_size: int, walked: bool) -> None:
    def stale(model: nn.Module, parameters: list[nn.Parameter]) -> None:
        optimizer = sgd(parameters)
        loss_of(model).backward()
        loss = loss_of(model)
        if walked:
            loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    plain = mlp()
    stale(plain, list(plain.parameters()))

    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        stale(model, model.get_trainable_chunk())
        loss_of(model).backward()
        assert_at_rest(model)

    on_ranks(world_size, mlp, body)


@WORLDS
def test_a_full_buffer_never_survives_an_optimizer_step(world_size: int) -> None:
    """Whatever was fetched before it, forward, evaluation, full_params: what is read after it is what the step made."""
    expected = parameters_after(mlp, 1)

    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        optimizer = sgd(model.get_trainable_chunk())
        loss_of(model).backward()
        loss_of(model)  # a validation loss, without a backward: the last layer stays fetched for one
        optimizer.step()
        found = full_parameters(model)
        assert all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in expected.items())
        loss_of(model)
        with torch.no_grad():
            for chunk in model.parameters():
                chunk.zero_()
        assert not any(value.any() for value in full_parameters(model).values())
        assert not loss_of(model).item()

    on_ranks(world_size, mlp, body)


@WORLDS
def test_create_graph_is_refused(world_size: int) -> None:
    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        x = X.clone().requires_grad_()
        loss = model(x).pow(2).mean()
        with pytest.raises(RuntimeError, match=r"create_graph=True through layer .*unsharded model"):
            torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="create_graph=True"):
            loss_of(model).backward(create_graph=True)
        loss_of(model).backward()
        assert_at_rest(model)

    on_ranks(world_size, mlp, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_changed_by_a_forward_is_kept_or_refused(world_size: int) -> None:
    """`max_norm` scales the rows that are looked up, in place: one rank can, of several each would do another."""

    def build() -> nn.Module:
        return seeded(lambda: nn.Embedding(7, WIDTH, max_norm=0.5), lambda: Calls(lambda m, x: m.a(x)))

    plain = build()
    plain(torch.arange(4))

    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        if world_size == 1:
            model(torch.arange(4))
            assert torch.equal(full_parameters(model)["0.weight"], plain[0].weight)
        else:
            says = r"rank \d: while layer .*Embedding.* computed, parameter 'weight' was changed in place.*writeback"
            with pytest.raises(RuntimeError, match=says):
                model(torch.arange(4))

    on_ranks(world_size, build, body)
