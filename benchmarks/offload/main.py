"""A model three times as large as what its processes may allocate, trained in files; and what that costs.

    python benchmarks/offload/main.py --help

Blocks are checkpointed. `memory` runs processes with a limit (RLIMIT_DATA); `time` takes turns in the same processes without one, and so
does `reader`, with a throttled reader; `tier` has a slow disk, and little memory for the kernel's copies of files (control groups: root).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from benchmarks.common.model import Size
from benchmarks.common.ranks import RanksFailed, on_ranks
from benchmarks.common.report import MEGABYTE, markdown, median, new_figure, progress, save, write
from benchmarks.offload.confined import can_confine, confined
from benchmarks.offload.counted import count
from benchmarks.offload.runs import SYSTEMS, against, slowly, within

STATE = 16  # bytes a parameter: values, gradients and AdamW's two moments, fp32
FILES, IN_BACKWARD, IN_MEMORY = SYSTEMS[:3]
CLIPPED = f"{FILES}, clipped"


def memory(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Who trains with a third of what the state takes, with which losses, and who does not."""
    more = int(STATE * size.parameters / args.ranks / args.times)
    runs, rows = {}, []
    for system, limit in [(IN_MEMORY, None), *((system, more) for system in SYSTEMS)]:
        name = system if limit is not None else f"{system}, no limit"
        progress(name)
        runs[name] = _run(args, size, system, limit)
        rows.append([name, *_told(runs[name], runs[f"{IN_MEMORY}, no limit"])])
    columns = ["", "outcome", "losses", "anonymous, most", "of mapped files, most"]
    title = (
        f"{size.parameters / 1e6:.1f} M parameters on {args.ranks} ranks: {STATE * size.parameters / args.ranks / MEGABYTE:.0f} MB a rank, "
        f"and {more / MEGABYTE:.0f} MB allowed\n\n"
    )
    write(args.output, "memory", {"allowed": more, **runs}, title + markdown(columns, rows))
    draw(runs, more, STATE * size.parameters / args.ranks, args.picture)
    return runs


