"""A hundred steps that fail, each in the same way on all ranks: not a byte stays behind, and the next step trains right."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.support.live import LiveBytes
from tests.support.models import mlp, rows
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_at_rest, full_gradients, full_parameters, process_group, sgd
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential
from zero3.comm.streams import HostLane, Then
from zero3.core.full_buffer import FullBuffer
from zero3.core.gradient_buffer import GradientBuffer
from zero3.core.layer_state import LayerState

X = rows(3)
REPETITIONS = 100

# Where in a step it happens, and with what: before the call of that name (a collective's by its kind) with this number.
PLACES: dict[str, tuple[str, int, type[BaseException]]] = {
    "forward": ("forward", 1, ValueError),
    "interrupted forward": ("forward", 2, KeyboardInterrupt),
    "backward": ("backward", 1, ValueError),
    "interrupted backward": ("backward", 2, KeyboardInterrupt),
    "a gather": ("all_gather", 1, RuntimeError),
    "a gather in backward": ("all_gather", 4, RuntimeError),
    "a reduction": ("reduce_scatter", 1, RuntimeError),
    "out of memory for parameters": ("allocate", 1, torch.OutOfMemoryError),
    "out of memory for parameters in backward": ("allocate", 4, torch.OutOfMemoryError),
    "out of memory for gradients": ("gradient", 1, torch.OutOfMemoryError),
    "an interrupted wait": ("wait", 1, KeyboardInterrupt),
    "an interrupted wait in backward": ("wait", 5, KeyboardInterrupt),
    "the launch of a transfer": ("issue", 2, KeyboardInterrupt),
}


class Trap:
    """Counts calls by their names, and raises at the one that it is set for. One a rank."""

    def __init__(self, name: str, number: int, error: type[BaseException]) -> None:
        self.name, self.number, self.error, self.calls = name, number, error, -1

    def set(self) -> None:
        self.calls = 0

    def passes(self, name: str) -> None:
        if self.calls < 0 or name != self.name:
            return
        self.calls += 1
        if self.calls > self.number:
            self.calls = -1
            raise self.error("the trap")


def _trapped(monkeypatch: pytest.MonkeyPatch, mine: threading.local) -> None:
    def wrap(owner: type, method: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def trapped(*args: Any, **kwargs: Any) -> Any:
            mine.trap.passes(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, trapped)

    wrap(FullBuffer, "allocate", "allocate")
    wrap(GradientBuffer, "__init__", "gradient")
    wrap(Then, "wait", "wait")
    wrap(HostLane, "issue", "issue")
    wrap(LayerState, "reset", "reset")


@pytest.mark.parametrize(("place", "transactional"), [(place, number % 2 == 1) for number, place in enumerate(PLACES)])
def test_a_hundred_failures(place: str, transactional: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = threading.local()
    _trapped(monkeypatch, mine)
    copies = [mlp(), mlp()]
    plain = mlp()
    plain(X).pow(2).mean().backward()
    sgd(plain.parameters()).step()

    def body(group: ThreadCommunicator) -> None:
        trap = mine.trap = Trap(*PLACES[place])
        group.before = trap.passes
        policy = ShardingPolicy(transactional=transactional)
        model = Zero3Sequential([Zero3Layer(m, policy=policy, process_group=process_group(group)) for m in copies[group.rank]])
        for layer in model:
            layer.module.register_forward_hook(_hook(trap))
        optimizer = sgd(model.get_trainable_chunk())

        def fail() -> None:
            trap.set()
            with contextlib.suppress(PLACES[place][2]):
                model(X).pow(2).mean().backward()
            assert trap.calls < 0, "nothing failed"
            zero3.reset(model)
            if not transactional:
                optimizer.zero_grad()

        model(X).pow(2).mean().backward()
        with LiveBytes() as live:
            held = []
            for _ in range(REPETITIONS):
                fail()
                group.exchange(b"", X.device)  # nobody has anything of another rank's in hand
                held.append(live.now)
            assert max(held[3:]) == min(held[3:]) == held[2], held
        assert_at_rest(model)
        if not transactional:
            model(X).pow(2).mean().backward()
        optimizer.step()
        found = full_parameters(model)
        assert all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in plain.named_parameters())

    run_ranks(2, body)


def _hook(trap: Trap) -> Callable[..., None]:
    def watch(module: Any, args: Any, output: Tensor) -> None:
        trap.passes("forward")
        output.register_hook(lambda gradient: trap.passes("backward"))

    return watch


@pytest.mark.parametrize("place", [("wait", 0), ("reset", 0), ("reset", 1)], ids=str)
def test_an_interrupted_reset(place: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a failed backward has left is waited for, and that is interrupted too. Later gradients are there."""
    mine = threading.local()
    _trapped(monkeypatch, mine)
    copies = [mlp(), mlp()]
    plain = mlp()
    plain(X).pow(2).mean().backward()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        trap = mine.trap = Trap("reduce_scatter", 1, RuntimeError)
        group.before = trap.passes
        model = Zero3Sequential([Zero3Layer(m, process_group=process_group(group)) for m in copies[group.rank]])
        trap.set()
        with pytest.raises(RuntimeError, match="the trap"):
            model(X).pow(2).mean().backward()
        trap = mine.trap = Trap(*place, KeyboardInterrupt)
        trap.set()
        with pytest.raises(KeyboardInterrupt):
            zero3.reset(model)
        model(X).pow(2).mean().backward()
        return full_gradients(model, group)

    for found in run_ranks(2, body):
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-12)
