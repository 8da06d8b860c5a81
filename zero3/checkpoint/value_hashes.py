"""Hashes of parameters' values. They tell whether a base is the one that adapters were trained on,
however ranks divide it.

A hash is a sum over a parameter's elements, modulo a prime, each element times a number that
belongs to its place. So each rank adds up its own slices, on the device where they lie, and no
value travels. Two parameters that are not the same have the same hash with a probability of about
2**-80. (It finds mistakes. Somebody who wants to can make other values with the same hash.)
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_256

import torch
from torch import Tensor

from ..comm.agreement import agreeing
from .contents import Contents

__all__: list[str] = []

# lanes; lanes are 16 bits of an element, or all 8. Each lane of a block has four numbers below
# 2**20
_BLOCK = 1 << 16
_AT_ONCE = 64  # blocks
_PRIME = (1 << 127) - 1
# block n counts times this to the power n + 1
_BASE = int.from_bytes(shake_256(b"zero3 block").digest(15))


def value_hashes(contents: Contents, names: Sequence[str], doing: str) -> dict[str, str]:
    """The hashes of the parameters `names`, 32 hexadecimal digits each. Every rank calls it, with
    the same names, and gets the same.
    """
    with agreeing(contents, f"the hashes of {doing}"):
        mine = _own_parts(contents, frozenset(names))
    payload = b"".join(mine.get(name, 0).to_bytes(16) for name in names)
    told = contents.communicator.exchange(payload, contents.device) if names else []
    shards = contents.communicator.shards
    found = {}
    for number, name in enumerate(names):
        parts = [int.from_bytes(each[16 * number : 16 * number + 16]) for each in told]
        # of each replica
        sums = [
            sum(parts[first : first + shards]) % _PRIME for first in range(0, len(parts), shards)
        ]
        # replicas that differ have no hash that was saved
        found[name] = "/".join(dict.fromkeys(f"{each:032x}" for each in sums))
    return found


def _own_parts(contents: Contents, names: frozenset[str]) -> dict[str, int]:
    parts: dict[str, int] = {}
    numbers = _numbers(contents.device) if names else None
    for chunk in contents.chunks():
        chunk.adopt_values()
        for span in contents.spans(chunk):
            if span.name in names and span.numel and numbers is not None:
                values, rows = span.of(chunk.shard.data), contents.rows(span.name)
                at = [(span.start, values)] if rows is None else rows.as_whole(span.start, values)
                part = sum(part_of_hash(each, start, numbers) for start, each in at)
                parts[span.name] = (parts.get(span.name, 0) + part) % _PRIME
    return parts


def _numbers(device: torch.device) -> Tensor:
    """The numbers of a block's lanes, `[_BLOCK, 4]`, as float64, in which their sums below are
    exact.
    """
    drawn = torch.frombuffer(
        bytearray(shake_256(b"zero3 lane").digest(_BLOCK * 16)), dtype=torch.int32
    )
    return ((drawn & 0xFFFFF) | 1).view(_BLOCK, 4).to(device, torch.float64)


def part_of_hash(values: Tensor, start: int, numbers: Tensor) -> int:
    """The part of a parameter's hash that its elements from number `start` on add, `values`
    `[n]`.
    """
    lanes = values.view(torch.int16 if values.itemsize > 1 else torch.uint8)
    position, part = start * (values.itemsize // lanes.itemsize), 0
    while len(lanes):
        within = position % _BLOCK
        whole = 0 if within else min(len(lanes) // _BLOCK, _AT_ONCE)
        count = whole * _BLOCK or min(len(lanes), _BLOCK - within)
        taken = lanes[:count].to(torch.float64)
        # at most 2**16 products of 2**15 and 2**20: exact in any order
        sums = (
            taken.view(whole, _BLOCK) @ numbers
            if whole
            else (taken @ numbers[within : within + count])[None]
        )
        factor = pow(_BASE, position // _BLOCK + 1, _PRIME)
        for row in sums.tolist():
            part += factor * sum(int(each) << 60 * column for column, each in enumerate(row))
            factor = factor * _BASE % _PRIME
        part %= _PRIME
        position, lanes = position + count, lanes[count:]
    return part
