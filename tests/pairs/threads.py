"""Pairs on ranks that are threads."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.pairs.joining import on_threads
from tests.pairs.life import Life, Place, World, live
from tests.pairs.rows import ROWS
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.ranks import World as Meeting

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
    """What a life on threads needs around it. Yields a directory of its own."""
    with tempfile.TemporaryDirectory() as folder, on_threads(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute")  # dynamo looks, whoever's tensor it is
        yield Path(folder)


def lead(names: Iterable[str], seed: int = 0) -> None:
    """Leads the life of some rows on threads. It raises what it raises."""
    rows = [row for name, row in ROWS.items() if name in set(names)]
    with scene() as folder:
        live(Life(rows, seed), launch, folder)
