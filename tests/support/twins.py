"""A sharded model on all ranks and its twin in plain torch: how both begin, what is done to the plain one, and how they are compared."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from torch import Tensor
from torch.func import functional_call

import zero3
from tests.support.crew import Crew, Member
from tests.support.inside import accounts_of, presences, states_of
from tests.support.lives import Block, Plan, dynamic_shards, look, plans, policies, shards, worlds
from tests.support.models import WIDTH
from tests.support.reference import assert_close, process_group

# of what is computed or reduced in that dtype; parameters are fp64. Errors do not add up: see `_follow`
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}


class Twins(RuleBasedStateMachine):
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
            found = [module for module in me.model.modules() if isinstance(module, Block)]
            me.blocks = [module.module if isinstance(module, zero3.Zero3Layer) else module for module in found]
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
            held += filter(torch.is_tensor, (each._guard.nothing for each in accounts_of(me.model)))
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

    # -- after everything

    @invariant()
    def all_is_as_in_plain_torch(self) -> None:
        if self.crew is None:
            return
        looks = self.policy.stage == 1 and self.number % 3 == 0  # then gradients are reduced that have stayed whole
        states = self.crew.each(lambda me: presences(me.model))
        assert all(presence in ("released", "kept") for presence in states[0]), states
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
