"""This process among those that the launcher started."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Ranks", "join_ranks"]


@dataclass(frozen=True)
class Ranks:
    """Who this process is, and the three things that a training script asks of the others."""

    rank: int
    world_size: int
    device: torch.device

    def mean(self, value: torch.Tensor) -> float:
        """The mean over all ranks of a number that each of them has."""
        total = value.detach().clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.item() / self.world_size

    def from_first(self, text: str) -> str:
        """What rank 0 passes, on every rank. As bytes: torch's collectives for objects unpickle what another rank sends."""
        if self.world_size == 1:
            return text
        sent = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        size = torch.tensor([sent.numel()], device=self.device)
        dist.broadcast(size, src=0)
        told = sent if self.rank == 0 else sent.new_empty(int(size))
        dist.broadcast(told, src=0)
        return bytes(told.tolist()).decode()

    def all(self, numbers: Iterable[int]) -> list[list[int]]:
        """Every rank's numbers, in rank order, on every rank."""
        mine = torch.tensor(list(numbers), device=self.device)
        everyone = [mine.clone() for _ in range(self.world_size)]
        if self.world_size > 1:
            dist.all_gather(everyone, mine)
        return [each.tolist() for each in everyone]


@contextmanager
def join_ranks(device_type: str, timeout: float | None = None) -> Iterator[Ranks]:
    """Joins the process group that `torchrun` prepared; a plain process stays alone and needs none.

    Args:
        device_type: "cuda" (one GPU a process, over NCCL) or "cpu" (over gloo).
        timeout: seconds after which a rank that waits for the others ends with an error. They also bound how long the first rank
            waits for the last to start. None: torch's, 10 minutes on NCCL, 30 on gloo.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(device_type, int(os.environ.get("LOCAL_RANK", "0"))) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            warnings.warn(
                "torchrun keeps one store for all attempts, and a restarted process may connect to one that is dead:"
                " set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun",
                stacklevel=3,
            )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=None if timeout is None else timedelta(seconds=timeout),
            device_id=device if device.type == "cuda" else None,
        )
    yield Ranks(int(os.environ.get("RANK", "0")), world_size, device)
    # Not in a `finally`: after an exception the others may be waiting for this rank, and the launcher ends them all.
    if world_size > 1:
        dist.destroy_process_group()
