"""The chunk of a layer's quantised parameters: bytes, of which each parameter has a slot for its
codes and scales.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..comm.communicator import Communicator
from ..comm.streams import Lane
from ..policy import ShardingPolicy, compute_dtype
from ..quantized.codec import Codec
from ..quantized.formats import Format
from .chunk import Chunk, FullBuffer, ResidentBuffer
from .flat import not_a_number, unpack
from .layout import ChunkLayout
from .parameters import ParameterSites
from .quantized_parameter import QuantizedParameter
from .recipes import QuantizedWeight, Recipe

__all__: list[str] = []


class QuantizedSites(ParameterSites):
    """A quantised parameter in its modules: with codes while the layer computes, with values in
    `full_params`.
    """

    def __init__(
        self,
        sites: ParameterSites,
        kind: Format,
        codec: Codec,
        policy: ShardingPolicy,
        device: torch.device,
    ) -> None:
        super().__init__(sites.name, sites.parameter, sites.places)
        dtype = compute_dtype(policy, sites.parameter.dtype)
        self.format = kind
        self.dtype = sites.parameter.dtype  # that of the values in `full_params` and in state dicts
        self.stretched = not_a_number(dtype, device).expand(sites.parameter.shape)
        shape = tuple(sites.parameter.shape)
        self.weight = QuantizedWeight(kind.name, shape, dtype, codec, weakref.ref(sites.parameter))
        self.replace(sites.parameter)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (self.format.nbytes(self.weight.shape),)

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.uint8

    def to_store(self, device: torch.device) -> Tensor:
        raw = torch.empty(self.stored_shape, dtype=torch.uint8, device=device)
        self.format.store(self.weight.codec.quantize(self.parameter.to(device)), raw)
        return raw

    def values_in(self, slot: Tensor) -> Tensor:
        return self.weight.codec.dequantize(self.format.seen(slot, self.weight.shape), self.dtype)

    def write(self, values: Tensor, slot: Tensor) -> None:
        """Values that the slot stands for already are left as they are, because quantising them
        again may change them.
        """
        if not torch.equal(self.values_in(slot), values):
            self.format.store(self.weight.codec.quantize(values), slot)

    def stand_in(self, blank: Tensor) -> Tensor:
        return self.stretched

    def data(self) -> Tensor:
        return self.stretched if self.weight.shown else super().data()

    def replace(self, parameter: nn.Parameter) -> None:
        if parameter is not self.parameter:
            super().replace(parameter)
        self.weight.parameter = weakref.ref(parameter)
        parameter.zero3_recipe = Recipe(self.weight)  # type: ignore[attr-defined]

    def show(self, value: Tensor) -> None:
        super().show(value)
        if value is self.stretched:
            self.weight.shown = True
            self.parameter.__class__ = QuantizedParameter

    def hide(self, stand_in: Tensor) -> None:
        self.weight.shown = False
        super().hide(self.stretched)


class QuantizedChunk(Chunk):
    """The parameters show nothing of the full buffer, which holds bytes. Their weights read it."""

    read_only = True

    def __init__(
        self,
        layout: ChunkLayout,
        shard: nn.Parameter,
        communicator: Communicator,
        sites: Sequence[QuantizedSites],
        device: torch.device | None = None,
    ) -> None:
        self._sites = sites  # in the order of slots
        self._seen: FullBuffer | ResidentBuffer | None = None
        super().__init__(layout, shard, communicator, shard.dtype, device)

    @property
    def stored_as(self) -> str:
        return self._sites[0].format.name

    gathered_as = stored_as

    @property
    def casts(self) -> bool:
        return True  # values are shown in a buffer of their own

    def make_room(self, *, as_stored: bool = False) -> None:
        super().make_room(as_stored=as_stored)
        self._see()

    def start_fetch(self, lane: Lane) -> None:
        super().start_fetch(lane)
        self._see()

    def _see(self) -> None:
        """Leads the weights to the present full buffer."""
        if self.full is not self._seen:
            for sites, raw in zip(self._sites, unpack(self.full.tensor, self.layout), strict=True):
                sites.weight.stored = sites.format.seen(raw, sites.weight.shape)
            self.full.views = [sites.stretched for sites in self._sites]
            self._seen = self.full

    def release(self) -> None:
        super().release()
        # a buffer of values, which nobody needs any more, or one that is left to its users
        if self.full is not self._seen:
            self._seen = None
            for sites in self._sites:
                sites.weight.stored = None

    @torch.no_grad()
    def finish_fetch(self) -> None:
        super().finish_fetch()
        if self._as_stored and self.full.views[0] is self._sites[0].stretched:
            slots = unpack(self.full.tensor, self.layout)
            with torch.inference_mode(False):
                self.full.views = [
                    sites.values_in(slot) for sites, slot in zip(self._sites, slots, strict=True)
                ]

    @torch.no_grad()
    def scatter(self) -> None:
        """Quantises the values that have changed on rank 0, and cuts the bytes into the chunks of
        all ranks.
        """
        for sites, slot, values in zip(
            self._sites, unpack(self.full.tensor, self.layout), self.full.views, strict=True
        ):
            sites.write(values, slot)
        torch.autograd.graph.increment_version(self.shard)
        super().scatter()
