"""joinable(): a sharded model in torch's `Join`, its context for uneven inputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..access import inside_a_layer, states_of, used
from ..comm.agreement import Members, agree
from ..comm.ddp import Joinable, Shadow, still_here
from ..comm.errors import NamingFailures, Subject
from ..comm.factory import process_group_of
from ..conductors.conducted import unconducted
from ..core.runtime import Runtime
from ..layer import adopt, layers_of, runtimes_in
from ..policy import shards_gradients
from ..sequences.parts import measures_of
from ..sequential import Zero3Sequential
from ..towers.entering import gates_of
from .coordinator import JoinCoordinator

__all__: list[str] = []


def joinable(model: nn.Module, step: Callable[[], Any]) -> JoinableModel:
    """Prepares a sharded model for torch's `Join`, under which ranks may have different numbers of
    batches, or none.

    A rank that is out of data takes part in the others' collectives, and updates its chunks with
    them. Every rank makes the joinable and enters the context. `Join` has two options that matter
    here. `divide_by_initial_world_size=True` (the default, as in DDP) divides gradients by the
    number of all ranks, False by the number of ranks that still have data.
    `throw_on_early_termination=True` makes all ranks raise when the first is out of data.

    Args:
        model: Any model that contains zero3 layers; it is the only joinable in its `Join`, and has
            all layers that the loss calls. (A part of a model of `shard` stands for the whole.)
        step: Everything that follows the backwards of a step: clip, update, schedule, zero. It is
            called without arguments, on ranks without data too, so it uses nothing that comes from
            a batch.

    Returns:
        A `JoinableModel`, for `Join`.

    Raises:
        ValueError: Nothing in `model` is sharded, it lies inside a layer, or the layers are on
            different process groups, or have `stage=1`, `dynamic=True`, or experts with
            `expert_parallel=True`.
        TypeError: `step` can't be called.
        RuntimeError: There is no process group.

    Example::

        def update():
            zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        uneven = zero3.joinable(model, update)
        with Join([uneven], divide_by_initial_world_size=False):
            for batch in batches:
                loss_of(model, batch).backward()
                uneven.step()
    """
    return JoinableModel(model, step)


class JoinableModel(Joinable):
    """A sharded model as torch's `Join` takes it. `joinable` makes it."""

    def __init__(self, model: nn.Module, step: Callable[[], Any]) -> None:
        super().__init__()
        if not callable(step):
            raise TypeError(
                f"step must be a function without arguments, found {type(step).__name__}"
            )
        states = states_of(model)
        if not (runtimes := runtimes_in(model)) and not layers_of(model):
            raise inside_a_layer(model, states, "joinable")
        # a loss may train more of the model than the part that joins
        states = [*dict.fromkeys([*states, *chain.from_iterable(r.layers for r in runtimes)])]
        first, *others = states
        if at_home := next((s for s in states if any(chunk.in_part for chunk in s.chunks)), None):
            raise ValueError(
                f"joinable: layer {at_home.label} has experts that stay at home "
                "(expert_parallel=True), which other ranks need as long as they have data. Call "
                "the model with an empty batch where there is none"
            )
        if not all(first.communicator.same_ranks(other.communicator) for other in others):
            raise ValueError("the model's layers are on different process groups: Join needs one")
        if any(state.policy.dynamic for state in states):
            raise ValueError(
                "joinable: policy.dynamic=True, expected False: ranks without data can't follow "
                "forwards that skip layers"
            )
        if whole := next((s for s in states if not shards_gradients(s.policy)), None):
            raise ValueError(
                f"joinable: layer {whole.label} has policy.stage=1, expected 2 or 3: ranks "
                "without data can't follow its reductions"
            )
        group = process_group_of(unconducted(first.communicator))
        if group is None:
            raise RuntimeError(
                "torch's Join needs a process group: call torch.distributed.init_process_group() "
                "before sharding the model. A mesh with replicas has one if it holds all ranks, "
                "and is no slice of a larger mesh."
            )
        self._model = model
        self._device = first.device
        self._communicator = unconducted(first.communicator)
        self._step = step
        self._rounds: JoinCoordinator | None = None

    def step(self) -> Any:
        """Runs the step function on all ranks, as soon as all that have data have called this.

        Returns:
            What the step function returned on this rank.
        """
        return self._step() if self._rounds is None else self._rounds.step()

    def join_hook(self, **kwargs: Any) -> Shadow:
        """`Join` calls it on every rank.

        Args:
            kwargs: `divide_by_initial_world_size`, as DDP has it; others are ignored.

        Returns:
            What `Join` runs on ranks without data.
        """
        used(self._model, "joinable")
        runtimes = runtimes_of(self._model)
        states = [state for runtime in runtimes for state in runtime.layers]
        divide_by_all = bool(kwargs.get("divide_by_initial_world_size", True))
        if self._rounds is not None:
            self._rounds.end()
        lines = [
            f"divide_by_initial_world_size={divide_by_all}",
            *(state.name_among_ranks for state in states),
        ]
        agree(Members(self._communicator, self._device), "what is to join", lines)
        self._rounds = JoinCoordinator(
            states,
            runtimes,
            self._communicator,
            self._step,
            [*measures_of(self._model), *gates_of(self._model)],
        )
        if self._communicator.world_size > 1:
            self._rounds.begin(self._has_data, divide_by_all=divide_by_all)
        shadow = Shadow(self._rounds.follow, self._rounds.leave)
        self._rounds.enter(weakref.ref(shadow))  # torch's context alone holds it
        return shadow

    @property
    def join_device(self) -> torch.device:
        """The device on which the model computes."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The ranks that share the model."""
        return process_group_of(self._communicator)

    def _has_data(self) -> bool:
        if not self._join_config.enable:
            return False
        if not self._join_config.is_first_joinable:
            raise RuntimeError(
                "a sharded model must be the only joinable in Join: put several models into one "
                "nn.ModuleList"
            )
        telling = Subject("data in Join")
        with NamingFailures(self._communicator, "telling other ranks of", telling):
            still_here(self)
        return True


def runtimes_of(model: nn.Module) -> list[Runtime]:
    """Of all layers. They are made here: a rank without data runs no forward to make its own."""
    if isinstance(model, Zero3Sequential):
        return [model._shared_runtime()]
    if any(layer._runtime is None for layer in layers_of(model)):
        return [adopt(model, ordered=False)]
    return runtimes_in(model)
