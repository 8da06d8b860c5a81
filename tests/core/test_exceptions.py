"""After an exception anywhere the next forward starts clean and trains right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import WORLDS, fused, mlp, rows
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import assert_at_rest, full_parameters, in_sequence, on_ranks, sgd
from zero3.core.parameters import ParameterSites

X = rows(3)


def loss_of(model: nn.Module) -> Tensor:
    return model(X).pow(2).mean()


def parameters_after(build: Callable[[], nn.Module], steps: int) -> dict[str, Tensor]:
    """Plain torch's, on the same input every step."""
    model = build()
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_trained(model: nn.Module, expected: dict[str, Tensor]) -> None:
    assert_at_rest(model)
    found = full_parameters(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name


@WORLDS
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_training_goes_on_after_an_exception(world_size: int, where: int, phase: str, error: type[BaseException]) -> None:
    """Gradients accumulated before are kept if a forward broke, and dropped if a backward did."""
    expected = parameters_after(fused, 2)

    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        optimizer = sgd(model.get_trainable_chunk())
        fuse = model[where].module
        loss_of(model).backward()
        accumulated = [chunk.grad.clone() for chunk in model.get_trainable_chunk()]
        fuse.blows = (phase, error)
        with pytest.raises(error, match="the fuse"):  # pytest keeps the traceback, and with it all its frames, alive
            loss_of(model).backward()
        fuse.blows = None
        loss = loss_of(model)
        gradients = [chunk.grad for chunk in model.get_trainable_chunk()]
        if phase == "backward":
            assert gradients == [None] * 3
            loss.backward()
        else:
            assert all(torch.equal(found, before) for found, before in zip(gradients, accumulated, strict=True))
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        assert_trained(model, expected)

    on_ranks(world_size, fused, body)


@WORLDS
@pytest.mark.parametrize("recomputes", [False, True])
def test_reset_does_at_once_what_the_next_forward_would(world_size: int, recomputes: bool) -> None:
    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        def loss() -> Tensor:
            x = X.clone().requires_grad_()
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False) if recomputes else layer(x)
            return x.pow(2).mean()

        before = loss()
        model[1].module.blows = ("backward", ValueError)
        with pytest.raises(ValueError, match="the fuse"):
            (before if recomputes else loss()).backward()
        model[1].module.blows = None
        zero3.reset(model)
        assert_at_rest(model)
        assert all(chunk.grad is None for chunk in model.parameters())
        for chunk in model.parameters():
            chunk.pow(2).sum().backward()  # a penalty. The backward that raised is forgotten, and takes nothing more with it
        loss()
        assert all(torch.equal(chunk.grad, 2 * chunk) for chunk in model.parameters())

    on_ranks(world_size, fused, body)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reset_inside_a_backward_is_refused(world_size: int, stage: Any) -> None:
    """The layers that were over by then would have lost their gradients, and nobody would know."""
    plain = fused()
    for _ in range(2):
        loss_of(plain).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])

    def shard(model: nn.Module, group: Any, policy: Any) -> nn.Module:
        return in_sequence(model, group, zero3.ShardingPolicy(stage=stage))

    def body(model: Any, group: ThreadCommunicator) -> None:
        def reset(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: zero3.reset(model))

        loss_of(model).backward()
        handle = model[0].module.register_forward_hook(reset)
        with pytest.raises(RuntimeError, match=rf"^rank {group.rank}: zero3.reset inside a backward"):
            loss_of(model).backward()
        handle.remove()
        zero3.reset(model)
        for _ in range(2):
            loss_of(model).backward()
        assert torch.allclose(zero3.clip_grad_norm_(model, float("inf")), expected, rtol=1e-12)

    on_ranks(world_size, fused, body, shard)


