"""The gradients of a chunk's parameters: one sum for each slot, and all of them in one flat buffer
when it is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.streams import on_device
from .autograd import autocast_is_on, copy_together
from .layout import SMALL, GradientLayout

__all__: list[str] = []


class GradientBuffer:
    """Takes any number of gradients for each slot: a slot without a gradient is zero, a slot with
    several holds their sum.

    The flat buffer is allocated as late as possible, when the layers behind have freed theirs. It
    is needed earlier only for a slot's second gradient, because sums are made in the buffer's
    dtype. `keep` gives later sums another dtype. The buffer takes that dtype when such a sum comes,
    so gradients of a single backward never take more memory.

    Behind each rank's slice it has a trailer, which says for each slot whether a gradient came.
    """

    __slots__ = (
        "_device",
        "_dtype",
        "_ones",
        "came",
        "full",
        "layout",
        "like",
        "made_in",
        "missing",
        "written",
    )

    def __init__(
        self,
        layout: GradientLayout,
        dtype: torch.dtype,
        device: torch.device,
        ones: Tensor,
    ) -> None:
        """`ones`: the trailer if gradients came for all slots, `[n]` in the gradients' dtype."""
        # its arguments, for the next one
        self.like = layout, dtype, device, ones
        self.layout = layout
        self._ones = ones
        self.made_in = self._dtype = dtype
        self._device = device
        self.came: dict[int, Tensor] = {}  # slot -> gradient that is not in the buffer yet
        self.written: set[int] = set()  # slots that are in the buffer
        self.missing = len(layout.of.slots)  # how many slots no gradient came for
        self.full: Tensor | None = None  # 1-D [W*(S+n)]

    @property
    def empty(self) -> bool:
        return self.full is None and not self.came

    @property
    def held(self) -> list[Tensor]:
        """All memory of its gradients."""
        return [*self.came.values(), *([] if self.full is None else [self.full])]

    def add(self, index: int, gradient: Tensor) -> None:
        """Adds a gradient of slot number `index`. The tensor is kept until the buffer is made."""
        if index in self.came:
            self.flat()
        if index in self.written:
            self._write(self._to_add_to(), index, gradient)
        else:
            self.came[index] = gradient
            self.missing -= 1

    def keep(self, dtype: torch.dtype) -> None:
        """Frees autograd's gradients. From now on sums are made in `dtype`."""
        if not self.empty:
            self.flat()
            self._dtype = dtype

    def scale(self, factor: Tensor) -> None:
        """Multiplies the sums by the 0-dim `factor`."""
        if self.full is not None:
            self._to_add_to().mul_(factor)

    def flat(self, *, told: bool = False) -> Tensor:
        """Makes the buffer with all gradients so far, and frees these. Slots without a gradient are
        not written. `told`: the trailers are.
        """
        layout = self.layout
        if self.full is None:
            self.full = torch.empty(layout.numel, dtype=self._dtype, device=self._device)
        few, together = layout.is_few, list[int]()
        for index in list(self.came):
            gradient = self.came[index]
            plain = gradient.layout == torch.strided and gradient.is_contiguous()
            if few and plain and gradient.numel() <= SMALL:
                together.append(index)
            else:
                self._write(self.full, index, gradient)
                del self.came[index]
            del gradient
        n, told = layout.trailer, told and layout.trailer > 0
        if told and not few and layout.of.bounds is None:
            told = False
            self.full.view(-1, layout.of.shard_numel + n)[:, -n:] = self.trailer(
                n, self._ones.dtype
            )
        if together or told:
            self._write_together(self.full, together, told=told)
        return self.full

    def _write_together(self, full: Tensor, together: list[int], *, told: bool) -> None:
        layout, pieces = self.layout, full.split_with_sizes(self.layout.sizes)
        places, values = list[Tensor](), list[Tensor]()
        for index in together:
            numbers, lengths = layout.cells[index]
            places += map(pieces.__getitem__, numbers)
            values += self.came[index].view(-1).split_with_sizes(lengths)
        if told:  # of the other values' dtype, which one kernel needs
            dtype = values[0].dtype if values else self._ones.dtype
            places += map(pieces.__getitem__, layout.cells[-1].numbers)
            values += [self.trailer(layout.trailer, dtype)] * layout.of.world_size
        if places:  # an empty slot has none
            copy_together(places, values)
        self.written.update(together)  # only now: if the copy raises, the gradients stay
        self.came.clear()

    def _in_place(self) -> list[Tensor]:
        """All that the buffer holds, in order, if a gradient came for each slot. Then the buffer is
        one copy, but if a gradient is in a wider dtype. `[]`: it is made in another way.
        """
        layout, ones = self.layout, self._ones
        if not layout.fits_one_copy or self._dtype != ones.dtype or autocast_is_on():
            return []
        pieces = [ones] * len(layout.sizes)
        for index, gradient in self.came.items():
            if gradient.layout != torch.strided or not gradient.is_contiguous():
                return []
            numbers, lengths = layout.cells[index]
            flat = gradient if gradient.dim() == 1 else gradient.view(-1)
            values = [flat] if len(numbers) == 1 else flat.split_with_sizes(lengths)
            for number, piece in zip(numbers, values, strict=True):
                pieces[number] = piece
        return pieces

    def _to_add_to(self) -> Tensor:
        full = self.flat()
        if full.dtype != self._dtype:
            self.full = full = full.to(self._dtype)
        return full

    def pieces(self) -> list[list[Tensor]] | None:
        """For each rank the 1-D pieces of its slice `[S]`, as views of autograd's gradients, and
        the trailer.

        None if a buffer exists or is needed.
        """
        if self.full is not None or not all(map(self._fits, self.came.values())):
            return None
        flat = {index: gradient.reshape(-1) for index, gradient in self.came.items()}
        n = self.layout.trailer
        trailer = [self.trailer(n, self._dtype)] if n else []
        return [
            [
                flat[index][start:stop] if index in flat else self._zeros(stop - start)
                for index, start, stop in cuts
            ]
            + trailer
            for cuts in self.layout.of.cuts
        ]

    def trailer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1 for each slot that a gradient came for, else 0, `[numel]`. Nobody writes into it."""
        if self.missing:
            known = [slot in self.came or slot in self.written for slot in range(numel)]
            return on_device(torch.tensor(known, dtype=dtype), self._device)
        if (numel, dtype) == (self._ones.numel(), self._ones.dtype):
            return self._ones
        return torch.ones(numel, dtype=dtype, device=self._device)

    def _fits(self, gradient: Tensor) -> bool:
        # then the bytes in memory are not the values
        lazy = gradient.is_conj() or gradient.is_neg()
        return (
            gradient.dtype == self._dtype
            and gradient.layout == torch.strided
            and gradient.device == self._device
            and not lazy
        )

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self._dtype, device=self._device)

    def complete(self) -> Tensor:
        """The buffer `[W*(S+n)]`, with zeros for slots without a gradient. From now on the buffer
        is the caller's.
        """
        if self.full is None and not self.missing and (pieces := self._in_place()):
            full = torch.cat(pieces)  # only now: if it raises, the gradients stay
            if full.dtype == self._dtype:
                self.full = full
                self.written.update(self.came)
                self.came.clear()
                return full
            del full
        full, spots = self.flat(told=True), self.layout.spots
        if self.missing or spots[-1]:  # padding
            for index in range(len(spots)):
                for spot in spots[index] if index not in self.written else ():
                    full.as_strided(*spot.strided).zero_()
        return full

    def merge(self, other: GradientBuffer, factor: Tensor | None) -> None:
        """Adds the sums of `other`, which were kept, multiplied by the 0-dim `factor`."""
        self._dtype = other._dtype
        full, others = self._to_add_to(), other.flat()
        for index in other.written:
            for spot in self.layout.spots[index]:
                found = others.as_strided(*spot.strided)
                found = found if factor is None else found.to(full.dtype) * factor
                self._add(full.as_strided(*spot.strided), index, found)
            self.written.add(index)
        self.missing = len(self.layout.of.slots) - len(self.written)

    def _write(self, full: Tensor, index: int, gradient: Tensor) -> None:
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        spots = self.layout.spots[index]
        for spot in spots:
            part = gradient
            if len(spots) > 1:
                part = gradient.reshape(-1)[spot.start : spot.stop].view(spot.strided[0])
            self._add(full.as_strided(*spot.strided), index, part)
        self.written.add(index)

    def _add(self, place: Tensor, index: int, gradient: Tensor) -> None:
        place.add_(gradient) if index in self.written else place.copy_(gradient)
