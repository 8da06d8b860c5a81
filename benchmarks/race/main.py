"""The race: zero3, FSDP2 and others on the same simulated GPU, with a clock. One command, no GPU.

    python -m benchmarks.race                                # the validation, all cells, the picture: some fifteen minutes on two cores
    python -m benchmarks.race --models 8b --ranks 8 --skip-validation --out results
    python -m benchmarks.race --trace 8b 64 1x2048 none      # lanes of one step: a Chrome trace for Perfetto, and a picture, in --out

All figures are simulated; no GPU was used. README.md says what is simulated, where each constant comes from, and what is not shown.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.report import leave, markdown, progress
from benchmarks.race import validate
from benchmarks.race.lanes import draw, trace_events
from benchmarks.race.machines import H100_500W, MACHINES
from benchmarks.race.recorders import Recorders, recorders
from tests.device.clock import HOSTS, Clocks

GIB = 2**30
SIMULATED = "Simulated; no GPU was used."
LINKS = (400, 200, 100)
EQUAL = 1.02  # ratios below it are called equal
MAIN = next(iter(MACHINES))


class Entry(NamedTuple):
    system: str
    settings: dict[str, Any]


SYSTEMS = {
    "zero3": Entry("zero3", {}),
    "FSDP2": Entry("fsdp2", {}),
    "FSDP2, last layer kept": Entry("fsdp2", {"keep_last": True}),
    "FSDP1": Entry("fsdp1", {}),
    "DDP": Entry("ddp", {}),
    "plain": Entry("plain", {}),
}
RIVALS = ("FSDP2", "FSDP2, last layer kept")


class Cell(NamedTuple):
    model: str
    ranks: int
    batch: str
    checkpointing: str

    def __str__(self) -> str:
        return f"{self.model.upper()}, {self.ranks}, {self.batch}, {self.checkpointing}"


def cells(models: Iterable[str], ranks: Iterable[int], batches: Iterable[str], checkpointing: Iterable[str]) -> list[Cell]:
    return [Cell(*each) for each in product(models, ranks, batches, checkpointing)]


def runs(of: list[Cell]) -> Iterator[tuple[Cell, str]]:
    """Who runs where: zero3 and FSDP2 everywhere, the others beside them in the cells of the first model and number of ranks."""
    for cell in of:
        for name in SYSTEMS:
            if name in ("zero3", *RIVALS) or cell[:2] == of[0][:2]:
                yield cell, name


def asked_of(cell: Cell, name: str, **more: Any) -> dict[str, Any]:
    entry = SYSTEMS[name]
    return {**cell._asdict(), "system": entry.system, "settings": entry.settings, "ranks": 1 if name == "plain" else cell.ranks, **more}


def figures_of(processes: Recorders, cell: Cell, name: str, out: Path) -> dict[str, Any]:
    """A run's figures. They are kept in `out`, so a race that was ended goes on where it was."""
    kept = out / "runs" / f"{SYSTEMS[name].system}-{'-'.join(map(str, cell))}-{'-'.join(SYSTEMS[name].settings)}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    try:
        found = processes.run(asked_of(cell, name))
    except RuntimeError as error:
        progress(f"{cell}: {name} does not run")
        return {"error": str(error).splitlines()[-1]}
    progress(f"{cell}: {name}, {found['recorded']:.0f} s to record, {found['replayed']:.0f} to replay")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found))
    return found


def step(found: dict[str, Any], link: int, host: str, machine: str = MAIN) -> dict[str, Any]:
    """(Memory stands with the first machine and link, and a host that is free.)"""
    return dict(found["steps"][f"{machine}, {link}, {host}"])


def ratio(value: float) -> str:
    """1.00 to 1.02 is printed as equal; what is above it in bold."""
    return f"**{value:.3f}**" if value > EQUAL else f"{value:.3f}" + (" (equal)" if value > 1 else "")


def comparison(results: dict[tuple[Cell, str], Any], of: list[Cell]) -> str:
    """zero3 over the better of FSDP2's settings."""
    rows = []
    for cell in of:
        ours = results[cell, "zero3"]
        theirs = [found for name in RIVALS if "error" not in (found := results[cell, name])]
        if "error" in ours or not theirs:
            rows.append([str(cell), ours.get("error") or results[cell, RIVALS[0]]["error"]])
            continue
        row = [str(cell)]
        for machine, link, host in [*product([MAIN], LINKS, ("free", "launches")), *product([*MACHINES][1:], LINKS, ("launches",))]:
            best = min(step(found, link, host, machine)["seconds"] for found in theirs)
            row.append(ratio(step(ours, link, host, machine)["seconds"] / best))
        mine, same = step(ours, 400, "free"), step(_of_same_gathers(ours, theirs), 400, "free")
        rows.append([*row, *(f"{mine[key] / GIB:.2f} ({ratio(mine[key] / same[key])})" for key in ("allocated", "reserved"))])
    columns = ["model, W, batch, checkpoints", *(f"{link}, {host}" for link in LINKS for host in ("free", "launches"))]
    return markdown([*columns, *(f"{link}, data sheet" for link in LINKS), "allocated GiB", "reserved GiB"], rows)


