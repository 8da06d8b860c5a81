"""What fits: the largest batch and sequence, and the cheapest change that makes a plan fit. All of it is tried, not estimated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..policy import ShardingPolicy
from .setup import Setup
from .trace import Trace, peak_of

__all__: list[str] = []

_MOST = 1 << 16  # no batch or number of blocks of tokens is looked for beyond it
MANY_RANKS = 1024
TRIES = 16  # changes that are tried, at most


def largest(peak: Callable[[int], int], room: int) -> int:
    """The largest number n with `peak(n) <= room`; 0 if not even 1.

    A peak is the largest of several sums that grow with n in straight lines. So a line through two numbers that were tried tells
    which to try next, and few have to be.
    """
    low, high = (0, 0), (1, peak(1))
    while high[1] <= room and high[0] < _MOST:
        before, low = low, high
        slope = (low[1] - before[1]) / (low[0] - before[0]) if before[0] else 0.0
        ahead = low[0] + int((room - low[1]) / slope) + 1 if slope > 0 else 2 * low[0]
        number = min(max(ahead, low[0] + 1), 8 * low[0], _MOST)
        high = (number, peak(number))
    if high[1] <= room:
        return high[0]
    while high[0] - low[0] > 1:
        share = (room - low[1]) / (high[1] - low[1]) if low[0] else 0.5
        number = low[0] + min(max(int(share * (high[0] - low[0])), 1), high[0] - low[0] - 1)
        found = (number, peak(number))
        low, high = (found, high) if found[1] <= room else (low, found)
    return low[0]


def largest_batch(trace: Trace, setup: Setup, room: int) -> int:
    """The most sequences a micro-batch may have."""
    return largest(lambda batch: peak_of(trace.measure(batch, setup.sequence, setup.accumulation))[0], room)


def largest_sequence(trace: Trace, setup: Setup, room: int, block: int = 128) -> int:
    """The most tokens that a sequence may have, in whole blocks."""
    return block * largest(lambda blocks: peak_of(trace.measure(setup.batch, block * blocks, setup.accumulation))[0], room)


_Options = tuple[str, ...]


class Change(NamedTuple):
    """A change of a setup, and the command line's options for it."""

    options: _Options
    setup: Setup


def changes(setup: Setup, fitting: int) -> Iterator[Change]:
    """Changes that take less memory, the cheapest first: what costs no time, then what costs time, then numbers of other
    precision, then GPUs, then another training. `fitting`: the largest batch that fits."""
    smaller: list[tuple[_Options, Setup]] = [((), setup)]
    if 0 < fitting < setup.batch:
        yield Change(("--batch", str(fitting)), setup.but(batch=fitting))
    if not setup.checkpointing:
        smaller.append((("--checkpointing",), setup.but(checkpointing=True)))
    policies: list[tuple[_Options, ShardingPolicy]] = [((), setup.policy)]
    if setup.policy.param_dtype is None and any(p.dtype == torch.float32 for p in setup.source.parameters()):
        policies.append((("--dtype", "bf16"), replace(setup.policy, param_dtype=torch.bfloat16)))
    batches: list[tuple[_Options, int]] = [((), setup.batch), *([(("--batch", "1"), 1)] if setup.batch > 1 else [])]
    all_train = setup.lora is None and all(parameter.requires_grad for parameter in setup.source.parameters())
    ranks: list[tuple[_Options, int]] = [((), setup.ranks)]
    while ranks[-1][1] < MANY_RANKS and len(ranks) < 6:
        more = 2 * ranks[-1][1]
        ranks.append((("--ranks", str(more)), more))
    adapters: list[tuple[_Options, Any]] = [((), setup.lora), *([(("--lora", "16"), 16)] if all_train else [])]
    for with_adapters, lora in adapters:
        for with_ranks, number in ranks:
            for with_policy, policy in policies:
                for with_batch, batch in batches:
                    for with_less, less in smaller:
                        options = (*with_batch, *with_less, *with_policy, *with_ranks, *with_adapters)
                        if options:
                            yield Change(options, less.but(batch=batch, policy=policy, ranks=number, lora=lora))
