"""What each stage holds and sends: live bytes and bytes on the wire of a step in mixed precision, next to the ZeRO paper's formulas.

    python benchmarks/stages/main.py --help

fp32 chunks and AdamW, bf16 compute and reduction, a step of one and of several micro-batches. Counted, not timed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
import torch.distributed as dist

from benchmarks.common.counters import LiveBytes, send_by_sockets, sent_bytes
from benchmarks.common.model import Size, batch, layers, loss_of
from benchmarks.common.ranks import enter_private_network, on_ranks
from benchmarks.common.report import MEGABYTE, markdown, progress, write

STAGES = (3, 2, 1)
POINTS = ("after backward", "after the step", "after zero_grad")


def measure(rank: int, world_size: int, stage: int, size: Size, micro_batches: int) -> dict[str, Any]:
    """Bytes on this rank at three points of the third step, and what all ranks sent in it."""
    from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

    send_by_sockets()
    policy = ShardingPolicy(stage=stage, param_dtype=torch.bfloat16)  # type: ignore[arg-type]
    with LiveBytes() as live:
        model = Zero3Sequential([Zero3Layer(module, policy=policy) for module in layers(size)])
        optimizer = torch.optim.AdamW(model.get_trainable_chunk())
        for step in range(3):
            dist.barrier()
            before, found = sent_bytes("lo"), []
            for number in range(micro_batches):
                loss_of(model, *batch(size, 10 * step + number, rank)).backward()
            found.append(live.now)
            optimizer.step()
            found.append(live.now)
            optimizer.zero_grad()
            found.append(live.now)
            dist.barrier()
            sent = sent_bytes("lo") - before
    return {"live": dict(zip(POINTS, found, strict=True)), "peak": live.peak, "sent": sent / world_size}


def paper(stage: int, parameters: int, ranks: int) -> float:
    """Bytes of parameters, gradients and optimizer state: table 1 of the ZeRO paper, K = 12."""
    p, g, k = 2 * parameters, 2 * parameters, 12 * parameters
    return {1: p + g + k / ranks, 2: p + (g + k) / ranks, 3: (p + g + k) / ranks}[stage]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Size.add_flags(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="of the accumulating step (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the table's numbers, as JSON")
    args = parser.parse_args()
    size = Size.from_flags(args)
    enter_private_network()
    rows, results, parameters = [], {}, size.parameters
    for stage in STAGES:
        progress(f"stage {stage}")
        one, several = (on_ranks(args.ranks, measure, stage, size, number)[0] for number in (1, args.micro_batches))
        results[str(stage)] = {"one": one, "several": several, "paper": paper(stage, parameters, args.ranks)}
        cells = [one["live"][point] for point in POINTS] + [paper(stage, parameters, args.ranks), one["sent"], several["sent"]]
        rows.append([stage, *(f"{cell / MEGABYTE:.1f}" for cell in cells)])
    columns = ["stage", *(f"live MB {point}" for point in POINTS), "ZeRO paper, MB", "sent MB, 1 micro-batch"]
    table = markdown([*columns, f"sent MB, {args.micro_batches} micro-batches"], rows)
    title = f"{parameters / 1e6:.1f} M parameters, {args.ranks} ranks, bytes of one rank\n\n"
    write(args.output, "stages", {"ranks": args.ranks, "parameters": parameters, "stages": results}, title + table)


if __name__ == "__main__":
    main()
