"""Records a training step of zero3 on the machine of step_machine.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from step_machine import BLOCKS, ROWS, WIDTH, Machine, Moment, Ranks, Recorded
from torch import Tensor, nn

import zero3
from zero3.access import states_of
from zero3.core.autograd import as_plain_tensors, inside_backward
from zero3.core.collectives import Collective, Conductor, Fetch, Gather, Reduce

NUMBERS = {  # the functions that docs/design.md numbers
    "Runtime.begin_pass": "F1", "Runtime.pre_forward": "F2", "Runtime.post_forward": "F4", "Runtime.end_pass": "F5", "Backward.begin": "B1",
    "Backward._before": "B2", "Account.add": "B4", "Backward._back_up": "B5", "Backward._end": "B6", "clip_grad_norm_": "S1",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Watching:
    """A conductor: who computes, what moves, and what each storage holds."""

    def __init__(self, machine: Machine, layer: int | None, inner: Conductor) -> None:
        self.machine, self.layer, self.inner = machine, layer, inner

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        machine, backward, asked = self.machine, inside_backward(), self.machine.now
        if isinstance(what, Gather | Reduce):
            machine.moving = self.layer
        done = self.inner.conduct(what, absent=absent)
        if isinstance(what, Fetch):
            machine.recorded.moments.append(Moment("B3", self.layer, asked) if backward else Moment("F3", self.layer, machine.now))
            machine.layer, machine.doing = self.layer, "backward" if backward else "forward"
        elif isinstance(what, Reduce):
            legs = [leg for ticket in done for leg in ticket._legs]
            for tensor in (each for leg in legs for held in leg.held for each in held if isinstance(each, Tensor)):
                machine.tag("full gradients", tensor)
        return done


def watch(machine: Machine, model: nn.Module) -> None:
    numbers = {id(layer._state): number for number, layer in enumerate(zero3.layer.layers_of(model))}  # type: ignore[attr-defined]
    for state in states_of(model):
        state.conducted_by(Watching(machine, numbers.get(id(state)), state.conductor))
        for sharded in state.parameters:
            with as_plain_tensors():
                sharded.sites.parameter.register_hook(partial(machine.tag, "full gradients"))  # type: ignore[no-untyped-call]
        for chunk in state.chunks:
            machine.tag("full parameters", chunk.full.tensor)
            machine.tag("chunks", chunk.shard.data)


@contextmanager
def noting(machine: Machine, model: nn.Module) -> Iterator[None]:
    """Notes when the numbered functions are called."""
    numbers = {id(state): number for number, state in enumerate(states_of(model)[:BLOCKS])}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (number := NUMBERS.get(frame.f_code.co_qualname)) is not None:
            held = frame.f_locals
            state = held.get("state", getattr(held.get("call"), "layer", None))
            layer = machine.layer if number == "B4" else numbers.get(id(state))
            machine.recorded.moments.append(Moment(number, layer, machine.now))

    before = sys.getprofile()
    machine.on = True
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        machine.on = False


def record() -> Recorded:
    """One step, after two others."""
    torch.manual_seed(0)
    machine = Machine()
    with machine:
        model = zero3.shard(nn.Sequential(*(Block() for _ in range(BLOCKS))), layers=Block, process_group=Ranks(machine))
        chunks = zero3.get_trainable_chunk(model)
        optimizer = torch.optim.AdamW(chunks)
        batch = torch.randn(ROWS, WIDTH)

        def step() -> None:
            loss = model(batch).pow(2).mean()
            loss.backward()
            machine.layer, machine.doing = None, "step"
            for chunk in chunks:
                machine.tag("gradients", chunk.grad.as_subclass(Tensor))  # type: ignore[union-attr]
            zero3.clip_grad_norm_(model, 1.0)
            machine.recorded.moments.append(Moment("S2", None, machine.now))
            optimizer.step()
            optimizer.zero_grad()
            machine.look()

        step()
        step()
        watch(machine, model)
        for value in (value for state in optimizer.state.values() for value in state.values()):
            machine.tag("optimizer state", value)
        machine.recorded.moments.clear()
        with noting(machine, model):
            step()
    return machine.recorded