def _of_same_gathers(ours: dict[str, Any], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one that gathers as much; memory is compared with it."""

    def gathered(found: dict[str, Any]) -> int:
        return int(step(found, 400, "free")["moved"]["all_gather"])

    return min(theirs, key=lambda found: abs(gathered(found) - gathered(ours)))


COLUMNS = [
    "system", "step ms", "tokens/s", "exposed ms", "waits for host ms", "launches", "collectives", "received GB", "copies in compute",
    "copies beside", "host waits", "allocated", "reserved GiB", "forward, backward, clip, optimizer ms",
]  # fmt: skip


def columns_of(cell: Cell, found: dict[str, Any], name: str, link: int = 400, host: str = "launches") -> list[str]:
    if "error" in found:
        return [name, found["error"]]
    one, memory = step(found, link, host), step(found, 400, "free")
    ends = [one["phases"][mark] for mark in ("backward", "clip", "optimizer")]
    phases = [end - begin for begin, end in zip([0.0, *ends], [*ends, one["seconds"]], strict=True)]
    kinds = ", ".join(f"{count} {kind}" for kind, count in one["collectives"].items())
    tokens = math.prod(map(int, cell.batch.split("x"))) / one["seconds"]
    copies = [f"{count} ({nbytes / 1e9:.1f} GB)" for count, nbytes in zip(one["copies"], one["copied"], strict=True)]
    return [
        name, f"{1e3 * one['seconds']:.1f}", f"{tokens:.0f}", f"{1e3 * one['exposed']:.1f}", f"{1e3 * one['starved']:.1f}",
        str(one["launches"]),
        kinds or "none", f"{sum(one['moved'].values()) / 1e9:.1f}", *copies, f"{one['host_waits']} {', '.join(one['waits'])}".strip(),
        f"{memory['allocated'] / GIB:.2f}", f"{memory['reserved'] / GIB:.2f}", ", ".join(f"{1e3 * each:.1f}" for each in phases),
    ]  # fmt: skip


def tables(results: dict[tuple[Cell, str], Any], of: list[Cell]) -> str:
    texts = [f"## zero3's step over FSDP2's (the better of its settings)\n\n{SIMULATED}\n\n{comparison(results, of)}"]
    for cell in of:
        rows = [columns_of(cell, results[cell, name], name) for name in SYSTEMS if (cell, name) in results]
        texts.append(f"## {cell}; {MAIN}, 400 Gbit/s, 5 us a launch\n\n{SIMULATED}\n\n{markdown(COLUMNS, rows)}")
    return "\n\n".join(texts)


def lanes(processes: Recorders, cell: Cell, out: Path) -> None:
    """What the lanes of one step do, of zero3 and of FSDP2."""
    out.mkdir(parents=True, exist_ok=True)
    steps = {}
    for name in ("zero3", "FSDP2"):
        with tempfile.NamedTemporaryFile() as scratch:
            processes.run(asked_of(cell, name, log=scratch.name))
            log = pickle.load(scratch)
        steps[name] = Clocks(H100_500W, HOSTS["launches"], spans=True).replay(log)[-1]
        file = out / f"{SYSTEMS[name].system}-{'-'.join(map(str, cell))}.trace.json"
        file.write_text(json.dumps(trace_events(steps[name], f"{name}, {cell}. {SIMULATED}")))
        progress(f"trace: {file}, for https://ui.perfetto.dev")
    draw(steps, f"{cell}; {MAIN}, 400 Gbit/s. {SIMULATED}", out / f"lanes-{'-'.join(map(str, cell))}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["8b", "70b", "moe"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--batches", nargs="+", default=["1x2048", "2x8192"])
    parser.add_argument("--checkpointing", nargs="+", default=["none", "full"])
    parser.add_argument("--skip-validation", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--trace", nargs=4, metavar=("MODEL", "RANKS", "BATCH", "CHECKPOINTING"))
    parser.add_argument("--out", type=Path, default=Path("race"), help="a folder for tables, the picture and the trace (%(default)s)")
    options = parser.parse_args()
    with recorders(options.jobs) as processes:
        if options.trace:
            model, ranks, batch, checkpointing = options.trace
            lanes(processes, Cell(model, int(ranks), batch, checkpointing), options.out)
        else:
            race(processes, options)


def race(processes: Recorders, options: argparse.Namespace) -> None:
    texts: list[str] = [SIMULATED]

    def say(text: str) -> None:
        texts.append(text)
        print(text, flush=True)

    if not options.skip_validation:
        say("## Validation\n")
        validate.report(processes, say)
    of = cells(options.models, options.ranks, options.batches, options.checkpointing)
    asked = list(runs(of))
    results = dict(zip(asked, processes.map(lambda each: figures_of(processes, *each, options.out), asked), strict=True))
    say(tables(results, of))
    leave(options.out, "race", {f"{cell}: {name}": found for (cell, name), found in results.items()}, "\n".join(texts))
    lanes(processes, of[0], options.out)


if __name__ == "__main__":
    main()
