"""What can be told of sharding on one GPU: time and memory at world size 1, host overhead, and overlap with simulated links.

    python benchmarks/gpu/main.py --output results      # needs one CUDA device; ends within --minutes
    python benchmarks/gpu/main.py --smoke               # the same paths, tiny and on the CPU: its numbers mean nothing

(a) a Llama-shaped stack in bf16 that fills the card, W = 1 on NCCL: plain torch, FSDP2, FSDP1, zero3; (b) host time a
layer with collectives that do nothing, and how much of a step nothing runs on the device; (c) rank 0 of 8, each transfer
a delay of its bytes over a link's bandwidth: step time against max(computation, communication); (d) pictures of a step.
One GPU can't show NCCL between GPUs, nor what a real transfer takes from the computation (memory bandwidth,
multiprocessors): (c) shows the order of the work, not a network.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch

from benchmarks.common.ranks import RanksFailed, alone
from benchmarks.common.report import markdown, median, new_figure, progress, save, write
from benchmarks.gpu.llama import TINY, Shape
from benchmarks.gpu.parts import PLAIN, alone_on_the_card, idle, over_a_link
from benchmarks.overhead.main import comparison, seconds_of

SYSTEMS = [PLAIN, "FSDP2", "FSDP1", "zero3"]
LINKS = {"no time": 0.0, "NVLink, 450 GB/s": 450e9, "400 Gbit/s": 50e9, "100 Gbit/s": 12.5e9}
GIGABYTE = 1e9


class Budget:
    """Runs measurements while there is time; what fails or is left out says so."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes
        self.missing: list[str] = []

    def run(self, what: str, *job: Any) -> Any:
        if time.monotonic() > self._end:
            self.missing.append(f"{what}: no time left")
            return None
        progress(what)
        try:
            return alone(*job)
        except RanksFailed as error:
            progress(str(error))
            self.missing.append(f"{what}: {str(error).strip().splitlines()[-1]}")
            return None


def on_one_card(args: argparse.Namespace, shape: Shape, depth: int, budget: Budget) -> dict[str, Any]:
    found = {}
    for system in SYSTEMS:
        result = budget.run(f"(a) {system}", alone_on_the_card, system, shape, depth, args.steps, args.smoke)
        if result:
            found[system] = result
    return found


def card_table(found: dict[str, Any], shape: Shape) -> str:
    rows = []
    for system, entry in found.items():
        own = median(entry["device"])
        ratio = f"{own / median(found[PLAIN]['device']):.3f}" if PLAIN in found else ""
        memory = [f"{entry[name] / GIGABYTE:.1f}" for name in ("allocated", "reserved")]
        host = f"{median(entry['host']) * 1e3:.1f}"
        rows.append(
            [system, f"{own * 1e3:.1f}", ratio, f"{shape.batch * shape.sequence / own:.0f}", *memory, host, f"{idle(entry['kernels']):.1%}"]
        )
    columns = ["system", "ms a step", "x plain", "tokens/s", "peak allocated GB", "peak reserved GB", "host ms a step"]
    return markdown([*columns, "of a step nothing runs on the device"], rows)


def overlap(args: argparse.Namespace, shape: Shape, depth: int, budget: Budget) -> dict[str, Any]:
    found: dict[str, Any] = {system: {} for system in ("FSDP2", "zero3")}
    for name, speed in LINKS.items():
        for system, by_link in found.items():
            picture = str(args.output / f"step-{name.split(',')[0].replace('/', '-').replace(' ', '-')}.png") if args.output else ""
            job = (over_a_link, system, shape, depth, args.steps, args.ranks, speed, args.smoke, picture)
            result = budget.run(f"(c) {system}, {name}", *job)
            if result:
                by_link[name] = result
    return found


def overlap_table(found: dict[str, Any]) -> str:
    rows = []
    for name, speed in LINKS.items():
        for system, by_link in found.items():
            if name not in by_link or "no time" not in by_link:
                continue
            entry, computation = by_link[name], by_link["no time"]["seconds"]
            communication = entry["nbytes"] / speed if speed else 0.0
            best = max(computation, communication)
            times = [f"{value * 1e3:.1f}" for value in (entry["seconds"], computation, communication)]
            memory = [f"{entry[key] / GIGABYTE:.2f}" for key in ("nbytes", "allocated", "reserved")]
            rows.append([name, system, *times, f"{entry['seconds'] / best:.2f}", *memory])
    columns = ["ms a step", "computation ms", "communication ms", "x max of the two", "GB a step", "peak allocated GB", "peak reserved GB"]
    return markdown(["link", "system", *columns], rows)


def draw(found: dict[str, Any], path: Path) -> None:
    """(d) One step of each system in (a): what ran on which stream, and when."""
    made = new_figure(12, 1.2 * len(found) + 0.6)
    if made is None or not found:
        return
    figure, axes = made
    rows: list[str] = []
    for system, entry in found.items():
        for stream in sorted({stream for stream, _, _ in entry["kernels"]}):
            bars = [(begin, end - begin) for own, begin, end in entry["kernels"] if own == stream]
            axes.broken_barh(bars, (len(rows) - 0.4, 0.8), facecolor=f"C{SYSTEMS.index(system)}")
            rows.append(f"{system}, stream {stream}")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xlabel("ms")
    axes.invert_yaxis()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU: shows that the script runs, and nothing else")
    parser.add_argument("--minutes", type=float, default=8.0, help="no measurement begins after that; default: %(default)s")
    parser.add_argument("--fill", type=float, default=0.55, help="share of the card for weights, gradients and AdamW; default: %(default)s")
    parser.add_argument("--overlap-depth", type=int, default=12, help="blocks in (c); default: %(default)s")
    parser.add_argument("--ranks", type=int, default=8, help="W that (c) plays rank 0 of; default: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="measured steps; default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=3, help="of (b); default: %(default)s")
    parser.add_argument("--output", type=Path, help="a folder for the tables, all that was measured, and pictures")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu needs one CUDA device, and finds none. (--smoke runs its paths, tiny, on the CPU.)")
    shape, depth, layers = Shape(), 0, 64
    if args.smoke:
        shape, depth, layers, args.overlap_depth = TINY, 2, 4, 2
    else:  # bf16 weights, gradients and two moments: 8 bytes a parameter
        total = torch.cuda.get_device_properties(0).total_memory
        depth = int(args.fill * total / 8 / shape.block_parameters)
    budget, device = Budget(args.minutes), "cpu" if args.smoke else "cuda"
    progress(f"{depth} blocks, {depth * shape.block_parameters / 1e9:.2f} billion parameters")
    card = on_one_card(args, shape, depth, budget)
    host: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    for repetition in range(args.repetitions):
        for system in SYSTEMS:
            result = budget.run(
                f"(b) {system}, {repetition + 1} of {args.repetitions}", seconds_of, system, layers, 2, 5 * args.steps, device
            )
            host[system] += [result] if result else []
    host = {system: each for system, each in host.items() if each}
    links = overlap(args, shape, args.overlap_depth, budget)
    tables = [card_table(card, shape), comparison(host, layers) if PLAIN in host else "", overlap_table(links), *budget.missing]
    results = {"smoke": args.smoke, "depth": depth, "card": card, "host": host, "links": links, "missing": budget.missing}
    write(args.output, "gpu", results, "\n\n".join(filter(None, tables)))
    if args.output:
        draw(card, args.output / "kernels.png")
    sys.exit(bool(budget.missing))


if __name__ == "__main__":
    main()
