"""Virtual time: replays what hosts asked of the simulated device (`C.take_log`) on the clocks of a cluster. One log, many machines.

Each stream, the host and the links have a time. A kernel starts when the host has launched it and its stream has come there, and lasts as
`Cluster.computing` says; `record` keeps a stream's time, `wait` takes the later one, and a host that waits is there when the stream is. A
collective begins after the earlier ones of its communicator, and lasts as `Cluster.moving` says; where other communicators' hold the link
before it, it takes what they leave. The constants are those of `zero3.plan`. All ranks are thought to do as this one does.

What it leaves out: kernels that run at once slow each other down; collectives take no part of the GPU; nobody is late.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.device.caching import CachingAllocator
from zero3 import Cluster
from zero3.planning.work import Work

PCIE = 50e9  # bytes a second between pinned memory and a GPU: PCIe 5.0 x16 by its data sheet, 64e9, less what a link loses


class Entry(NamedTuple):
    """What a host asked for. `kind`: see tests/device/src/log.h."""

    kind: str
    name: str = ""
    stream: int = 0
    id: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    narrow: float = 0.0
    kernels: int = 1  # of a collective: its ranks
    host: float = 0.0  # seconds of the processor so far


class Host(NamedTuple):
    """What the host takes, in seconds. `python`: of what this machine's processor took, the share that counts."""

    launch: float = 0.0  # of a kernel, a copy or a collective
    event: float = 0.0  # to record one, or to wait for one
    python: float = 0.0


# Always named where a time stands. (5 us: what torch's eager mode takes to launch a small kernel from C++.)
HOSTS = {"free": Host(), "launches": Host(5e-6, 1e-6), "python": Host(5e-6, 1e-6, 1.0)}


class Span(NamedTuple):
    lane: str  # "compute", "gather", "reduce", "other", "side" or "host"
    begin: float
    end: float
    name: str
    stream: int


@dataclass
class Step:
    """One step. Times in seconds, memory in bytes."""

    seconds: float = 0.0
    compute: float = 0.0  # in which the compute stream runs kernels
    exposed: float = 0.0  # in which it waits for other streams
    starved: float = 0.0  # in which it waits for the host
    host: float = 0.0  # in which the host works, or waits
    launches: int = 0
    kernels: Counter[tuple[str, int]] = field(default_factory=Counter)  # launches by name and stream
    spent: Counter[tuple[str, int]] = field(default_factory=Counter)  # seconds by name and stream
    collectives: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)  # bytes that a rank receives, by kind of collective
    copies: Counter[int] = field(default_factory=Counter)  # kernels that only copy, by stream
    copied: Counter[int] = field(default_factory=Counter)  # bytes that they read and write, by stream
    waits: list[str] = field(default_factory=list)  # what the host waited for
    phases: dict[str, float] = field(default_factory=dict)  # until when each mark's part lasted, from the step's begin
    allocated: int = 0  # at most
    requested: int = 0
    active: int = 0
    reserved: int = 0
    segments: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def copies_in_compute(self) -> int:
        return self.copies[0]


COPIES = ("copy_", "_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "cat", "clone")
LANES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "reduce"}


def received(kind: str, nbytes: float, ranks: int) -> float:
    """What a rank receives in a collective over `nbytes` in all."""
    share = (ranks - 1) / ranks
    return nbytes * {"all_reduce": 2 * share, "broadcast": 1.0, "scatter": 1 / ranks}.get(kind, share)


