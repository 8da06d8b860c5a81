"""A run that uses everything at once, in any order: ranks are threads, and plain torch says what should come of it.

hypothesis draws a policy and what users do between and inside steps. ZERO3_EXAMPLES=2000 draws more, and others every time.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import zero3
from tests.support.everything import (
    BLOCKS,
    Model,
    Run,
    chosen,
    clipped,
    drawn,
    layers_of,
    loss_by,
    made,
    options_of,
    plain_run,
    runs,
    scaled,
    transformed,
)
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_close, process_group
from tests.support.stacks import loss_of

EXAMPLES = int(os.environ.get("ZERO3_EXAMPLES", "25"))


class Sharded:
    """The same on one rank of a sharded model."""

    def __init__(self, run: Run, model: Model, group: ThreadCommunicator, folder: Path) -> None:
        self.run, self.group, self.folder = run, group, folder
        if run.compiled:
            model.blocks[1].compile(backend="eager")
        layers = layers_of(model) if run.together else None
        self.model: Any = zero3.shard(model, layers, process_group=process_group(group), policy=run.policy, device="cpu")
        zero3.register_forward_method(self.model, "encode")
        for block in self.model.blocks:
            zero3.register_forward_method(block, "features")
        if run.from_meta:
            zero3.materialize(self.model, init=drawn if run.drawn else None)
        self.make_optimizer()

    def own(self) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters() if "chunk" not in name]

    def make_optimizer(self) -> None:
        parameters: Any = zero3.param_groups(self.model, options_of) if self.run.grouped else zero3.get_trainable_chunk(self.model)
        self.optimizer, self.older = torch.optim.SGD(parameters, lr=0.05), False  # whether set_trainable was called since
        listed = [p for p in self.model.parameters() if p.requires_grad and all(p is not own for own in self.own())]
        assert [*map(id, listed)] == [*map(id, zero3.get_trainable_chunk(self.model))]

    def zero(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        try:
            self.optimizer.step()
        except RuntimeError:
            if not self.older:  # a new one would have been needed
                raise
            self.make_optimizer()
            self.optimizer.step()

    def do(self, number: int, action: str, seed: int) -> list[Any]:
        model, shown = self.model, list[Any]()
        if action in ("micro-batch", "kept micro-batch", "offloaded micro-batch", "encode", "features"):
            offloads = zero3.offload_activations(min_bytes=1) if action == "offloaded micro-batch" else nullcontext()
            with zero3.no_sync(model) if action == "kept micro-batch" else nullcontext():
                with offloads:
                    loss = loss_by(model, action, Turn(self.group.rank, number, self.run.world_size), seed)
                if loss.requires_grad:
                    loss.backward()
        elif action == "guarded micro-batch":
            can_be = self.run.policy.stage == 3 and not self.run.policy.dynamic
            with zero3.step_guard(model) if can_be else nullcontext():
                loss_of(model, Turn(self.group.rank, number, self.run.world_size)).backward()
        elif action == "fetch":
            zero3.fetch(model if seed > 20 else model.blocks[seed % BLOCKS])
        elif action == "release":
            zero3.release(model if seed > 20 else model.blocks[seed % BLOCKS])
        elif action == "transform":
            with zero3.resident(model):
                shown.append([transformed(model, seed)])
        elif action == "evaluate":
            with zero3.resident(model) if seed % 2 else nullcontext(), torch.no_grad():
                shown.append([loss_of(model, Turn(0, seed, 1))])
        elif action == "order":
            ends = [layer for layer in (model.embed, model.head) if isinstance(layer, zero3.Zero3Layer)]
            zero3.set_forward_order(model, [*ends, *model.blocks] if seed % 2 else [*ends[:1], *model.blocks, *ends[1:]])
        elif action == "checkpoint":
            zero3.save_checkpoint(self.folder / "checkpoint", model, extra=number)
            self.spoil()
            assert zero3.load_checkpoint(self.folder / "checkpoint", model) == number
        elif action == "load":
            values = zero3.full_state_dict(model)
            self.spoil()
            zero3.load_full_state_dict(model, values)
        elif action == "write":
            with zero3.full_params(model.blocks[seed % BLOCKS], writeback=True), torch.no_grad():
                model.blocks[seed % BLOCKS].down.weight.mul_(0.9)
        elif action == "report":
            assert zero3.report(model).world_size == self.run.world_size
        else:
            zero3.reduce_gradients(model)
            shown += self.with_gradients(action, seed)
        return [*shown, zero3.full_state_dict(model, rank0_only=False)]

    def spoil(self) -> None:
        for chunk in zero3.get_trainable_chunk(self.model):
            chunk.data.mul_(1.5)

    def with_gradients(self, action: str, seed: int) -> list[Any]:
        if action == "clip":
            return [[zero3.clip_grad_norm_(self.model, 0.5)]]
        if action == "scale by name":
            scaled(zero3.named_gradients(self.model))
        elif action == "clip by name":
            with zero3.full_gradients(self.model, writeback=True) as gradients:
                clipped(gradients)
        elif action == "step":
            for parameter in self.own():
                if parameter.grad is not None:
                    self.group.all_reduce(parameter.grad)
                    parameter.data.sub_(parameter.grad / self.run.world_size, alpha=0.05)
            self.step()
            self.zero()
        elif action == "set_trainable":
            self.zero()
            zero3.set_trainable(self.model, chosen(seed))
            self.older = True
            if seed % 2 or self.run.grouped:
                self.make_optimizer()
        return []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks, whoever's tensor it is
@settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 25, suppress_health_check=list(HealthCheck))
@given(runs())
def test_everything_together(run: Run) -> None:
    torch.compiler.reset()
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        expected = plain_run(run)
        with torch.device("meta") if run.from_meta else nullcontext():
            models = [made(run) for _ in range(run.world_size)]
        torch.manual_seed(4)

        def body(group: ThreadCommunicator) -> list[Any]:
            sharded = Sharded(run, models[group.rank], group, Path(folder))
            return [each for number, (action, seed) in enumerate(run.actions) for each in sharded.do(number, action, seed)]

        chosen_by = (run.policy.grad_dtype, run.policy.gather_format, run.policy.reduce_format)
        tolerance = 1e-9 if chosen_by == (None, None, None) else 1e-4
        for found in run_ranks(run.world_size, body):
            assert len(found) == len(expected)
            for mine, theirs in zip(found, expected, strict=True):
                mine = {name: mine[name] for name in theirs} if isinstance(theirs, dict) else mine
                assert_close(mine, theirs, tolerance, str(replace(run)))
