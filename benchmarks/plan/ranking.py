"""Do plans rank policies as benchmarks/fabric measured them?

    python -m benchmarks.plan.ranking

The measured steps are the table "Policies of zero3" of benchmarks/fabric/README.md. Nothing is fitted to them but the speed of
computation, which is that of the same run's "no communication"; the processor's seconds a byte are those of `benchmarks.plan.fabric`.
"""

from __future__ import annotations

import re
from itertools import combinations

import zero3
from benchmarks.common.model import Size
from benchmarks.common.report import markdown
from benchmarks.common.systems import POLICIES
from benchmarks.plan import fabric

SIZE = Size(batch=1, sequence=64)
SECTION = "\n## Policies of zero3"
ALIKE = 0.08  # of a step: measured differences below it mean nothing on such a machine


def measured() -> tuple[float, dict[float, dict[str, float]]]:
    """The seconds of computation, and those of a step: rate in Gbit/s -> system -> seconds."""
    computing, found = 0.0, dict[float, dict[str, float]]()
    for line in fabric.MEASURED.read_text().partition(SECTION)[2].splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")] if line.startswith("|") else []
        if "no communication" in line:
            computing = int(re.search(r"(\d+) \(", line)[1]) / 1e3  # type: ignore[index]
        elif len(cells) > 2 and (time := re.match(r"(\d+) \(", cells[2])):
            system = cells[1].partition(" (")[0]  # what follows is the field
            found.setdefault(float(cells[0]), {})[system] = int(time[1]) / 1e3
    return computing, found


def predicted(computing: float, rate: float, system: str, host_cost: float) -> float:
    policy = zero3.ShardingPolicy(**POLICIES.get(system, {}))
    step = fabric.events(policy, SIZE)
    return fabric.predicted(step, fabric.Measured(rate, computing, 0.0), host_cost, SIZE)


def pairs(found: dict[str, float]) -> list[tuple[str, str]]:
    """Which system was faster than which, where the difference means something."""
    return [
        (fast, slow)
        for fast, slow in combinations(sorted(found, key=lambda name: found[name]), 2)
        if found[slow] > (1 + ALIKE) * found[fast]
    ]


def main() -> None:
    host_cost = fabric.fit(fabric.events(), fabric.measured())
    computing, rates = measured()
    rows, right, total = [], 0, 0
    for rate, found in sorted(rates.items()):
        told = {system: predicted(computing, rate, system, host_cost) for system in found}
        right += sum(told[fast] < told[slow] for fast, slow in pairs(found))
        total += len(pairs(found))
        for system in sorted(found, key=lambda name: found[name]):
            error = told[system] / found[system] - 1
            rows.append([f"{rate:g}", system, f"{1e3 * found[system]:.0f}", f"{1e3 * told[system]:.0f} ({error:+.1%})"])
    print(markdown(["Gbit/s", "system", "measured ms", "predicted"], rows))
    print(f"\n{right} of {total} pairs that differ by more than {ALIKE:.0%} are ranked as measured")


if __name__ == "__main__":
    main()
