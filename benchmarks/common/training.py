"""Trains one system on every rank and reports what a step took: seconds, bytes sent, resident memory, losses."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from .counters import LiveBytes, Resident, sent_bytes
from .model import Size, batch, layers, loss_of
from .systems import BY_NAME, SYSTEMS, plain


def train(
    rank: int, world_size: int, system: str, size: Size, steps: int, warmup: int, interface: str = "lo", micro_batches: int = 1
) -> dict[str, Any]:
    """Timed, and nothing else in the way. A step is forward, backward, optimizer step and `zero_grad`, begun by all ranks at once."""
    for name in ("torch.distributed.fsdp", "zero3"):  # what an import takes is not the price of building
        import_module(name)
    resident, modules = Resident(), layers(size)
    dist.barrier()
    resident.restart()  # the peak of sharding begins at a whole model, initialised
    begin = time.perf_counter()
    training = (SYSTEMS | BY_NAME)[system](modules, "adamw")
    del modules
    report: dict[str, Any] = {"construction": time.perf_counter() - begin, "rss_construction": resident.peak()}
    resident.restart()
    rows = []
    for step in range(warmup + steps):
        ids, labels = batch(size, step, rank)
        dist.barrier()
        sent, begin, busy = sent_bytes(interface), time.perf_counter(), time.process_time()
        for _ in range(micro_batches - 1):
            with training.accumulating():
                training.backward(loss_of(training.model, ids, labels))
        training.backward(loss_of(training.model, ids, labels))
        computed = time.perf_counter()
        training.update()
        end, busy = time.perf_counter(), time.process_time() - busy
        dist.barrier()
        rows.append((end - begin, computed - begin, sent_bytes(interface) - sent, busy))
    seconds, computing, sent_in, processor = zip(*rows[warmup:], strict=True)
    report |= {"rss_step": resident.peak(), "seconds": seconds, "forward_backward": computing, "sent": sent_in}
    return report | {"processor_seconds": processor}  # on a machine that others use, these say more


def check(rank: int, world_size: int, system: str, size: Size, steps: int) -> dict[str, Any]:
    """Counted: live bytes and collectives under AdamW, and the losses of AdamW and SGD, averaged over the ranks."""
    with LiveBytes() as live:
        training = (SYSTEMS | BY_NAME)[system](layers(size), "adamw")
        report: dict[str, Any] = {"live_construction": live.now, "live_construction_peak": live.peak}
        losses = []
        for step in range(steps):
            live.restart()
            losses.append(_step(training, size, step, rank))
            report |= {"live_step": live.now, "live_peak": live.peak, "collectives": dict(live.collectives)}
    report["adamw"] = _averaged(losses, world_size)
    training = (SYSTEMS | BY_NAME)[system](layers(size), "sgd")
    return report | {"sgd": _averaged([_step(training, size, step, rank) for step in range(steps)], world_size)}


def _step(training: Any, size: Size, step: int, rank: int) -> float:
    loss = loss_of(training.model, *batch(size, step, rank))
    training.backward(loss)
    training.update()
    return loss.item()


def _averaged(losses: list[float], world_size: int) -> list[float]:
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / world_size).tolist()


def reference(size: Size, steps: int, ranks: int) -> dict[str, list[float]]:
    """The losses of one process that sees the batches of all ranks, by optimizer."""
    found: dict[str, list[float]] = {}
    for optimizer in ("adamw", "sgd"):
        training, found[optimizer] = plain(layers(size), optimizer), []
        for step in range(steps):
            batches = [batch(size, step, rank) for rank in range(ranks)]
            loss = loss_of(training.model, *(torch.cat(parts) for parts in zip(*batches, strict=True)))
            training.backward(loss)
            training.update()
            found[optimizer].append(loss.item())
    return found


def slowest(reports: list[dict[str, Any]]) -> list[float]:
    """Seconds of every step: those of the rank that took longest."""
    return [max(each) for each in zip(*(report["seconds"] for report in reports), strict=True)]
