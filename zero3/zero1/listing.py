"""Tells ranks that have listed the same parameters in different orders. Names and shapes may not
show it, but what the parameters hold does.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from .division import Spread, flat, is_gapless

__all__: list[str] = []

_BITS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
_SAMPLE = 2**16  # of a larger tensor every second element is looked at, or every third, ...


class Listing:
    """What this rank's parameters hold, one after another: sums of the bits of values, and of those
    of gradients, since the values of biases may be alike.
    """

    def __init__(self, spreads: Sequence[Spread], device: torch.device) -> None:
        self._names = [spread.name for spread in spreads]
        parameters = [spread.parameter for spread in spreads]
        tensors = [*parameters, *(parameter.grad for parameter in parameters)]
        sums = [_sum_of_bits(tensor).to(device) for tensor in tensors]
        self._form = f"<{len(sums)}q"
        self.sums = struct.pack(self._form, *torch.stack(sums).tolist())

    def check(self, told: Mapping[int, bytes]) -> None:
        """Ranks may hold other values, which updates make alike. It is a mistake if they hold the
        same ones at other parameters.

        Args:
            told: Rank -> its sums.

        Raises:
            ValueError: A rank has another order than the first one.
        """
        count = len(self._names)
        for what, held in (("values", slice(count)), ("gradient", slice(count, None))):
            sums = {rank: struct.unpack(self._form, each)[held] for rank, each in told.items()}
            least, first = next(iter(sums.items()))
            for rank, theirs in sums.items():
                if theirs != first and sorted(theirs) == sorted(first):
                    place = next(place for place in range(count) if theirs[place] != first[place])
                    raise ValueError(
                        f"rank {rank}: {self._names[place]} has the {what} that "
                        f"{self._names[first.index(theirs[place])]} has on rank {least}. Give all "
                        "ranks the same parameters in the same order"
                    )


def _sum_of_bits(tensor: Tensor | None) -> Tensor:
    """Is the same wherever the bits are."""
    if tensor is None or tensor.layout != torch.strided or not tensor.numel():
        return torch.zeros((), dtype=torch.int64)
    tensor = tensor.detach()
    elements = flat(tensor) if is_gapless(tensor) else tensor.reshape(-1)
    elements = elements[:: -(-len(elements) // _SAMPLE)]
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    return elements.view(_BITS[elements.element_size()]).sum()
