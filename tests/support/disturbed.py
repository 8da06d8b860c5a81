"""A script for torchrun: examples/finetune.py, and what happens to it. The first argument says what, the others are the example's.

torchrun's environment tells an attempt from another: how many processes there are, and how often a failure has made it start anew.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import finetune

import zero3
from tests.support import disk

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
RESTARTS = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def host_dies() -> None:
    os.kill(os.getppid(), signal.SIGKILL)  # torchrun's agent, or it would tell the others
    die()


def wait_for(happened: Callable[[], bool]) -> None:
    """And no longer than the agent lives: a process that nobody watches would stay."""
    agent = os.getppid()
    while not happened() and os.getppid() == agent:
        time.sleep(0.05)


def in_step(number: int, act: Callable[[], object]) -> None:
    """In the middle of the step that this process trains as its number `number`."""
    clip, calls = zero3.clip_grad_norm_, 0

    def counting(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            act()
        return clip(*given)

    zero3.clip_grad_norm_ = counting  # type: ignore[assignment]


def in_save(number: int, act: Callable[[], object]) -> None:
    """When half of what this rank writes into its checkpoint number `number` is on the disk."""
    save, saves = zero3.save_checkpoint, 0

    def counting(*given: Any, **options: Any) -> Any:
        nonlocal saves
        saves += 1
        if saves == number:
            with disk.replaced("write", half):
                return save(*given, **options)
        return save(*given, **options)

    def half(file: Any, views: list[memoryview]) -> None:
        disk.OPERATIONS["write"](file, [views[0][: len(views[0]) // 2]])
        act()

    zero3.save_checkpoint = counting


def all_are_there(scratch: Path) -> None:
    """Else the timeout would have to bear the time that they need to start."""
    (scratch / f"ready-{RANK}").touch()
    wait_for(lambda: all((scratch / f"ready-{rank}").exists() for rank in range(2)))


def fast_output() -> Path:
    return Path(sys.argv[sys.argv.index("--fast-output") + 1])


def disturb(how: str, scratch: Path) -> None:
    """A checkpoint is made after every third of ten steps. Processes count their own steps."""
    if how == "kills" and RANK == 1 and RESTARTS == 0:
        in_save(2, die)
    elif how == "kills" and RANK == 1 and RESTARTS == 1:
        in_step(5, die)
    elif how == "membership" and WORLD_SIZE == 1 and RESTARTS == 0:
        in_step(5, lambda: wait_for(lambda: False))  # until torchrun ends it, because another host has come
    elif how == "membership" and "GUEST" in os.environ:
        in_step(5, host_dies)
    elif how == "lost" and WORLD_SIZE == 2:
        all_are_there(scratch)
        if "GUEST" in os.environ:
            in_step(5, lambda: (shutil.rmtree(fast_output()), host_dies()))  # with its disk
    elif how == "cable" and WORLD_SIZE == 2:
        all_are_there(scratch)
        in_step(5, lambda: ((scratch / f"held-{RANK}").touch(), wait_for((scratch / "cut").exists)))


def say_what_is_there(checkpoints: Path) -> None:
    fast = [fast_output()] if "--fast-output" in sys.argv else []
    latest = zero3.latest_checkpoint(*fast, checkpoints)
    if os.environ["LOCAL_RANK"] == "0":
        print(f"\nattempt: {WORLD_SIZE} processes, from {latest and latest.name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    say_what_is_there(Path(sys.argv[2]) / "run" / "checkpoints")
    disturb(sys.argv[1], Path(sys.argv[2]))
    finetune.main(sys.argv[3:])
