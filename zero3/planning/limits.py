"""What fits: the largest batch and sequence, the policy that moves least, and the cheapest change
that makes a plan fit. All of it is tried, not estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from ..policy import ShardingPolicy
from ..quantized.formats import NF4
from .setup import Setup
from .trace import Trace

__all__: list[str] = []

_MOST = 1 << 16  # no batch or number of blocks of tokens is looked for beyond it
MANY_RANKS = 1024
TRIES = 24  # changes that are tried, at most
# of all frozen buffers: fewer are not worth the comparison that each forward makes for them
LEAST = 0.1


def largest(peak: Callable[[int], int], room: int, first: int = 1) -> int:
    """The largest number n with `peak(n) <= room`; 0 if not even 1. `first`: which to try first.

    A peak is the largest of several sums that grow with n in straight lines. So a line through two
    numbers that were tried tells which to try next, and few have to be.
    """
    low, high = (0, 0), (first, peak(first))
    if first > 1 and high[1] > room:
        low = (1, peak(1))
        if low[1] > room:
            return 0
    while high[1] <= room and high[0] < _MOST:
        before, low = low, high
        slope = (low[1] - before[1]) / (low[0] - before[0]) if before[0] else 0.0
        ahead = low[0] + int((room - low[1]) / slope) + 1 if slope > 0 else 2 * low[0]
        number = min(max(ahead, low[0] + 1), 8 * low[0], _MOST)
        high = (number, peak(number))
    if high[1] <= room:
        return high[0]
    halve = not low[0]
    while (between := high[0] - low[0]) > 1:
        share = 0.5 if halve else (room - low[1]) / (high[1] - low[1])
        number = low[0] + min(max(int(share * between), 1), between - 1)
        found = (number, peak(number))
        low, high = (found, high) if found[1] <= room else (low, found)
        # where lines bend between the two, one of them may hardly move
        halve = not low[0] or 2 * (high[0] - low[0]) > between
    return low[0]


def largest_batch(trace: Trace, setup: Setup, room: int) -> int:
    """The most sequences a micro-batch may have."""
    found = largest(
        lambda batch: trace.peak(batch, setup.sequence, setup.accumulation), room, setup.batch
    )
    return found if found and setup.holds(found) else 0


def largest_sequence(trace: Trace, setup: Setup, room: int, block: int = 128) -> int:
    """The most tokens that a sequence may have, in whole blocks."""
    return block * largest(
        lambda blocks: trace.peak(setup.batch, block * blocks, setup.accumulation),
        room,
        max(1, setup.sequence // block),
    )


_Options = tuple[str, ...]


class Change(NamedTuple):
    """A change of a setup, and the command line's options for it."""

    options: _Options
    setup: Setup


def levels(setup: Setup, fitting: int) -> Iterator[list[Change]]:
    """Changes that take less memory, the cheapest first: what costs no time, then communication,
    then computation, then numbers of other precision, then the host's memory, then GPUs, then
    another training. In a level each takes less than those before it. `fitting`: the largest batch
    that fits.
    """
    if 0 < fitting < setup.batch:
        yield [Change(("--batch", str(fitting)), setup.but(batch=fitting))]
    options, policy = _thrifty(setup.policy)
    if options:
        yield [Change(options, setup.but(policy=policy))]
    tried = (setup, setup.but(policy=policy))
    for with_training, training in _trainings(setup.but(policy=policy)):
        for with_ranks, ranks in _more_room(training):
            for with_bits, bits in _fewer_bits(ranks):
                others = (*with_bits, *with_ranks, *with_training)
                level = [
                    Change((*with_batch, *with_less, *options, *with_dtype, *others), last)
                    for with_dtype, dtype in _compute_dtypes(bits)
                    for with_batch, batch in _smaller_batches(dtype)
                    for with_less, last in _checkpoints(batch)
                ]
                if level := [change for change in level if change.setup not in tried]:
                    yield level


def _thrifty(policy: ShardingPolicy) -> tuple[_Options, ShardingPolicy]:
    """The policy without what it spends memory on, in order to communicate less."""
    options: _Options = ("--stage", "3") if policy.stage != 3 else ()
    options += ("--no-keep",) if not policy.reshard_after_forward else ()
    options += ("--resident", "0") if policy.resident_bytes else ()
    return options, replace(policy, stage=3, reshard_after_forward=True, resident_bytes=0)


def _or(setup: Setup, other: Setup | None, *options: str) -> list[Change]:
    """The setup as it is and, if there is one, the other."""
    return [Change((), setup), *([] if other is None else [Change(options, other)])]


def _checkpoints(setup: Setup) -> list[Change]:
    more = None if setup.checkpointing else setup.but(checkpointing=True)
    return _or(setup, more, "--checkpointing")


def _smaller_batches(setup: Setup) -> list[Change]:
    one = setup.but(batch=1) if setup.batch > 1 and setup.holds(1) else None
    return _or(setup, one, "--batch", "1")


