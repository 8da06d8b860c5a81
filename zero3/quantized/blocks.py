"""The arithmetic of blocks that have one scale each, in memory that the caller gives: nothing is
allocated, and few passes are made.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__: list[str] = []

INT8_MAX = 127
FLOAT8_MAX = 448.0  # of torch.float8_e4m3fn


def encode_blocks(
    values: Tensor, codes: Tensor, scales: Tensor, work: Tensor, noise: Tensor | None
) -> None:
    """Writes the codes, and the scales, of blocks: the largest absolute value of a block gets the
    largest code.

    A block with an infinity or a NaN has a scale that is none, so all of it is decoded as
    infinities and NaN.

    Args:
        values: The blocks `[n, size]`, of any floating dtype.
        codes: Where their codes come, `[n, size]`, int8 or float8_e4m3fn.
        scales: Where their scales come, `[n]`, float32.
        work: At least `n * (size + 1)` elements, flat, float32.
        noise: For int8, uniform numbers in [0, 1) `[n, size]`: a quotient is rounded down after its
            number was added, so that the mean of many roundings is the quotient. None: it is
            rounded to the nearest integer, and to an even one between two.
    """
    count, size = values.shape
    divisors, quotients = work[:count], work[count : count * (size + 1)].view(count, size)
    whole = codes.dtype == torch.int8
    largest = INT8_MAX if whole else FLOAT8_MAX
    if values.dtype != torch.float32:
        values = quotients.copy_(values)
    torch.amax(values, 1, out=scales)
    torch.amin(values, 1, out=divisors)
    torch.maximum(scales, divisors.neg_(), out=scales).abs_().div_(largest)
    # 1 where a scale is 0: such blocks have the codes 0
    torch.eq(scales, 0, out=divisors).add_(scales)
    torch.div(values, divisors[:, None], out=quotients)
    if noise is not None:
        quotients.add_(noise).floor_()
    elif whole:
        quotients.round_()
    codes.copy_(quotients.clamp_(-largest, largest))


def decode_blocks(codes: Tensor, scales: Tensor, out: Tensor, work: Tensor, *, add: bool) -> None:
    """Writes what blocks stand for into `out` `[n, size]`, or adds it there. Products are float32,
    and rounded once.

    Args:
        codes: `[n, size]`, int8 or float8_e4m3fn.
        scales: `[n]`, float32.
        out: `[n, size]`, of any floating dtype.
        work: At least `n * size` elements, flat, float32.
        add: Whether the numbers are added to what `out` holds. Then `out` is float32.
    """
    straight = out.dtype == torch.float32 and not add
    values = out if straight else work[: out.numel()].view(out.shape)
    values.copy_(codes).mul_(scales[:, None])
    if add:
        out.add_(values)
    elif not straight:
        out.copy_(values)


# an odd number, and those of a well-known hash of 32 bits
_STEP, _MIXERS = -1640531527, ((16, 2146121005), (15, -2073254261))


def uniform(start: int, key: int, numbers: Tensor, work: Tensor) -> Tensor:
    """Numbers in [0, 1) that look random: a hash of a key and of the places `start`, `start + 1`,
    ... They are the same on every device.

    Args:
        start: The first place.
        key: An integer of 32 bits, with a sign.
        numbers: Memory for the result, flat, int32.
        work: Memory of the same length, int32.

    Returns:
        `numbers`, seen as float32.
    """
    torch.arange(start, start + numbers.numel(), out=numbers)
    numbers.mul_(_STEP).add_(key)
    for shift, factor in _MIXERS:
        numbers.bitwise_xor_(_shifted(numbers, shift, work)).mul_(factor)
    numbers.bitwise_xor_(_shifted(numbers, 16, work))
    bits = _shifted(numbers, 9, numbers).bitwise_or_(0x3F800000)  # of a number from 1 to 2
    return bits.view(torch.float32).sub_(1)


def _shifted(numbers: Tensor, bits: int, out: Tensor) -> Tensor:
    """`numbers` shifted to the right. Zeros follow, also behind a sign."""
    return torch.bitwise_right_shift(numbers, bits, out=out).bitwise_and_((1 << (32 - bits)) - 1)
