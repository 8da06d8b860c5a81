"""This rank's share of the optimizer: the parts of parameters that it updates, and a local optimizer over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ..comm.communicator import Communicator
from .buckets import Bucket, Entry, Exchange, Part, cut, is_gapless, keep_in_place, laid_out_as

__all__: list[str] = []

Held = list[tuple[Part, nn.Parameter]]
NOT_OPTIONS = ("params", "param_names")


class Shards:
    """The parts of parameters, the local optimizer over views of them, and the buckets that spread updates."""

    def __init__(self, communicators: Mapping[torch.device, Communicator], *, apart: bool, viewed: bool) -> None:
        self.communicators = dict(communicators)
        self.entries: list[Entry] = []
        self.held: dict[Entry, Held] = {}  # this rank's parts, and the local optimizer's parameters, which are views of them
        self.optimizer: Optimizer
        self.updates = 0  # the number of updates so far, of some or all parameters
        self._buckets: dict[Bucket, None] = {}
        self._exchange = Exchange(self.communicators)
        self._apart, self._viewed = apart, viewed
        self._owned: list[int] = []  # the bytes of whole parameters that each rank owns

    @property
    def device(self) -> torch.device:
        return next(iter(self.communicators))

    @property
    def communicator(self) -> Communicator:
        return self.communicators[self.device]

    def create(self, optimizer_class: Callable[..., Any], groups: Sequence[tuple[list[Entry], dict[str, Any]]], defaults: Any) -> None:
        """Makes the local optimizer over this rank's parts of all groups. A group may be empty."""
        self._divide([entry for entries, _ in groups for entry in entries])
        self.optimizer = optimizer_class([{**options, "params": self._parameters(entries)} for entries, options in groups], **defaults)

    def add(self, entries: list[Entry], options: dict[str, Any]) -> None:
        """Adds a group. The parts of other groups do not change."""
        self._divide(entries)
        self.optimizer.add_param_group({**options, "params": self._parameters(entries)})

    def everyones_parts(self) -> dict[Entry, list[tuple[int, int, Part]]]:
        """Returns the parts of each parameter: the rank that updates it, its number among that rank's parts, and the part."""
        found: dict[Entry, list[tuple[int, int, Part]]] = {entry: [] for entry in self.entries}
        for entry in self.entries:
            if entry.owner is not None:
                found[entry].append((entry.owner, 0, Part(entry, 0, entry.parameter.numel())))
        for rank in range(self.communicator.world_size):
            counts = Counter[Entry]()
            for part in (part for bucket in self._buckets for part in bucket.parts(rank)):
                found[part.entry].append((rank, counts[part.entry], part))
                counts[part.entry] += 1
        return found

    def copy_options_in(self, groups: Iterable[dict[str, Any]]) -> None:
        """Copies the options that a schedule or the caller has set to the local optimizer's groups."""
        for ours, theirs in zip(self.optimizer.param_groups, groups, strict=True):
            ours.update({key: value for key, value in theirs.items() if key not in NOT_OPTIONS})

    def copy_options_out(self, groups: Iterable[dict[str, Any]]) -> None:
        """Copies the local optimizer's options to the groups that the caller sees."""
        for ours, theirs in zip(self.optimizer.param_groups, groups, strict=True):
            theirs.update({key: value for key, value in ours.items() if key not in NOT_OPTIONS})

    def take(self, entry: Entry, gradient: Tensor | None, *, copy: bool = False) -> None:
        """Gives this rank's parts of a gradient to the local optimizer, without a copy unless `copy` is set or strides differ."""
        self._follow(entry)
        if self.held[entry] and gradient is not None:
            gradient = laid_out_as(gradient.detach(), entry.parameter)
        for part, parameter in self.held[entry]:
            own = None if gradient is None else part.of(gradient)
            parameter.grad = own.clone() if copy and own is not None else own

    def drop_gradients(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            for _, parameter in self.held[entry]:
                parameter.grad = None

    def start_spreading(self, entries: Sequence[Entry]) -> None:
        """Begins to send every rank's new values of these parameters to all ranks. `finish_spreading` waits for them."""
        self.updates += 1
        if self.communicator.world_size > 1:
            changed = set(entries)
            self._exchange.start([bucket for bucket in self._buckets if changed.intersection(bucket.entries)])
            self._exchange.broadcast(entries)
        increment_version([entry.parameter for entry in entries])  # as a plain optimizer's update in place does

    def finish_spreading(self) -> None:
        self._exchange.finish()

    def drop_spreading(self) -> None:
        """Forgets transfers under way, after an exception."""
        self._exchange.drop()

    def load(self, state: dict[Entry, list[dict[str, Any]]], options: Sequence[dict[str, Any]]) -> None:
        """Loads a state for each of this rank's parts, and every group's options."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters(self.entries))}
        groups = [
            {**given, "params": [numbers[id(parameter)] for parameter in group["params"]]}
            for given, group in zip(options, self.optimizer.param_groups, strict=True)
        ]
        states = {
            numbers[id(parameter)]: own
            for entry, of_parts in state.items()
            for (_, parameter), own in zip(self.held[entry], of_parts, strict=True)
        }
        self.optimizer.load_state_dict({"state": states, "param_groups": groups})

    def _divide(self, entries: list[Entry]) -> None:
        world_size = self.communicator.world_size
        self._owned = self._owned or [0] * world_size
        for entry in sorted(entries, key=lambda entry: -entry.parameter.numel()):
            # a parameter that is empty, or has gaps in its memory, can't be cut
            if entry.owner is not None or not entry.parameter.numel() or not is_gapless(entry.parameter):
                entry.owner = self._owned.index(min(self._owned))
                self._owned[entry.owner] += entry.parameter.numel() * entry.parameter.element_size()
        buckets = cut(entries, world_size, apart=self._apart, viewed=self._viewed)
        self._buckets.update(dict.fromkeys(buckets))
        self.entries += entries
        for entry in entries:
            self.held[entry] = []
            if entry.owner == self.communicator.rank:
                self._hold(Part(entry, 0, entry.parameter.numel()))
        for bucket in buckets:
            for part in bucket.parts(self.communicator.rank):
                self._hold(part)

    def _hold(self, part: Part) -> None:
        self.held[part.entry].append(
            (part, nn.Parameter(part.of(part.entry.parameter), requires_grad=part.entry.parameter.dtype.is_floating_point))
        )

    def _parameters(self, entries: Iterable[Entry]) -> list[nn.Parameter]:
        return [parameter for entry in entries for _, parameter in self.held[entry]]

    def _follow(self, entry: Entry) -> None:
        """Makes the local optimizer's parameters views again, if other code has replaced the parameter's `.data`."""
        keep_in_place(entry)
        for part, parameter in self.held[entry]:
            now = part.of(entry.parameter)
            if now.data_ptr() != parameter.data_ptr():
                parameter.data = now
