"""Is the simulation right about FSDP2? Published figures, and torch's own trackers, before anything is said about zero3.

    python -m benchmarks.race.validate       # six runs of FSDP2 and FSDP1, two of torch's trackers; some five minutes on two cores

Cells are those whose recipe runs here, as it was published: model, loss, checkpointing, optimizer, clipping, the allocator's settings,
without torch.compile. One constant is fitted, on cells that are not judged by it.
"""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.common.report import markdown
from benchmarks.race.machines import H100, H100_500W, REACHED
from benchmarks.race.models import SHAPES
from benchmarks.race.recorders import Recorders, recorders
from tests.device.clock import HOSTS, Clocks
from zero3.planning.cluster import PRODUCT

Run = Callable[[dict[str, Any]], dict[str, Any]]
GIB = 2**30
ALLOWED, OF_TRACKERS = 0.10, 0.03
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
PULL = "torchtitan, pull request 165, of a GPU of 95.0396 GiB"
OF_PULL = 95.0396 / 100
SETTINGS: dict[str, Any] = {"root_holds_ends": True, "fused": False}


@dataclass(frozen=True)
class Cell:
    """A published run. Memory in GiB, at most; tokens a second and GPU (the middle, where a range is published)."""

    system: str
    model: str
    ranks: int
    batch: str
    checkpointing: str
    source: str
    tokens: float
    reserved: float
    active: float | None = None
    expandable: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.system.upper()} {self.model.upper()}, W = {self.ranks}, {self.batch}, {self.checkpointing}"

    @property
    def per_step(self) -> int:
        return math.prod(map(int, self.batch.split("x")))


def _of_pull(system: str, checkpointing: str, active: float, reserved: float, tokens: float) -> Cell:
    held = {**SETTINGS, "holds_logits": True}
    return Cell(system, "7b", 8, "8x2048", checkpointing, PULL, tokens, reserved * OF_PULL, active * OF_PULL, settings=held)


def _of_titan(ranks: int, reserved: float, tokens: float) -> Cell:
    return Cell("fsdp2", "8b", ranks, "2x8192", "selective", TITAN, tokens, reserved, expandable=True, settings=SETTINGS)


FITTED = [_of_pull("fsdp2", "full", 23.92, 32.64, 6200), _of_pull("fsdp2", "selective", 52.13, 62.51, 6700)]
JUDGED = [
    _of_titan(8, 82.4, 5762),
    _of_titan(128, 67.0, 5605),
    _of_pull("fsdp1", "full", 24.81, 33.82, 6150),
    _of_pull("fsdp1", "selective", 52.98, 67.23, 6600),
]


