"""Lives have the digests that the file keeps (all of them: `python -m tests.pairs.digest`), and a digest sees the smallest change."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import zero3
from tests.pairs.digest import (
    FIELDS,
    FILE,
    KINDS,
    OTHER_MACHINE,
    Watched,
    difference,
    digest_of,
    log_of_threads,
    misfit,
    on_threads,
    screen,
)
from tests.pairs.life import Life, Row, Sharded
from tests.pairs.rows import ROWS
from tests.pairs.threads import scene

KEPT = json.loads(FILE.read_text())
# Not those that compile: dynamo takes its time at its first call.
SAMPLE = random.Random(0).sample([name for name in KEPT["lives"] if not name.startswith("device") and "compile" not in name], 10)


def test_lives_have_the_digests_that_are_kept() -> None:
    """In a process whose torch has the same kernels on every x86 processor."""
    command = [sys.executable, "-m", "tests.pairs.digest", "--life", *SAMPLE]
    run = subprocess.run(command, env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}, capture_output=True, text=True)
    if run.returncode == OTHER_MACHINE:
        pytest.skip(run.stdout)
    assert not run.returncode, f"{run.stdout}{run.stderr}\nif it is meant: ATEN_CPU_CAPABILITY=avx2 python -m tests.pairs.digest --write"


class Flipped(Row):
    """One bit of one gradient on one rank, before the last step."""

    def before_step(self, one: Sharded) -> None:
        if one.rank == 1 and one.epoch == one.life.last:
            gradient = zero3.get_trainable_chunk(one.model)[0].grad
            assert isinstance(gradient, Tensor)
            gradient.view(torch.int64)[0] ^= 1


class Rounded(Row):
    """One bit of a loss that is told."""

    def loss(self, one: Sharded, loss: Tensor, data: object, rank: int) -> Tensor:  # type: ignore[override]
        bit = torch.nextafter(known := loss.detach(), known + 1) - known
        return loss + bit if (one.epoch, rank) == (2, 0) else loss


class Fetching(Row):
    """One transfer more, which changes no number."""

    def between(self, one: Sharded) -> None:
        if one.epoch == 1:
            zero3.fetch(one.model.blocks[1])
            zero3.release(one.model.blocks[1])


class Asking(Row):
    """Ranks exchange words, and move nothing."""

    def between(self, one: Sharded) -> None:
        one.group.exchange(b"?", one.device)


def digests(row: Row, kind: str = "threads") -> str:
    with scene() as folder:
        return digest_of(Life([row, Watched()]), on_threads(KINDS[kind]), folder, log_of_threads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_sees_a_change_and_nothing_else(kind: str) -> None:
    before = digests(Row(), kind)
    assert digests(Row(), kind) == before
    flipped = set(difference(before, digests(Flipped(), kind)))  # whether a step of lr 0.05 rounds it away is another question
    assert {"gradients"} <= flipped <= {"gradients", "parameters", "optimizer"}
    assert "losses" in difference(before, digests(Rounded(), kind))
    assert difference(before, digests(Fetching(), kind)) == ["transfers", "order"]
    assert difference(before, digests(Asking(), kind)) == ["order"]


def test_the_screen_tells_which_lives_differ_and_in_what() -> None:
    kept = dict.fromkeys(["threads: stage 1", "threads: no_sync", "pieces: stage 1"], "1 2 3 4 5 6")
    found = {"threads: stage 1": "1 0 3 4 5 0", "threads: no_sync": "1 2 3 4 5 6", "pieces: stage 1": ValueError("no")}
    assert screen(kept, found) == [  # type: ignore[arg-type]
        "threads: stage 1: gradients, order",
        "pieces: stage 1: raised ValueError: no",
        "most often: stage 1 (2)",
        "3 lives compared, 2 differ: 1 in gradients, 1 in order, 1 in raised",
    ]


def test_another_machine_is_told() -> None:
    assert "torch 1.0" in misfit({**KEPT, "torch": "1.0"})
    assert "arithmetic 0" in misfit({**KEPT, "arithmetic": "0"})


def test_every_life_of_the_file_is_whole() -> None:
    assert all(len(each.split()) == len(FIELDS) for each in KEPT["lives"].values())
    named = {row for name in KEPT["lives"] for row in name.partition(": ")[2].split(" + ")}
    assert named <= set(ROWS), "rows were renamed: python -m tests.pairs.digest --write"