def _run(args: argparse.Namespace, size: Size, system: str, limit: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
        log = Path(directory, "log")
        try:
            found = on_ranks(args.ranks, within, system, size, directory, limit, args.steps, str(log))
        except RanksFailed as failure:
            reason = next((row for row in reversed(str(failure).strip().splitlines()) if row.strip()), "")
            return {"died": log.read_text(), "reason": reason.strip()}
    losses = [sum(each) / args.ranks for each in zip(*(rank["losses"] for rank in found), strict=True)]
    return {"losses": losses, **{key: found[0][key] for key in ("samples", "begin", "marks")}}


def _told(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    if "died" in run:
        reason = "can't allocate memory" if "allocate memory" in run["reason"] else run["reason"][:90]
        return [f"dies {run['died']}: {reason}", "", "", ""]
    anonymous = max(row[1] for row in run["samples"]) - run["begin"]
    mapped = max(row[2] for row in run["samples"]) - run["samples"][0][2]
    losses = ", ".join(f"{loss:.4f}" for loss in (run["losses"][0], run["losses"][-1]))
    same = "" if run is reference else " (same bits)" if run["losses"] == reference["losses"] else " (OTHERS)"
    return ["trains", losses + same, f"{anonymous / MEGABYTE:.0f} MB", f"{mapped / MEGABYTE:.0f} MB"]


def draw(runs: dict[str, Any], allowed: int, state: float, path: Path | None) -> None:
    """Anonymous memory over time."""
    made = new_figure(9, 4) if path is not None else None
    if made is None or path is None:
        return
    figure, axes = made
    for name, run in runs.items():
        if "died" not in run:
            axes.plot([row[0] for row in run["samples"]], [(row[1] - run["begin"]) / MEGABYTE for row in run["samples"]], label=name)
    axes.axhline(allowed / MEGABYTE, color="black", linestyle="--", label="allowed")
    axes.axhline(state / MEGABYTE, color="grey", linestyle=":", label="parameters, gradients, moments")
    axes.set(xlabel="seconds", ylabel="MB of anonymous memory above the start", ylim=(0, None))
    axes.legend()
    save(figure, path)


def time(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Seconds a step with the files in the page cache, against memory."""
    results, rows = {}, []
    for fused in (False, True):
        progress(f"time, fused={fused}")
        with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
            found = on_ranks(args.ranks, against, [IN_MEMORY, FILES, IN_BACKWARD], size, directory, fused, args.steps)
        seconds = {system: [max(each) for each in zip(*(rank[system] for rank in found), strict=True)] for system in found[0]}
        results["fused" if fused else "default"] = seconds
        base = median(seconds[IN_MEMORY])
        ratios = [median([a / b for a, b in zip(seconds[s], seconds[IN_MEMORY], strict=True)]) for s in (FILES, IN_BACKWARD)]
        rows.append(["fused" if fused else "default", f"{base:.2f} s", *(f"{ratio:.2f}" for ratio in ratios)])
    write(args.output, "time", results, markdown(["AdamW", "in memory", "files, ratio", "files, in backward, ratio"], rows))
    return results


def counts(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Bytes: of anonymous memory that tensors hold, and of files that a step reads and lets go."""
    rows, results = [], {}
    for system in (IN_MEMORY, FILES, CLIPPED, IN_BACKWARD):
        progress(f"counted: {system}")
        with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
            results[system] = found = on_ranks(args.ranks, count, system, size, directory)[0]
        rows.append([system, *(f"{found[key] / MEGABYTE:.1f}" for key in ("resting", "others"))])
    limit = results[IN_MEMORY]["others"]
    for row, system in zip(rows, results, strict=True):
        row.append(f"{results[system]['others'] / limit:.3f}")
    moved = [
        [system, *(f"{results[system]['moved'][kind] / results[system]['size'][kind]:.2f}" for kind in ("values", "gradients", "state"))]
        for system in (FILES, CLIPPED, IN_BACKWARD)
    ]
    table = markdown(["MB of live tensors, at most", "chunks, gradients, state", "all else", "over that in memory"], rows)
    table += "\n\n" + markdown(["brought in for a step, times their size", "chunks", "gradients", "state"], moved)
    write(args.output, "counts", results, table)
    return results


def reader(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """A reader that takes a share of a step's seconds for what the optimizer works on, against the longer of computing and reading."""
    rows, results = [], {}
    moving = STATE * size.parameters / args.ranks  # bytes of a rank: chunk, gradient, moments
    for share in (0.5, 1.0):
        progress(f"reader, {share}")
        with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
            common = ([IN_MEMORY], size, directory, False, args.steps)
            compute = median(on_ranks(args.ranks, against, *common)[0][IN_MEMORY])
            speed = moving / (share * compute)
            found = on_ranks(args.ranks, against, [IN_MEMORY, FILES, IN_BACKWARD], *common[1:], speed)[0]
        results[str(share)] = {"speed": speed, **found}
        longer = [max(seconds, moving / speed) for seconds in found[IN_MEMORY]]
        ratios = [median([a / b for a, b in zip(found[system], longer, strict=True)]) for system in (FILES, IN_BACKWARD)]
        times = [median(found[IN_MEMORY]), moving / speed]
        rows.append([f"{speed / MEGABYTE:.0f}", *(f"{each:.1f}" for each in times), *(f"{ratio:.2f}" for ratio in ratios)])
    columns = ["MB/s", "computing, s", "reading, s", "files, over the longer", "files, in backward, over the longer"]
    write(args.output, "reader", results, markdown(columns, rows))
    return results


def tier(args: argparse.Namespace, size: Size) -> dict[str, Any]:
    """A slow disk, and no room for the kernel's copies: a step against the longer of computing and moving bytes."""
    if not can_confine():
        progress("tier: no control groups can be made here")
        return {}
    compute = None
    rows, results = [], {}
    with tempfile.TemporaryDirectory(dir=args.scratch) as directory:
        alone = on_ranks(args.ranks, against, [IN_MEMORY], size, directory, False, args.steps)
        compute = median([max(each) for each in zip(*(rank[IN_MEMORY] for rank in alone), strict=True)])
        for system in (FILES, IN_BACKWARD):
            progress(f"tier: {system}")
            with confined(int(args.tier_memory * MEGABYTE), int(args.tier_speed * MEGABYTE), directory):
                found = on_ranks(args.ranks, slowly, system, size, directory, False, args.steps)
            results[system] = found
            seconds, read, written = (median([row[k] for row in found[0]["rows"]]) for k in range(3))
            moving = max(read, written) / MEGABYTE / args.tier_speed
            ratio = seconds / max(compute, moving)
            megabytes = [f"{each / MEGABYTE:.0f}" for each in (read, written)]
            rows.append([system, *megabytes, f"{compute:.2f}", f"{moving:.2f}", f"{seconds:.2f}", f"{ratio:.2f}"])
    columns = ["", "MB read a step", "written", "computing, s", "moving, s", "step, s", "over the longer"]
    title = f"{args.tier_speed:g} MB/s each way, {args.tier_memory:g} MB of memory for all ranks, with what the kernel keeps of files\n\n"
    write(args.output, "tier", {"compute": compute, **results}, title + markdown(columns, rows))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=["memory", "time", "counts", "reader", "tier"], help="default: all")
    Size.add_flags(parser)
    parser.set_defaults(depth=24, batch=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--times", type=float, default=3.0, help="how much larger state is than what is allowed (default: %(default)s)")
    parser.add_argument("--tier-speed", type=float, default=200.0, metavar="MB/s", help="default: %(default)s")
    parser.add_argument("--tier-memory", type=float, default=1200.0, metavar="MB", help="of all ranks together (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()), help="on a local disk (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for numbers and tables")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="of memory over time")
    args = parser.parse_args()
    size = Size.from_flags(args)
    for part in (memory, time, counts, reader, tier):
        if not args.what or part.__name__ in args.what:
            part(args, size)


if __name__ == "__main__":
    main()
