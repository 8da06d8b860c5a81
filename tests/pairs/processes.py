"""Pairs on ranks that are processes, over gloo: on CPUs, or on one GPU that they share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.device.test_pairs import mesh_of, ranks_in
from tests.pairs.exceptions import Names
from tests.pairs.life import Life, Place, World, live
from tests.support.processes import Rank, on_ranks


def lead(names: Names, life_of: Callable[[Names], Life], device: str = "cpu") -> None:
    """Leads the life of some rows, in which the number of ranks does not change. `life_of`: a function of a module."""
    (world,) = life_of(names).chapters
    on_ranks(ranks_in(world), _rank_of, names, life_of, device, debug="OFF")


def _rank_of(me: Rank, names: Names, life_of: Callable[[Names], Life], kind: str) -> None:
    """Each rank leads the life in one process too, on the same device."""
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    os.environ["ZERO3_RING_DIR"] = str(me.scratch / "rings")
    warnings.filterwarnings("ignore", message="The .grad attribute")  # dynamo looks, whoever's tensor it is

    def launch(world: World, body: Callable[[Place], Any], parts: int = 1) -> list[Any]:
        return [body(Place(me.number, me.world_size, mesh_of(world, parts, kind), device))]

    live(life_of(names), launch, me.scratch, device)
