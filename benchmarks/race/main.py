"""The race: zero3, FSDP2 and others on the same simulated GPU, with a clock. One command, no GPU.

    python -m benchmarks.race                                # the validation, all cells, the picture; goes on where it was ended
    python -m benchmarks.race --readme                       # and writes the tables into README.md
    python -m benchmarks.race --models 8b --ranks 8 --skip-validation --out results
    python -m benchmarks.race --pool                         # would a pool of full buffers take less memory?
    python -m benchmarks.race --trace 8b 64 1x2048 none      # lanes of one step: a Chrome trace for Perfetto, and a picture, in --out

All figures are simulated; no GPU was used. README.md says what is simulated, where each constant comes from, and what is not shown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.report import leave, progress
from benchmarks.race import pool, validate
from benchmarks.race.lanes import draw, trace_events
from benchmarks.race.machines import H100_500W
from benchmarks.race.models import SHAPES
from benchmarks.race.runs import LONG, Run, kept
from benchmarks.race.tables import AT_HOME, MAIN, OTHERS, OURS, RIVALS, SIMULATED, SYSTEMS, Results, ahead, comparison, per_cell
from tests.device.clock import HOSTS, Clocks

HERE = Path(__file__).parent
AT_LEAST = 1 << 17  # tokens of a sequence that ranks share


def cells(models: Iterable[str], ranks: Iterable[int], batches: Iterable[str], checkpointing: Iterable[str]) -> list[Run]:
    """Each as zero3's run."""
    return [Run(OURS, model, world, *_sizes(batch), kept) for model, world, batch, kept in product(models, ranks, batches, checkpointing)]


def _sizes(batch: str) -> tuple[int, int]:
    rows, sequence = map(int, batch.split("x"))
    return rows, sequence


def entered(of: list[Run]) -> Iterator[tuple[Run, str]]:
    """Who runs where: zero3 and FSDP2 everywhere, the others beside them in the cells of the first model and number of ranks. Experts stay
    at home where each rank has some; ranks share long sequences alone."""
    for cell in of:
        for name, (_, chosen) in SYSTEMS.items():
            if LONG in chosen and cell.sequence < AT_LEAST:
                continue
            if AT_HOME in chosen and SHAPES[cell.model].experts < cell.ranks:
                continue
            if name not in OTHERS or (cell.model, cell.ranks) == (of[0].model, of[0].ranks):
                yield cell, name


def run_of(cell: Run, name: str) -> Run:
    system, chosen = SYSTEMS[name]
    return replace(cell, system=system, chosen=chosen, ranks=1 if name == "plain" else cell.ranks)


def figures_of(run: Run, out: Path) -> dict[str, Any]:
    try:
        return dict(kept("told", run, out))
    except Exception as error:  # whatever it is, the other runs go on, and the table has it
        progress(f"{run.slug} does not run")
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"}


def lanes(cell: Run, out: Path, picture: Path) -> None:
    """What the lanes of one step do, of zero3 and of FSDP2."""
    out.mkdir(parents=True, exist_ok=True)
    steps = {}
    for name in ("zero3", RIVALS[0]):
        run = run_of(cell, name)
        steps[name] = Clocks(H100_500W, HOSTS["launches"], spans=True).replay(kept("logged", run, out))[-1]
        file = out / f"{run.slug}.trace.json"
        file.write_text(json.dumps(trace_events(steps[name], f"{name}, {run.cell}. {SIMULATED}")))
        progress(f"trace: {file}, for https://ui.perfetto.dev")
    draw(steps, f"{cell.cell}; {MAIN}, 400 Gbit/s. {SIMULATED}", picture / "lanes.png")


def sections(options: argparse.Namespace, of: list[Run]) -> tuple[dict[str, str], Results]:
    """The texts that a race makes, by the names of their places in the README, and all figures."""
    texts = {} if options.skip_validation else {"validation": validate.report(options.out, options.jobs).text}
    for text in texts.values():
        print(text, flush=True)
    asked = list(entered(of))
    with ThreadPoolExecutor(options.jobs) as threads:
        results = dict(zip(asked, threads.map(lambda each: figures_of(run_of(*each), options.out), asked), strict=True))
    texts |= {"comparison": comparison(results, of), "ahead": ahead(results, of), "cells": per_cell(results, of)}
    return texts, results


def written_into(page: str, texts: dict[str, str]) -> str:
    """The page, with each text between its marks: <!-- name --> and <!-- /name -->.

    Raises:
        ValueError: The page lacks a mark.
    """
    for name, text in texts.items():
        before, begin, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        if not (begin and end):
            raise ValueError(f"the page has no place for {name!r}")
        page = f"{before}{begin}\n{text}\n\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["8b", "70b", "moe"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512])
    parser.add_argument("--batches", nargs="+", default=["1x2048", "2x8192"])
    parser.add_argument("--checkpointing", nargs="+", default=["none", "full"])
    parser.add_argument("--skip-validation", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--pool", action="store_true", help="whether a pool of full buffers would take less memory, and nothing else")
    parser.add_argument("--trace", nargs=4, metavar=("MODEL", "RANKS", "BATCH", "CHECKPOINTING"))
    parser.add_argument("--readme", action="store_true", help="write the tables and the picture into benchmarks/race/README.md's places")
    parser.add_argument("--out", type=Path, default=Path("race"), help="a folder for tables, the picture and the trace (%(default)s)")
    options = parser.parse_args()
    if options.pool:
        return print(pool.report(options.out, options.jobs))
    if options.trace:
        model, ranks, batch, checkpointing = options.trace
        return lanes(cells([model], [int(ranks)], [batch], [checkpointing])[0], options.out, options.out)
    of = cells(options.models, options.ranks, options.batches, options.checkpointing)
    texts, results = sections(options, of)
    whole = "\n\n".join([SIMULATED, *texts.values()])
    print(whole)
    leave(options.out, "race", {f"{cell.cell}: {name}": found for (cell, name), found in results.items()}, whole)
    lanes(of[0], options.out, HERE if options.readme else options.out)
    if options.readme:
        page = HERE / "README.md"
        page.write_text(written_into(page.read_text(), texts))


if __name__ == "__main__":
    main()
