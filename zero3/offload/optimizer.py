"""offload_optimizer(): the optimizer's state rests where chunks rest, and a step is made one chunk
after another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from ..comm.agreement import agreeing
from ..core.chunk_gradient import reduce_deferred
from ..core.collectives import Use
from ..core.layer_state import check_process
from ..guards.optimizer_steps import layers_stepped_by
from ..optim.several import held_by, members_of
from ..optim.state_memory import land_steps
from ..policy import directory_of, shards_gradients
from .in_backward import InBackward, check_unstepped
from .one_by_one import step_of
from .turns import Turns

__all__: list[str] = []

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def offload_optimizer(optimizer: Opt, *, in_backward: bool = False) -> Opt:
    """Lets the optimizer's state rest where the policy's `offload` lets chunks rest. Every rank
    calls it, before the first step.

    With `offload=DIR` the state lies in files beside those of the chunks. `optimizer.step()` goes
    from chunk to chunk: while one is stepped, the next one's numbers are read, and those of the one
    before leave the process. The numbers have the bits of a step of all chunks at once, on the
    host: an accelerator's own step may round otherwise. With `offload="cpu"` the state lies in the
    host's memory beside the chunks, as torch makes it. Without `offload` nothing changes.

    All else is as before: `state_dict` and `load_state_dict`, schedulers, groups, hooks, closures,
    clipping, `GradScaler`, accumulation, checkpoints. The optimizer's implementation stays the one
    that was asked for. On a CPU, AdamW with `fused=True` is several times as fast as by default,
    and rounds differently.

    Args:
        optimizer: Any optimizer that treats each parameter by itself. It holds chunks, or what
            `param_groups` returned, of one model.
        in_backward: Step each chunk inside backward, as soon as its gradient has landed, so that no
            more than a few gradients are alive, and files are read beside backward's computation.
            `optimizer.step()` is called as always, after each backward, and steps what is left.
            Clipping, `GradScaler` and whatever else reads gradients raise. Micro-batches accumulate
            inside `no_sync` alone. If a backward raises, chunks may have been stepped, so go on
            from a checkpoint.

    Returns:
        The same object.

    Raises:
        ValueError: The optimizer computes something from all parameters at once, or can't make
            steps on small tensors; its `step` was replaced already, as a scheduler does (make it
            afterwards); or `in_backward` with stage 1, or while another optimizer steps the same
            chunks so. Every rank raises it.
        OSError: There is no room for the state. Every rank raises it, and nothing has changed.
            (State that no trial has shown and that finds no room later stays in memory, with a
            warning.)
        TypeError: It is no `torch.optim.Optimizer`, or `in_backward` no bool.

    Example::

        # model = zero3.shard(model, policy=zero3.ShardingPolicy(offload="/local/scratch"))
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=3e-4)
        optimizer = zero3.offload_optimizer(optimizer)
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"expected a torch.optim.Optimizer, found a {type(optimizer).__name__}: call it for "
            "each optimizer of torch's"
        )
    if not isinstance(in_backward, bool):
        raise TypeError(f"in_backward must be True or False, found {in_backward!r}")
    members = members_of(optimizer)
    led = [(member, _turns_of(member, in_backward)) for member in members]
    for member, turns in led:
        if turns is not None:
            _lead(member, turns, in_backward)
    return optimizer


def _lead(optimizer: torch.optim.Optimizer, turns: Turns, in_backward: bool) -> None:
    optimizer.step = _StepByTurns(optimizer, turns, in_backward)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(turns.take_in)
    turns.lead_loads(optimizer)
    turns.take_in(optimizer)


def _turns_of(optimizer: torch.optim.Optimizer, in_backward: bool) -> Turns | None:
    """Checks an optimizer and makes room for its state; None: its step stays as it is."""
    states = [state for state in layers_stepped_by(optimizer) if state.policy.offload is not None]
    found = (directory_of(state.policy) for state in states)
    directories = {directory for directory in found if directory is not None}
    is_led = isinstance(vars(optimizer).get("step"), _StepByTurns)
    if is_led or not states or not (directories or in_backward):
        return None
    check_process(states)
    states[0].conductor.conduct(Use(states[0], "offload_optimizer"))
    with agreeing(states[0], "offload_optimizer"):
        if "step" in vars(optimizer):
            raise ValueError(
                f"the step of this {type(optimizer).__name__} was replaced already, as a "
                "scheduler of torch does: call zero3.offload_optimizer first, and make the "
                "scheduler with what it returns"
            )
        if in_backward and not all(shards_gradients(state.policy) for state in states):
            raise ValueError(
                "in_backward=True with stage=1, where gradients are reduced after backward: use "
                "stage 2 or 3"
            )
        if in_backward:
            check_unstepped(optimizer)
        land_steps(states)  # of an optimizer before this one
        turns = Turns(directories)
        turns.reserve(optimizer)
    return turns


class _StepByTurns:
    """A bound method in place of `optimizer.step`, which does not hold the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, turns: Turns, in_backward: bool) -> None:
        own = step_of(type(optimizer))
        hooks = InBackward(optimizer, turns, own) if in_backward else None

        @wraps(own)
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            if hooks is not None:
                hooks.finish()
            reduce_deferred(parameter.grad for parameter in held_by(optimizer))
            turns.make_all(optimizer, lambda: own(optimizer))
            return loss

        # what no gradient has reached (`guards/optimizer_steps.py`); wrappers of it, as torch's
        # schedulers make them, say so too
        self.zero3_leaves_alone = step.zero3_leaves_alone = True  # type: ignore[attr-defined]
        # schedulers of torch ask for it
        self.__func__ = torch.optim.Optimizer.profile_hook_step(step)
        self._optimizer = weakref.ref(optimizer)

        if hooks is not None:
            optimizer.register_load_state_dict_post_hook(lambda _: hooks.finish())

    def __call__(self, *args: Any, **options: Any) -> Any:
        optimizer = self._optimizer()
        return None if optimizer is None else self.__func__(optimizer, *args, **options)
