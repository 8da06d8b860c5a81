"""What each rank runs: a model that is built layer by layer, and trained in memory or in files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.common.model import Block, Embedding, Readout, Size, batch, loss_of
from benchmarks.common.systems import Training

from .confined import Samples, allow, enter, give_back_at_once, moved, status

SYSTEMS = ("zero3, files", "zero3, files, in backward", "zero3", "FSDP2", "plain torch")


def modules(size: Size) -> Iterator[nn.Module]:
    """The layers, one at a time, with the values that `benchmarks.common.model.layers` gives them. Blocks are computed anew in backward."""
    torch.manual_seed(0)
    yield Embedding(size)
    for _ in range(size.depth):
        block = Block(size)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        yield block
    yield Readout(size)


def build(system: str, size: Size, directory: str, fused: bool) -> Training:
    if system == "plain torch":
        model: nn.Module = nn.Sequential(*modules(size))
        return Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused or None))
    if system == "FSDP2":
        model = _fsdp2(size)
        return Training(model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=fused or None))
    import zero3

    policy = zero3.ShardingPolicy(offload=directory if "files" in system else None)
    sharded = zero3.Zero3Sequential([zero3.Zero3Layer(module, policy=policy) for module in modules(size)])
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(sharded), lr=3e-4, fused=fused or None)
    return Training(sharded, zero3.offload_optimizer(optimizer, in_backward="in backward" in system))


def _fsdp2(size: Size) -> nn.Module:
    """From the meta device, so that no rank ever holds all of it. Its values are others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = nn.Sequential(*modules(size))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(std=0.02)  # type: ignore[operator]
    return model


def warm_up(directory: str) -> None:
    """What imports, threads and first calls take is not the price of training."""
    size = Size(width=32, depth=1, heads=2, vocabulary=50, sequence=8, batch=1)
    for system in ("zero3, files", "zero3", "FSDP2", "plain torch"):
        step(build(system, size, directory, fused=False), size, 0, 0)
    del size


def step(training: Training, size: Size, number: int, rank: int, clips: bool = False) -> float:
    loss = loss_of(training.model, *batch(size, number, rank))
    training.backward(loss)
    if clips:
        import zero3

        zero3.clip_grad_norm_(training.model, 0.01)  # so small that there is always something to scale
    training.update()
    return loss.item()


def within(rank: int, world_size: int, system: str, size: Size, directory: str, more: int | None, steps: int, log: str) -> dict[str, Any]:
    """Trains with `more` bytes than the process has after it is warmed up. None: without a limit. `log`: where it says how far it came."""
    give_back_at_once()
    warm_up(directory)
    dist.barrier()
    samples, begin, told = Samples(), status("RssAnon"), Path(log)
    samples.start()
    if more is not None:
        allow(more)
    told.write_text("while it was built")
    training = build(system, size, directory, fused=False)
    losses, marks = [], []
    for number in range(steps):
        told.write_text(f"in step {number + 1}")
        marks.append(samples.rows[-1][0] if samples.rows else 0.0)
        losses.append(step(training, size, number, rank))
    return {"losses": losses, "samples": samples.end(), "begin": begin, "marks": marks}


def against(
    rank: int, world_size: int, systems: list[str], size: Size, directory: str, fused: bool, steps: int, speed: float | None = None
) -> dict[str, list[float]]:
    """Seconds a step of several systems, which take turns in the same processes. `speed`: bytes a second that come from files, at most."""
    with reading_at(speed) if speed is not None else nullcontext():
        trainings = {system: build(system, size, directory, fused) for system in systems}
        seconds: dict[str, list[float]] = {system: [] for system in systems}
        for number in range(steps + 1):
            for system, training in trainings.items():
                dist.barrier()
                begin = perf_counter()
                step(training, size, number, rank)
                seconds[system].append(perf_counter() - begin)
    return {system: each[1:] for system, each in seconds.items()}  # the first makes the state


@contextmanager
def reading_at(speed: float) -> Iterator[None]:
    """What an optimizer's thread brings from files takes as long as from a slow disk."""
    from zero3.scratch.mapped_files import MappedFiles

    bring = MappedFiles.bring

    def slowly(files: Any, tensor: torch.Tensor, *, to_write: bool) -> None:
        begin = perf_counter()
        bring(files, tensor, to_write=to_write)
        if tensor in files:
            sleep(max(0.0, tensor.nbytes / speed - (perf_counter() - begin)))

    with patch.object(MappedFiles, "bring", slowly):
        yield


def slowly(rank: int, world_size: int, system: str, size: Size, directory: str, fused: bool, steps: int) -> dict[str, Any]:
    """Seconds and bytes of steps of a confined process."""
    warm_up(directory)
    dist.barrier()
    enter()
    training = build(system, size, directory, fused)
    rows = []
    for number in range(steps + 1):
        dist.barrier()
        before, begin = moved(), perf_counter()
        dist.barrier()
        step(training, size, number, rank)
        dist.barrier()
        rows.append((perf_counter() - begin, *(moved()[way] - before[way] for way in before)))
    return {"rows": rows[1:]}
