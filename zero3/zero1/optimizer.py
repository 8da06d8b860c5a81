"""ZeroRedundancyOptimizer: ZeRO stage 1. The optimizer's state is spread over the ranks, and the
model is not changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.agreement import meeting
from ..comm.ddp import Joinable, Shadow, still_here
from ..comm.factory import process_group_of
from ..comm.plain_values import integer
from ..guards.unshardable import check_overlap
from .ddp_overlap import DDPOverlap
from .division import Packing, Spread
from .groups import (
    check_addition,
    checked,
    function_name,
    line_of,
    listed,
    mistake_in,
    said_of,
    spreads_of,
)
from .local import LocalOptimizers, copy_options, options_of
from .ranks import Ranks
from .shards import Shards
from .state import consolidate, lines_of, own_state

__all__: list[str] = []


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """A torch optimizer whose state is spread over the ranks (ZeRO stage 1), for a model that every
    rank holds, as under DDP.

    It has the interface of `torch.distributed.optim.ZeroRedundancyOptimizer`. Every rank updates an
    equal number of the parameters' elements, with its own `optimizer_class` over 1-D views of them,
    and gathers the other ranks' results. All ranks must have the same gradients, as after DDP's
    all-reduce. Parameters may have several dtypes and devices.

    Args:
        params: Parameters, (name, parameter) pairs, or dicts of parameters with options, as any
            torch optimizer takes them. The option `whole=True` (of a group, or as a default) keeps
            each parameter on one rank and in its own shape.
        optimizer_class: Makes the local optimizer. An optimizer that is not elementwise needs
            `whole=True`.
        process_group: The ranks. None: the default group, or this process alone if there is no
            group.
        parameters_as_bucket_view: Parameters become views of flat buckets, which are gathered
            without copies.
        overlap_with_ddp: Updates happen during DDP's backward. `hook(ddp)` has to be called once.
        defaults: Options for `optimizer_class`.

    Raises:
        ValueError: There are no parameters, a parameter appears twice, shares memory with another
            one or belongs to a sharded model, parameters or flags differ between ranks, or
            `optimizer_class` makes no torch optimizer or one that updates parts differently. Every
            rank raises it.
        TypeError: `params` is no iterable of tensors or dicts. Every rank raises it.

    Example::

        parameters = plain_model.parameters()
        optimizer = zero3.ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3)
        loss_of(plain_model, batch).backward()
        optimizer.step()
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
        plain = {key: value for key, value in defaults.items() if key != "whole"}
        self._local = LocalOptimizers(optimizer_class, plain, one_by_one=overlap_with_ddp)
        self._whole_by_default = bool(defaults.get("whole"))
        self._whole: list[bool] = []  # of each group
        # whether the optimizer can be tried only at the first step, because `step` takes keywords
        self._untried = False
        # at the shards' count of updates
        self._consolidated: tuple[int, dict[Tensor, dict[str, Any]] | None] = (0, None)
        Joinable.__init__(self)
        spreads: list[list[Spread]] = []
        error = mistake_in(lambda: self._take(params, plain, spreads))
        every = [spread for held in spreads for spread in held]
        ranks, mistake = Ranks.of(process_group, (spread.parameter.device for spread in every))
        self.process_group = process_group_of(ranks.communicator)
        self.rank, self.world_size = ranks.index, ranks.count
        with meeting(ranks.communicator, error := error or mistake), ranks.agreeing() as lines:
            if error is not None:
                raise error
            lines += [
                f"overlap_with_ddp={bool(overlap_with_ddp)}, "
                f"parameters_as_bucket_view={bool(parameters_as_bucket_view)}",
                *map(line_of, every),
                *self._options(self.param_groups),
            ]
            self._check(range(len(self.param_groups)))
        shared = Packing.VIEWED if parameters_as_bucket_view else Packing.STAGED
        shards = Shards(ranks, Packing.ALONE if overlap_with_ddp else shared)
        self._overlap = DDPOverlap(shards, self) if overlap_with_ddp else None
        with ranks.agreeing():
            options = map(options_of, self.param_groups)
            shards.create(self._local, list(zip(spreads, options, strict=True)))
        self._shards = shards
        self.defaults = {**shards.optimizer.defaults, **plain}
        shards.give_options(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Updates all parameters that have a gradient. Every rank calls it. (With overlap, the
        update has happened in the backward.)

        Args:
            closure: Computes the loss and the gradients anew. It is called once.
            kwargs: Passed to the local optimizer's `step`. If that takes any, the optimizer is
                tried at the first step, with copies.

        Returns:
            The result of `closure`, or None.

        Raises:
            ValueError, RuntimeError: Ranks have gradients of different parameters, or a sparse one;
                parameters are in another order on a rank (a first step finds it by their values);
                options (a schedule's lr, say) or `kwargs` differ between ranks; or a parameter has
                another shape than before. Every rank raises it.
            TypeError: `closure` is no function. Likewise. Or there are `kwargs`, with overlap.
        """
        given: object = closure
        error: Exception | None = None
        if given is not None and not callable(given):
            error = TypeError(f"closure must be a function, found {type(given).__name__}")
        elif self._overlap is not None and kwargs:
            error = TypeError(
                "with overlap_with_ddp=True the update was made in the backward: step() takes "
                f"nothing for the local optimizer, found {', '.join(kwargs)}"
            )
        with torch.enable_grad():
            loss = closure() if closure is not None and error is None else None
        if self._overlap is None:
            with self._opened.ranks.naming("telling other ranks of", "data in Join"):
                still_here(self)
            if self._untried:
                error = error or mistake_in(
                    lambda: self._check(range(len(self.param_groups)), kwargs)
                )
            lines = [*self._opened.changes_in(self.param_groups), f"step(): {said_of(kwargs)}"]
            self._opened.step(self.param_groups, kwargs, lines, loss=loss, error=error)
            self._consolidated = (0, None)
        elif error is not None:
            raise error
        else:
            self._overlap.check_hooked()
        return loss

    def hook(
        self, ddp: Any, reduction: Callable[[Any, Any], Any] | None = None
    ) -> Callable[[Any, Any], Any]:
        """Makes the communication hook that `overlap_with_ddp=True` needs:
        `ddp.register_comm_hook(None, optimizer.hook(ddp))`, once.

        After that every backward of `ddp` updates the parameters, and `step()` is not needed. Every
        rank calls it.

        Args:
            ddp: The `DistributedDataParallel` model with these parameters.
            reduction: Another hook for DDP, which reduces gradients. Its state is the first
                argument of `register_comm_hook`.

        Returns:
            A communication hook for `ddp`.

        Raises:
            ValueError: `overlap_with_ddp` is not set, `ddp` lacks a parameter or has
                `find_unused_parameters=True`, or ranks give its parameters in different orders. All
                ranks raise it.
        """
        if self._overlap is None:
            raise ValueError(
                "hook() is for ZeroRedundancyOptimizer(..., overlap_with_ddp=True); without it, "
                "call step()"
            )
        return self._overlap.hook(ddp, reduction)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, for example of layers that were frozen before. The state of other groups
        stays. Every rank calls it.

        Args:
            param_group: A dict of `params` and their options.

        Raises:
            ValueError: A parameter is in a group already or shares memory with another one, or
                ranks add different parameters. Every rank raises it.
            RuntimeError: `overlap_with_ddp=True`, and `hook` was called already.
        """
        if (shards := self._shards) is None:  # torch's constructor
            self._append(param_group)
            return
        before, changes = len(self.param_groups), shards.changes_in(self.param_groups)
        hooked = self._overlap is not None and self._overlap.hooked
        try:
            with shards.ranks.agreeing("add_param_group") as lines:
                self._append(param_group)
                added = self.param_groups[before]
                check_addition(added, shards.ranks.on, hooked=hooked)
                self._check([before])
                spreads = spreads_of(added, before, whole=self._whole[before])
                check_overlap([*shards.spreads, *spreads])
                lines += [*map(line_of, spreads), *self._options([added], before), *changes]
        except Exception:
            del self.param_groups[before:], self._whole[before:]
            raise
        # what a schedule has set since the last step
        copy_options(self.param_groups[:before], shards.optimizer.param_groups)
        shards.add(spreads, options_of(added))
        shards.give_options(self.param_groups)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gathers the state of all parameters on one rank, for its `state_dict()`. Every rank calls
        it.

        Args:
            to: The rank. It receives one tensor at a time, on the CPU, and saves its own options.
                State that earlier calls have gathered is dropped.

        Raises:
            ValueError: There is no such rank, ranks differ, or a state belongs to no single
                parameter. Every rank raises it.
            TypeError: A state could only be pickled. Every rank raises it, with the state's name.
        """
        shards = self._opened
        with shards.ranks.agreeing("consolidate_state_dict") as lines:
            lines.append(f"consolidate_state_dict(to={to})")
            if integer(to) is None or not 0 <= to < self.world_size:
                raise ValueError(f"to={to!r}, expected a rank from 0 to {self.world_size - 1}")
        self._consolidated = (shards.updates, consolidate(shards, to))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state dict of a plain `optimizer_class`, with tensors on the CPU, from the
        last `consolidate_state_dict`.

        Returns:
            A dict of "state" and "param_groups", in which numbers stand for parameters.

        Raises:
            RuntimeError: The state was not gathered on this rank, or a step has followed.
        """
        updates, state = self._consolidated
        if state is None or updates != self._opened.updates:
            self._consolidated = (0, None)
            raise RuntimeError(
                f"rank {self.rank}: the optimizer's state is spread over the ranks, or changed "
                f"since it was brought together. Call consolidate_state_dict(to={self.rank}) on "
                f"all ranks, and then state_dict() on rank {self.rank} alone."
            )
        self.state = defaultdict(dict, state)
        try:
            return super().state_dict()
        finally:
            self.state = defaultdict(dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state dict of a plain optimizer, or of this class at any world size. Every rank
        calls it, and keeps its part.

        Args:
            state_dict: The same on every rank. It is not changed.

        Raises:
            ValueError: Groups or shapes differ from the optimizer's, or ranks load different
                options, or state of different parameters, keys, shapes or numbers of steps. Every
                rank raises it, before anything changes.
        """
        shards, groups = self._opened, self.param_groups
        taken: dict[nn.Parameter, dict[str, Any]] = {}

        def keep_own_part(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            """After the caller's hooks. It leaves no state, so that torch copies only options."""
            numbers = [group["params"] for group in given["param_groups"]]
            taken.update(own_state(shards, numbers, given["state"]))
            lines.extend(lines_of(given["state"]))
            return {**given, "state": {}}

        handle = self.register_load_state_dict_pre_hook(keep_own_part)
        try:
            caller = "ZeroRedundancyOptimizer.load_state_dict"
            with shards.ranks.agreeing(caller) as lines:
                super().load_state_dict(state_dict)
                lines += self._options(self.param_groups)
        except Exception:
            self.param_groups = groups
            raise
        finally:
            handle.remove()
        shards.load(taken, [options_of(group) for group in self.param_groups])
        shards.give_options(self.param_groups)
        self._consolidated = (0, None)

    def join_hook(self, **kwargs: Any) -> Shadow:
        """`Join([ddp, optimizer])` calls it, so that a rank without data still updates its part.

        Args:
            kwargs: The keyword arguments of `Join`, which are DDP's.

        Returns:
            The hook that `Join` runs on ranks without data.

        Raises:
            ValueError: `divide_by_initial_world_size=False` with `overlap_with_ddp=True`.
        """
        if self._overlap is not None and not kwargs.get("divide_by_initial_world_size", True):
            raise ValueError(
                "divide_by_initial_world_size=False has no effect on DDP with a communication "
                "hook: use overlap_with_ddp=False"
            )
        return Shadow(self._shadow)

    @property
    def optim(self) -> Optimizer:
        """This rank's local optimizer, over its parts of the parameters."""
        return self._opened.optimizer

    @property
    def join_device(self) -> torch.device:
        """The device of the context's collectives."""
        return self._opened.ranks.device

    @property
    def join_process_group(self) -> Any:
        """The process group of the context's collectives."""
        return process_group_of(self._opened.ranks.communicator)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError(
            "a ZeroRedundancyOptimizer can't be copied or pickled: consolidate_state_dict(), and "
            "save its state_dict()"
        )

    @property
    def _overlap_with_ddp(self) -> bool:  # torch's own hooks read it
        raise RuntimeError(
            "torch's ddp_zero_hook drives torch's class only: ddp.register_comm_hook(None, "
            "optimizer.hook(ddp)) instead"
        )

    @property
    def _opened(self) -> Shards:
        if self._shards is None:
            raise RuntimeError("this ZeroRedundancyOptimizer's constructor did not end")
        return self._shards

    def _shadow(self) -> None:
        """Takes part in a step of the others. With overlap, DDP's own hook does it."""
        if self._overlap is None:
            self._opened.step(self.param_groups, {}, joined=True)
            self._consolidated = (0, None)

    def _take(self, params: Any, options: dict[str, Any], into: list[list[Spread]]) -> None:
        """As torch's constructor. `into` gets the parameters of each group."""
        Optimizer.__init__(self, listed(params), options)
        for number, group in enumerate(self.param_groups):
            into.append(spreads_of(group, number, whole=self._whole[number]))
        check_overlap([spread for held in into for spread in held])

    def _append(self, group: dict[str, Any]) -> None:
        """Adds a group as torch does, after checks that torch leaves out."""
        group = checked(group, len(self.param_groups))
        whole = bool(group.pop("whole", self._whole_by_default))
        super().add_param_group(group)
        self._whole.append(whole)

    def _options(self, groups: list[dict[str, Any]], first: int = 0) -> list[str]:
        made = function_name(self._local.optimizer_class)
        told = (said_of(options_of(group)) for group in groups)
        return [f"group {number}: {made}, {options}" for number, options in enumerate(told, first)]

    def _check(self, numbers: Iterable[int], keywords: dict[str, Any] | None = None) -> None:
        """Tries the optimizer with these groups' options. `keywords`: of `step()`, when known."""
        tried = True
        for number in numbers:
            if (group := self.param_groups[number])["params"]:
                tried &= self._local.check(group, whole=self._whole[number], keywords=keywords)
        self._untried = not tried or (self._untried and keywords is None)