def test_reset_after_an_interrupt_at_the_begin_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer runs, though nothing has told the forward that it is over."""
    expected = parameters_after(fused, 2)

    def interrupt() -> bool:
        raise KeyboardInterrupt

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = sgd(model.get_trainable_chunk())
        for _ in range(2):
            with monkeypatch.context() as patched:
                patched.setattr(torch, "is_autocast_cache_enabled", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model)
            zero3.reset(model)
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_trained(model, expected)

    on_ranks(1, fused, body)


@WORLDS
@pytest.mark.parametrize("where", [nullcontext, zero3.resident, torch.no_grad], ids=lambda each: each.__name__)
def test_reset_inside_a_forward_is_refused(world_size: int, where: Callable[..., Any]) -> None:
    """It took away the frames of layers under way: an IndexError from the inside. All goes on as in plain torch."""
    expected = parameters_after(fused, 2)

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = sgd(model.get_trainable_chunk())
        for _ in range(2):
            handle = model[1].module.register_forward_pre_hook(lambda *_: zero3.reset(model))
            with (
                where(*[model][: where is zero3.resident]),
                pytest.raises(RuntimeError, match=rf"^rank {group.rank}: zero3.reset inside a forward, whose layers"),
            ):
                model(X)
            handle.remove()
            with zero3.resident(model):
                model(X)
                zero3.reset(model)  # between two forwards it may be called
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_trained(model, expected)

    on_ranks(world_size, fused, body)


@WORLDS
def test_retain_graph_survives_a_backward_that_broke(world_size: int) -> None:
    """`retain_graph`, and no forward in between."""
    expected = parameters_after(fused, 1)

    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        optimizer = sgd(model.get_trainable_chunk())
        loss = loss_of(model)
        model[0].module.blows = ("backward", ValueError)
        with pytest.raises(ValueError, match="the fuse"):
            loss.backward(retain_graph=True)
        model[0].module.blows = None
        loss.backward()
        optimizer.step()
        assert_trained(model, expected)

    on_ranks(world_size, fused, body)


@WORLDS
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_training_goes_on_after_an_exception_in_a_checkpoints_recomputation(world_size: int, use_reentrant: bool, phase: str) -> None:
    def build() -> nn.Module:
        return fused()

    expected = parameters_after(build, 1)

    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        def run(x: Tensor) -> Tensor:
            for layer in model:
                x = checkpoint(layer, x, use_reentrant=use_reentrant, preserve_rng_state=False)
            return x.pow(2).mean()

        optimizer = sgd(model.get_trainable_chunk())
        run(X.clone().requires_grad_()).backward()
        optimizer.zero_grad()
        loss = run(X.clone().requires_grad_())
        model[1].module.blows = (phase, ValueError)
        with pytest.raises(ValueError, match="the fuse"):
            loss.backward()
        model[1].module.blows = None
        run(X.clone().requires_grad_()).backward()
        optimizer.step()
        assert_trained(model, expected)

    on_ranks(world_size, build, body)


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_training_goes_on_after_a_transfer_that_failed(kind: str, number: int) -> None:
    """Wherever in a step it was: `number` counts the transfers of its kind."""
    expected = parameters_after(mlp, 1)

    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        made, armed = 0, True

        def fail(found: str) -> None:
            nonlocal made
            made += found == kind
            if armed and made == number and found == kind:
                raise RuntimeError("the link is down")

        optimizer = sgd(model.get_trainable_chunk())
        group.before = fail  # the model's second communicator, made at its first forward, takes it over
        fails = number <= (5 if kind == "all_gather" else 3)
        with pytest.raises(RuntimeError, match=r"layer .* failed: the link is down") if fails else nullcontext():
            loss_of(model).backward()
        armed = False
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        assert_trained(model, expected)

    on_ranks(2, mlp, body)


@WORLDS
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("moment", ["show", "hide"])
def test_an_interrupt_between_two_parameters_leaves_no_half_layer(
    world_size: int, moment: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, armed, original = parameters_after(mlp, 1), threading.local(), getattr(ParameterSites, moment)

    def interrupted(self: ParameterSites, value: Tensor) -> None:
        armed.left = getattr(armed, "left", -1) - 1
        if armed.left == 0:
            raise KeyboardInterrupt
        original(self, value)

    monkeypatch.setattr(ParameterSites, moment, interrupted)

    def body(model: zero3.Zero3Sequential, group: ThreadCommunicator) -> None:
        optimizer = sgd(model.get_trainable_chunk())
        armed.left = number + 1
        with pytest.raises(KeyboardInterrupt):
            loss_of(model).backward()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        assert_trained(model, expected)

    on_ranks(world_size, mlp, body)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: zero3.set_trainable(model, lambda name, info: info.ndim == 2),
        lambda model: zero3.param_groups(model, lambda name, info: {"weight_decay": 0.0}),
        zero3.fetch,
        zero3.release,
    ],
    ids=["set_trainable", "param_groups", "fetch", "release"],
)
@WORLDS
def test_what_needs_layers_at_rest_names_reset(world_size: int, call: Callable[[nn.Module], object]) -> None:
    """A forward that raised has left layers fetched."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        handle = model[1].module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model)
        handle.remove()
        with pytest.raises(RuntimeError, match=r"after an exception, call zero3\.reset\(model\) first"):
            call(model)
        zero3.reset(model)
        call(model)

    on_ranks(world_size, mlp, body)
