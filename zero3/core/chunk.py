"""A chunk: this rank's slice of a layer's flat parameters, and the full buffer that it is gathered into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..comm.communicator import Communicator
from ..comm.streams import Lane, Mark
from .flat import split, unpack, zero_padding
from .layout import ChunkLayout

__all__: list[str] = []


class FullBuffer:
    """A flat tensor whose storage comes and goes while the tensor, and all views of it, stay the same objects.

    Graphs save views of the weights they need. They see the storage, so a layer's buffer is its own for life: given
    back after forward and filled again in backward, it holds for the graph what it held before.
    """

    def __init__(self, layout: ChunkLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self.tensor = torch.empty(0, dtype=dtype, device=device)  # 1-D [W*S], from its first use on
        self.views: list[Tensor] = []  # one a slot, in its shape

    def allocate(self) -> None:
        if not self.views:
            with torch.inference_mode(False):  # it will serve training too
                self.tensor = torch.empty(self._layout.padded_numel, dtype=self.tensor.dtype, device=self.tensor.device)
                self.views = unpack(self.tensor, self._layout)
        elif (storage := self._storage).nbytes() != (nbytes := self.tensor.nbytes):
            storage.resize_(nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    def aliases(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.untyped_storage() is self._storage  # other layouts have no storage

    @property
    def _storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()


class ResidentBuffer:
    """At world size 1 the chunk is the full buffer: nothing is allocated, moved or freed."""

    def __init__(self, layout: ChunkLayout, shard: nn.Parameter) -> None:
        self.tensor = shard.data  # 1-D [S], the same memory
        self.views = unpack(self.tensor, layout)

    def allocate(self) -> None:
        return None

    def free(self) -> None:
        return None

    def aliases(self, tensor: Tensor) -> bool:
        return False  # its storage stays, so a tensor that aliases it may escape


class Part(NamedTuple):
    """What an optimizer sees as one parameter: elements `[start, stop)` of the chunk, the same memory; its gradient is its own."""

    parameter: nn.Parameter
    start: int
    stop: int
    whole: bool = False  # one of the model's parameters, in its own shape

    def of(self, flat: Tensor) -> Tensor:
        """Its elements of `flat` `[S]`, in its shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


