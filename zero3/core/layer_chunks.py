"""A layer's chunks: how they are gathered, and where they are listed."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from ..comm.communicator import Communicator, history_of
from ..comm.errors import NamingFailures, Subject
from ..comm.log import Entry, TransferLog
from ..comm.streams import Lanes
from .chunk import Chunk
from .ticket import Ticket

__all__: list[str] = []


class LayerChunks(list[Chunk]):
    """The chunks of one layer, trainable and frozen ones."""

    def __init__(self, communicator: Communicator, device: torch.device, subject: Subject) -> None:
        super().__init__()
        # a random number, the same on all ranks; labels may differ between ranks
        self.identity = communicator.channel
        self.log = TransferLog(history_of(communicator), self.identity)  # of all layers of a model
        self._entry = Entry("gathering", subject, 2 * self.identity + 1)
        self._names = NamingFailures(communicator, "gathering", subject)
        self._new_lanes = partial(communicator.lanes, device)
        self._lanes: Lanes | None = None
        # the `_parameters` of the module that lists them
        self._registry: dict[str, nn.Parameter | None] = {}

    def write_into(self, log: TransferLog) -> None:
        """`log`: the model's."""
        self.log = log

    @property
    def lanes(self) -> Lanes:
        """The lanes, which all layers of a runtime share. A layer that is fetched before it has a
        runtime makes its own.
        """
        self._lanes = self._lanes or self._new_lanes()
        return self._lanes

    def go_through(self, lanes: Lanes) -> None:
        """From now on they are gathered, and their gradients reduced, in these."""
        self._lanes = lanes

    # -- gathers

    def gather(self) -> None:
        """Starts the gathers. There is room for them."""
        self.log.entries.append(self._entry)
        lane, names = self.lanes.fetch, self._names
        for chunk in self:
            chunk.start_fetch(lane, names)

    def take_part_in_gather(self) -> None:
        """Takes part in a gather that only other ranks need."""
        self.log.entries.append(self._entry)
        lane, names = self.lanes.fetch, self._names
        tickets = [chunk.take_part_in_gather(lane, names) for chunk in self]
        for chunk, ticket in zip(self, tickets, strict=True):
            ticket.wait()
            chunk.store.rest(chunk.shard.data)

    def gather_again(self, chunk: Chunk) -> None:
        """Gathers one of them, which the log does not note: a full buffer is to be filled anew."""
        chunk.start_fetch(self.lanes.fetch, self._names)

    def read(self, chunk: Chunk, full: Tensor) -> Ticket:
        """Starts to gather a chunk for a reader: see `Chunk.read`. No conductor hears of it, nor
        does the log, because the ranks of another replica may read at another time, or not at all.
        """
        return chunk.read(full, self.lanes.fetch, self._names)

    # -- what others see of them

    def trainable(self) -> list[nn.Parameter]:
        """The parameters for an optimizer: the trainable chunks, or their parts."""
        return [
            part.parameter for chunk in self for part in chunk.parts if part.parameter.requires_grad
        ]

    def full_nbytes(self) -> int:
        """The bytes of the layer's full buffers while it is fetched."""
        return sum(chunk.full_nbytes for chunk in self)

    def names(self) -> dict[str, nn.Parameter | None]:
        """The chunks, or their parts, by parameter name: `trainable_chunk`, `frozen_chunk`, with
        the dtype if there are several.
        """
        names: dict[str, nn.Parameter | None] = {}
        for chunk in self:
            trained = chunk.parts.trained_at_first
            name = "trainable_chunk" if trained else "frozen_chunk"
            alike = [c for c in self if c.parts.trained_at_first == trained]
            if len({c.own_dtype for c in alike}) > 1:
                name += f"_{str(chunk.own_dtype).removeprefix('torch.')}"
            if chunk.in_part:  # there is one for each parameter
                name += "_of_" + chunk.layout.slots[0].name.replace(".", "_")
            elif chunk.layout.bounds is not None:
                name += "_dealt"
            for number, part in enumerate(chunk.parts):
                whole = part.parameter is chunk.shard
                names[name if whole else f"{name}_{number}"] = part.parameter
        return names

    def list_in(self, registry: dict[str, nn.Parameter | None] | None = None) -> None:
        """Lists them in a module's `_parameters`. None: in those that listed them before."""
        self._registry = self._registry if registry is None else registry
        self._registry.update(self.names())

    def unlist(self) -> None:
        for name in self.names():
            self._registry.pop(name, None)
