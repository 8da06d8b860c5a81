"""Which rank updates which elements of the parameters.

Parameters lie side by side in buckets. Each bucket is cut into W equal runs, one for each rank. A
rank's *shares* are the elements of each parameter in its runs. A large parameter is a bucket by
itself, and is gathered in its own memory, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..core.layout import ChunkLayout, Slot

__all__: list[str] = []

# a parameter of this size has a bucket by itself: two copies would cost more than one more message
LARGE_BYTES = 2**18


class Packing(IntEnum):
    """Which parameters share a bucket. The number is the bytes that one with several may have."""

    ALONE = 0  # none, so that each can be updated by itself
    STAGED = 2**22  # small ones, which are sent through a copy of this size at most
    VIEWED = 25 * 2**20  # all; they become views of it


@dataclass(frozen=True, eq=False, slots=True)
class Share:
    """Elements `[start, stop)` of a parameter, which the rank of number `index` updates."""

    index: int
    start: int
    stop: int
    offset: int = 0  # in that rank's run of a bucket


class Spread:
    """One parameter of the caller."""

    def __init__(self, parameter: Tensor, group: int, name: str, *, whole: bool) -> None:
        self.parameter, self.group, self.name = parameter, group, name
        # one rank updates all of it, in its own shape; else every rank updates a share
        self.whole = whole
        self.shares: list[Share] = []  # all ranks'
        # this rank's, as its local optimizer has them: views of the parameter
        self.own: dict[Share, nn.Parameter] = {}
        # the bucket's memory for the parameter, if the parameter is a view of a bucket
        self.place: Tensor | None = None
        # as it was given: shares, and their state, are in the order of its memory
        self._shape, self._strides = parameter.shape, parameter.stride()

    @property
    def flat(self) -> Tensor:
        """A 1-D view of its elements in the order of its memory."""
        return flat(self.parameter.detach())

    def mistake(self) -> Exception | None:
        """What has happened to the parameter, so that it can't be updated."""
        gradient, found = self.parameter.grad, self.parameter.shape
        if found != self._shape:
            return ValueError(
                f"{self.name} has shape {tuple(found)}, but had {tuple(self._shape)} when the "
                "ZeroRedundancyOptimizer was made: make another one"
            )
        if gradient is not None and gradient.layout != torch.strided:
            return RuntimeError(
                f"the gradient of {self.name} is sparse, which has no parts to spread over "
                "ranks: use dense gradients"
            )
        return None

    @property
    def layout(self) -> str:
        """How it lies in memory."""
        sizes = zip(self._shape, self._strides, strict=True)
        strides = tuple(stride for size, stride in sizes if size > 1)
        return "" if self.parameter.is_contiguous() else f" with strides {strides}"

    @property
    def shaped(self) -> bool:
        """Whether the local optimizer has it in its own shape. Other shares are 1-D."""
        return self.whole or self.parameter.numel() <= 1

    def cut(self, share: Share, tensor: Tensor) -> Tensor:
        """A view of this share of the parameter, or of a tensor that lies in memory as it does."""
        return tensor.detach() if self.shaped else flat(tensor.detach())[share.start : share.stop]

    def move_to(self, run: Tensor) -> None:
        """Makes the parameter a view of a bucket's elements, with its values and strides."""
        self.place = run.as_strided(self.parameter.shape, self.parameter.stride())
        self.bring_back()

    def hold(self, index: int) -> None:
        """Makes the local optimizer's parameters from this rank's shares. `index`: this rank."""
        self.shares.sort(key=lambda share: share.index)
        for share in (share for share in self.shares if share.index == index):
            values = self.cut(share, self.parameter)
            self.own[share] = nn.Parameter(values, requires_grad=values.dtype.is_floating_point)

    def take(self, gradient: Tensor | None, *, copy: bool = False) -> None:
        """Gives the local optimizer this rank's shares of a gradient. They are no copies unless
        `copy` is set or strides differ.
        """
        self.bring_back()
        if self.own and gradient is not None:
            gradient = laid_out_as(gradient.detach(), self.parameter)
        for share, local in self.own.items():
            _point(local, self.cut(share, self.parameter))
            own = None if gradient is None else self.cut(share, gradient)
            local.grad = own.clone() if copy and own is not None else own

    def bring_back(self) -> None:
        """Puts the parameter and its new values back, if other code has replaced its `.data`, or
        its layout there.
        """
        values = self.parameter.detach()
        if self.place is not None:
            if not _is(values, self.place):
                self.place.copy_(values.clone())  # they may be in this memory, in another order
                _point(self.parameter, self.place)
        elif not self.shaped and not _lies_as(values, self._strides):
            lies = torch.empty_strided(
                self._shape, self._strides, dtype=values.dtype, device=values.device
            )
            _point(self.parameter, lies.copy_(values))


Item = TypeVar("Item")
Range = tuple[Spread, int, int]  # elements `[start, stop)` of a parameter


