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
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from io import FileIO
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3
from benchmarks.common.report import markdown, median, progress, write
from zero3.checkpoint import hosts, manifest, safetensors_files

WIDTH, RANKS = 2048, 2
TIERS = ("fast", "slow")
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


def build(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    zero3.shard(model, layers=nn.Linear)
    return model, torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=1e-6)


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
    model, optimizer = build(layers)
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
    """Writes down when, after the kill, this rank was here, had loaded, and had made a step."""
    join(rank, root, tier)
    model, optimizer = build(layers)
    spent = time.process_time()
    begun, link = time.time(), Link(rate / RANKS if tier == "slow" else float("inf"))
    with ExitStack() as stack:
        for module in (safetensors_files, manifest, hosts):
            stack.enter_context(mock.patch.object(module, "read_bytes", link))
        zero3.load_checkpoint(zero3.latest_checkpoint(f"{root}/{tier}", model=model), model, optimizer)
    loaded, spent = time.time(), time.process_time() - spent
    loss = step(model, optimizer)
    found = {
        "start": begun - killed,
        "load": loaded - begun,
        "processor": spent,
        "restart": time.time() - killed,
        "bytes": link.nbytes,
        "loss": repr(loss),
    }
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


def once(options: argparse.Namespace, tier: str) -> list[dict[str, float]]:
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
    found: dict[str, list[list[dict[str, float]]]] = {tier: [] for tier in TIERS}
    for repetition in range(options.repetitions):
        for tier in TIERS:
            progress(f"repetition {repetition + 1} of {options.repetitions}: {tier}")
            found[tier].append(once(options, tier))
    slowest = {
        tier: {what: median([max(rank[what] for rank in run) for run in runs]) for what in ("start", "load", "processor", "restart")}
        for tier, runs in found.items()
    }
    rows = [
        [tier, *(f"{slowest[tier][what]:.2f}" for what in slowest[tier]), f"{sum(rank['bytes'] for rank in found[tier][0]) / 1e6:.0f}"]
        for tier in TIERS
    ]
    ratio = {what: slowest["fast"][what] / slowest["slow"][what] for what in ("load", "restart")}
    tables = markdown(
        ["tier", "s until the processes are there", "s to load", "processor s of that", "s from the kill to a step", "MB read"], rows
    )
    tables += f"\n\nfast / slow: {ratio['load']:.2f} of loading, {ratio['restart']:.2f} from the kill to a step"
    write(options.output, "restart", {"found": found, "ratio": ratio}, tables)


if __name__ == "__main__":
    main()
