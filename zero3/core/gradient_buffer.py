"""The gradients of a chunk's parameters: one sum for each slot, and all of them in one flat buffer
when it is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .autograd import copy_together
from .layout import ChunkLayout

__all__: list[str] = []

# elements of a gradient that is copied together with others: torch's kernel for several tensors
# takes 21 million, so that a large one alone would be many kernels
SMALL = 2**22


class GradientBuffer:
    """Takes any number of gradients for each slot: a slot without a gradient is zero, a slot with
    several holds their sum.

    The flat buffer is allocated as late as possible, when the layers behind have freed theirs. It
    is needed earlier only for a slot's second gradient, because sums are made in the buffer's
    dtype. `keep` gives later sums another dtype. The buffer takes that dtype when such a sum comes,
    so gradients of a single backward never take more memory.
    """

    __slots__ = ("_came", "_device", "_dtype", "_layout", "_written", "full", "made_in")

    def __init__(self, layout: ChunkLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._layout = layout
        self.made_in = self._dtype = dtype
        self._device = device
        self._came: dict[int, Tensor] = {}  # slot -> gradient that is not in the buffer yet
        self._written: set[int] = set()  # slots that are in the buffer
        self.full: Tensor | None = None  # 1-D [W*S]

    @property
    def empty(self) -> bool:
        return self.full is None and not self._came

    @property
    def held(self) -> list[Tensor]:
        """All memory of its gradients."""
        return [*self._came.values(), *([] if self.full is None else [self.full])]

    def like(self) -> GradientBuffer:
        """An empty one."""
        return GradientBuffer(self._layout, self.made_in, self._device)

    def add(self, index: int, gradient: Tensor) -> None:
        """Adds a gradient of slot number `index`. The tensor is kept until the buffer is made."""
        if index in self._came:
            self.flat()
        if index in self._written:
            self._write(self._to_add_to(), index, gradient)
        else:
            self._came[index] = gradient

    def keep(self, dtype: torch.dtype) -> None:
        """Frees autograd's gradients. From now on sums are made in `dtype`."""
        if not self.empty:
            self.flat()
            self._dtype = dtype

    def scale(self, factor: Tensor) -> None:
        """Multiplies the sums by the 0-dim `factor`."""
        if self.full is not None:
            self._to_add_to().mul_(factor)

    def flat(self) -> Tensor:
        """Makes the buffer with all gradients so far, and frees these. Slots without a gradient are
        not written.
        """
        if self.full is None:
            self.full = torch.empty(
                self._layout.padded_numel, dtype=self._dtype, device=self._device
            )
        places, values = [], []
        while self._came:
            index, gradient = self._came.popitem()
            small = gradient.numel() <= SMALL and gradient.layout == torch.strided
            if small and index not in self._written:
                self._written.add(index)
                places.append(self._slot(self.full, index))
                values.append(gradient)
            else:
                self._write(self.full, index, gradient)
        if places:
            copy_together(places, values)
        return self.full

    def _to_add_to(self) -> Tensor:
        full = self.flat()
        if full.dtype != self._dtype:
            self.full = full = full.to(self._dtype)
        return full

    def pieces(self) -> list[list[Tensor]] | None:
        """For each rank the 1-D pieces of its slice `[S]`, as views of autograd's gradients.

        None if a buffer exists or is needed.
        """
        if self.full is not None or not all(map(self._fits, self._came.values())):
            return None
        flat = {index: gradient.reshape(-1) for index, gradient in self._came.items()}
        return [
            [
                flat[index][start:stop] if index in flat else self._zeros(stop - start)
                for index, start, stop in cuts
            ]
            for cuts in self._layout.cuts
        ]

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
        """The buffer `[W*S]`, with zeros for slots without a gradient. From now on the buffer is
        the caller's.
        """
        full = self.flat()
        for index in range(len(self._layout.slots)):
            if index not in self._written:
                self._slot(full, index).zero_()
        if self._layout.numel < self._layout.padded_numel:
            full[self._layout.numel :].zero_()
        return full

    def merge(self, other: GradientBuffer, factor: Tensor | None) -> None:
        """Adds the sums of `other`, which were kept, multiplied by the 0-dim `factor`."""
        self._dtype = other._dtype
        full, others = self._to_add_to(), other.flat()
        for index in other._written:
            found = self._slot(others, index)
            self._write(full, index, found if factor is None else found.to(full.dtype) * factor)

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
