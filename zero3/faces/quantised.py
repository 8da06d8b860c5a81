"""The face of a chunk of quantised parameters: bytes, of which each parameter has a slot for its
codes and scales. Parameters show nothing of the full buffer; their weights read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..core.flat import not_a_number, unpack
from ..core.layout import ChunkLayout
from ..core.sites import ParameterSites
from ..quantized.codec import Codec
from ..quantized.formats import Format
from .quantized_parameter import QuantizedParameter
from .recipes import QuantizedWeight, Recipe

__all__: list[str] = []


class Quantised:
    """With codes while the layer computes, with values in `full_params`."""

    read_only = True
    own: torch.dtype | None = None

    def __init__(self, kind: Format, codec: Codec, device: torch.device) -> None:
        self.name: str | None = kind.name
        self._kind, self._codec, self._device = kind, codec, device
        # by the name of the slot. (Sites would be a cycle: they know their face.)
        self._weights: dict[str, QuantizedWeight] = {}

    def take(self, sites: ParameterSites, computes: torch.dtype) -> None:
        """Makes a parameter one of these. `computes`: the dtype in which operations compute."""
        parameter = sites.parameter
        weight = self._weights[sites.name] = QuantizedWeight(
            self._kind,
            tuple(parameter.shape),
            parameter.dtype,
            computes,
            self._codec,
            not_a_number(computes, self._device).expand(parameter.shape),
            self._kind.rows(tuple(parameter.shape)),
            QuantizedParameter,
            weakref.ref(parameter),
        )
        sites.take_face(self, weight)

    # -- one parameter

    def stored(self, sites: ParameterSites) -> tuple[tuple[int, ...], torch.dtype]:
        return self._kind.stored(sites.known.shape), torch.uint8

    def store(self, sites: ParameterSites, device: torch.device) -> Tensor:
        raw = torch.empty(self.stored(sites)[0], dtype=torch.uint8, device=device)
        sites.known.rows.store(self._codec.quantize(sites.parameter.to(device)), raw)
        return raw

    def value(self, sites: ParameterSites, slot: Tensor) -> Tensor:
        return self._value(sites.known, slot)

    def _value(self, weight: QuantizedWeight, slot: Tensor) -> Tensor:
        return weight.values(weight.rows.seen(slot), weight.own_dtype)

    def put(self, sites: ParameterSites, values: Tensor, slot: Tensor) -> None:
        self._put(sites.known, values, slot)

    def _put(self, weight: QuantizedWeight, values: Tensor, slot: Tensor) -> None:
        """Values that the slot stands for already are left as they are, because quantising them
        again may change them.
        """
        if not torch.equal(self._value(weight, slot), values):
            weight.rows.store(self._codec.quantize(values), slot)

    def stand_in(self, sites: ParameterSites, blank: Tensor) -> Tensor:
        stretched: Tensor = sites.known.stretched
        return stretched

    def know(self, sites: ParameterSites) -> None:
        weight: QuantizedWeight = sites.known
        weight.is_of(sites.parameter)
        sites.parameter.zero3_recipe = Recipe(weight)  # type: ignore[attr-defined]

    def shown_as(self, sites: ParameterSites, value: Tensor) -> type[nn.Parameter]:
        return QuantizedParameter if value is sites.known.shown else nn.Parameter

    # -- all of them

    def _slots(self, full: Tensor, layout: ChunkLayout) -> list[tuple[QuantizedWeight, Tensor]]:
        weights = [self._weights[slot.name] for slot in layout.slots]
        return list(zip(weights, unpack(full, layout), strict=True))

    def views(self, full: Tensor, layout: ChunkLayout) -> Sequence[Tensor]:
        slots = self._slots(full, layout)
        for weight, raw in slots:
            weight.see(raw)
        return [weight.shown for weight, _ in slots if weight.shown is not None]

    def values(self, full: Tensor, layout: ChunkLayout) -> Sequence[Tensor]:
        return [self._value(weight, slot) for weight, slot in self._slots(full, layout)]

    def write(self, values: Sequence[Tensor], full: Tensor, layout: ChunkLayout) -> None:
        for (weight, slot), given in zip(self._slots(full, layout), values, strict=True):
            self._put(weight, given, slot)

    def forget(self) -> None:
        for weight in self._weights.values():
            weight.see(None)


def weight_of(sites: ParameterSites) -> QuantizedWeight | None:
    """What is known of a quantised parameter. None: it is not quantised."""
    return sites.known if isinstance(sites.known, QuantizedWeight) else None
