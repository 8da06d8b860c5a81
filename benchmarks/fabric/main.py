"""Step time over a link of a given rate, against the ideal max(computation, communication).

    sudo python benchmarks/fabric/main.py --help

Ranks in two network namespaces, joined by a rate-limited cable (veth, tbf): communication costs time and little CPU, as
on a cluster and unlike the loopback. With two ranks at each end, the link inside a pair has no limit. Computation is a step of
processes that never speak, communication what an end sends in a step divided by the link's rate. Every (repetition, rate,
system) is a fresh group of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from benchmarks.common.model import Size
from benchmarks.common.ranks import RanksFailed, on_ranks
from benchmarks.common.report import MEGABYTE, markdown, median, new_figure, progress, save, spread, write
from benchmarks.common.systems import COMPRESSED, NO_COMMUNICATION, POLICIES, SYSTEMS, missing
from benchmarks.common.training import slowest, train
from benchmarks.fabric.network import INTERFACE, Cable, NoNetwork, cable

Point = dict[str, list[float]]  # seconds of every step, bytes a rank sent in each


def measure(link: Cable, args: argparse.Namespace, size: Size) -> dict[str, dict[float, Point]]:
    """By system and rate in Gbit/s. Computation has no rate: it is under 0."""
    found: dict[str, dict[float, Point]] = {system: {} for system in [NO_COMMUNICATION, *args.systems]}
    for repetition in range(args.repetitions):
        for rate in args.rates:
            link.set_rate(rate)
            for system in found:
                progress(f"repetition {repetition + 1} of {args.repetitions}, {rate:g} Gbit/s: {system}")
                namespaces = [name for name in link.names for _ in range(args.ranks_at_an_end)]
                options = {"namespaces": namespaces, "timeout": args.timeout}
                try:
                    reports = on_ranks(
                        len(namespaces), train, system, size, args.steps, args.warmup, INTERFACE, args.micro_batches, **options
                    )
                except RanksFailed as error:
                    progress(f"failed: {error}")
                    continue
                place = 0.0 if system == NO_COMMUNICATION else rate
                point = found[system].setdefault(place, {"seconds": [], "sent": []})
                point["seconds"] += slowest(reports)
                point["sent"] += [max(pair) for pair in zip(*(report["sent"] for report in reports), strict=True)]
    return found


def ideal(found: dict[str, dict[float, Point]], system: str, rate: float) -> float:
    computation = median(found[NO_COMMUNICATION][0.0]["seconds"])
    return max(computation, median(found[system][rate]["sent"]) * 8 / (rate * 1e9))


def table(found: dict[str, dict[float, Point]]) -> str:
    rows = [["", NO_COMMUNICATION, spread(found[NO_COMMUNICATION][0.0]["seconds"]), *[""] * 6]]
    rates = sorted({rate for by_rate in found.values() for rate in by_rate} - {0.0})
    for rate in rates:
        for system, by_rate in found.items():
            if rate not in by_rate:
                continue
            own, best = median(by_rate[rate]["seconds"]), ideal(found, system, rate)
            peers = [found[peer][rate]["seconds"] if rate in found.get(peer, {}) else [] for peer in ("DDP", "FSDP2", "FSDP2 HSDP")]
            ratios = [f"{own / median(peer):.2f}" if peer else "" for peer in peers]
            sent = f"{median(by_rate[rate]['sent']) / MEGABYTE:.1f}"
            rows.append([f"{rate:g}", system, spread(by_rate[rate]["seconds"]), sent, f"{best * 1e3:.0f}", f"{own / best:.2f}", *ratios])
    return markdown(
        ["Gbit/s", "system", "ms a step (spread)", "MB sent an end", "ideal ms", "x ideal", "x DDP", "x FSDP2", "x FSDP2 HSDP"], rows
    )


def draw(found: dict[str, dict[float, Point]], path: Path) -> None:
    made = new_figure(6, 4)
    if made is None:
        return
    figure, axes = made
    computation = median(found[NO_COMMUNICATION][0.0]["seconds"]) * 1e3
    axes.axhline(computation, color="gray", linewidth=1, label="computation alone")
    for number, system in enumerate(name for name in found if name != NO_COMMUNICATION and found[name]):
        rates = sorted(found[system])
        times = [median(found[system][rate]["seconds"]) * 1e3 for rate in rates]
        axes.plot(rates, times, marker="o", color=f"C{number}", label=system)
        best = [ideal(found, system, rate) * 1e3 for rate in rates]
        axes.plot(rates, best, linestyle=":", color=f"C{number}", label=f"{system}: max(computation, its bytes / rate)")
    axes.set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="ms a step")
    axes.legend(fontsize=8)
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Size.add_flags(parser)
    parser.set_defaults(batch=8)
    peers = [system for system in (*SYSTEMS, *COMPRESSED, *POLICIES) if system != NO_COMMUNICATION]
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1, 2, 3, 5, 10], metavar="GBIT", help="default: %(default)s")
    parser.add_argument("--systems", nargs="+", default=["DDP", "FSDP2", "zero3"], choices=peers, metavar="SYSTEM", help=", ".join(peers))
    parser.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each process; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--ranks-at-an-end", type=int, default=1, help="2: fast inside a pair, slow between; default: %(default)s")
    parser.add_argument("--micro-batches", type=int, default=1, help="in a step; default: %(default)s")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one group of processes; default: %(default)s")
    parser.add_argument("--output", type=Path, help="a folder for the table, all that was measured, and a picture")
    args = parser.parse_args()
    size = Size.from_flags(args)
    for system in [system for system in args.systems if missing(system)]:
        parser.error(f"{system}: {missing(system)}")
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    try:
        with cable() as link:
            found = measure(link, args, size)
    except NoNetwork as error:
        sys.exit(f"benchmarks/fabric: {error}")
    results: dict[str, Any] = {"size": asdict(size), "parameters": size.parameters, "found": found}
    write(args.output, "fabric", results, table(found))
    if args.output:
        draw(found, args.output / "fabric.png")


if __name__ == "__main__":
    main()
