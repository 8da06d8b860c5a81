"""How long a run stands still after a rank was killed (-9): from a fast tier of checkpoints, and from a slow one.

    python benchmarks/checkpoint/restart.py --help

Two processes train, save to a fast directory (`local=True`) and to a slow one, and go on; one is killed. From then the clock runs: the
other is ended, as torchrun ends it, new processes start, load the newest checkpoint of one tier, and make a step. In turns, and in fresh
processes. The fast tier's files are where a restart on the same host finds them, in the page cache; with --cold on its disk.

The slow tier is a simulated link: where zero3 reads a file, bytes that a rank has not read before take the time that they would over a
link that all ranks share (--rate). What a rank has read once is in its host's page cache, and free. Nothing else is slowed down.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3
from benchmarks.common.report import markdown, median, progress, write
from zero3.checkpoint import safetensors_files

WIDTH, RANKS = 2048, 2
TIERS = ("fast", "slow")
PHASES = ("imports", "join", "build", "load", "step")
PATIENCE = 600.0  # seconds


class Link:
    """Reads as `read_bytes` does, over a link of so many bytes a second that reads ahead: no byte is there before it could have come."""

    PAGE = 1 << 16  # what comes at once

    def __init__(self, rate: float) -> None:
        self._rate, self._read, self._known, self.nbytes = rate, safetensors_files.read_bytes, set[tuple[int, int]](), 0
        self._begun = time.monotonic()

    def __call__(self, file: FileIO, offset: int, into: memoryview) -> int:
        count = self._read(file, offset, into)
        inode = os.fstat(file.fileno()).st_ino
        self._known |= {(inode, page) for page in range(offset // self.PAGE, -(-(offset + count) // self.PAGE))}
        self.nbytes = len(self._known) * self.PAGE
        time.sleep(max(0.0, self._begun + self.nbytes / self._rate - time.monotonic()))
        return count


def build(layers: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On the meta device no values are drawn: what is loaded needs none."""
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    zero3.shard(model, layers=nn.Linear)
    return model, torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=1e-6, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(2, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def join(rank: int, root: str, life: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "ZERO3_RING_DIR": "0"}
    where = f"file://{root}/rendezvous-{life}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS, timeout=timedelta(minutes=10))


def first_life(rank: int, root: str, layers: int) -> None:
    """Until it is killed."""
    join(rank, root, "first")
    torch.manual_seed(0)
    model, optimizer = build(layers, "cpu")
    with torch.no_grad():
        for chunk in zero3.get_trainable_chunk(model):
            chunk.mul_(math.sqrt(3))  # no layer makes its input smaller: a processor is slow at numbers that are next to nothing
    step(model, optimizer)
    zero3.save_checkpoint(f"{root}/fast/step-1", model, optimizer, local=True)
    zero3.save_checkpoint(f"{root}/slow/step-1", model, optimizer)
    if rank == 0:
        Path(f"{root}/expected").write_text(repr(step(model, optimizer)))
    else:
        step(model, optimizer)
    Path(f"{root}/saved-{rank}").touch()
    while True:
        step(model, optimizer)


def next_life(rank: int, root: str, layers: int, tier: str, rate: float, killed: float) -> None:
    """Writes down when, after the kill, this rank had come to the end of each phase, and what processor time that took."""
    ends = [(time.time(), time.process_time())]  # imports are over
    join(rank, root, tier)
    ends.append((time.time(), time.process_time()))
    model, optimizer = build(layers, "meta")
    ends.append((time.time(), time.process_time()))
    link = Link(rate / RANKS if tier == "slow" else float("inf"))
    vars(safetensors_files)["read_bytes"] = link
    zero3.load_checkpoint(zero3.latest_checkpoint(f"{root}/{tier}", model=model), model, optimizer)
    ends.append((time.time(), time.process_time()))
    loss = step(model, optimizer)
    ends.append((time.time(), time.process_time()))
    begins = [(killed, 0.0), *ends[:-1]]
    found: dict[str, Any] = {phase: [end[0] - begin[0], end[1] - begin[1]] for phase, begin, end in zip(PHASES, begins, ends, strict=True)}
    found |= {"restart": [time.time() - killed, ends[-1][1]], "bytes": link.nbytes, "loss": repr(loss)}
    Path(f"{root}/{tier}-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def live(body: Callable[..., None], *arguments: object) -> list[multiprocessing.Process]:
    found = [multiprocessing.get_context("spawn").Process(target=body, args=(rank, *arguments)) for rank in range(RANKS)]
    for each in found:
        each.start()
    return found


def forget(root: Path) -> None:
    """Files are on the disk, and no longer in the page cache."""
    for path in (each for each in root.rglob("*") if each.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def once(options: argparse.Namespace, tier: str) -> list[dict[str, Any]]:
    """Of each rank."""
    root = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        lives = live(first_life, str(root), options.layers)
        end = time.monotonic() + PATIENCE
        while not all((root / f"saved-{rank}").exists() for rank in range(RANKS)):
            if time.monotonic() > end or not all(each.is_alive() for each in lives):
                raise RuntimeError("the run has not come to its checkpoints")
            time.sleep(0.05)
        if options.cold:
            forget(root)
        killed = time.time()
        for each in reversed(lives):  # the last rank is lost, and whoever looks after the run ends the others
            each.kill()
            each.join()
        for each in live(next_life, str(root), options.layers, tier, options.rate * 1e6, killed):
            each.join(PATIENCE)
        found = [json.loads((root / f"{tier}-{rank}.json").read_text()) for rank in range(RANKS)]
        if found[0].pop("loss") != (root / "expected").read_text():
            raise RuntimeError("the loss is not that of the step that was lost")
        return found
    finally:
        shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=38, help=f"of {WIDTH} x {WIDTH} parameters, fp32 (default: %(default)s, 160 M)")
    parser.add_argument("--rate", type=float, default=100.0, metavar="MB/S", help="of the slow tier (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--cold", action="store_true", help="files are written out, and dropped from the page cache, before the kill")
    parser.add_argument("--directory", help="on the disk of the fast tier (default: the system's temporary one)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the table, and all that was measured")
    options = parser.parse_args()
    found: dict[str, list[list[dict[str, Any]]]] = {tier: [] for tier in TIERS}
    for repetition in range(options.repetitions):
        for tier in TIERS:
            progress(f"repetition {repetition + 1} of {options.repetitions}: {tier}")
            found[tier].append(once(options, tier))
    slowest = {
        tier: {
            phase: [median([max(rank[phase][which] for rank in run) for run in runs]) for which in (0, 1)] for phase in (*PHASES, "restart")
        }
        for tier, runs in found.items()
    }
    rows = [
        [
            tier,
            *(f"{wall:.1f} ({spent:.1f})" for wall, spent in slowest[tier].values()),
            f"{sum(rank['bytes'] for rank in found[tier][0]) / 1e6:.0f}",
        ]
        for tier in TIERS
    ]
    ratio = {phase: slowest["fast"][phase][0] / slowest["slow"][phase][0] for phase in ("load", "restart")}
    tables = "Seconds (and a processor's) of the slower rank:\n\n"
    tables += markdown(["tier", *PHASES, "from the kill to a step", "MB read"], rows)
    tables += f"\n\nfast / slow: {ratio['load']:.2f} of loading, {ratio['restart']:.2f} from the kill to a step"
    write(options.output, "restart", {"found": found, "ratio": ratio}, tables)


if __name__ == "__main__":
    main()
