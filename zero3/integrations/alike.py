"""What ranks must have chosen alike, before they train by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch

from ..comm.agreement import Members, agree, agreeing, exchange_texts
from ..comm.board import by_rank
from ..comm.factory import communicator_for

__all__: list[str] = []


def everyone(device: torch.device) -> Members:
    return Members(communicator_for(None, device), device)


def all_ranks(device: torch.device, subject: str) -> AbstractContextManager[list[str]]:
    """`agreeing` of all ranks: what one raises inside, all raise."""
    return agreeing(everyone(device), subject)


def check_alike(
    device: torch.device,
    what: str,
    values: Mapping[str, object],
    caller: str,
    remedy: str = "Give every rank the same",
) -> None:
    """Every rank calls it. Objects are compared by their types.

    Raises:
        ValueError: Ranks differ. All of them raise it, and it names each value that differs.
    """
    ranks = everyone(device)
    if ranks.communicator.world_size == 1:
        return
    agree(ranks, what, [], caller=caller)
    own = {
        name: json.dumps(v, skipkeys=True, default=lambda v: type(v).__name__)
        for name, v in values.items()
    }
    texts = exchange_texts(ranks, json.dumps(own))
    told = [json.loads(text) for text in texts]
    found = {
        name: {rank: each.get(name, "nothing") for rank, each in enumerate(told)}
        for name in sorted(set().union(*told))
    }
    differing = [
        f"{name} ({by_rank(by)})" for name, by in found.items() if len(set(by.values())) > 1
    ]
    if differing:
        raise ValueError(f"ranks differ in {what}: {', '.join(differing)}. {remedy}")
