"""Whatever users do with a model, in any order: after every step of it the model is what plain torch says.

Ranks are threads. What hypothesis draws happens to a sharded model on all of them, and to the same model in plain torch,
where it is told in a line or two what should come of it. ZERO3_EXAMPLES=3000 draws more, and others every time.
"""

from __future__ import annotations

import copy
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from torch import Tensor

import zero3
from tests.support.crew import Member
from tests.support.lives import BLOCKS, blocks, phases, rows, with_layers_together, with_shard, worlds
from tests.support.models import Broken
from tests.support.reference import assert_close
from tests.support.twins import Twins

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("ZERO3_EXAMPLES", "25"))


class Life(Twins):
    # -- rules: training

    @rule(sizes=rows, waits=st.booleans(), forwards=st.integers(1, 2), skipping=st.none() | st.tuples(st.integers(0, 2), blocks))
    def accumulate(self, sizes: list[int], waits: bool, forwards: int, skipping: tuple[int, int] | None) -> None:
        batches = self._batches(sizes)

        def backward(me: Member) -> None:
            if skipping is not None:
                me.blocks[skipping[1]].skips = skipping[0] == me.group.rank
            with zero3.no_sync(me.model) if waits else ExitStack():
                sum(self._loss(me.model, me.own(batches) * (1 + i)) for i in range(forwards)).backward()
            for block in me.blocks:
                block.skips = False

        self.crew.each(backward)
        self._join(self._plain_backward(batches, skipping, forwards), waits=waits)

    @precondition(lambda self: self.policy.dynamic and self.shard in (with_shard, with_layers_together))
    @rule(sizes=rows, omits=st.lists(st.sets(blocks, max_size=BLOCKS - 1), min_size=3, max_size=3), trains=st.booleans())
    def leave_out(self, sizes: list[int], omits: list[set[int]], trains: bool) -> None:
        """Ranks call different blocks. (One that calls none has nothing to run backward through.)"""
        batches = self._batches(sizes)

        def run(me: Member) -> None:
            me.model.omits = omits[me.group.rank]
            if trains:
                self._loss(me.model, me.own(batches)).backward()
            else:
                me.model(me.own(batches).requires_grad_())
            me.model.omits = set()

        self.crew.each(run)
        if trains:
            self._join(self._plain_backward(batches, omits=omits))

    @precondition(lambda self: self.kept is None)
    @rule(clips=st.booleans())
    def step(self, clips: bool) -> None:
        if clips:
            expected = torch.nn.utils.clip_grad_norm_([p for p in self.plain.parameters() if p.grad is not None], 0.5)
            for norm in self.crew.each(lambda me: zero3.clip_grad_norm_(me.model, 0.5).item()):
                assert norm == pytest.approx(expected.item(), rel=10 * self.tolerance, abs=10 * self.tolerance)
        self.steps.step()
        self.crew.each(lambda me: me.optimizer.step())

    @rule(to_none=st.booleans())
    def zero_grad(self, to_none: bool) -> None:
        to_none = to_none or self.kept is not None
        self.crew.each(lambda me: me.optimizer.zero_grad(set_to_none=to_none))
        self.kept = None
        self.steps.zero_grad(set_to_none=to_none)

    # -- rules: forwards

    @rule(sizes=rows, how=st.sampled_from(["no_grad", "inference_mode", "for nothing", "resident", "eval"]))
    def forward(self, sizes: list[int], how: str) -> None:
        batches = self._batches(sizes)

        def run(me: Member) -> Tensor:
            with ExitStack() as stack:
                if how == "no_grad" or how == "resident":
                    stack.enter_context(torch.no_grad())
                if how == "inference_mode":
                    stack.enter_context(torch.inference_mode())
                if how == "resident":
                    stack.enter_context(zero3.resident(me.model))
                    for _ in range(me.group.rank):
                        me.model(batches[0].to(me.device))
                me.model.train(how != "eval")
                found = me.model(me.own(batches).clone().requires_grad_())
                me.model.train()
                return found.detach().clone().cpu()

        for rank, found in enumerate(self.crew.each(run)):
            assert_close([found], [self._plain_forward(batches[rank]).detach()], self.tolerance, f"output of rank {rank}")

    # -- rules: what goes wrong

    @rule(
        sizes=rows,
        where=blocks,
        phase=phases,
        error=st.sampled_from([Broken, KeyboardInterrupt, torch.OutOfMemoryError]),
        waits=st.booleans(),
    )
    def fail_everywhere(self, sizes: list[int], where: int, phase: str, error: type[BaseException], waits: bool) -> None:
        batches = self._batches([1 + size for size in sizes])

        def fail(me: Member) -> None:
            me.blocks[where].blows = (phase, error)
            try:
                with pytest.raises(error), zero3.no_sync(me.model) if waits else ExitStack():
                    self._loss(me.model, me.own(batches)).backward()
            finally:
                me.blocks[where].blows = None
            zero3.reset(me.model)

        self.crew.each(fail)
        if phase == "backward" and not self.policy.transactional:
            self._drop()

    @precondition(lambda self: self.policy.dynamic and self.world_size > 1)
    @rule(sizes=rows, where=blocks, unlucky=st.integers(0, 2))
    def fail_alone(self, sizes: list[int], where: int, unlucky: int) -> None:
        """Of forwards that may differ, all ranks hear the end."""
        batches, unlucky = self._batches([1 + size for size in sizes]), unlucky % self.world_size

        def run(me: Member) -> None:
            mine = me.group.rank == unlucky
            me.blocks[where].blows = ("forward", Broken) if mine else None
            with pytest.raises(Broken if mine else RuntimeError, match=None if mine else f"rank {unlucky}: .*Broken"):
                me.model(me.own(batches).requires_grad_())
            me.blocks[where].blows = None
            zero3.reset(me.model)

        self.crew.each(run)

    @precondition(lambda self: self.policy.stage == 3 and not self.policy.dynamic)
    @rule(sizes=rows, where=blocks, phase=phases, waits=st.booleans(), unlucky=st.integers(0, 5))
    def guarded(self, sizes: list[int], where: int, phase: str, waits: bool, unlucky: int) -> None:
        """Rank `unlucky` fails, if there is one, and not before it can know what the others do."""
        batches = self._batches([1 + size for size in sizes])
        kind = (waits, *(p.requires_grad for p in self.plain.parameters()))
        fails = unlucky < self.world_size and (kind in self.rehearsed or self.world_size == 1)
        self.rehearsed.add(kind)

        def run(me: Member) -> None:
            me.blocks[where].blows = (phase, Broken) if fails and me.group.rank == unlucky else None
            with zero3.no_sync(me.model) if waits else ExitStack(), zero3.step_guard(me.model) as guarded:
                self._loss(me.model, me.own(batches)).backward()
            me.blocks[where].blows = None
            assert list(guarded.errors) == [unlucky] * fails, guarded

        self.crew.each(run)
        if not fails:
            self._join(self._plain_backward(batches), waits=waits)

    @rule()
    def copy_and_convert(self) -> None:
        def attempt(me: Member) -> None:
            layer = next(module for module in me.model.modules() if isinstance(module, zero3.Zero3Layer))
            with pytest.raises(RuntimeError, match="deepcopy"):
                copy.deepcopy(layer)
            with pytest.raises(RuntimeError, match="state_dict"):
                me.model.state_dict()
            with pytest.raises(RuntimeError, match=r"convert|released|sharded"):
                me.model.float()

        self.crew.each(attempt)

    # -- rules: values

    @rule(seed=st.integers(1, 9))
    def load(self, seed: int) -> None:
        with torch.no_grad():
            other = self.plan.build(seed)
            self.plain.load_state_dict(other.state_dict())
        self.crew.each(lambda me: zero3.load_full_state_dict(me.model, other.state_dict() if me.group.rank == 0 else None))

    @rule(where=blocks, factor=st.sampled_from([0.5, 1.5]), writeback=st.booleans())
    def write(self, where: int, factor: float, writeback: bool) -> None:
        def scale(me: Member) -> None:
            with zero3.full_params(me.model, writeback=writeback), torch.no_grad():
                me.blocks[where].a.weight.mul_(factor if me.group.rank == 0 else 7.0)

        changes = writeback or self.world_size == 1
        self.crew.each(scale)
        with torch.no_grad():
            self.plain[where].a.weight.mul_(factor if changes else 1.0)

    @precondition(lambda self: self.kept is None and self.policy.stage > 1)  # at stage 1 there may be gradients that are not reduced
    @rule(where=st.sampled_from([0, 1]), trains=st.booleans())
    def freeze(self, where: int, trains: bool) -> None:
        """Not the last block: something has to train."""

        def toggle(me: Member) -> None:
            layers = [module for module in me.model.modules() if isinstance(module, zero3.Zero3Layer)]
            layer = next(layer for layer in layers if layer.module is me.blocks[where])
            for chunk in layer._state.chunks:
                chunk.shard.requires_grad_(trains)

        alone = where == 1 or self.shard is not with_layers_together  # a chunk is frozen as a whole
        if alone and where != self.plan.frozen:  # a chunk that was frozen when wrapped is in no optimizer
            self.crew.each(toggle)
            self.plain[where].requires_grad_(trains)

    @rule(world_size=worlds, data=st.data())
    def gather_and_load_at(self, world_size: int, data: Any) -> None:
        saved = self.crew.each(lambda me: zero3.full_state_dict(me.model))
        assert all(not other for other in saved[1:])
        assert_close(saved[0], self.plain.state_dict(), self.tolerance, "the state dict")
        self.crew.dismiss()
        self._build(world_size, data.draw(self.shards), seed=5)
        self.crew.each(lambda me: zero3.load_full_state_dict(me.model, saved[0] if me.group.rank == 0 else None))

    @rule(world_size=worlds, background=st.booleans(), data=st.data())
    def save_and_load_at(self, world_size: int, background: bool, data: Any) -> None:
        """On disk, with the optimizer's state."""
        path, state = Path(self.directory.name) / "checkpoint", self.steps.state_dict()
        self.crew.each(lambda me: zero3.save_checkpoint(path, me.model, me.optimizer, extra=self.number, background=background).wait())
        self.crew.dismiss()
        self._build(world_size, data.draw(self.shards), seed=5)
        self.steps.load_state_dict(state)
        assert set(self.crew.each(lambda me: zero3.load_checkpoint(path, me.model, me.optimizer))) == {self.number}


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=20,
    deadline=None,
    derandomize=EXAMPLES == 25,
    suppress_health_check=list(HealthCheck),
)
