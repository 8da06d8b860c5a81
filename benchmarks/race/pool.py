"""Would a pool of full buffers take less memory? Each of some cells is recorded once, and replayed on torch's allocator in two ways.

    python -m benchmarks.race --pool

As it is: the memory of a full buffer is given back when its layer is released, and asked for again when the layer is fetched. Pooled: it
goes to a slot, which the next full buffer of the same size takes, and nobody else; there are as many slots of a size as were ever in use at
a time. All figures are simulated; no GPU was used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.report import leave, markdown
from benchmarks.race.machines import GIB
from benchmarks.race.runs import FULL_BUFFER, Run, kept
from benchmarks.race.tables import OURS, SIMULATED

CELLS = (
    Run(OURS, "8b", 8, 1, 2048), Run(OURS, "8b", 8, 1, 2048, "full"),
    Run(OURS, "8b", 64, 1, 2048, "full"), Run(OURS, "8b", 64, 2, 8192, "full"),
    Run(OURS, "70b", 64, 1, 2048, "full"), Run(OURS, "70b", 512, 1, 2048, "full"), Run(OURS, "moe", 64, 1, 2048, "full"),
    Run(OURS, "moe", 512, 1, 2048, "full"), Run(OURS, "moe", 512, 1, 2048),
)  # fmt: skip


def pooled(log: Iterable[Any]) -> Iterator[Any]:
    """The log of a program whose full buffers come from a pool. In the given one marks stand around what is asked for them."""
    free: defaultdict[int, list[int]] = defaultdict(list)  # slots, by their bytes
    slots: dict[int, tuple[int, int]] = {}  # a full buffer's slot, and its bytes
    inside = False
    for entry in log:
        kind, name, _, ident, _, nbytes, *_ = entry
        if kind == "m" and name == FULL_BUFFER:
            inside = not inside
        elif kind == "a" and inside:
            taken = free[nbytes].pop() if free[nbytes] else None
            slots[ident] = ident if taken is None else taken, nbytes
            if taken is None:
                yield entry
        elif kind == "f" and ident in slots:
            slot, size = slots.pop(ident)
            free[size].append(slot)
        else:
            yield entry


def table(found: dict[Run, dict[str, dict[str, int]]]) -> str:
    rows = []
    for run, ways in found.items():
        own, pool = ways["as it is"], ways["pooled"]
        figures = [f"{way[what] / GIB:.2f}" for what in ("allocated", "reserved") for way in (own, pool)]
        rows.append([run.cell, *figures, f"{pool['reserved'] / own['reserved']:.3f}", own["segments"], pool["segments"]])
    columns = [
        "model, W, batch, checkpoints",
        "allocated GiB",
        "pooled",
        "reserved GiB",
        "pooled",
        "pooled / as it is",
        "segments",
        "pooled",
    ]
    return f"{SIMULATED}\n\n{markdown(columns, rows)}"


def report(out: Path, jobs: int) -> str:
    """Of all cells: a minute where nothing is kept."""
    with ThreadPoolExecutor(jobs) as threads:
        found = dict(zip(CELLS, threads.map(lambda run: kept("held", run, out), CELLS), strict=True))
    text = table(found)
    leave(out, "pool", {run.cell: ways for run, ways in found.items()}, text)
    return text