def judge(name: str, *where: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "benchmarks.race.judges", name, *where], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip()[-800:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def logged(cell: Cell, run: Run) -> list[Any]:
    with tempfile.NamedTemporaryFile() as file:
        run({
            "system": cell.system, "model": cell.model, "ranks": cell.ranks, "batch": cell.batch, "checkpointing": cell.checkpointing,
            "settings": cell.settings, "log": file.name,
        })  # fmt: skip
        return list(pickle.load(file))


def simulated(cell: Cell, log: list[Any], reached: float = REACHED) -> Any:
    machine = replace(H100_500W, flops=H100_500W.flops * reached / REACHED)
    return Clocks(machine, HOSTS["launches"], expandable=cell.expandable).replay(log)[-1]


def tokens(cell: Cell, log: list[Any], reached: float = REACHED) -> float:
    return cell.per_step / float(simulated(cell, log, reached).seconds)


def fit(logs: dict[str, list[Any]]) -> float:
    """The share of the data sheet's FLOP/s that is nearest to the fitted cells, in steps of 0.01."""

    times = {cell.name: [entry for entry in logs[cell.name] if entry[0] not in "afu"] for cell in FITTED}

    def missed(share: float) -> float:
        return sum(math.log(tokens(cell, times[cell.name], share) / cell.tokens) ** 2 for cell in FITTED)

    return min((share / 100 for share in range(40, 76)), key=missed)


def judged(found: float, expected: float, allowed: float = ALLOWED) -> str:
    error = found / expected - 1
    return f"{error:+.1%}" if abs(error) <= allowed else f"**{error:+.1%}, a miss**"


def trackers(run: Run) -> list[list[str]]:
    """Rows: a judge, its figure, the simulation's, the difference."""
    batch, rows = ("8b", "8", "1x2048", "full"), []
    cell = Cell("fsdp2", "8b", 8, "1x2048", "full", "", 1, 1)
    peak = simulated(cell, logged(cell, run)).allocated
    plain = Clocks(H100).replay(logged(replace(cell, system="plain", ranks=1), run))[-1]
    told = judge("memory", *batch)
    causes = ", ".join(f"{cause} {nbytes / GIB:.2f}" for cause, nbytes in told.items() if nbytes > 1e7 and cause != "Total")
    rows.append(
        [
            "FSDPMemTracker: peak, GiB",
            f"{told['Total'] / GIB:.3f} ({causes})",
            f"{peak / GIB:.3f}",
            judged(peak, told["Total"], OF_TRACKERS),
        ]
    )
    roofline = judge("computation", *batch)["seconds"]
    seconds = plain.phases["clip"]
    rows.append(
        [
            "RuntimeEstimator: forward and backward of plain torch, ms",
            f"{1e3 * roofline:.1f}",
            f"{1e3 * seconds:.1f}",
            judged(seconds, roofline, ALLOWED),
        ]
    )
    return rows


def report(processes: Recorders, say: Callable[[str], None] = print) -> bool:
    """Says all of it. Returns whether nothing is missed."""
    cells = [*FITTED, *JUDGED]
    made = processes.map(lambda cell: logged(cell, processes.run), cells)
    logs = {cell.name: log for cell, log in zip(cells, made, strict=True)}
    share = fit(logs)
    if abs(share - REACHED) > 0.011:
        raise RuntimeError(f"benchmarks/race/machines.py has {REACHED} for what the GPU reaches, and the fit is {share}")
    rows, steps = [], {cell.name: simulated(cell, logs[cell.name]) for cell in cells}
    for cell in cells:
        step = steps[cell.name]
        speed = cell.per_step / step.seconds
        active = "" if cell.active is None else f"{step.active / GIB:.1f} for {cell.active:.1f} ({judged(step.active / GIB, cell.active)})"
        memory = f"{step.reserved / GIB:.1f} for {cell.reserved:.1f} ({judged(step.reserved / GIB, cell.reserved)})"
        time = f"{speed:.0f} for {cell.tokens:.0f} ({'fitted, ' if cell in FITTED else ''}{judged(speed, cell.tokens)})"
        state = 16 * SHAPES[cell.model].parameters / cell.ranks / GIB
        unfitted = cell.per_step / simulated(cell, logs[cell.name], PRODUCT).seconds
        rows.append(
            [
                cell.name,
                memory,
                active,
                time,
                f"{state:.1f} GiB ({state / cell.reserved - 1:+.0%})",
                f"{unfitted:.0f} ({unfitted / cell.tokens - 1:+.0%})",
            ]
        )
    say(f"Fitted: {share:.2f} of the data sheet's 989 TFLOP/s are reached, on the first two rows. Nothing else is.\n")
    say(markdown(["published run", "reserved GiB", "active GiB", "tokens/s a GPU", "null: state / N", f"unfitted ({PRODUCT})"], rows))
    few, many = (steps[cell.name].reserved / GIB for cell in JUDGED[:2])
    difference = JUDGED[0].reserved - JUDGED[1].reserved
    null = 16 * SHAPES["8b"].parameters * (1 / 8 - 1 / 128) / GIB
    say(
        f"\nFrom W = 8 to 128: {few - many:.1f} GiB less for {difference:.1f} "
        f"({judged(few - many, difference)}); null, state / N: {null:.1f}.\n"
    )
    told = trackers(processes.run)
    say(markdown(["torch's own tracker", "it says", "simulated", ""], told))
    everything = [*(text for row in rows for text in row), judged(few - many, difference), *(text for row in told for text in row)]
    misses = sum("a miss" in text for text in everything)
    say(
        f"\n{misses or 'No'} {'miss' if misses == 1 else 'misses'} "
        f"(allowed: {ALLOWED:.0%}; of torch's tracker of memory {OF_TRACKERS:.0%}).\n"
    )
    return not misses


if __name__ == "__main__":
    with recorders(2) as both:
        report(both)
