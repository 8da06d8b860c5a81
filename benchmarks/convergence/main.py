"""What compressed transfers do to training: the losses of examples/finetune.py, beside those of exact transfers.

    python benchmarks/convergence/main.py --help

The example trains its small model from new weights, as processes on this machine, once for each seed and each way of
transfer. Everything else is the same: weights, batches, learning rates.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from benchmarks.common.report import markdown, progress, write

ROOT = Path(__file__).parents[2]
EXACT = "exact"
WAYS: dict[str, list[str]] = {
    EXACT: [],
    "int8 gathers": ["--gather-format", "int8"],
    "int8 reductions": ["--reduce-format", "int8"],
    "int8 both": ["--gather-format", "int8", "--reduce-format", "int8"],
    "int8 both, stochastic": ["--gather-format", "int8", "--reduce-format", "int8-stochastic"],
    "float8 gathers, int8 reductions": ["--gather-format", "float8", "--reduce-format", "int8"],
}
LAST = 20  # steps whose mean loss stands in the table


def train(way: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """The summary of one run of the example."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        command = [*launch, str(ROOT / "examples/finetune.py"), "--output", folder, "--seed", str(seed), "--steps", str(args.steps)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *WAYS[way], *args.options], env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"benchmarks/convergence: {way}, seed {seed}, failed:\n{done.stderr}")
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
        return summary


def table(found: dict[str, dict[int, dict[str, Any]]]) -> str:
    rows = []
    for way, runs in found.items():
        for seed, run in runs.items():
            after, last = run["held_out_loss_after"], fmean(run["losses"][-LAST:])
            exact = found.get(EXACT, {}).get(seed)
            apart = [f"{after - exact['held_out_loss_after']:+.4f}", f"{last - fmean(exact['losses'][-LAST:]):+.4f}"] if exact else ["", ""]
            rows.append([way, seed, f"{run['held_out_loss_before']:.4f}", f"{after:.4f}", apart[0], f"{last:.4f}", apart[1]])
    beside = "less exact's"
    return markdown(["transfers", "seed", "held-out loss before", "after", beside, f"mean of the last {LAST} steps", beside], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--options", type=shlex.split, default=[], help="further options of the example, as one text")
    parser.add_argument("--output", type=Path, help="a folder for the table and all losses")
    args = parser.parse_args()
    found: dict[str, dict[int, dict[str, Any]]] = {way: {} for way in args.ways}
    for seed in args.seeds:
        for way in args.ways:
            progress(f"seed {seed}: {way}")
            found[way][seed] = train(way, seed, args)
            progress(table({way: {seed: found[way][seed]}}).splitlines()[-1])
    write(args.output, "convergence", {"steps": args.steps, "ranks": args.ranks, "found": found}, table(found))


if __name__ == "__main__":
    main()