class Chunk:
    """One dtype's trainable or frozen parameters of a layer. Glossary: shard `[S]`, full `[W*S]`, views in slots' shapes."""

    def __init__(self, layout: ChunkLayout, shard: nn.Parameter, communicator: Communicator, compute_dtype: torch.dtype) -> None:
        self.layout = layout
        self.shard = shard  # 1-D [S], of the dtype that the optimizer updates
        self.compute_dtype = compute_dtype  # of the full buffer, and on the way there
        self.parts = [Part(shard, 0, shard.numel())]  # what the optimizer updates: the shard itself, or what stands in for it
        self.divided = False  # whether parts stand in for chunks anywhere in the model: ranks may hold different numbers of them
        self.unloaded: set[int] = set()  # slots that were on meta and have no values yet: to be filled before the first fetch
        self.trainable_when_wrapped = self.trains = shard.requires_grad  # trains: what its parameters have been told
        self._communicator = communicator
        self._seen_version = shard._version
        self._in_flight: Mark | None = None
        self._as_stored = False  # see `show_as_stored`
        self._computing: FullBuffer | ResidentBuffer | None = None  # meanwhile the buffer that graphs know
        self._own = slice(*layout.chunk_range(communicator.rank))  # this rank's place in the full buffer
        self.full = self._new_buffer()
        self.tracks_versions = not self.resident  # its full buffer comes and goes, and only the layer and its graphs look at it
        self.left = False  # somebody else looks at the buffer: at its release it is left to them

    @property
    def views(self) -> list[Tensor]:
        """The parameters in the full buffer, in the order of the slots."""
        return self.full.views

    @property
    def resident(self) -> bool:
        """Whether the full buffer is the chunk itself."""
        return isinstance(self.full, ResidentBuffer)

    @property
    def casts(self) -> bool:
        return self.compute_dtype != self.shard.dtype

    def show_as_stored(self) -> None:
        """Until its release the full buffer has the chunk's own dtype: for who reads and writes values, not for who computes."""
        if self.casts and self._computing is None:
            self._computing, self._as_stored = self.full, True
            self.full = self._new_buffer()

    def start_fetch(self, lane: Lane) -> None:
        """[fetch 2] Begins to gather. The lane waits for compute: for the optimizer's step, and for the buffer's last reader."""
        self.adopt_values()
        if self.resident:
            if self.full.tensor.data_ptr() != self.shard.data_ptr():  # somebody gave the chunk other data
                self.full = self._new_buffer()
            return
        self.full.allocate()
        with lane.issue():
            pending = self._communicator.all_gather(self.full.tensor, self._outgoing(self.full.tensor), self.layout.bounds)
            self._in_flight = lane.complete(pending)

    def take_part_in_fetch(self) -> None:
        """Takes part in a fetch that this rank has no use for: it sends its chunk, and what it receives goes at once."""
        self.adopt_values()
        full = torch.empty(self.layout.padded_numel, dtype=self.compute_dtype, device=self.shard.device)
        self._communicator.all_gather(full, self._outgoing(full), self.layout.bounds).wait()

    def _outgoing(self, full: Tensor) -> Tensor:
        """What this rank sends: the chunk, cast before it travels, in its own place of the full buffer."""
        if full.dtype == self.shard.dtype:
            return self.shard.data
        own = full[self._own]
        return own.copy_(self.shard.data)

    def adopt_values(self) -> None:
        """A part that was given other data (`parameter.data = values`) brings them here, and lies here again."""
        if self.parts[0].parameter is not self.shard:
            self._adopt_values_of_parts()

    @torch.no_grad()
    def _adopt_values_of_parts(self) -> None:
        address, size = self.shard.data_ptr(), self.shard.element_size()
        for part in self.parts:
            parameter = part.parameter
            if parameter.numel() and parameter.data_ptr() != address + part.start * size:
                home = self.shard.data[part.start : part.stop].view(parameter.shape)
                parameter.data = home.copy_(parameter.data)
                torch.autograd.graph.increment_version(self.shard)

    def finish_fetch(self) -> None:
        """Compute waits for the gather."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight = None

    def is_stale(self) -> Tensor:
        """Whether the chunk holds other values than its place in the full buffer, 0-dim."""
        self.adopt_values()
        own = self.full.tensor[self._own]
        return (own != self.shard.data.to(own.dtype)).any()

    def release(self) -> None:
        self.finish_fetch()
        if self._computing is not None:
            self.full, self._computing, self._as_stored, self.left = self._computing, None, False, False
            return
        if not self.left:
            self.full.free()  # [release 2]
            return
        left = StorageWeakRef(self.full.tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.full, self.left = self._new_buffer(), False
        # Torch makes a view's node anew when its base has another version, from what the base looks like by then.
        self.tracks_versions = self.tracks_versions and left.expired()  # type: ignore[no-untyped-call]

    def leave_buffer(self) -> None:
        """Somebody may keep views of the full buffer: at its release it is left to them, and the next fetch takes a new one."""
        self.left = not self.resident

    def let_escape(self, tensor: Tensor) -> None:
        """An output that is a view of a parameter keeps the memory it looks at."""
        if self.full.aliases(tensor):
            self.leave_buffer()

    def abandon_fetch(self) -> None:
        """The wait for a gather that may have failed; whatever it brought is of no use."""
        try:
            self.finish_fetch()
        except RuntimeError:
            self._in_flight = None
            self.leave_buffer()  # what failed may still write into it

    def changed(self) -> bool:
        """Whether the shard was written since this was last asked: graphs built before must not run after."""
        version = self.shard._version
        changed, self._seen_version = version != self._seen_version, version
        return changed

    @torch.no_grad()
    def scatter(self) -> None:
        """Rank 0's full buffer, cut into everybody's chunks."""
        zero_padding(self.full.tensor, self.layout)
        if self._communicator.world_size > 1:
            slices = split(self.full.tensor, self.layout) if self._communicator.rank == 0 else None
            self._communicator.scatter(self.shard.data, slices, self.layout.bounds).wait()
            torch.autograd.graph.increment_version(self.shard)
        self.unloaded.clear()

    def _new_buffer(self) -> FullBuffer | ResidentBuffer:
        with torch.inference_mode(False):  # it will serve training too
            dtype = self.shard.dtype if self._as_stored else self.compute_dtype
            if self._communicator.world_size == 1 and dtype == self.shard.dtype:
                return ResidentBuffer(self.layout, self.shard)
            return FullBuffer(self.layout, dtype, self.shard.device)


def registered(chunks: Sequence[Chunk]) -> dict[str, nn.Parameter | None]:
    """The names under which a layer's chunks, or their parts, are parameters: `trainable_chunk`, `frozen_chunk`, with dtypes if several."""
    names: dict[str, nn.Parameter | None] = {}
    for chunk in chunks:
        name = "trainable_chunk" if chunk.trainable_when_wrapped else "frozen_chunk"
        alike = [c for c in chunks if c.trainable_when_wrapped == chunk.trainable_when_wrapped]
        if len({c.shard.dtype for c in alike}) > 1:
            name += f"_{str(chunk.shard.dtype).removeprefix('torch.')}"
        if chunk.layout.bounds is not None:
            name += "_dealt"
        for number, part in enumerate(chunk.parts):
            names[name if part.parameter is chunk.shard else f"{name}_{number}"] = part.parameter
    return names