class Link:
    """Who holds a link, from when to when. Communicators share its bandwidth: the first keeps it, and later ones take what is left."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []  # in order, apart

    def take(self, begin: float, seconds: float) -> tuple[float, float]:
        """When a transfer that is ready at `begin`, and lasts so long alone, begins and ends."""
        left, at, first = seconds, begin, None
        for start, end in self._taken:
            if end <= at:
                continue
            if start > at:
                first = at if first is None else first
                if start - at >= left:
                    break
                left -= start - at
            at = end
        first = at if first is None else first
        self._taken = _joined([*self._taken, (first, at + left)])
        return first, at + left


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


class Clocks:
    """The clocks of one rank, and its allocator."""

    def __init__(self, cluster: Cluster, host: Host = HOSTS["free"], *, expandable: bool = False, spans: bool = False) -> None:
        """`spans`: whether each step keeps what its lanes did, for pictures."""
        self.host = 0.0
        self.memory = CachingAllocator(expandable=expandable)
        self._cluster, self._cost, self._keeps = cluster, host, spans
        self._streams: defaultdict[int, float] = defaultdict(float)  # when each has done what it was asked so far
        self._busy: defaultdict[int, float] = defaultdict(float)  # when its last kernel ends
        self._events: dict[int, float] = {}
        self._links, self._communicators = {True: Link(), False: Link()}, defaultdict[int, float](float)
        self._processor: float | None = None
        self._lasting: dict[tuple[float, float, float, int], float] = {}
        self._step, self._began, self._host_began = Step(), 0.0, 0.0
        self._known = {
            "k": self._kernel, "a": self._allocation, "f": self._free, "r": self._record, "w": self._wait,
            "c": self._collective, "u": self._use, "h": self._host_waits, "e": self._host_waits, "d": self._host_waits,
        }  # fmt: skip

    def replay(self, log: Iterable[Any], step: str = "step") -> list[Step]:
        """The steps, each from a mark `step` to the next one. A step begins when the compute stream comes to its mark."""
        steps: list[Step] = []
        share = self._cost.python
        for each in log:
            entry = Entry(*each)
            if share:
                self.host += share * max(0.0, entry.host - (entry.host if self._processor is None else self._processor))
                self._processor = entry.host
            if entry.kind != "m":
                self._known[entry.kind](entry)
                continue
            now = max(self.host, self._streams[0])
            if entry.name == step:
                steps.append(self._close(now))
                self._began, self._step = now, Step()
                self._host_began = self.host
                self.memory.forget_peaks()
            else:
                self._step.phases[entry.name] = now - self._began
        return steps[1:]  # without what was before the first

    def _close(self, now: float) -> Step:
        done, memory = self._step, self.memory
        self._stands_still(now)
        done.seconds, done.host = now - self._began, self.host - self._host_began
        done.allocated, done.active, done.reserved = memory.peak_allocated, memory.peak_active, memory.peak_reserved
        done.requested = memory.peak_requested
        done.segments = memory.segments
        done.spans = [span._replace(begin=span.begin - self._began, end=span.end - self._began) for span in done.spans]
        return done

    def _span(self, lane: str, begin: float, end: float, name: str, stream: int) -> None:
        if self._keeps:
            self._step.spans.append(Span(lane, begin, end, name, stream))

    def _kernel(self, entry: Entry) -> None:
        step, stream = self._step, entry.stream
        self._host_works(self._cost.launch * entry.kernels, entry.name)
        key = entry.flops, entry.nbytes, entry.narrow, entry.kernels
        if (lasts := self._lasting.get(key)) is None:
            work = Work(int(entry.flops), int(entry.nbytes), int(entry.narrow), entry.kernels)
            lasts = self._lasting[key] = self._cluster.computing(work)
        if "pinned memory" in entry.name:
            lasts = entry.nbytes / PCIE
        ready = self._streams[stream]
        begin = max(self.host, ready)
        if stream == 0:
            self._stands_still(begin)
            step.compute += lasts
        self._streams[stream] = self._busy[stream] = begin + lasts
        step.launches += entry.kernels
        step.kernels[entry.name, stream] += entry.kernels
        step.spent[entry.name, stream] += lasts
        if entry.name.removeprefix("aten::").partition(".")[0] in COPIES:
            step.copies[stream] += entry.kernels
            step.copied[stream] += int(entry.nbytes)
        self._span("compute" if stream == 0 else "side", begin, begin + lasts, entry.name, stream)

    def _stands_still(self, until: float) -> None:
        """The compute stream has had nothing to do: the host's is what it was free for and had not been told, all else is exposed."""
        starved = max(0.0, min(until, self.host) - max(self._streams[0], self._began))
        self._step.starved += starved
        self._step.exposed += max(0.0, until - max(self._busy[0], self._began)) - starved

    def _host_works(self, seconds: float, name: str) -> None:
        if seconds and self._keeps:
            self._span("host", self.host, self.host + seconds, name, -1)
        self.host += seconds

    def _record(self, entry: Entry) -> None:
        self.host += self._cost.event
        self._events[entry.id] = self._streams[entry.stream]

    def _wait(self, entry: Entry) -> None:
        self.host += self._cost.event
        self._streams[entry.stream] = max(self._streams[entry.stream], self._events.get(entry.id, 0.0))

    def _collective(self, entry: Entry) -> None:
        step, stream = self._step, entry.stream
        self._host_works(self._cost.launch, entry.name)
        step.launches += 1
        step.collectives[entry.name] += 1
        nbytes = received(entry.name, entry.nbytes, entry.kernels)
        step.moved[entry.name] += int(nbytes)
        ready = max(self.host, self._streams[stream], self._communicators[entry.id])
        link = self._links[entry.kernels <= self._cluster.ranks_per_node]  # NVLink, or that between nodes
        begin, end = link.take(ready, self._cluster.moving(int(nbytes), entry.kernels))
        if stream == 0:  # compute waits for it
            self._stands_still(begin)
            step.exposed += end - begin
            self._busy[0] = end
        self._streams[stream] = self._communicators[entry.id] = end
        self._span(LANES.get(entry.name, "other"), begin, end, entry.name, stream)

    def _host_waits(self, entry: Entry) -> None:
        until = {
            "h": lambda: self._streams[entry.stream],
            "e": lambda: self._events.get(entry.id, 0.0),
            "d": lambda: max(self._streams.values(), default=0.0),
        }[entry.kind]()
        self._step.waits.append(entry.name)
        self.host = max(self.host, until)

    def _allocation(self, entry: Entry) -> None:
        self.memory.allocate(entry.id, entry.nbytes, entry.stream, self.host)

    def _free(self, entry: Entry) -> None:
        self.memory.free(entry.id, self._streams.__getitem__)

    def _use(self, entry: Entry) -> None:
        self.memory.use(entry.id, entry.stream)
