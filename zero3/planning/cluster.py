"""Machines, and how long a step takes on them: the events of a traced step, replayed over a compute
lane and the transfers' lanes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from ..comm.plain_values import integer
from .absent import Awaited, Issued
from .work import Work

__all__: list[str] = []

# The constants of the model of time; docs/plan.md says where they come from.
PRODUCT = 0.75  # of `flops`, that large matrix products reach, where `GPUS` does not know better
HALF = 64  # the smallest dimension of a product at which it is half as efficient as a large one
STREAM = 0.8  # of `memory_bandwidth`, that operations reach which only move bytes
START = 4e-6  # seconds, that a kernel takes at least
LINK = 0.85  # of a link's bandwidth, that collectives reach


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines that a plan is for. All ranks are alike.

    Attributes:
        flops: Floating-point operations a second of one GPU in the dtype of computation, by its
            data sheet, without sparsity.
        memory_bandwidth: Bytes a second between a GPU and its memory.
        link: Bytes a second that one GPU sends to other nodes, and receives at the same time.
        latency: Seconds that a collective takes at least.
        ranks_per_node: GPUs in a node.
        node_link: Bytes a second that one GPU sends inside its node. None: as `link`.
        host_cost: Seconds that computation loses for each byte that moves, where the processor that
            computes moves it: sockets on CPUs.
        spread: The standard deviation of a rank's step, as a share of it. A step takes as long as
            its slowest rank, so many ranks take longer than few.
        reached: The share of `flops` that large matrix products reach, at most 1.
        straight: Whether each rank sends to each, as over gloo, so that a byte enters a node once
            for each of its ranks that needs it. Otherwise it enters once, as with NCCL.

    Raises:
        ValueError: A number is not positive, `reached` is above 1, or `straight` is no bool.

    Example::

        links = {"link": 50e9, "ranks_per_node": 8, "node_link": 450e9}
        cluster = zero3.Cluster(flops=989e12, memory_bandwidth=3.35e12, **links)
        print(zero3.plan(directory, ranks=16, cluster=cluster).seconds)
    """

    flops: float
    memory_bandwidth: float
    link: float
    latency: float = 20e-6
    ranks_per_node: int = 8
    node_link: float | None = None
    host_cost: float = 0.0
    spread: float = 0.0
    reached: float = PRODUCT
    straight: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.straight, bool):
            raise ValueError(f"straight must be True or False, found {self.straight!r}")
        for field in fields(self)[:-1]:
            number = getattr(self, field.name)
            wrong = not isinstance(number, float) and integer(number) is None
            if number != field.default and (wrong or not number > 0):  # NaN is neither
                raise ValueError(f"{field.name} must be a number above 0, found {number!r}")
        if self.reached > 1:
            raise ValueError(f"reached is a share, at most 1, found {self.reached!r}")

    def moving(self, nbytes: int, ranks: int, apart: int = 1) -> float:
        """The seconds in which each of so many `ranks` receives `nbytes` from the others, in slices
        of equal size.

        `apart`: each is the `apart`-th after the one before, as those that hold the same chunk are
        on a mesh.
        """
        if ranks == 1:
            return 0.0
        near = max(1, self.ranks_per_node // apart)  # of these ranks, those in one node
        if ranks <= near:
            return self.latency + nbytes / (LINK * (self.node_link or self.link))
        # Between nodes, each byte enters a node once, over the links of all these ranks in it.
        # Inside, it goes on to the others. (Or each goes `straight` to its rank, over that rank's
        # link.)
        outside = 1 - (near - 1) / (ranks - 1)
        between = nbytes * outside / (self.link if self.straight else near * self.link)
        inside = nbytes / (self.node_link or self.link) if near > 1 else 0.0
        return self.latency * (1 + math.log2(ranks / near)) + max(between, inside) / LINK

    def slowest(self, ranks: int) -> float:
        """How much longer the slowest of `ranks` takes than their mean: the largest of so many
        deviations of a normal distribution.
        """
        return 1 + self.spread * math.sqrt(2 * math.log(ranks))

    def computing(self, work: Work) -> float:
        """The seconds that a GPU takes for `work`, as a trace has it."""
        moved = work.nbytes / (STREAM * self.memory_bandwidth)
        full = work.narrow / (work.narrow + HALF) if work.narrow else 1.0
        return max(work.flops / (self.flops * self.reached * full), moved, START * work.kernels)


_AMPERE, _HOPPER = 0.70, 0.48  # fitted to published steps, see docs/plan.md

# By data sheets: dense bf16, memory, NVLink in one direction. And the share that products reach.
GPUS = MappingProxyType(
    {
        "a100": (312e12, 2.04e12, 300e9, _AMPERE),
        "a100-40": (312e12, 1.555e12, 300e9, _AMPERE),
        "h100": (989e12, 3.35e12, 450e9, _HOPPER),
        "h100-500w": (989e12, 2.4e12, 450e9, _HOPPER),  # its power is limited; 96 GB of HBM2e
        "h200": (989e12, 4.8e12, 450e9, _HOPPER),
        "b200": (2250e12, 8.0e12, 900e9, PRODUCT),
        "4090": (165e12, 1.01e12, 32e9, PRODUCT),
        "l40s": (362e12, 0.86e12, 32e9, PRODUCT),
    }
)


def cluster_of(gpu: str, link: float) -> Cluster:
    """The cluster of known GPUs, eight to a node, with a `link` in bytes a second each."""
    if gpu.lower() not in GPUS:
        raise ValueError(f"--gpu must be one of {', '.join(GPUS)}, found {gpu!r}")
    flops, memory_bandwidth, node_link, reached = GPUS[gpu.lower()]
    return Cluster(flops, memory_bandwidth, link, node_link=node_link, reached=reached)


def replay(
    events: Iterable[Any],
    cluster: Cluster,
    ranks: int,
    *,
    replicas: int = 1,
    one_queue: bool = True,
) -> float:
    """The seconds of a step. `one_queue`: one communicator makes all fetches and backups, one after
    another.

    Sums over `replicas` have a communicator of their own. Each begins after the backup that was
    issued before it.
    """
    now, shards = 0.0, ranks // replicas
    free = {"fetch": 0.0, "backup": 0.0, "replicas": 0.0}  # when each lane is done with what it has
    ends: dict[int, float] = {}
    together = {"fetch", "backup"} if one_queue else set[str]()
    for event in events:
        if isinstance(event, Work):
            now += cluster.computing(event)
        elif isinstance(event, Issued):
            now += cluster.host_cost * event.nbytes
            among, apart = (replicas, shards) if event.lane == "replicas" else (shards, 1)
            after = {event.lane} | ({"backup"} if event.lane == "replicas" else together)
            begin = max(now, *(free[lane] for lane in after))
            free[event.lane] = ends[event.number] = begin + cluster.moving(
                event.nbytes, among, apart
            )
        elif isinstance(event, Awaited):
            now = max(now, ends[event.number])
    return max(now, *free.values()) * cluster.slowest(ranks)
