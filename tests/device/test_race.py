"""zero3 beside FSDP2 on the simulated GPU: a small model on eight ranks, counted. Nothing here depends on how fast the machine is.

What zero3 takes may only shrink: `MOST`. Cells of real sizes are in benchmarks/race.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

MOST = {
    "launches": 520,
    "gathered": 48_643_056,
    "copies": 95,
    "copied": 222_854_728,
    "exposed": 146.3e-6,
    "allocated": 105_101_824,
    "collectives": 18,
}
# In what zero3 takes more than FSDP2, which is to be no more: goals that are not reached, and may only come nearer.
# The README of the race says what is known of them.
MISSED = {"requested": 200, "allocated": 308_736, "exposed": 24.1e-6}


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    """A steady step of zero3, and one of FSDP2 that keeps its last layer, as zero3 does; with a host that is free, and one that is not."""
    from benchmarks.race.machines import H100
    from benchmarks.race.record import logged
    from benchmarks.race.runs import Run
    from tests.device.clock import HOSTS, Clocks

    found: dict[str, Any] = {}
    ours = Run("zero3", "small", 8, 2, 256)
    for name, run in {"zero3": ours, "fsdp2": replace(ours, system="fsdp2", chosen=("keep_last",)), "again": ours}.items():
        log = logged(run, steps=2)
        for host in ("free", "launches"):
            found[f"{name}, {host}"] = Clocks(H100, HOSTS[host]).replay(log)[-1]
    return found


@pytest.mark.parametrize("host", ["free", "launches"])
def test_what_is_recorded_twice_has_the_same_figures(steps: dict[str, Any], host: str) -> None:
    """Bit for bit: times, counts, memory."""
    assert steps[f"again, {host}"] == steps[f"zero3, {host}"]


def test_experts_at_home_send_less_and_wait_once_for_each_call() -> None:
    """Three blocks of four experts, on four ranks: the model's code is the same."""
    from benchmarks.race.machines import H100
    from benchmarks.race.record import logged
    from benchmarks.race.runs import Run
    from tests.device.clock import HOSTS, Clocks

    gathers = Run("zero3", "tiny-moe", 4, 1, 32)
    systems = {"home": replace(gathers, chosen=("expert_parallel",)), "gathered": gathers, "fsdp2": replace(gathers, system="fsdp2")}
    found = {name: Clocks(H100, HOSTS["free"]).replay(logged(run, steps=2))[-1] for name, run in systems.items()}
    assert found["home"].collectives["all_to_all"] == 3 * 5
    assert len(found["home"].waits) == 3 and not found["gathered"].waits
    assert found["home"].moved["reduce_scatter"] < found["gathered"].moved["reduce_scatter"] / 2
    sent = {name: sum(each.moved.values()) for name, each in found.items()}
    assert sent["home"] < sent["gathered"] < 1.01 * sent["fsdp2"]


def test_parts_of_sequences_hold_less_and_exchange_six_times_a_block() -> None:
    """Three blocks that are recomputed, on two ranks: there and back in forward, again, and in backward."""
    from benchmarks.race.machines import H100
    from benchmarks.race.record import logged
    from benchmarks.race.runs import LONG, Run
    from tests.device.clock import HOSTS, Clocks

    whole = Run("zero3", "tiny", 2, 1, 1 << 14, "full")
    parts = replace(whole, chosen=(LONG,))
    found = {run: Clocks(H100, HOSTS["free"]).replay(logged(run, steps=2))[-1] for run in (whole, parts)}
    assert found[parts].collectives["all_to_all"] == 3 * 6 and not found[whole].collectives["all_to_all"]
    assert 2 * parts.tokens == whole.tokens and any("pinned memory" in name for name, _ in found[parts].kernels)
    assert found[parts].allocated < found[whole].allocated / 2


def test_zero3_asks_for_no_more_than_fsdp2(steps: dict[str, Any]) -> None:
    ours, theirs = steps["zero3, free"], steps["fsdp2, free"]
    assert ours.launches <= theirs.launches
    assert ours.collectives["reduce_scatter"] <= theirs.collectives["reduce_scatter"]
    assert ours.collectives["all_gather"] <= theirs.collectives["all_gather"]
    assert ours.moved["all_gather"] <= theirs.moved["all_gather"]
    assert ours.copies_in_compute <= theirs.copies_in_compute
    assert ours.copied[0] <= theirs.copied[0]
    assert not ours.waits


@pytest.mark.parametrize("host", ["free", "launches"])
def test_zero3s_step_takes_no_longer_than_fsdp2s(steps: dict[str, Any], host: str) -> None:
    """Ratios up to 1.02 are equal."""
    assert steps[f"zero3, {host}"].seconds <= 1.02 * steps[f"fsdp2, {host}"].seconds


def test_zero3_holds_no_more_than_fsdp2_at_the_same_gathers(steps: dict[str, Any]) -> None:
    """But for what is known to be missed."""
    ours, theirs = steps["zero3, free"], steps["fsdp2, free"]
    assert ours.requested <= theirs.requested + MISSED["requested"]
    assert ours.allocated <= theirs.allocated + MISSED["allocated"]  # torch's allocator gives whole blocks
    assert ours.reserved <= theirs.reserved


def test_zero3_exposes_no_more_than_fsdp2(steps: dict[str, Any]) -> None:
    """Where the host counts; where it is free, but for what is known to be missed."""
    assert steps["zero3, launches"].exposed <= steps["fsdp2, launches"].exposed
    assert steps["zero3, free"].exposed <= steps["fsdp2, free"].exposed + MISSED["exposed"]


def test_what_zero3_takes_only_shrinks(steps: dict[str, Any]) -> None:
    ours = steps["zero3, free"]
    found = {
        "launches": ours.launches, "gathered": ours.moved["all_gather"], "copies": ours.copies_in_compute, "copied": ours.copied[0],
        "exposed": ours.exposed, "allocated": ours.allocated, "collectives": ours.collectives.total(),
    }  # fmt: skip
    assert not {name: (found[name], most) for name, most in MOST.items() if found[name] > most}
