"""Whatever users do with a model, in any order: after every step of it the model is what plain torch says.

Ranks are threads. What hypothesis draws happens to a sharded model on all of them, and to the same model in plain torch,
where it is told in a line or two what should come of it. ZERO3_EXAMPLES=3000 draws more, and others every time.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor
from torch.func import functional_call

import zero3
from tests.support.crew import Crew, Member
from tests.support.lives import (
    BLOCKS,
    Block,
    Plan,
    blocks,
    dynamic_shards,
    look,
    phases,
    plans,
    policies,
    rows,
    shards,
    with_layers_together,
    with_shard,
    worlds,
)
from tests.support.models import WIDTH, Broken
from tests.support.reference import assert_close, process_group
from zero3.access import states_of
from zero3.core.layer_state import Presence, reducers_of
from zero3.core.parameters import unwrapped

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("ZERO3_EXAMPLES", "25"))
# of what is computed or reduced in that dtype; parameters are fp64. Errors do not add up: see `_follow`
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}


class Life(RuleBasedStateMachine):
    crew: Crew | None = None
    hire: type[Crew] = Crew

    # -- beginnings

    @initialize(plan=plans, policy=policies, world_size=worlds, data=st.data())
    def begin(self, plan: Plan, policy: zero3.ShardingPolicy, world_size: int, data: Any) -> None:
        self.plan, self.policy, self.number = plan, policy, 0
        self.shards = st.sampled_from(dynamic_shards if policy.dynamic else shards)
        self.tolerance = max(TOLERANCES[dtype] for dtype in (torch.float64, policy.param_dtype, policy.reduce_dtype) if dtype is not None)
        self.plain: Any = plan.build()
        self.directory = tempfile.TemporaryDirectory()
        self._build(world_size, data.draw(self.shards))

    def _build(self, world_size: int, shard: Any, seed: int | None = None) -> None:
        """`seed`: the sharded model begins with other values, and is going to be loaded."""
        self.world_size, self.shard = world_size, shard
        for block in self.plain:
            block.requires_grad_(block.number != self.plan.frozen)  # an optimizer knows what trained when it was made
        copies = [copy.deepcopy(self.plain if seed is None else self.plan.build(seed)) for _ in range(world_size)]
        for block, *copied in zip(self.plain, *copies, strict=True):
            for each in copied:
                each.reentrant = self.plan.reentrant[block.number]
            block.reentrant = None  # recomputation is to change nothing
        self.plain.zero_grad()
        self.kept: dict[str, Tensor] | None = None  # what no_sync has kept, by names; the gradients can't be used meanwhile
        self.rehearsed: set[Any] = set()
        self.steps = self._optimizer(p for p in self.plain.parameters() if p.requires_grad)
        self.crew = self.hire(world_size)

        def make(me: Member) -> None:
            me.model = shard(copies[me.group.rank].to(me.device), process_group(me.group), self.policy)
            me.blocks = [unwrapped(module) for module in me.model.modules() if isinstance(module, Block)]
            me.optimizer = self._optimizer(zero3.get_trainable_chunk(me.model))
            copies[me.group.rank] = None  # type: ignore[call-overload]
            with zero3.full_params(me.model):  # this makes buffers that are made at their first use
                me.names = {id(parameter): name for name, parameter in me.model.named_parameters()}

        self.crew.each(make)
        self.at_rest = self._live_bytes()

    def _live_bytes(self) -> list[int]:
        """Of each rank, without what its optimizer holds, and the one number a chunk that a first `step_guard` leaves for the next one.

        The ranks' hashes that are on their way are read before.
        """

        def count(me: Member) -> int:
            for state in states_of(me.model):
                state.log.look()
            held = [value for state in me.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
            held += filter(torch.is_tensor, (getattr(each, "_nothing", None) for each in reducers_of(states_of(me.model))))
            return me.live.now - sum(tensor.nbytes for tensor in held)

        return self.crew.each(count)

    @staticmethod
    def _optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)

    def teardown(self) -> None:
        if self.crew is not None:
            self.crew.dismiss()
            self.directory.cleanup()

    # -- what happens to both

    def _batches(self, sizes: list[int]) -> list[Tensor]:
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        return [torch.randn(size, WIDTH, dtype=torch.float64, generator=generator) for size in sizes]

    def _plain_backward(
        self, batches: list[Tensor], skipping: tuple[int, int] | None = None, forwards: int = 1, omits: list[set[int]] | None = None
    ) -> dict[str, Tensor]:
        """The gradients that a backward of all ranks brings, reduced. The model's own stay as they are."""
        divisor = self.world_size if self.policy.gradient_reduction == "mean" else 1
        trained = {name: p for name, p in self.plain.named_parameters() if p.requires_grad}
        found = {name: torch.zeros_like(p) for name, p in trained.items()}
        for rank in range(self.world_size):
            self.plain[skipping[1] if skipping else 0].skips = skipping is not None and skipping[0] == rank
            self.plain.omits = omits[rank] if omits is not None else set()
            loss = sum(self._loss(self._plain_forward, batches[rank] * (1 + i)) for i in range(forwards)) / divisor
            if loss.requires_grad:
                for name, gradient in zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True), strict=True):
                    found[name] += 0 if gradient is None else gradient
        for block in self.plain:
            block.skips = False
        self.plain.omits = set()
        return found

    def _plain_forward(self, x: Tensor) -> Tensor:
        """With the casts that the policy asks for."""
        dtype = self.policy.param_dtype
        if dtype is None:
            return self.plain(x)
        return functional_call(self.plain, {name: p.to(dtype) for name, p in self.plain.named_parameters()}, (x.to(dtype),))

    @staticmethod
    def _loss(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return model(x.clone().requires_grad_()).pow(2).sum()

    def _join(self, brought: dict[str, Tensor], *, waits: bool = False) -> None:
        waits = waits and self.world_size > 1 and self.policy.stage > 1  # at stage 1 all wait, until somebody looks
        if waits or self.kept is not None:
            self.kept = {name: brought[name] + (self.kept or {}).get(name, 0) for name in brought}
        if waits:
            return
        brought, self.kept = self.kept or brought, None
        for name, parameter in self.plain.named_parameters():
            if name in brought:
                parameter.grad = brought[name] + (0 if parameter.grad is None else parameter.grad)

    def _drop(self) -> None:
        self.kept = None
        self.plain.zero_grad()

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

    # -- after everything

    @invariant()
    def all_is_as_in_plain_torch(self) -> None:
        if self.crew is None:
            return
        looks = self.policy.stage == 1 and self.number % 3 == 0  # then gradients are reduced that have stayed whole
        states = self.crew.each(lambda me: [state.presence for state in states_of(me.model)])
        assert all(presence in (Presence.RELEASED, Presence.KEPT) for presence in states[0]), states
        assert all(other == states[0] for other in states)
        parameters = dict(self.plain.named_parameters())
        zeros = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
        found = self.crew.each(lambda me: look(me, looks, self.policy.stage == 3 or self.number % 2 == 0))
        for rank, (values, gradients, _) in enumerate(found):
            assert_close(values, {name: p.detach() for name, p in parameters.items()}, self.tolerance, f"parameters of rank {rank}")
            if self.kept is None:
                expected = {name: zeros[name] for name in gradients}
                assert_close(gradients, expected, self.tolerance, f"gradients of rank {rank}")
        logs = [log for *_, log in found]
        assert all(log == logs[0] for log in logs)
        if self.tolerance > TOLERANCES[torch.float64]:
            self._follow(found[0][0], found[0][1] if self.kept is None else {})
        del found, values, gradients
        if all(p.grad is None for p in parameters.values()) and self.kept is None:
            self.crew.each(lambda me: zero3.reset(me.model))  # else what no_sync kept, and was zeroed since, goes with the next backward
            assert self._live_bytes() == self.at_rest, "bytes of live tensors"

    def _follow(self, values: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Plain torch goes on from what was found: roundings of narrow dtypes are not to grow over a life."""
        with torch.no_grad():
            for name, parameter in self.plain.named_parameters():
                parameter.copy_(values[name])
                if parameter.grad is not None and name in gradients:
                    parameter.grad.copy_(gradients[name])


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=20,
    deadline=None,
    derandomize=EXAMPLES == 25,
    suppress_health_check=list(HealthCheck),
)
