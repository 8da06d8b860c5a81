"""Pairs on ranks that are threads."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.pairs.joining import on_threads
from tests.pairs.life import Life, Place, World, live
from tests.pairs.rows import ROWS
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.ranks import World as Meeting
from zero3.diagnose.hang import judge, models_in

PATIENCE = 20.0  # seconds that a rank waits for another one


def launch(world: World, body: Callable[[Place], Any], kind: type[ThreadCommunicator] | None = None, parts: int = 1) -> list[Any]:
    replicas, shards = world
    shared = [Meeting(parts, PATIENCE) for _ in range(max(1, replicas) * shards // parts)]

    def rank(group: Any) -> Any:
        if parts > 1:
            number, index = divmod(group.rank, parts)
            group.sequence_group = ThreadCommunicator(shared[number], index, f"sp {number}", group.rank)
        return body(Place(group.rank, group.world_size, group, torch.device("cpu")))

    return run_mesh(replicas, shards, rank, PATIENCE, kind=kind) if replicas else run_ranks(shards, rank, PATIENCE, kind=kind)


@contextmanager
def scene() -> Iterator[Path]:
    """What a life on threads needs around it. Yields a directory of its own. Each rank's last transfers lie in a ring there."""
    with tempfile.TemporaryDirectory() as folder, on_threads(), warnings.catch_warnings(), patch.dict(os.environ):
        os.environ["ZERO3_RING_DIR"] = f"{folder}/rings"
        warnings.filterwarnings("ignore", message="The .grad attribute")  # dynamo looks, whoever's tensor it is
        yield Path(folder)


def lead(names: Iterable[str], seed: int = 0) -> None:
    """Leads the life of some rows on threads. It raises what it raises."""
    rows = [row for name, row in ROWS.items() if name in set(names)]
    with scene() as folder:
        live(Life(rows, seed), launch, folder)
        check_rings(folder / "rings")


def check_rings(directory: Path) -> None:
    """All ranks have noted the same transfers, whatever they have done."""
    damaged: dict[str, str] = {}
    for model in models_in(directory, damaged) if directory.is_dir() else ():
        found = judge(model)
        counts = {rank: each["transfers"] for rank, each in found["ranks"].items()}
        assert not damaged and not found["missing"] and found["verdict"] != "differ" and len(set(counts.values())) == 1, found
