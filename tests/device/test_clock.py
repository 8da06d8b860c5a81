"""The clock, by cases that are computed by hand, and by what holds whatever the log is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.device.clock import PCIE, Clocks, Entry, Host, Link, Step
from zero3 import Cluster
from zero3.planning.absent import Awaited, Issued
from zero3.planning.cluster import LINK, PRODUCT, START, STREAM, replay
from zero3.planning.work import Work

pytestmark = pytest.mark.no_device

# Round figures: a product takes 1 ms for each 10^9 FLOPs, other kernels 1 ms for each MB, a transfer 1 ms for each MB and nothing more.
MACHINE = Cluster(flops=1e12 / PRODUCT, memory_bandwidth=1e9 / STREAM, link=1e9 / LINK, latency=1e-12, ranks_per_node=1)
MS, MB = 1e-3, 1e6
BEGIN, END = Entry("m", "step"), Entry("m", "step")
FREE = Host()


def kernel(ms: float, stream: int = 0, kernels: int = 1) -> Entry:
    return Entry("k", "kernel", stream, nbytes=ms * MB, kernels=kernels)


def gather(ms: float, stream: int = 1, group: int = 1) -> Entry:
    return Entry("c", "all_gather", stream, group, nbytes=2 * ms * MB, kernels=2)  # of two ranks, each receives half


def recorded(event: int, stream: int) -> Entry:
    return Entry("r", "", stream, event)


def awaits(event: int, stream: int = 0) -> Entry:
    return Entry("w", "", stream, event)


def replayed(*entries: Entry, host: Host = FREE) -> Step:
    return Clocks(MACHINE, host).replay([BEGIN, *entries, END])[0]


def test_kernels_of_one_stream_run_one_after_another() -> None:
    assert replayed(kernel(2), kernel(3)).seconds == pytest.approx(5 * MS)


def test_a_product_lasts_as_long_as_its_operations_or_its_bytes() -> None:
    """And no kernel is shorter than the least."""
    assert replayed(Entry("k", "mm", flops=4e9, nbytes=1 * MB)).seconds == pytest.approx(4 * MS)
    assert replayed(Entry("k", "mm", flops=4e9, nbytes=9 * MB)).seconds == pytest.approx(9 * MS)
    assert replayed(Entry("k", "mm", flops=1, nbytes=1, kernels=3)).seconds == pytest.approx(3 * START)


def test_a_transfer_beside_computation_costs_what_sticks_out() -> None:
    step = replayed(gather(4), recorded(1, 1), kernel(3), awaits(1), kernel(2))
    assert step.seconds == pytest.approx(6 * MS)
    assert step.exposed == pytest.approx(1 * MS)
    assert step.compute == pytest.approx(5 * MS)


def test_a_forgotten_wait_costs_nothing() -> None:
    assert replayed(gather(4), recorded(1, 1), kernel(3), kernel(2)).seconds == pytest.approx(5 * MS)


def test_a_needless_wait_costs_its_length() -> None:
    step = replayed(gather(4), recorded(1, 1), awaits(1), kernel(3), kernel(2))
    assert step.seconds == pytest.approx(9 * MS)
    assert step.exposed == pytest.approx(4 * MS)


def test_a_wait_is_for_what_was_recorded_and_not_for_what_came_later() -> None:
    assert replayed(gather(4), recorded(1, 1), gather(9), awaits(1), kernel(1)).seconds == pytest.approx(5 * MS)


def test_collectives_of_one_group_run_one_after_another() -> None:
    """On whatever streams."""
    entries = gather(4), gather(3, stream=2), recorded(1, 2), awaits(1), kernel(1)
    assert replayed(*entries).seconds == pytest.approx(8 * MS)


def test_two_groups_share_a_link() -> None:
    """The first keeps it. What both move takes as long as if they had come one after another."""
    entries = gather(4, group=1), gather(3, stream=2, group=2), recorded(1, 2), awaits(1), kernel(1)
    assert replayed(*entries).seconds == pytest.approx(8 * MS)


def test_a_later_group_takes_what_is_left_before_an_earlier_one() -> None:
    """The first group's collective waits for computation, so the link is free until then."""
    link = Link()
    assert link.take(5.0, 2.0) == (5.0, 7.0)
    assert link.take(1.0, 3.0) == (1.0, 4.0)
    assert link.take(3.0, 3.0) == (4.0, 9.0)  # 1 before the first one, 2 behind it
    assert link.take(0.0, 1.0) == (0.0, 1.0)


def test_a_host_that_is_slower_than_the_device_is_what_a_step_takes() -> None:
    step = replayed(*[kernel(1) for _ in range(10)], host=Host(launch=2 * MS))
    assert step.seconds == pytest.approx(21 * MS)
    assert step.starved == pytest.approx(11 * MS)


def test_kernels_count_as_a_gpu_has_them() -> None:
    step = replayed(kernel(1, kernels=7), host=Host(launch=MS))
    assert (step.launches, step.seconds) == (7, pytest.approx(8 * MS))


def test_a_host_wait_sets_the_hosts_time() -> None:
    waiting = Entry("h", "copy_ to host")
    step = replayed(kernel(5), waiting, kernel(1), host=Host(launch=MS))
    assert step.seconds == pytest.approx(8 * MS)
    assert step.waits == ["copy_ to host"]


