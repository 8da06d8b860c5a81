"""Slices of a flat buffer as they travel in a format: encoded straight into the bytes that are
sent, decoded out of those that came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from .blocks import decode_blocks, encode_blocks, uniform
from .formats import Float8, Format, Int8
from .kernels import Kernels, kernels_on
from .sections import aligned

__all__: list[str] = []

# Elements that are worked on at once. On a CPU they stay in its cache; on an accelerator a few
# kernels do for a large slice.
_AT_ONCE_ON_CPU, _AT_ONCE = 2**18, 2**22

_LONGEST = 2**15  # a block that a kernel works on; compiling for longer ones takes minutes

Bounds = tuple[int, ...] | None


class Workspace:
    """Memory for intermediate results. All of it is allocated here, so that nothing can be missing
    while ranks wait.
    """

    def __init__(self, numel: int, size: int, device: torch.device, *, random: bool) -> None:
        """For at most `numel` elements at once, in blocks of `size`. `random`: for stochastic
        rounding.
        """
        self.numel = numel
        with torch.inference_mode(False):  # a transfer may be waited for outside of it
            self.values = torch.empty(numel + -(-numel // size), dtype=torch.float32, device=device)
            self._numbers = torch.empty(numel, dtype=torch.int32, device=device) if random else None

    def noise(self, start: int, key: int, count: int, size: int) -> Tensor | None:
        """Random numbers `[count, size]` for the elements from place `start` on. None: rounding is
        to the nearest.
        """
        if self._numbers is None:
            return None
        numel = count * size
        return uniform(
            start, key, self._numbers[:numel], self.values.view(torch.int32)[:numel]
        ).view(count, size)


class Row:
    """A 1-D tensor of a given length as bytes: codes, and a scale for each block. The last block
    may be short.
    """

    def __init__(self, kind: Format, numel: int, kernels: Kernels | None) -> None:
        self.nbytes = kind.nbytes((numel,))
        self._kind, self.numel, self._size = kind, numel, block_size(kind)
        self.kernels = kernels

    def encode(self, pieces: Sequence[Tensor], raw: Tensor, work: Workspace, key: int = 0) -> None:
        """Writes `pieces`, which side by side make the tensor, into the bytes `raw` `[nbytes]`.
        `key`: of the random numbers.
        """
        start, stored = 0, self._kind.seen(raw, (self.numel,))
        if self.kernels is not None:
            noisy = key if is_stochastic(self._kind) else None
            values = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
            self.kernels.encode(values, stored.codes, stored.scales, self._size, noisy)
            return
        for values in _at_once(pieces, work.numel):
            for place, blocks, shape in self._blocks(start, values.numel()):
                part = values[place.start - start : place.stop - start].view(shape)
                codes, noise = stored.codes[place].view(shape), work.noise(place.start, key, *shape)
                encode_blocks(part, codes, stored.scales[blocks], work.values, noise)
            start += values.numel()

    def decode(self, raw: Tensor, out: Tensor, work: Workspace, *, add: bool = False) -> None:
        """Writes what the bytes stand for into `out`, of any floating dtype; or adds it to `out`,
        which then is float32.
        """
        stored = self._kind.seen(raw, (self.numel,))
        if self.kernels is not None:
            self.kernels.decode(stored.codes, stored.scales, out, self._size, add=add)
            return
        for start in range(0, self.numel, work.numel or 1):
            many = min(work.numel, self.numel - start)
            for place, blocks, shape in self._blocks(start, many):
                codes, scales = stored.codes[place].view(shape), stored.scales[blocks]
                decode_blocks(codes, scales, out[place].view(shape), work.values, add=add)

    def _blocks(self, start: int, numel: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
        """The blocks of the elements from `start` on, as (elements, numbers of blocks, (count,
        size)): all whole ones together, and a short one.
        """
        count, rest = divmod(numel, self._size)
        first, border = start // self._size, start + numel - rest
        if count:
            yield slice(start, border), slice(first, first + count), (count, self._size)
        if rest:
            last = first + count
            yield slice(border, start + numel), slice(last, last + 1), (1, rest)


class Rows:
    """One row for each rank, side by side in the bytes of a message to all, or from all.

    Behind each row there is room for `trailer` bytes. `kernels`: see `row_kernels_on`.
    """

    def __init__(
        self, kind: Format, lengths: Sequence[int], trailer: int = 0, kernels: Kernels | None = None
    ) -> None:
        made = {length: Row(kind, length, kernels) for length in lengths}
        self._rows = [made[length] for length in lengths]
        self._trailer = trailer
        sizes = (row.nbytes + aligned(trailer) for row in self._rows)
        self._starts = tuple(accumulate(sizes, initial=0))
        self._kind, self._longest = kind, max(lengths)
        self.bounds: Bounds = self._starts if len(made) > 1 else None  # None: all rows are as long

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def use(self, kernels: Kernels) -> None:
        """From now on rows are encoded, and decoded, by them."""
        for row in self._rows:
            row.kernels = kernels

    def __getitem__(self, rank: int) -> Row:
        return self._rows[rank]

    def of(self, raw: Tensor, rank: int) -> Tensor:
        """The bytes of one rank's row among the bytes of all."""
        return raw[self._starts[rank] : self._starts[rank] + self._rows[rank].nbytes]

    def trailers(self, raw: Tensor) -> Iterator[Tensor]:
        """The bytes behind the rows among the bytes of all: `[n]` each, or `[W, n]` if all rows are
        as long.
        """
        n, first = self._trailer, self._rows[0].nbytes
        if self.bounds is None:
            yield raw.view(len(self._rows), -1)[:, first : first + n]
            return
        for start, row in zip(self._starts, self._rows, strict=False):
            yield raw[start + row.nbytes : start + row.nbytes + n]

    def sent_to(self, rank: int) -> int:
        """The bytes of a message to one rank."""
        return self._starts[rank + 1] - self._starts[rank]

    def empty(self, device: torch.device) -> Tensor:
        """Memory for the bytes of all rows."""
        with torch.inference_mode(False):
            return torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def work(self, device: torch.device) -> Workspace:
        """Memory to work on one row after another. Kernels need none."""
        size = block_size(self._kind)
        most = max(1, (_AT_ONCE_ON_CPU if device.type == "cpu" else _AT_ONCE) // size) * size
        numel = 0 if self._rows[0].kernels is not None else min(most, self._longest)
        return Workspace(numel, size, device, random=is_stochastic(self._kind))


def row_kernels_on(device: torch.device, kind: Format) -> Kernels | None:
    """The kernels for rows on `device`. None: torch's operations do it."""
    if block_size(kind) > _LONGEST:
        return None
    codes = torch.int8 if isinstance(kind, Int8) else torch.float8_e4m3fn
    return kernels_on(device, kind.name, codes, lambda kernels: _alike(kernels, kind, device))


def _alike(kernels: Kernels, kind: Format, device: torch.device) -> bool:
    """Compares what both make of slices over many magnitudes, one with a short block at its end.
    (Triton compiles for multiples of 16 apart.)
    """
    size = block_size(kind)
    for numel in (3 * size + 5, 16 * size):
        values = torch.linspace(-4, 4, numel, device=device).pow(7)
        if not all(map(torch.equal, _made(None, kind, values), _made(kernels, kind, values))):
            return False
    return True


def _made(kernels: Kernels | None, kind: Format, values: Tensor) -> list[Tensor]:
    rows, made = Rows(kind, [values.numel()], 0, kernels), [torch.ones_like(values)]
    work = rows.work(values.device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        raw, out = rows.empty(values.device).zero_(), torch.empty_like(values, dtype=dtype)
        rows[0].encode([values.to(dtype)], raw, work, 3)
        rows[0].decode(raw, out, work)
        rows[0].decode(raw, made[0], work, add=True)
        made += [raw, out]
    return made


def block_size(kind: Format) -> int:
    """The length of the blocks of a 1-D tensor."""
    if isinstance(kind, Int8):
        return kind.block_size
    if isinstance(kind, Float8):
        return kind.block[1]
    raise TypeError(f"{kind} is no format for transfers")


def is_stochastic(kind: Format) -> bool:
    """Whether elements are rounded at random."""
    return isinstance(kind, Int8) and kind.stochastic


def _at_once(pieces: Sequence[Tensor], numel: int) -> Iterator[Tensor]:
    """The pieces side by side, in tensors of `numel` elements, the last one shorter. They are
    views, but where pieces meet.
    """
    parts: list[Tensor] = []
    room = numel
    for piece in pieces:
        start = 0
        while start < piece.numel():
            stop = min(piece.numel(), start + room)
            parts.append(piece[start:stop])
            room -= stop - start
            start = stop
            if not room:
                yield torch.cat(parts) if len(parts) > 1 else parts[0]
                parts, room = [], numel
    if parts:
        yield torch.cat(parts) if len(parts) > 1 else parts[0]
