"""Nights in which a run is killed, gets stuck, finds its newest checkpoint damaged or its disk full, and is started again each time.

Two processes, each a host with a disk of its own, save in every step to these disks, with a copy on the other one, and sometimes
where both see it. Whoever looks after the run starts it again until it is through: then its losses are those of a run that nobody
has disturbed, bit for bit.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import zero3
from tests.support import disk
from tests.support.hanging import behind
from tests.support.processes import Rank, on_ranks, try_on_ranks

WIDTH, STEPS, SLOW = 16, 12, 5
KILLED, STUCK, FULL, DAMAGED = (
    "killed by kill -9",
    "stuck, named by `hang`, and killed",
    "the fast disk is full",
    "the newest checkpoint is damaged",
)


def night(rank: Rank, root: str, how: str, unlucky: int, when: int) -> list[float] | None:
    """One life of the run, from its newest whole checkpoint on. The losses, if it has come to the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    with mock.patch.dict(os.environ, ZERO3_RING_DIR=f"{root}/rings"):  # these processes have other tests, too
        zero3.shard(model, [*model])
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=1e-2)
    fast, slow, losses = Path(root) / f"disk{rank.number}", Path(root) / "shared", list[float]()
    while (latest := zero3.latest_checkpoint(fast, slow, model=model)) is not None:
        try:
            losses = zero3.load_checkpoint(latest, model, optimizer)["losses"]
            break
        except ValueError as error:
            if "corrupt" not in str(error):
                raise
            shutil.rmtree(latest, ignore_errors=True)  # on both disks
            torch.distributed.barrier()
    begun = len(losses)
    for step in range(begun, STEPS):
        mine = rank.number == unlucky and step == begun + when
        if mine and how == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        if mine and how == STUCK:
            assert behind(Path(root) / "rings", unlucky)["layer"] is None
            os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank.number))
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        _save(model, optimizer, fast, slow, step, losses, full=mine and how == FULL)
    return losses


def _save(model: Any, optimizer: Any, fast: Path, slow: Path, step: int, losses: list[float], *, full: bool) -> None:
    """Rank 0's losses are in it: ranks have their own, and rank 0's are compared."""
    given: dict[str, Any] = {"extra": {"losses": losses}, "keep_last": 2}
    if step % SLOW == SLOW - 1:
        zero3.save_checkpoint(slow / f"step-{step}", model, optimizer, **given)
    with disk.replaced("write", mock.Mock(side_effect=OSError(errno.ENOSPC, "injected"))) if full else nullcontext():
        try:
            zero3.save_checkpoint(fast / f"step-{step}", model, optimizer, local=True, replicas=1, **given)
        except OSError as error:  # on all ranks: the run goes on without this one
            if "injected" not in str(error):
                raise


def damage(root: Path, unlucky: int) -> None:
    """A bit of what a rank has in its newest checkpoint."""
    newest = max((root / f"disk{unlucky}").glob("step-*/manifest.json"), key=lambda path: int(path.parent.name[5:])).parent
    (part,) = newest.glob(f"data-*/model-{unlucky:05}-*")
    text = bytearray(part.read_bytes())
    text[-1] ^= 1
    part.write_bytes(text)


def one_run(root: Path, dice: random.Random, counts: Counter[str]) -> list[float]:
    """A run with three bad nights. Its losses."""
    for number, how in enumerate([*dice.sample((KILLED, STUCK), 2), FULL]):
        unlucky, when = dice.randrange(2), dice.randrange(1, 4)
        if number and (number == 1 or dice.random() < 0.5):
            damage(root, dice.randrange(2))
            counts[DAMAGED] += 1
        counts[how] += 1
        outcomes = try_on_ranks(2, night, str(root), how, unlucky, when, fresh=True, group_timeout=60.0, debug="OFF")
        errors = [outcome.error for outcome in outcomes]
        if how != FULL and errors[unlucky] != "killed":
            raise RuntimeError(f"{how}: {errors}: {outcomes[unlucky].text}\n{outcomes[unlucky].trace}")
    if any(errors):
        raise RuntimeError(f"{errors}: {[outcome.text for outcome in outcomes]}")
    return outcomes[0].value  # type: ignore[no-any-return]


def nights(seconds: float, seed: int) -> tuple[str, bool]:
    """As many runs as go into so many seconds, one at least. A report in markdown, and whether all is well."""
    dice, counts, began, lost, runs = random.Random(seed), Counter[str](), time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        calm = on_ranks(2, night, f"{folder}/calm", "", -1, -1, fresh=True, debug="OFF")[0]
        while not runs or time.monotonic() - began < seconds:
            root = Path(folder) / f"run{runs}"
            lost += one_run(root, dice, counts) != calm
            shutil.rmtree(root)
            runs += 1
    lines = ["| night | how often |", "|---|---|", *(f"| {how} | {counts[how]} |" for how in (KILLED, STUCK, FULL, DAMAGED)), ""]
    lines.append(
        f"{runs} runs of {STEPS} steps, started again {2 * runs} times: the losses of {runs - lost} are the same bits as undisturbed."
    )
    return "\n".join(lines), not lost
