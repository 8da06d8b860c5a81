"""Is the simulation right about FSDP2? Published figures, and torch's own trackers, before anything is said about zero3.

    python -m benchmarks.race.validate       # six runs of FSDP2 and FSDP1, two of torch's trackers; some five minutes on two cores

Cells are those whose recipe runs here, as it was published: model, loss, checkpointing, optimizer, clipping, the allocator's settings,
without torch.compile. One constant is fitted, on cells that are not judged by it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.report import markdown
from benchmarks.race.machines import GIB, H100, H100_500W, REACHED
from benchmarks.race.models import SHAPES
from benchmarks.race.runs import Run, kept
from tests.device.clock import HOSTS, Clocks, Step
from zero3.planning.cluster import PRODUCT

ALLOWED, OF_TRACKERS = 0.10, 0.03
SHARES = [share / 100 for share in range(40, 76)]  # of the data sheet's FLOP/s, that are tried
OF_PULL = 95.0396 / 100  # the pull request tells percentages
Log = list[Any]


@dataclass(frozen=True)
class Published:
    """What was measured by others. Memory in GiB, at most; tokens a second and GPU (the middle, where a range is published)."""

    run: Run
    tokens: float
    reserved: float
    active: float | None = None
    expandable: bool = False

    @property
    def name(self) -> str:
        return f"{self.run.system.upper()} {self.run.cell}"


def _of_pull(system: str, checkpointing: str, active: float, reserved: float, tokens: float) -> Published:
    """torchtitan, pull request 165, of a GPU of 95.0396 GiB."""
    run = Run(system, "7b", 8, 8, 2048, checkpointing, ("root_holds_ends", "by_lists", "holds_logits"))
    return Published(run, tokens, reserved * OF_PULL, active * OF_PULL)


def _of_titan(ranks: int, reserved: float, tokens: float) -> Published:
    """torchtitan, benchmarks/llama3_h100_202412_torchtitan.md."""
    return Published(Run("fsdp2", "8b", ranks, 2, 8192, "selective", ("root_holds_ends", "by_lists")), tokens, reserved, expandable=True)


FITTED = [_of_pull("fsdp2", "full", 23.92, 32.64, 6200), _of_pull("fsdp2", "selective", 52.13, 62.51, 6700)]
JUDGED = [
    _of_titan(8, 82.4, 5762),
    _of_titan(128, 67.0, 5605),
    _of_pull("fsdp1", "full", 24.81, 33.82, 6150),
    _of_pull("fsdp1", "selective", 52.98, 67.23, 6600),
]
TRACKED = Run("fsdp2", "8b", 8, 1, 2048, "full")


@dataclass(frozen=True)
class Verdict:
    """What was found for what is expected."""

    what: str
    found: float
    expected: float
    allowed: float = ALLOWED
    fitted: bool = False

    @property
    def missed(self) -> bool:
        return abs(self.found / self.expected - 1) > self.allowed

    def __str__(self) -> str:
        error = f"{self.found / self.expected - 1:+.1%}"
        return f"**{error}, a miss**" if self.missed else f"{'fitted, ' * self.fitted}{error}"


def simulated(cell: Published, log: Log, reached: float = REACHED) -> Step:
    machine = replace(H100_500W, reached=reached)
    return Clocks(machine, HOSTS["launches"], expandable=cell.expandable).replay(log)[-1]


def fit(logs: dict[Published, Log]) -> float:
    """The share of the data sheet's FLOP/s that is nearest to the fitted cells."""
    times = {cell: [entry for entry in logs[cell] if entry[0] not in "afu"] for cell in FITTED}

    def missed(share: float) -> float:
        return sum(math.log(cell.run.tokens / simulated(cell, log, share).seconds / cell.tokens) ** 2 for cell, log in times.items())

    return min(SHARES, key=missed)


def verdicts(cell: Published, step: Step) -> list[Verdict]:
    memory = [Verdict("reserved GiB", step.reserved / GIB, cell.reserved)]
    memory += [] if cell.active is None else [Verdict("active GiB", step.active / GIB, cell.active)]
    return [*memory, Verdict("tokens/s a GPU", cell.run.tokens / step.seconds, cell.tokens, fitted=cell in FITTED)]


def difference(steps: dict[Published, Step]) -> Verdict:
    """In reserved memory, between the two numbers of ranks."""
    few, many = JUDGED[:2]
    return Verdict("from W = 8 to 128, reserved GiB less", (steps[few].reserved - steps[many].reserved) / GIB, few.reserved - many.reserved)


