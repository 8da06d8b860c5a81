"""Do plans rank policies and meshes as benchmarks/fabric measured them?

    python -m benchmarks.plan.ranking

The measured steps are three tables of benchmarks/fabric/README.md: policies of zero3 on two ranks; replicas, and replicas and eight
bits, with two ranks at each end. Nothing is fitted to them but the speed of computation, which is that of the same run's "no
communication"; the processor's seconds a byte are those of `benchmarks.plan.fabric`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import zero3
from benchmarks.common.model import Size
from benchmarks.common.report import markdown
from benchmarks.common.systems import NO_COMMUNICATION, POLICIES
from benchmarks.plan import fabric
from zero3.planning.cluster import LINK, replay

SIZE = Size(batch=1, sequence=64)
INSIDE = 12e9  # bytes a second between the ranks of an end, where nothing is limited: of the order of a memory's
ALIKE = 0.08  # of a step: measured differences below it mean nothing on such a machine


@dataclass
class Run:
    """Systems that were measured together. In seconds."""

    gbits: float
    at_an_end: int  # ranks
    micro_batches: int
    computing: float
    systems: dict[str, float]


# Heading of a table -> what the first cell of its rows stands for.
TABLES: dict[str, Callable[[float, float, dict[str, float]], Run]] = {
    "## Policies of zero3": lambda gbits, *times: Run(gbits, 1, 1, *times),
    "### With nothing else on the machine": lambda micro_batches, *times: Run(1.0, 2, int(micro_batches), *times),
    "## Replicas and eight bits over a slow link": lambda micro_batches, *times: Run(0.25, 2, int(micro_batches), *times),
}
ROW = re.compile(r"^\|\s*([\d.]*)\s*\|\s*([^|(]+?)\s*(?:\([^|]*)?\|\s*(\d+) \(", re.MULTILINE)  # what stands in brackets is a field


def measured() -> list[Run]:
    found: list[Run] = []
    for heading, run_of in TABLES.items():
        section = fabric.MEASURED.read_text().partition(f"\n{heading}\n")[2].partition("\n##")[0]
        rows = [(first, system, int(milliseconds) / 1e3) for first, system, milliseconds in ROW.findall(section)]
        computing = {first: seconds for first, system, seconds in rows if system == NO_COMMUNICATION}
        ours = [row for row in rows if row[1].startswith("zero3")]
        for number in dict.fromkeys(first for first, *_ in ours):
            systems = {system: seconds for first, system, seconds in ours if first == number}
            found.append(run_of(float(number), computing.get(number) or computing[""], systems))
    return found


def predicted(run: Run, system: str, host_cost: float) -> float:
    eight = zero3.Int8() if "int8" in system else None
    policy = zero3.ShardingPolicy(gather_format=eight, reduce_format=eight, **POLICIES.get(system, {}))
    ranks, replicas = 2 * run.at_an_end, 2 if "HSDP" in system else 1
    step = fabric.events(policy, SIZE, ranks, replicas, run.micro_batches)
    link = fabric.SHARE * run.gbits * 1e9 / 8 / LINK / run.at_an_end  # its ranks share the cable
    ends = replace(
        fabric.host(run.computing, SIZE, run.micro_batches), link=link, host_cost=host_cost, ranks_per_node=run.at_an_end,
        node_link=INSIDE, straight=True,
    )  # fmt: skip
    return replay(step, ends, ranks, replicas=replicas)


def pairs(found: dict[str, float]) -> list[tuple[str, str]]:
    """Which system was faster than which, where the difference means something."""
    return [
        (fast, slow)
        for fast, slow in combinations(sorted(found, key=lambda name: found[name]), 2)
        if found[slow] > (1 + ALIKE) * found[fast]
    ]


def main() -> None:
    host_cost = fabric.fit(fabric.events(), fabric.measured())
    rows, right, total = [], 0, 0
    for run in measured():
        told = {system: predicted(run, system, host_cost) for system in run.systems}
        right += sum(told[fast] < told[slow] for fast, slow in pairs(run.systems))
        total += len(pairs(run.systems))
        for system in sorted(run.systems, key=lambda name: run.systems[name]):
            seconds, error = run.systems[system], told[system] / run.systems[system] - 1
            where = [2 * run.at_an_end, f"{run.gbits:g}", run.micro_batches]
            rows.append([*where, system, f"{1e3 * seconds:.0f}", f"{1e3 * told[system]:.0f} ({error:+.1%})"])
    print(markdown(["ranks", "Gbit/s", "micro-batches", "system", "measured ms", "predicted"], rows))
    print(f"\n{right} of {total} pairs that differ by more than {ALIKE:.0%} are ranked as measured")


if __name__ == "__main__":
    main()
