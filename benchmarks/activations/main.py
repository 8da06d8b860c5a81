"""What `offload_activations` frees, and what it costs: live bytes and seconds of a step whose blocks are checkpointed, or not.

    python benchmarks/activations/main.py --help

Both ways in turn, in the same processes, with the same batches; gradients must have the same bits. Bytes are those of a micro-batch whose
gradients are added to others, so that no gradient is among what it takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from benchmarks.common.counters import LiveBytes
from benchmarks.common.model import Size, batch, layers, loss_of
from benchmarks.common.ranks import on_ranks
from benchmarks.common.report import MEGABYTE, markdown, median, progress, write

# of blocks, and what the table calls them
KINDS = {"not reentrant": "checkpointed", "reentrant": "checkpointed, reentrant; backward inside too", "": "not"}


def step(model: Any, size: Size, number: int, rank: int, around: AbstractContextManager[Any], kind: str) -> None:
    with around:
        loss = loss_of(model, *batch(size, number, rank))
    with around if kind == "reentrant" else nullcontext():  # then what a block saves when it is computed anew goes out, too
        loss.backward()


def measure(rank: int, world_size: int, size: Size, directory: str, kind: str, steps: int) -> dict[str, Any]:
    """This rank's peak bytes above those at rest, and seconds a step, without and with offload. `kind`: see `KINDS`."""
    import zero3

    with LiveBytes() as live:
        modules = layers(size)
        if kind:
            for module in modules[1:-1]:
                module.forward = partial(checkpoint, module.forward, use_reentrant=kind == "reentrant")  # type: ignore[method-assign]
        model = zero3.Zero3Sequential([zero3.Zero3Layer(module) for module in modules])
        ways = {"without": nullcontext(), "with": zero3.offload_activations(directory)}
        peaks, gradients = {}, {}
        for way, around in ways.items():
            model.zero_grad()
            step(model, size, 0, rank, around, kind)
            rest = live.now
            live.restart()
            step(model, size, 1, rank, around, kind)
            peaks[way] = {"rest": rest, "peak": live.peak - rest}
            gradients[way] = [chunk.grad.clone() for chunk in zero3.get_trainable_chunk(model) if chunk.grad is not None]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(steps):
        for way, around in ways.items():
            dist.barrier()
            model.zero_grad()
            begin = perf_counter()
            step(model, size, number, rank, around, kind)
            seconds[way].append(perf_counter() - begin)
    same = all(torch.equal(mine, theirs) for mine, theirs in zip(gradients["with"], gradients["without"], strict=True))
    return {"bytes": peaks, "seconds": {way: median(times) for way, times in seconds.items()}, "same": same}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Size.add_flags(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="timed, each way (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, default=tempfile.gettempdir(), help="where activations go (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the table's numbers, as JSON")
    args = parser.parse_args()
    size = Size.from_flags(args)
    rows, results = [], {}
    for kind, name in KINDS.items():
        progress(f"blocks {name}")
        found = on_ranks(args.ranks, measure, size, str(args.scratch), kind, args.steps)[0]
        results[name] = found
        without, with_it = (found["bytes"][way]["peak"] for way in ("without", "with"))
        ratio, cost = with_it / without, found["seconds"]["with"] / found["seconds"]["without"]
        megabytes = [f"{nbytes / MEGABYTE:.1f}" for nbytes in (found["bytes"]["with"]["rest"], without, with_it)]
        rows.append([name, *megabytes, f"{ratio:.2f}", f"{cost:.2f}", "same" if found["same"] else "DIFFERENT"])
    columns = ["blocks", "MB at rest", "peak above, without", "with", "ratio", "seconds, ratio", "gradients' bits"]
    title = f"{size.parameters / 1e6:.1f} M parameters, batch {size.batch} x {size.sequence}, {args.ranks} ranks, bytes of one rank\n\n"
    write(args.output, "activations", {"ranks": args.ranks, **results}, title + markdown(columns, rows))


if __name__ == "__main__":
    main()
