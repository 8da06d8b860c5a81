"""What sharding costs the host: a step of many small layers whose collectives do nothing, against plain torch.

    python benchmarks/overhead/main.py --help

One process plays rank 0 of W (torch's `fake` backend). Every (repetition, system) is a fresh process, repetitions
outermost. What a step takes beyond plain torch's, divided by the layers, is the overhead a layer and step. Then the same
for more layers and for more ranks: the first must grow with the layers, the second must not grow.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
from torch import nn

from benchmarks.common.alone import rank_zero_of
from benchmarks.common.ranks import alone
from benchmarks.common.report import markdown, median, new_figure, progress, save, write
from benchmarks.common.systems import NO_COMMUNICATION, SYSTEMS

PLAIN, WIDTH = "plain torch", 64
KINDS = {PLAIN: NO_COMMUNICATION, "FSDP2": "FSDP2", "FSDP1": "FSDP1", "zero3": "zero3"}


class Small(nn.Module):
    """One layer of the stack: two parameters, next to no work."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(self.linear(x))


def seconds_of(system: str, layers: int, ranks: int, steps: int, device: str = "cpu") -> dict[str, float]:
    """Medians over steps: CPU time of forward and backward, the same by the clock, CPU time of the optimizer. Least: the first's minimum,
    which says more than its median where other work disturbs the machine.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.set_flush_denormal(True)  # collectives that do nothing leave what was in memory
    with rank_zero_of(ranks) as transfers:
        training = SYSTEMS[KINDS[system]]([Small().to(device) for _ in range(layers)], "adamw", device=device)
        x = torch.randn(4, WIDTH, device=device)
        rows = []
        for step in range(3 + steps):
            if step == 2:
                transfers.replace()
            wait()  # a queue that is full would make the host wait for the device
            clock, begin = time.perf_counter(), time.process_time()
            training.backward(training.model(x).sum())
            middle, spent = time.process_time(), time.perf_counter() - clock
            training.update()
            rows.append((middle - begin, spent, time.process_time() - middle))
    columns = zip(*rows[3:], strict=True)
    return dict(zip(("compute", "clock", "optimizer"), map(median, columns), strict=True)) | {"least": min(row[0] for row in rows[3:])}


def measure(args: argparse.Namespace, layers: int, ranks: int, systems: list[str]) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
    for repetition in range(args.repetitions):
        for system in systems:
            progress(f"{layers} layers, {ranks} ranks, repetition {repetition + 1} of {args.repetitions}: {system}")
            found[system].append(alone(seconds_of, system, layers, ranks, args.steps))
    return found


def overhead(found: dict[str, list[dict[str, float]]], system: str, layers: int, what: str = "compute") -> float:
    """Microseconds a layer and step beyond plain torch: of medians, or of the least of all steps."""
    over_processes = min if what == "least" else median
    own, base = (over_processes([each[what] for each in found[name]]) for name in (system, PLAIN))
    return (own - base) / layers * 1e6


def comparison(found: dict[str, list[dict[str, float]]], layers: int) -> str:
    rows = []
    for system, each in found.items():
        own = [overhead(found, system, layers, what) for what in ("compute", "clock", "optimizer")]
        peers = [overhead(found, "FSDP2", layers, what) if "FSDP2" in found else float("nan") for what in ("compute", "least")]
        step, least = median([one["compute"] for one in each]) * 1e3, overhead(found, system, layers, "least")
        ratios = [f"{own[0] / peers[0]:.2f}", f"{least:.0f}", f"{least / peers[1]:.2f}"]
        rows.append([system, f"{step:.2f}", *(f"{value:.0f}" for value in own), *ratios])
    columns = ["system", "forward and backward, CPU ms", "us beyond plain, a layer", "... by the clock", "... of the optimizer"]
    return markdown([*columns, "x FSDP2", "us beyond plain, by the least", "x FSDP2, by the least"], rows)


def growth(args: argparse.Namespace, systems: list[str]) -> dict[str, dict[int, dict[str, float]]]:
    """Overhead a layer for several numbers of layers (W = 2), and for several W."""
    result: dict[str, dict[int, dict[str, float]]] = {"layers": {}, "ranks": {}}
    for layers in args.growth_layers:
        found = measure(args, layers, 2, [PLAIN, *systems])
        result["layers"][layers] = {system: overhead(found, system, layers) for system in systems}
    for ranks in args.growth_ranks:
        found = measure(args, args.layers, ranks, [PLAIN, *systems])
        result["ranks"][ranks] = {system: overhead(found, system, args.layers) for system in systems}
    return result


def growth_table(result: dict[str, dict[int, dict[str, float]]], systems: list[str]) -> str:
    rows = [[f"{number} {what}", *(f"{values[s]:.0f}" for s in systems)] for what, by in result.items() for number, values in by.items()]
    return markdown(["us beyond plain, a layer and step", *systems], rows)


def draw(found: dict[str, list[dict[str, float]]], result: dict[str, Any], layers: int, systems: list[str], path: Path) -> None:
    made = new_figure(11, 3.2, columns=3)
    if made is None:
        return
    figure, (bars, by_layers, by_ranks) = made
    sharded = [system for system in found if system != PLAIN]
    bars.bar(sharded, [overhead(found, system, layers) for system in sharded], color=["C7" if s != "zero3" else "C0" for s in sharded])
    bars.set_ylabel("us a layer and step")
    for axes, what in ((by_layers, "layers"), (by_ranks, "ranks")):
        for system in systems:
            axes.plot(list(result[what]), [values[system] for values in result[what].values()], marker="o", label=system)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(what)
        if result[what]:
            axes.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="W of the comparison; default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each process; default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--systems", nargs="+", default=list(KINDS), choices=list(KINDS), metavar="SYSTEM", help=", ".join(KINDS))
    parser.add_argument("--growth-layers", nargs="*", type=int, default=[16, 32, 64, 128, 256], metavar="L", help="none: skip")
    parser.add_argument("--growth-ranks", nargs="*", type=int, default=[2, 8, 64, 256, 1024], metavar="W", help="none: skip")
    parser.add_argument("--output", type=Path, help="a folder for the table, all that was measured, and a picture")
    args = parser.parse_args()
    systems = [PLAIN, *(system for system in args.systems if system != PLAIN)]
    grown = [system for system in ("FSDP2", "zero3") if system in systems]
    found = measure(args, args.layers, args.ranks, systems)
    result = growth(args, grown)
    tables = comparison(found, args.layers)
    if any(result.values()):
        tables += "\n\n" + growth_table(result, grown)
    write(args.output, "overhead", {"arguments": vars(args) | {"output": str(args.output)}, "comparison": found, "growth": result}, tables)
    if args.output:
        draw(found, result, args.layers, grown, args.output / "overhead.png")


if __name__ == "__main__":
    main()
