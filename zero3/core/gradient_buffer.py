"""The gradients of a chunk's parameters, one sum a slot: as autograd made them, and, once it is asked for, in one flat buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import ChunkLayout

__all__: list[str] = []


class GradientBuffer:
    """Nothing is counted: a slot that got no gradient is zero, one that got several holds their sum.

    The buffer is allocated as late as possible, so that layers behind have given theirs back by then. Only a slot's second
    gradient needs it before, because sums are made in its dtype.
    """

    __slots__ = ("_came", "_dtype", "_layout", "_like", "_written", "full")

    def __init__(self, layout: ChunkLayout, like: Tensor, dtype: torch.dtype) -> None:
        self._layout = layout
        self._like = like  # on the device where the buffer is to be
        self._dtype = dtype
        self._came: dict[int, Tensor] = {}  # by slot; not in the buffer yet
        self._written: set[int] = set()  # slots of the buffer
        self.full: Tensor | None = None  # 1-D [W*S]

    @property
    def empty(self) -> bool:
        return self.full is None and not self._came

    def add(self, index: int, gradient: Tensor) -> None:
        """Takes in the gradient of slot number `index`, and keeps it."""
        if index in self._came:
            self.flat()
        if index in self._written:
            self._write(self.flat(), index, gradient)
        else:
            self._came[index] = gradient

    def flat(self) -> Tensor:
        """The buffer, with all that has come in; the gradients themselves are let go of. Slots without one are not written."""
        if self.full is None:
            self.full = self._like.new_empty(self._layout.padded_numel, dtype=self._dtype)
        while self._came:
            self._write(self.full, *self._came.popitem())
        return self.full

    def pieces(self) -> list[list[Tensor]] | None:
        """For every rank the pieces of its slice `[S]`, 1-D, side by side, as autograd made them.

        None where there is a buffer already, or has to be: on a device, where a transfer takes one buffer.
        """
        if self.full is not None or self._like.device.type != "cpu" or not all(map(self._fits, self._came.values())):
            return None
        flat = {index: gradient.reshape(-1) for index, gradient in self._came.items()}
        return [
            [flat[index][start:stop] if index in flat else self._zeros(stop - start) for index, start, stop in cuts]
            for cuts in self._layout.cuts
        ]

    def _fits(self, gradient: Tensor) -> bool:
        lazy = gradient.is_conj() or gradient.is_neg()  # its bytes are not its values
        return gradient.dtype == self._dtype and gradient.layout == torch.strided and gradient.device.type == "cpu" and not lazy

    def _zeros(self, numel: int) -> Tensor:
        return self._like.new_zeros(numel, dtype=self._dtype)

    def complete(self) -> Tensor:
        """The buffer `[W*S]`, with zeros where nothing came. The caller takes it over."""
        full = self.flat()
        for index in range(len(self._layout.slots)):
            if index not in self._written:
                self._slot(full, index).zero_()
        if self._layout.numel < self._layout.padded_numel:
            full[self._layout.numel :].zero_()
        return full

    def merge(self, other: GradientBuffer, factor: Tensor | None) -> None:
        """Adds the sums of `other`, times `factor`, 0-dim."""
        full, others = self.flat(), other.flat()
        for index in other._written:
            found = self._slot(others, index)
            self._write(full, index, found if factor is None else found * factor)

    def _write(self, full: Tensor, index: int, gradient: Tensor) -> None:
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        slot = self._slot(full, index)
        if index in self._written:
            slot.add_(gradient)
        else:
            self._written.add(index)
            slot.copy_(gradient)

    def _slot(self, full: Tensor, index: int) -> Tensor:
        return full.as_strided(*self._layout.slots[index].strided)