class Bucket:
    """Ranges of parameters side by side: the slots of `layout`."""

    def __init__(self, ranges: Sequence[Range], ranks: int, *, large: bool = False) -> None:
        """`large`: it is one large parameter, or the largest range of one that divides evenly."""
        self.spreads = [spread for spread, _, _ in ranges]
        sizes = [stop - start for _, start, stop in ranges]
        offsets = accumulate(sizes, initial=0)
        slots = (Slot(str(number), (size,), next(offsets)) for number, size in enumerate(sizes))
        self.layout = ChunkLayout(tuple(slots), ranks)
        # each rank's shares, with their parameters
        self.runs: list[list[tuple[Spread, Share]]] = [[] for _ in range(ranks)]
        for index, run in enumerate(self.runs):
            for piece in self.layout.pieces(index):
                spread, start, _ = ranges[int(piece.slot.name)]
                run.append(
                    (spread, Share(index, start + piece.start, start + piece.stop, piece.offset))
                )
                spread.shares.append(run[-1][1])
        self._large = large
        self._memory: Tensor | None = None  # [W*S], if the parameters are views of it

    @property
    def name(self) -> str:
        """The bucket's name in errors."""
        names = list(dict.fromkeys(spread.name for spread in self.spreads))
        return (
            f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} of ZeroRedundancyOptimizer"
        )

    @property
    def kind(self) -> tuple[torch.device, torch.dtype]:
        return _kind(self.spreads[0])

    @property
    def nbytes(self) -> int:
        """With padding."""
        return self.layout.padded_numel * self.kind[1].itemsize

    @property
    def full(self) -> Tensor | None:
        """[W*S]: the memory of the parameters themselves, if they fill the bucket."""
        return self.spreads[0].flat[: self.layout.numel] if self._large else self._memory

    def move_in(self) -> None:
        """Makes the parameters views of the bucket. Buckets follow one another, so that only one
        bucket's memory is held twice.
        """
        device, dtype = self.kind
        self._memory = torch.empty(self.layout.padded_numel, dtype=dtype, device=device)
        self._memory[self.layout.numel :].zero_()
        for spread, slot in zip(self.spreads, self.layout.slots, strict=True):
            spread.move_to(self._memory[slot.offset : slot.stop])


def divide(spreads: Sequence[Spread], packing: Packing, owned: list[int]) -> list[Bucket]:
    """Divides parameters among ranks, and makes buckets of those that no single rank updates.
    `owned`: the bytes of whole parameters that each rank has. The new ones are added.
    """
    for spread in sorted(spreads, key=lambda spread: -spread.parameter.numel()):
        # a parameter that is empty, or has gaps in its memory, can't be cut
        if spread.whole or not spread.parameter.numel() or not is_gapless(spread.parameter):
            owner = owned.index(min(owned))
            owned[owner] += spread.parameter.nbytes
            spread.whole, spread.shares = True, [Share(owner, 0, spread.parameter.numel())]
    kinds: dict[tuple[torch.device, torch.dtype], list[Spread]] = {}
    for spread in spreads:
        if not spread.whole:
            kinds.setdefault(_kind(spread), []).append(spread)
    buckets: list[Bucket] = []
    for same in kinds.values():
        small: list[Range] = []
        for spread in same:
            numel = spread.parameter.numel()
            large = packing is not Packing.VIEWED and spread.parameter.nbytes >= LARGE_BYTES
            even = numel - numel % len(owned) if large else 0
            if even:
                buckets.append(Bucket([(spread, 0, even)], len(owned), large=True))
            if even < numel:
                small.append((spread, even, numel))
        buckets += [
            Bucket(ranges, len(owned))
            for ranges in packed(
                small, lambda item: (item[2] - item[1]) * item[0].parameter.element_size(), packing
            )
        ]
    if packing is Packing.VIEWED:
        for bucket in buckets:
            bucket.move_in()
    return buckets


def packed(
    items: Iterable[Item], nbytes_of: Callable[[Item], int], limit: int
) -> Iterator[list[Item]]:
    """Packs items in order. What holds several has at most `limit` bytes."""
    held: list[Item] = []
    size = 0
    for item in items:
        nbytes = nbytes_of(item)
        if held and size + nbytes > limit:
            yield held
            held, size = [], 0
        held.append(item)
        size += nbytes
    if held:
        yield held


def _kind(spread: Spread) -> tuple[torch.device, torch.dtype]:
    return spread.parameter.device, spread.parameter.dtype


def _point(parameter: Tensor, values: Tensor) -> None:
    if not _is(parameter, values):
        parameter.data = values


def _is(tensor: Tensor, other: Tensor) -> bool:
    """Whether it is the same memory, in the same order."""
    return tensor.data_ptr() == other.data_ptr() and _lies_as(tensor, other.stride())


def _lies_as(tensor: Tensor, strides: Sequence[int]) -> bool:
    each = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(size <= 1 or own == other for size, own, other in each)


def flat(tensor: Tensor) -> Tensor:
    """Returns a 1-D view of a gapless tensor's elements, in the order of its memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_gapless(tensor: Tensor) -> bool:
    """Whether its elements fill its memory, each once, in any order (transposed, channels last)."""
    strides, sizes = tensor.stride(), tensor.size()
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], -sizes[dim]))
    return tensor.permute(order).is_contiguous()


def laid_out_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Returns `tensor` if it lies in memory as `parameter` does, or a copy that does."""
    if _lies_as(tensor, parameter.stride()):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
