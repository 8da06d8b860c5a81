"""What a plan chooses where memory is given: the policy that moves least of those that fit, or the
cheapest change that fits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from ..policy import ShardingPolicy
from .limits import Change, levels
from .setup import Setup
from .trace import Trace

__all__: list[str] = []

TRIES = 24  # changes that are tried, at most
# of all frozen buffers: fewer are not worth the comparison that each forward makes for them
LEAST = 0.1


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


class Advice(NamedTuple):
    """A change that was tried and fits, and its peak."""

    change: Change
    peak: int


def advised(setup: Setup, room: int, fitting: int, state: int) -> Advice | None:
    """The cheapest change that fits, tried. `fitting`: the largest batch that fits. `state`: the
    bytes of chunks, their gradients and the optimizer's state, which only more ranks, fewer
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
            less = (Advice(change, peak) for change, peak in peaks if peak is not None)
            return next(less, Advice(level[-1], most))
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