def test_measured_time_of_the_processor_counts_where_it_is_asked_for() -> None:
    entries = [entry._replace(host=at) for entry, at in ((kernel(1), 0.5), (kernel(1), 0.7), (kernel(1), 1.2))]
    log = [BEGIN._replace(host=0.4), *entries, END._replace(host=1.3)]
    assert Clocks(MACHINE, Host(python=1.0)).replay(log)[0].seconds == pytest.approx(0.9)
    assert Clocks(MACHINE, Host()).replay(log)[0].seconds == pytest.approx(3 * MS)


def test_copies_from_pinned_memory_take_the_bus() -> None:
    assert replayed(Entry("k", "copy_ from pinned memory", nbytes=PCIE)).seconds == pytest.approx(1.0)


def test_memory_that_another_stream_uses_comes_back_when_that_stream_is_done() -> None:
    """`record_stream`: what the host asks for before that is new memory, and what it asks for later is not."""
    size = 32 * 2**20
    made, used, freed = Entry("a", stream=0, id=1, nbytes=size), Entry("u", stream=1, id=1), Entry("f", id=1)
    again = Entry("a", stream=0, id=2, nbytes=size)
    busy = gather(4)
    assert replayed(made, busy, used, freed, again).reserved == 2 * size
    assert replayed(made, busy, used, freed, Entry("h", "wait", 1), again).reserved == size
    assert replayed(made, busy, freed, again).reserved == size


def test_steps_follow_each_other_without_a_wait() -> None:
    log = [BEGIN, gather(9), kernel(2), END, kernel(3), END]
    assert [step.seconds for step in Clocks(MACHINE).replay(log)] == [pytest.approx(2 * MS), pytest.approx(3 * MS)]


streams = st.integers(0, 2)
lengths = st.floats(0.01, 9)
kernels = st.builds(kernel, lengths, streams)
gathers = st.builds(gather, lengths, streams, st.integers(1, 2))
events = st.integers(1, 5)
logs = st.lists(st.one_of(kernels, gathers, st.builds(recorded, events, streams), st.builds(awaits, events, streams)), max_size=40)


@given(logs, st.sampled_from([0.0, 1e-4, 5e-3]))
def test_no_step_is_shorter_than_its_computation_or_its_host(log: list[Entry], launch: float) -> None:
    """Nor are all steps of a link shorter than what goes over it."""
    first = Clocks(MACHINE, Host(launch=launch))
    step = first.replay([BEGIN, *log, *(entry for stream in (1, 2) for entry in (recorded(9, stream), awaits(9))), END])[0]
    assert step.seconds >= step.compute - 1e-9
    assert step.seconds >= launch * step.launches - 1e-9
    assert step.seconds >= step.moved["all_gather"] / 1e9 - 1e-9
    assert step.seconds == pytest.approx(step.compute + step.exposed + step.starved, abs=launch + 1e-6)
    again = Clocks(MACHINE, Host(launch=launch)).replay(
        [BEGIN, *log, *(e for stream in (1, 2) for e in (recorded(9, stream), awaits(9))), END]
    )[0]
    assert again == step


def test_a_group_inside_a_node_leaves_the_link_between_nodes_alone() -> None:
    nodes = Cluster(flops=1e12, memory_bandwidth=1e9, link=1e9 / LINK, latency=1e-12, ranks_per_node=2, node_link=1e9 / LINK)
    near, far = gather(4, group=1), gather(3, stream=2, group=2)._replace(kernels=4, nbytes=3 * MB * 4 / 3)
    log = [BEGIN, near, far, recorded(1, 1), recorded(2, 2), awaits(1), awaits(2), END]
    both = Clocks(nodes).replay(log)[0].seconds
    assert both == pytest.approx(max(4 * MS, Clocks(nodes).replay([each for each in log if each is not near])[0].seconds))


def test_a_link_forgets_nothing_that_is_still_to_come() -> None:
    """However many transfers stand behind it."""
    link = Link()
    for number in range(200):
        link.take(10.0 + 2 * number, 1.0)
    assert link.take(9.5, 1.0) == (9.5, 11.5)


parts = st.lists(
    st.one_of(
        st.builds(lambda ms: Work(0, int(ms * MB), 0, 1), st.floats(0.1, 9)),
        st.tuples(st.sampled_from(["fetch", "backup"]), st.integers(1, 9 * 10**6)),
        st.integers(0, 9),  # waits for the transfer that is so many back
    ),
    max_size=30,
)


@given(parts)
def test_a_plans_replay_is_the_clocks(drawn: list[Any]) -> None:
    """Of a step that both can tell: two lanes on one communicator. The same seconds."""
    events: list[Any] = []
    log, number = [BEGIN], 0
    for part in drawn:
        if isinstance(part, Work):
            events.append(part)
            log.append(Entry("k", "kernel", 0, flops=part.flops, nbytes=part.nbytes))
        elif isinstance(part, tuple):
            number, stream = number + 1, 1 + (part[0] == "backup")
            events.append(Issued(number, part[0], part[1]))
            log += [recorded(1000 + number, 0), awaits(1000 + number, stream)]
            log += [Entry("c", "all_gather", stream, 1, nbytes=2 * part[1], kernels=2), recorded(number, stream)]
        elif number > part:
            events.append(Awaited(number - part))
            log.append(awaits(number - part))
    log += [entry for stream in (1, 2) for entry in (recorded(-stream, stream), awaits(-stream))]
    assert replay(events, MACHINE, 2) == pytest.approx(Clocks(MACHINE).replay([*log, END])[0].seconds, abs=1e-12)
