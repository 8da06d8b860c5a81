"""A chunk: this rank's slice of a layer's flat parameters, and the full buffer that it is gathered
into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..comm.communicator import Communicator, is_first
from ..comm.streams import Lane, Mark, Pending
from .flat import split, unpack, zero_padding
from .layout import ChunkLayout, Piece

__all__: list[str] = []

_MARK = "_zero3_shows_parameters"  # attribute of a storage


def _marked(full: Tensor) -> Tensor:
    setattr(full.untyped_storage(), _MARK, True)
    return full


def shows_parameters(tensor: Tensor) -> bool:
    """Whether a strided tensor's memory is a full buffer."""
    return getattr(tensor.untyped_storage(), _MARK, False)


class FullBuffer:
    """A flat tensor whose storage is freed and allocated again, while the tensor and its views stay
    the same objects.

    Graphs save views of the weights. These views see the storage, so a layer keeps one buffer for
    life: the buffer is freed after forward and filled again in backward, and then the graph's views
    show the same values as in forward.
    """

    def __init__(self, layout: ChunkLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self.tensor = torch.empty(0, dtype=dtype, device=device)  # 1-D [W*S] from its first use on
        self.views: list[Tensor] = []  # one for each slot, in its shape

    def allocate(self) -> None:
        if not self.views:
            with torch.inference_mode(False):  # training may use the same buffer later
                self.tensor = _marked(
                    torch.empty(
                        self._layout.padded_numel,
                        dtype=self.tensor.dtype,
                        device=self.tensor.device,
                    )
                )
                self.views = unpack(self.tensor, self._layout)
        elif (storage := self._storage).nbytes() != (nbytes := self.tensor.nbytes):
            storage.resize_(nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    def aliases(self, tensor: Tensor) -> bool:
        # sparse tensors have no storage
        return tensor.layout == torch.strided and tensor.untyped_storage() is self._storage

    @property
    def _storage(self) -> torch.UntypedStorage:
        return self.tensor.untyped_storage()


class ResidentBuffer:
    """The full buffer at world size 1. It is the chunk itself, so nothing is allocated, transferred
    or freed.
    """

    def __init__(self, layout: ChunkLayout, shard: nn.Parameter) -> None:
        self.tensor = _marked(shard.data)  # 1-D [S], the same memory
        self.views = unpack(self.tensor, layout)

    def allocate(self) -> None:
        return None

    def free(self) -> None:
        return None

    def aliases(self, tensor: Tensor) -> bool:
        return False  # the storage is never freed, so views of it stay valid


class Part(NamedTuple):
    """One parameter for the optimizer: elements `[start, stop)` of the chunk. It shares the chunk's
    memory and has its own gradient.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    whole: bool = False  # whether it is one of the model's parameters, in its own shape

    def of(self, flat: Tensor) -> Tensor:
        """The part's elements of `flat` `[S]`, in the part's shape."""
        return flat[self.start : self.stop].view(self.parameter.shape)


class Chunk:
    """This rank's slice, `shard` `[S]`, of a layer's parameters of one dtype, either trainable or
    frozen.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        shard: nn.Parameter,
        communicator: Communicator,
        compute_dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        self.layout = layout
        # which of the layout's slices is this rank's. On a mesh, replicas have the same
        self.index = communicator.shard_rank
        self.device = device or shard.device  # where the layer computes
        self.shard = shard  # 1-D [S], in the dtype that the optimizer updates
        self.compute_dtype = compute_dtype  # the dtype of gathers and of the full buffer
        # the optimizer's parameters: the shard itself, or parts of it
        self.parts = [Part(shard, 0, shard.numel())]
        # whether any chunk of the model is cut into parts; then ranks may hold different numbers of
        # parts
        self.divided = False
        # the slots that are in none of the optimizer's groups, on all ranks
        self.left_out: frozenset[str] = frozenset()
        # slots that were on meta and have no values yet; a fetch needs them filled
        self.unloaded: set[int] = set()
        # trains: the requires_grad of the chunk's parameters
        self.trainable_when_wrapped = self.trains = shard.requires_grad
        self._communicator = communicator
        self._seen_version = shard._version
        self._in_flight: Mark | None = None
        self._as_stored = False  # see `show_as_stored`
        # the usual buffer, while `full` is another one
        self._computing: FullBuffer | ResidentBuffer | None = None
        self._own = slice(*layout.chunk_range(self.index))  # this rank's slice of the full buffer
        self.full = self._new_buffer()
        # whether parameters' versions tell graphs that the full buffer was released
        self.tracks_versions = not self.resident
        # whether views of the buffer are in use outside: then release does not free it
        self.left = False
        # whether the full buffer holds what the chunks of all ranks held at its last gather
        self.filled = False
        self.stays = False  # whether it stays filled from step to step (`resident_bytes`)

    @property
    def views(self) -> list[Tensor]:
        """The parameters in the full buffer, in the order of the slots."""
        return self.full.views

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of slots that this rank's slice holds, in order. Empty slots have no piece."""
        return self.layout.pieces(self.index)

    @property
    def is_first_holder(self) -> bool:
        """Whether this rank's slice is the first that is not empty. Empty parameters, which are in
        no slice, belong to it.
        """
        return self.index == self.layout.first_holder

    @property
    def resident(self) -> bool:
        """Whether the full buffer is the chunk itself."""
        return isinstance(self.full, ResidentBuffer)

    read_only = False  # whether its values can't be written, only loaded
    far = False  # whether it rests in other memory than that in which its layer computes
    rests = "memory"  # where reports say that it rests

    def taken(self, nbytes: int) -> int:
        """What so many bytes take where it rests, values or a gradient."""
        return nbytes

    @property
    def stored_as(self) -> str:
        """What reports call the numbers of the chunk: by their dtype, or by their format."""
        return str(self.shard.dtype).removeprefix("torch.")

    @property
    def gathered_as(self) -> str:
        """What reports call the numbers of the full buffer."""
        return str(self.compute_dtype).removeprefix("torch.")

    @property
    def casts(self) -> bool:
        return self.compute_dtype != self.shard.dtype

    def show_as_stored(self) -> None:
        """Until the next release, the full buffer has the chunk's dtype and not the compute dtype,
        so that values are exact.
        """
        if self.casts and self._computing is None:
            self._computing, self._as_stored = self.full, True
            self.full = self._new_buffer()

    def make_room(self, *, as_stored: bool = False) -> None:
        """[fetch 2] Allocates the full buffer, before ranks rely on the gather: memory may run out
        on one rank alone.
        """
        if self.filled:
            return
        if as_stored:
            self.show_as_stored()
        self.full.allocate()

    def start_fetch(self, lane: Lane) -> None:
        """Starts the gather. The lane waits for the compute stream: for the optimizer's step and
        the buffer's last reader.
        """
        if self.filled:
            return
        self.adopt_values()
        if self.resident:
            # the caller has set chunk.data
            if self.full.tensor.data_ptr() != self.shard.data_ptr():
                self.full = self._new_buffer()
            return
        with lane.issue():
            self._in_flight = lane.complete(self._gather(self.full.tensor))

    def take_part_in_fetch(self) -> None:
        """Takes part in a fetch that only other ranks need. This rank sends its chunk, and drops
        what it receives.
        """
        self.adopt_values()
        full = torch.empty(self.layout.padded_numel, dtype=self.compute_dtype, device=self.device)
        self._gather(full).wait()

    def _gather(self, full: Tensor) -> Pending:
        """Sends the chunk, or its cast in this rank's slice of `full`."""
        own = (
            self.shard.data
            if full.dtype == self.shard.dtype
            else full[self._own].copy_(self.shard.data)
        )
        return self._communicator.all_gather(full, own, self.layout.bounds)

    def adopt_values(self) -> None:
        """Copies values of a part that was given other data (`parameter.data = values`) back into
        the shard.
        """
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
        """Makes the compute stream wait for the gather."""
        if self._in_flight is not None:
            self._in_flight.wait()
            self._in_flight, self.filled = None, True

    def is_stale(self) -> Tensor:
        """Whether the full buffer has to be gathered because of this rank's chunk, as a 0-dim
        tensor.
        """
        if not self.filled:
            return torch.ones((), dtype=torch.bool, device=self.device)
        self.adopt_values()
        own = self.full.tensor[self._own]
        return (own != self._as_gathered(own.dtype).to(own.device)).any()

    def _as_gathered(self, dtype: torch.dtype) -> Tensor:
        """What the chunk's values are in a full buffer of that dtype."""
        return self.shard.data.to(dtype)

    def release(self) -> None:
        self.finish_fetch()
        self.filled = False
        if self._computing is not None:
            self.full, self._computing, self._as_stored, self.left = (
                self._computing,
                None,
                False,
                False,
            )
            return
        if not self.left:
            self.full.free()  # [release 2]
            return
        left = StorageWeakRef(self.full.tensor.untyped_storage())  # type: ignore[no-untyped-call]
        self.full, self.left = self._new_buffer(), False
        # If views are still in use, versions must stay: a new version makes torch rebuild their
        # grad_fn from the base as it is now.
        self.tracks_versions = self.tracks_versions and left.expired()  # type: ignore[no-untyped-call]

    def leave_buffer(self) -> None:
        """Called if views of the full buffer may stay in use. Release leaves it to them, and the
        next fetch takes a new buffer.
        """
        self.left = not self.resident

    def let_escape(self, tensor: Tensor) -> None:
        """Keeps the buffer's memory for `tensor`, an output of the layer, if it is a view of a
        parameter.
        """
        if self.full.aliases(tensor):
            self.leave_buffer()

    def abandon_fetch(self) -> None:
        """Ends a gather that may have failed, after an exception. Its result is not used."""
        try:
            self.finish_fetch()
        except RuntimeError:
            self._in_flight = None
            self.leave_buffer()  # the failed transfer may still write into it

    def changed(self) -> bool:
        """Whether the shard was written since the last call. If it was, a backward through older
        graphs is an error.
        """
        version = self.shard._version
        changed, self._seen_version = version != self._seen_version, version
        return changed

    @torch.no_grad()
    def scatter(self) -> None:
        """Cuts rank 0's full buffer into the chunks of all ranks."""
        zero_padding(self.full.tensor, self.layout)
        if not self.resident:
            self.receive(
                split(self.full.tensor, self.layout) if is_first(self._communicator) else None
            )
            torch.autograd.graph.increment_version(self.shard)
        self.unloaded.clear()

    def receive(self, slices: list[Tensor] | None) -> None:  # one for each rank, on rank 0
        self._communicator.scatter(self.shard.data, slices, self.layout.bounds).wait()

    def hand_over(
        self, take: Callable[[Tensor, Tensor], None], landed: Tensor, summed: Tensor
    ) -> None:
        """Lets a reducer `take` a gradient that has landed, and the sum that it was made from, in
        the order of the lane.
        """
        take(landed, summed)

    def way_home(self, mark: Mark) -> Mark:
        """`mark`, or if the gradient that it is the end of has further to go, the mark of all the
        way.
        """
        return mark

    def _new_buffer(self) -> FullBuffer | ResidentBuffer:
        with torch.inference_mode(False):  # training may use the same buffer later
            dtype = self.shard.dtype if self._as_stored else self.compute_dtype
            if self._communicator.world_size == 1 and dtype == self.shard.dtype and not self.far:
                return ResidentBuffer(self.layout, self.shard)
            return FullBuffer(self.layout, dtype, self.device)


def registered(chunks: Sequence[Chunk]) -> dict[str, nn.Parameter | None]:
    """A layer's chunks, or their parts, by parameter name: `trainable_chunk`, `frozen_chunk`, with
    the dtype if there are several.
    """
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