def _compute_dtypes(setup: Setup) -> list[Change]:
    wide = any(parameter.dtype == torch.float32 for parameter in setup.source.parameters())
    may = setup.policy.param_dtype is None and wide
    half = setup.with_policy(param_dtype=torch.bfloat16) if may else None
    return _or(setup, half, "--dtype", "bf16")


def _fewer_bits(setup: Setup) -> list[Change]:
    four = setup.with_policy(quantize=NF4()) if setup.may_quantize else None
    return _or(setup, four, "--quantize", "nf4")


def _more_room(setup: Setup) -> list[Change]:
    """Fewer replicas of the same ranks, then the memory of the host, then more ranks."""
    found = [Change((), setup)]
    for replicas in range(setup.replicas - 1, 0, -1):
        if setup.ranks % replicas == 0:
            shards = setup.ranks // replicas
            fewer = setup.but(mesh=(replicas, shards))
            found.append(Change(("--mesh", f"{replicas}x{shards}"), fewer))
    if setup.device == "cuda" and setup.policy.offload is None:
        options, fewest = found[-1]
        found.append(Change((*options, "--offload", "cpu"), fewest.with_policy(offload="cpu")))
    for ranks in [setup.ranks << doublings for doublings in range(1, 6)]:
        options = () if setup.mesh is None else ("--mesh", f"1x{ranks}")
        if ranks <= MANY_RANKS:
            more = setup.but(ranks=ranks, mesh=setup.mesh and (1, ranks))
            found.append(Change(("--ranks", str(ranks), *options), more))
    return found


def _trainings(setup: Setup) -> list[Change]:
    """The same, and adapters in place of a whole model."""
    whole = all(parameter.requires_grad for parameter in setup.source.parameters())
    return _or(setup, setup.but(lora=16) if whole and setup.lora is None else None, "--lora", "16")


def roomier(setup: Setup, trace: Trace, room: int, peak: int) -> ShardingPolicy:
    """The setup's policy or, if they fit: chunks that are not offloaded, frozen buffers that stay
    from step to step, and a gather a step for the others.

    `trace` and `peak`: the setup's own.
    """
    policy = setup.policy
    if trace.offloads:
        here = setup.with_policy(offload=None)
        other = here.trace()
        if (needed := other.peak(*setup.sizes)) <= room:
            return roomier(here, other, room, needed)
    if setup.shards == 1 or policy.stage != 3 or policy.expert_parallel:
        return policy
    sums = list(accumulate(trace.frozen_buffers))
    more = sums and sums[-1] > policy.resident_bytes
    if more and (kept := _most_resident(setup, sums, room, peak)) is not None:
        policy = replace(policy, resident_bytes=kept)
    # else no room is left
    again = trace.trains_in_layers and policy.resident_bytes >= sum(trace.frozen_buffers)
    if again and policy.reshard_after_forward:
        once = replace(policy, reshard_after_forward=False)
        policy = once if _peak_in(setup.but(policy=once)) <= room else policy
    return policy


def _most_resident(setup: Setup, sums: list[int], room: int, peak: int) -> int | None:
    """How many bytes of frozen buffers may stay: of those of the first layers, all that fit.
    `sums`: of the first one, two and so on.
    """
    # a peak has some of them already
    surely = sum(1 for nbytes in sums if nbytes <= room - peak + setup.policy.resident_bytes)
    found = None
    for number in range(max(surely, 1), len(sums) + 1):
        if _peak_in(setup.with_policy(resident_bytes=sums[number - 1])) > room:
            break
        found = sums[number - 1]
    enough = max(setup.policy.resident_bytes, LEAST * sums[-1])
    return found if found is not None and found > enough else None


def _peak_in(setup: Setup) -> int:
    return setup.trace().peak(*setup.sizes)


def advised(setup: Setup, room: int, fitting: int, state: int) -> tuple[Change, int] | None:
    """The cheapest change that fits, and its peak. `fitting`: the largest batch that fits. `state`:
    the bytes of chunks, their gradients and the optimizer's state, which only more ranks, fewer
    replicas, offload, adapters and fewer bits make less.

    Changes stand in levels, the cheap ones first. If all that a level allows together does not fit,
    nothing in it does.
    """
    tries = 0

    def fits(change: Change) -> int | None:
        nonlocal tries
        tries += 1
        peak = _peak_in(change.setup)
        return peak if peak <= room else None

    for level in levels(setup, fitting):
        if tries >= TRIES:
            break
        if _at_least(level[-1].setup, setup, state) > room:
            continue
        if (most := fits(level[-1])) is not None:
            peaks = ((change, fits(change)) for change in level[:-1])
            less = ((change, peak) for change, peak in peaks if peak is not None)
            return next(less, (level[-1], most))
    return None


def _at_least(last: Setup, setup: Setup, state: int) -> int:
    """Bytes that a rank holds in any case, without a trace of `last`: a change of `setup`."""
    if last.policy.offload is not None:
        return 0
    if last.policy.quantize != setup.policy.quantize:
        return sum(parameter.numel() for parameter in setup.source.parameters()) // 2 // last.shards
    if last.lora != setup.lora:
        return sum(parameter.nbytes for parameter in setup.source.parameters()) // last.shards
    return state * setup.shards // last.shards
