"""Trains one transformer under every system, interleaved, and compares time, memory, traffic, collectives and losses.

    python benchmarks/peers/main.py --help

Every (repetition, system) is a fresh group of processes, repetitions outermost, so that a noisy machine is noisy to all.
A last group of each is counted and not timed: live bytes, collectives, losses under AdamW and SGD against one process
that sees all ranks' batches. A peer that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from benchmarks.common.model import Size
from benchmarks.common.ranks import RanksFailed, alone, enter_private_network, on_ranks
from benchmarks.common.report import leave, progress
from benchmarks.common.systems import COMPILED, SYSTEMS, missing
from benchmarks.common.training import check, reference, slowest, train
from benchmarks.peers.tables import draw, tables


def attempt(found: dict[str, Any], body: Any, args: argparse.Namespace, *arguments: Any) -> list[dict[str, Any]]:
    """What each rank reports; [] if one fails, and then the system is not tried again."""
    try:
        return on_ranks(args.ranks, body, *arguments, timeout=args.timeout)
    except RanksFailed as error:
        progress(f"failed: {error}")
        found["failed"] = str(error).strip().splitlines()[-1]
        return []


def measure(args: argparse.Namespace, size: Size) -> Iterator[dict[str, dict[str, Any]]]:
    """By system: what the ranks of every repetition reported, what was counted, or why there is nothing. After each repetition."""
    found: dict[str, dict[str, Any]] = {system: {"runs": [], "check": [], "failed": missing(system)} for system in args.systems}
    for repetition in range(args.repetitions):
        for system, entry in found.items():
            if not entry["failed"]:
                progress(f"repetition {repetition + 1} of {args.repetitions}: {system}")
                reports = attempt(entry, train, args, system, size, args.steps, args.warmup)
                if reports:
                    entry["runs"].append({"seconds": slowest(reports), "ranks": reports})
        yield found
    for system, entry in found.items():
        if args.check_steps and not entry["failed"]:
            progress(f"counting, and comparing losses: {system}")
            entry["check"] = attempt(entry, check, args, system, size, args.check_steps)
    yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Size.add_flags(parser)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each process; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--check-steps", type=int, default=3, help="steps that are counted and compared; 0: none; default: %(default)s")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one group of processes; default: %(default)s")
    known = [*SYSTEMS, *COMPILED]
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=known, metavar="SYSTEM", help=", ".join(known))
    parser.add_argument("--output", type=Path, help="a folder for the tables, all that was measured, and pictures")
    args = parser.parse_args()
    size = Size.from_flags(args)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    private = enter_private_network()
    if not private:
        progress("not root: bytes on the wire are those of the whole machine's loopback, other programs included")
    progress(f"{size.parameters / 1e6:.1f} M parameters")
    losses: dict[str, list[float]] = {}
    if args.check_steps:
        progress("one process, as a reference for losses")
        losses = alone(reference, size, args.check_steps, args.ranks)
    results = {"size": asdict(size), "parameters": size.parameters, "ranks": args.ranks, "own loopback": private, "reference": losses}
    for found in measure(args, size):
        leave(args.output, "peers", results | {"systems": found}, tables(found, losses))
    print(tables(found, losses))
    if args.output:
        draw(found, args.output)
    sys.exit(any(entry["failed"] and not missing(system) for system, entry in found.items()))


if __name__ == "__main__":
    main()
