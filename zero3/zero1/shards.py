"""All parameters of the caller, and this rank's local optimizer over its shares of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from .division import Bucket, Packing, Spread, divide, laid_out_as
from .gathers import Gathers
from .groups import changes_in, notes_of
from .local import Groups, LocalOptimizers, copy_options, options_of, step_locally
from .ranks import Listing, Ranks

__all__: list[str] = []


class Shards:
    """Parameters in the order of groups, the local optimizer, and buckets that bring updates."""

    def __init__(self, ranks: Ranks, packing: Packing) -> None:
        self.ranks = ranks
        self.spreads: list[Spread] = []
        self.optimizer: Optimizer
        self.updates = 0  # the number of updates so far, of some or all parameters
        self.gathers = Gathers(ranks)
        self._given: list[dict[str, str]] = []  # the caller's options after the last update
        self._buckets: list[Bucket] = []
        self._packing = packing
        self._ordered = False  # ranks have compared the order of parameters
        self._owned = [0] * ranks.count  # the bytes of whole parameters that each rank has

    def create(
        self, local: LocalOptimizers, groups: Sequence[tuple[list[Spread], dict[str, Any]]]
    ) -> None:
        """Makes the local optimizer over this rank's shares of all groups. A group may be empty."""
        self._divide([spread for spreads, _ in groups for spread in spreads])
        self.optimizer = local.make(
            [{**options, "params": _own(spreads)} for spreads, options in groups]
        )

    def add(self, spreads: list[Spread], options: dict[str, Any]) -> None:
        """Adds a group. The shares of other groups do not change."""
        self._divide(spreads)
        self.optimizer.add_param_group({**options, "params": _own(spreads)})

    def update(self, spreads: Sequence[Spread], loss: Any, keywords: Mapping[str, Any]) -> None:
        """Updates the parameters, which have taken gradients, and begins to send their new values
        to all ranks.

        `gathers.finish` waits for them. `loss`: the result of the caller's closure. `keywords`:
        those of `step()`.
        """
        step_locally(self.optimizer, loss, keywords)
        for local in _own(spreads):
            local.grad = None
        self.updates += 1
        if self.ranks.count > 1:
            changed = set(spreads)
            self.gathers.start(
                bucket for bucket in self._buckets if changed.intersection(bucket.spreads)
            )
            self.gathers.broadcast(spreads)
        # as a plain optimizer's update in place does
        increment_version([spread.parameter for spread in spreads])

    def step(
        self,
        groups: Groups,
        keywords: dict[str, Any],
        lines: Sequence[str] = (),
        *,
        loss: Any = None,
        joined: bool = False,
        error: Exception | None = None,
    ) -> None:
        """Updates the parameters that have a gradient, on all ranks together.

        A rank that has joined (has no data any more) gets gradients from a rank with data. `lines`:
        what ranks with data compare, besides which parameters have gradients. `loss`: the result of
        the caller's closure. `error`: a mistake of this rank, which every rank raises.
        """
        present = [spread.parameter.grad is not None for spread in self.spreads]
        error = error or (None if joined else self.mistake())
        compares = not self._ordered and error is None and self.ranks.count > 1
        told_of = zip(self.spreads, present, strict=True)
        have = [f"{each.name}: {'a' if has else 'no'} gradient" for each, has in told_of]
        leader = self.ranks.roll_call(
            [] if joined else [*have, *lines],
            joined=joined,
            error=error,
            listing=Listing(self.spreads, self.ranks.device) if compares else None,
        )
        self._ordered = True
        if leader is not None:
            told: dict[str, Any] = {
                "gradients": present,
                "options": [options_of(group) for group in groups],
                "kwargs": keywords,
            }
            told = self.ranks.tell(told, leader, "step() of ZeroRedundancyOptimizer")
            present, keywords = told["gradients"], told["kwargs"]
            if joined:
                copy_options(told["options"], groups)
        spreads = [spread for spread, has_one in zip(self.spreads, present, strict=True) if has_one]
        copy_options(groups, self.optimizer.param_groups)
        for spread in self.spreads:  # one without gradient is sent with others of its bucket
            spread.bring_back()
        for spread in spreads:
            shared = None if leader is None else _shared_gradient(self.ranks, spread, leader)
            spread.take(shared if joined else spread.parameter.grad, copy=joined)
        try:
            self.update(spreads, loss, keywords)
            self.gathers.finish()
        except BaseException:
            self.gathers.drop()
            raise
        self.give_options(groups)

    def give_options(self, groups: Groups) -> None:
        """Gives the caller's groups what the local optimizer's have."""
        copy_options(self.optimizer.param_groups, groups)
        self._given = notes_of(groups, self.optimizer.defaults, waits=False)

    def changes_in(self, groups: Groups) -> list[str]:
        """Describes what the caller has changed in them since then, and all tensors on a device: an
        exchange follows, for which the host waits anyway.
        """
        return changes_in(notes_of(groups, self.optimizer.defaults, waits=True), self._given)

    def load(
        self, state: Mapping[nn.Parameter, dict[str, Any]], options: Sequence[dict[str, Any]]
    ) -> None:
        """Loads the state of the local optimizer's parameters, and every group's options."""
        numbers = {parameter: number for number, parameter in enumerate(_own(self.spreads))}
        groups = [
            {**given, "params": [numbers[parameter] for parameter in group["params"]]}
            for given, group in zip(options, self.optimizer.param_groups, strict=True)
        ]
        states = {numbers[parameter]: held for parameter, held in state.items()}
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def mistake(self) -> Exception | None:
        """What has happened to a parameter, so that it can't be updated."""
        found = (spread.mistake() for spread in self.spreads)
        return next((mistake for mistake in found if mistake is not None), None)

    def _divide(self, spreads: list[Spread]) -> None:
        self._ordered = False
        self._buckets += divide(spreads, self._packing, self._owned)
        self.spreads += spreads
        for spread in spreads:
            spread.hold(self.ranks.index)


def _own(spreads: Iterable[Spread]) -> list[nn.Parameter]:
    return [parameter for spread in spreads for parameter in spread.own.values()]


def _shared_gradient(ranks: Ranks, spread: Spread, leader: int) -> Tensor:
    """Sends a gradient to ranks that have joined. (They took part in DDP's reduction without its
    result.) Their `.grad` does not change.
    """
    parameter, gradient = spread.parameter, spread.parameter.grad
    laid = (
        torch.empty_like(parameter)
        if gradient is None or ranks.index != leader
        else laid_out_as(gradient.detach(), parameter)
    )
    if laid.numel():
        subject = f"the gradient of {spread.name} of ZeroRedundancyOptimizer from rank {leader}"
        ranks.broadcast(laid, leader, "broadcasting", subject)
    return laid
