"""ZeRO stage 1: the optimizer's state spread over the ranks, the model untouched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm.ddp import Joinable, Shadow, still_here
from ..comm.factory import process_group_of
from .buckets import Entry
from .check import check_divisible
from .ddp_overlap import DDPOverlap
from .groups import agree_on, check_devices, checked, communicators_of, entries_of, line_of, line_of_group, listed, mistake_in, options_of
from .shards import Shards
from .state import consolidate, local_state
from .step import step

__all__: list[str] = []


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """A torch optimizer whose state is spread over the ranks (ZeRO stage 1), for a model that every rank holds, as under DDP.

    Interface and call sites of `torch.distributed.optim.ZeroRedundancyOptimizer`. Every rank updates an equal run of the
    parameters' elements, by its own `optimizer_class` over 1-D views of them, and all-gathers what it updated. All ranks
    must have the same gradients, as DDP's all-reduce leaves them. Parameters may be of several dtypes and devices.

    Args:
        params: parameters, or dicts of them with options, as any torch optimizer takes them; (name, parameter) pairs too. The option
            `whole=True` (of a group, or as a default) keeps each parameter on one rank in its own shape, for optimizers of matrices.
        optimizer_class: makes the local optimizer. One that is not elementwise needs `whole=True`.
        process_group: None is the default group, or no group at all for a single process.
        parameters_as_bucket_view: parameters become views of flat buckets, which are gathered without copies.
        overlap_with_ddp: updates happen during DDP's backward: register `hook(ddp)`.
        defaults: options for `optimizer_class`.

    Raises:
        ValueError: no parameters, or one twice, or one of a sharded model; an `optimizer_class` that makes no torch optimizer, or whose
            updates of parts are not parts of its updates; ranks with different parameters, options or flags. On every rank.
        TypeError: `params` is no iterable of tensors or dicts. On every rank.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Any],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        self._shards: Shards | None = None
        self._make = optimizer_class
        self._defaults = {key: value for key, value in defaults.items() if key != "whole"}
        self._whole_by_default = bool(defaults.get("whole"))
        self._whole: list[bool] = []  # of each group
        self._untried = False  # whether a class can be judged only at the first step, whose keywords it needs
        self._consolidated: dict[Tensor, dict[str, Any]] | None = None
        self._consolidated_at = 0  # the shards' count of updates
        error = mistake_in(lambda: Optimizer.__init__(self, listed(params), self._defaults))
        Joinable.__init__(self)
        self._open(process_group, overlap_with_ddp, parameters_as_bucket_view, error)

    def _open(self, process_group: Any, overlapping: bool, viewed: bool, error: Exception | None) -> None:
        groups = [] if error else self.param_groups
        entries = [entries_of(group, number, whole=self._whole[number]) for number, group in enumerate(groups)]
        communicators, mistake = communicators_of(process_group, dict.fromkeys(e.parameter.device for group in entries for e in group))
        shards = Shards(communicators, apart=overlapping, viewed=viewed and not overlapping)
        self.process_group = process_group_of(shards.communicator)
        self.rank, self.world_size = shards.communicator.rank, shards.communicator.world_size
        self._overlap = DDPOverlap(shards, self) if overlapping else None
        lines = [f"overlap_with_ddp={bool(overlapping)}, parameters_as_bucket_view={bool(viewed)}"]
        lines += [line_of(entry) for group in entries for entry in group] + self._options(groups)
        agree_on(shards, lines, error or mistake or mistake_in(self._check_all))
        divided = [(held, options_of(group)) for held, group in zip(entries, groups, strict=True)]
        agree_on(shards, [], mistake_in(lambda: shards.create(self._make, divided, self._defaults)))
        self._shards = shards
        self.defaults = {**shards.optimizer.defaults, **self._defaults}
        shards.copy_options_out(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One update of all parameters that have a gradient, the same on all ranks. Collective.

        Args:
            closure: computes the loss and the gradients anew; called once.
            kwargs: for the local optimizer's `step`. One that needs some is judged at the first step, with copies of them.

        Returns:
            What `closure` returned, or else None. With `overlap_with_ddp=True` all is done already.

        Raises:
            RuntimeError: ranks have gradients of different parameters, or a sparse one; on every rank.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._overlap is None:
            still_here(self)
            error = mistake_in(lambda: self._check_all(kwargs)) if self._untried else None
            step(self._opened, self.param_groups, kwargs, loss=loss, error=error)
            self._consolidated = None
        elif not self._overlap.hooked:
            raise RuntimeError(
                "overlap_with_ddp=True updates parameters during DDP's backward, but DDP knows nothing of it: call "
                "ddp.register_comm_hook(None, optimizer.hook(ddp)) once, before training"
            )
        return loss

    def hook(self, ddp: Any, reduction: Callable[[Any, Any], Any] | None = None) -> Callable[[Any, Any], Any]:
        """What `overlap_with_ddp=True` needs once: `ddp.register_comm_hook(None, optimizer.hook(ddp))`.

        Every backward of `ddp` then updates the parameters; `step()` may be called or not. Collective.

        Args:
            ddp: the `DistributedDataParallel` model whose parameters these are.
            reduction: another communication hook of DDP's to reduce gradients with, its state being what is registered.

        Returns:
            A communication hook for `ddp`.

        Raises:
            ValueError: made without `overlap_with_ddp=True`, a parameter that `ddp` lacks, `find_unused_parameters=True`; on every rank.
        """
        if self._overlap is None:
            raise ValueError("hook() is for ZeroRedundancyOptimizer(..., overlap_with_ddp=True); without it, call step()")
        return self._overlap.hook(ddp, reduction)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group, for example of layers that were frozen so far; what the others' state is stays. Collective.

        Args:
            param_group: `params` and their options.

        Raises:
            ValueError: a parameter that is in a group already, ranks that add different parameters; on every rank.
            RuntimeError: `overlap_with_ddp=True`, and `hook` was called already.
        """
        if self._shards is None:  # torch's constructor
            self._append(param_group)
            return
        before = len(self.param_groups)
        if (error := mistake_in(lambda: self._append(param_group))) is None:
            error = mistake_in(lambda: self._check_addition(before))
        added = self.param_groups[before:]
        entries = entries_of(added[0], before, whole=self._whole[before]) if added else []
        try:
            agree_on(self._shards, [line_of(entry) for entry in entries] + self._options(added, before), error)
        except Exception:
            del self.param_groups[before:], self._whole[before:]
            raise
        self._shards.add(entries, options_of(self.param_groups[before]))
        self._shards.copy_options_out(self.param_groups)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Brings the state of all parameters to one rank, for its `state_dict()`. Collective.

        One tensor at a time, to the CPU: the other ranks hold no more than one part of one tensor beside their own.

        Args:
            to: the rank. The others' earlier consolidated state is dropped.

        Raises:
            ValueError: no such rank, ranks that name different ones, or a state that is none of single parameters.
            TypeError: a state that could only be pickled; on every rank, by name.
        """
        shards = self._opened
        known = isinstance(to, int) and 0 <= to < self.world_size
        wrong = None if known else ValueError(f"to={to!r}, expected a rank from 0 to {self.world_size - 1}")
        agree_on(shards, [f"consolidate_state_dict(to={to})"], wrong)
        self._consolidated, self._consolidated_at = consolidate(shards, to), shards.updates

    def state_dict(self) -> dict[str, Any]:
        """A plain `optimizer_class`'s state dict, with tensors on the CPU, as of the last `consolidate_state_dict`.

        Raises:
            RuntimeError: the state was not consolidated to this rank, or a step was made since.
        """
        if self._consolidated is None or self._consolidated_at != self._opened.updates:
            self._consolidated = None
            raise RuntimeError(
                f"rank {self.rank}: the optimizer's state is spread over the ranks, or changed since it was brought together. Call "
                f"consolidate_state_dict(to={self.rank}) on all ranks, and then state_dict() on rank {self.rank} alone."
            )
        self.state = defaultdict(dict, self._consolidated)
        try:
            return super().state_dict()
        finally:
            self.state = defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A plain optimizer's state dict, or one from here at any world size; each rank keeps its part. Collective.

        Args:
            state_dict: not changed; every rank passes the same.

        Raises:
            ValueError: groups or shapes that differ from the optimizer's; on every rank, before anything changes.
        """
        shards, groups = self._opened, self.param_groups
        taken: dict[Entry, list[dict[str, Any]]] = {}

        def keep_own_part(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            """Runs after the user's hooks; all that torch gets to copy is the options."""
            taken.update(local_state(shards, [group["params"] for group in given["param_groups"]], given["state"]))
            return {**given, "state": {}}

        handle = self.register_load_state_dict_pre_hook(keep_own_part)
        error = mistake_in(lambda: super(ZeroRedundancyOptimizer, self).load_state_dict(state_dict))
        handle.remove()
        try:
            agree_on(shards, self._options(self.param_groups) if error is None else [], error)
        except Exception:
            self.param_groups = groups
            raise
        shards.load(taken, [options_of(group) for group in self.param_groups])
        shards.copy_options_out(self.param_groups)
        self._consolidated = None

    def join_hook(self, **kwargs: Any) -> Shadow:
        """For `torch.distributed.algorithms.join.Join([ddp, optimizer])`: a rank without data still updates its part.

        Args:
            kwargs: of the context; DDP's.

        Raises:
            ValueError: `divide_by_initial_world_size=False` with `overlap_with_ddp=True`.
        """
        if self._overlap is not None and not kwargs.get("divide_by_initial_world_size", True):
            raise ValueError(
                "divide_by_initial_world_size=False has no effect on DDP with a communication hook: use overlap_with_ddp=False"
            )
        return Shadow(self._shadow)

    @property
    def optim(self) -> Optimizer:
        """This rank's local optimizer, over its parts of the parameters."""
        return self._opened.optimizer

    @property
    def join_device(self) -> torch.device:
        """The device of the context's collectives."""
        return self._opened.device

    @property
    def join_process_group(self) -> Any:
        """The process group of the context's collectives."""
        return process_group_of(self._opened.communicator)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("a ZeroRedundancyOptimizer can't be copied or pickled: consolidate_state_dict(), and save its state_dict()")

    @property
    def _overlap_with_ddp(self) -> bool:  # what torch's hooks ask for
        raise RuntimeError("torch's ddp_zero_hook drives torch's class only: ddp.register_comm_hook(None, optimizer.hook(ddp)) instead")

    @property
    def _opened(self) -> Shards:
        if self._shards is None:
            raise RuntimeError("this ZeroRedundancyOptimizer's constructor did not end")
        return self._shards

    def _shadow(self) -> None:
        """An iteration of the other ranks. With overlap all happens in DDP's shadow of it."""
        if self._overlap is None:
            step(self._opened, self.param_groups, {}, joined=True)
            self._consolidated = None

    def _append(self, group: dict[str, Any]) -> None:
        """As torch does, after what it lets pass."""
        group = checked(group, len(self.param_groups))
        whole = bool(group.pop("whole", self._whole_by_default))
        super().add_param_group(group)
        self._whole.append(whole)

    def _options(self, groups: list[dict[str, Any]], first: int = 0) -> list[str]:
        return [line_of_group(self._make, number, group) for number, group in enumerate(groups, first)]

    def _check_all(self, keywords: dict[str, Any] | None = None) -> None:
        """`keywords`: of `step()`, when they are known."""
        self._untried = True
        self._untried = not all(self._tried(number, keywords) for number in range(len(self.param_groups)))

    def _tried(self, number: int, keywords: dict[str, Any] | None = None) -> bool:
        group, whole, alone = self.param_groups[number], self._whole[number], self._overlap is not None
        check = partial(check_divisible, self._make, self._defaults, options_of(group), group["params"])
        return not group["params"] or check(whole=whole, one_by_one=alone, keywords=keywords)

    def _check_addition(self, number: int) -> None:
        if self._overlap is not None and self._overlap.hooked:
            raise RuntimeError("with overlap_with_ddp=True, add parameter groups before hook(ddp): DDP reduces only what it was made with")
        check_devices(self._opened.communicators, self.param_groups[number])
        self._untried = not self._tried(number) or self._untried