def _judge(name: str) -> dict[str, Any]:
    where = [TRACKED.model, TRACKED.ranks, f"{TRACKED.rows}x{TRACKED.sequence}", TRACKED.checkpointing]
    done = subprocess.run([sys.executable, "-m", "benchmarks.race.judges", name, *map(str, where)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-800:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


CAUSES = {"sharded parameters": "Sharded Param", "optimizer": "OptState"}  # here, and in torch's tracker


def by_cause(told: dict[str, Any], found: dict[str, float]) -> list[Verdict]:
    """torch's tracker has more causes; all others are one here. (A gradient that is being reduced is "temporary" until it is shown.)"""
    theirs = {cause: told[word] for cause, word in CAUSES.items()}
    theirs["all else"] = told["Total"] - sum(theirs.values())
    theirs["peak"] = told["Total"]
    return [Verdict(f"FSDPMemTracker: {cause}, GiB", found[cause] / GIB, nbytes / GIB, OF_TRACKERS) for cause, nbytes in theirs.items()]


def trackers(out: Path) -> list[Verdict]:
    """torch's own, beside the simulation."""
    plain = Clocks(H100).replay(kept("logged", replace(TRACKED, system="plain", ranks=1), out))[-1]
    roofline = Verdict(
        "RuntimeEstimator: forward and backward of plain torch, ms", 1e3 * plain.phases["clip"], 1e3 * _judge("computation")["seconds"]
    )
    return [*by_cause(_judge("memory"), kept("causes", TRACKED, out)), roofline]


def rows_of(cell: Published, log: Log, step: Step) -> list[str]:
    state = 16 * SHAPES[cell.run.model].parameters / cell.run.ranks / GIB
    unfitted = cell.run.tokens / simulated(cell, log, PRODUCT).seconds
    told = {
        each.what: f"{each.found:.{0 if each.found > 999 else 1}f} for {each.expected:.{0 if each.found > 999 else 1}f} ({each})"
        for each in verdicts(cell, step)
    }
    null = [f"{state:.1f} GiB ({state / cell.reserved - 1:+.0%})", f"{unfitted:.0f} ({unfitted / cell.tokens - 1:+.0%})"]
    return [cell.name, *(told.get(what, "") for what in ("reserved GiB", "active GiB", "tokens/s a GPU")), *null]


@dataclass(frozen=True)
class Report:
    text: str
    misses: int


def report(out: Path, jobs: int = 2) -> Report:
    """All of it. A fit that is not the one that machines.py has is a miss."""
    with ThreadPoolExecutor(jobs) as pool:
        torchs = pool.submit(trackers, out)
        cells = [*FITTED, *JUDGED]
        logs = dict(zip(cells, pool.map(lambda cell: kept("logged", cell.run, out), cells), strict=True))
        told = torchs.result()
    steps = {cell: simulated(cell, log) for cell, log in logs.items()}
    share, apart_by = Verdict("fitted share of FLOP/s", fit(logs), REACHED, 0.02), difference(steps)
    columns = ["published run", "reserved GiB", "active GiB", "tokens/s a GPU", "null: state / N", f"unfitted ({PRODUCT})"]
    table = markdown(columns, [rows_of(cell, log, steps[cell]) for cell, log in logs.items()])
    null = 16 * SHAPES["8b"].parameters * (1 / 8 - 1 / 128) / GIB
    rows = [[each.what, f"{each.expected:.2f}", f"{each.found:.2f}", f"{each}"] for each in told]
    own = f"torch's own trackers, of {TRACKED.cell}"
    misses = _misses([share, apart_by, *told, *(each for cell in cells for each in verdicts(cell, steps[cell]))])
    return Report(
        f"Simulated; no GPU was used. Fitted, on the first two rows: {share.found:.2f} of the data sheet's 989 TFLOP/s are reached "
        f"(machines.py has {REACHED}: {share}). Nothing else is.\n\n{table}\n\n"
        f"From W = 8 to 128: {apart_by.found:.1f} GiB less for {apart_by.expected:.1f} ({apart_by}); null, state / N: {null:.1f}.\n\n"
        f"{markdown([own, 'it says', 'simulated', ''], rows)}\n\n"
        f"Misses: {misses or 'none'} (allowed: {ALLOWED:.0%}; of torch's tracker of memory {OF_TRACKERS:.0%}).",
        misses,
    )


def _misses(of: Iterable[Verdict]) -> int:
    return sum(each.missed for each in of)


if __name__ == "__main__":
    print(report(Path("race")).text)
