"""Models and optimizers whose numbers rest in files: how they are made and trained, and where their numbers are."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, linear, seeded, step
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence, process_group

Make = Callable[[Any], torch.optim.Optimizer]

MAKES: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adamw foreach amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True, amsgrad=True),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),  # makes its state at once
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    "asgd": lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
}


def odd() -> nn.Sequential:
    """Layers of unequal sizes, one of them smaller than most numbers of ranks, one frozen."""
    model = seeded(linear, lambda: nn.Sequential(linear(), nn.Tanh(), linear()), lambda: nn.LayerNorm(WIDTH), linear, linear)
    model[3].requires_grad_(False)
    return model


def wrapped(group: ThreadCommunicator, place: object, model: nn.Module | None = None, **policy: Any) -> zero3.Zero3Sequential:
    policy["offload"] = place
    return in_sequence(odd() if model is None else model, process_group(group), zero3.ShardingPolicy(**policy))  # type: ignore[return-value]


def groups_of(model: nn.Module, how: str) -> Any:
    if how == "chunks":
        return zero3.get_trainable_chunk(model)
    whole = {"whole": True} if how == "whole" else {}
    return zero3.param_groups(model, lambda name, info: {"weight_decay": 0.1 if info.ndim > 1 else 0.0, **whole})


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, group: ThreadCommunicator, micro_batches: int = 1, clip: bool = True
) -> None:
    for number in range(3):
        for micro in range(micro_batches):
            with zero3.no_sync(model) if micro < micro_batches - 1 else torch.enable_grad():
                step(model, Turn(group.rank, 10 * number + micro, group.world_size))
        if clip:
            zero3.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module) -> list[Tensor]:
    return [chunk.detach().clone() for chunk in model.parameters()]


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    found = (value for group in optimizer.param_groups for p in group["params"] for value in optimizer.state.get(p, {}).values())
    return [value for value in found if isinstance(value, Tensor) and value.ndim and value.numel()]


def in_files(values: list[Tensor]) -> bool:
    """Whether the memory of all of them is that of files without a name, shared with them."""
    rows = (row.split() for row in Path("/proc/self/maps").read_text().splitlines() if row.endswith("(deleted)"))
    spans = [[int(each, 16) for each in row[0].split("-")] for row in rows if row[1] == "rw-s"]
    return bool(values) and all(any(start <= value.data_ptr() < stop for start, stop in spans) for value in values)


def same(mine: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


def same_bits(world_size: int, run: Callable[[ThreadCommunicator, Any], Iterable[Tensor]], place: object) -> None:
    """On ranks as threads, `run` finds the same bits with what rests in `place` as without."""

    def body(group: ThreadCommunicator) -> None:
        assert same(run(group, None), run(group, place))

    run_ranks(world_size, body)


def small(place: Path, width: int = 100, depth: int = 4, **policy: Any) -> zero3.Zero3Sequential:
    layers = seeded(*[lambda: nn.Linear(width, width)] * depth)
    return zero3.Zero3Sequential([zero3.Zero3Layer(layer, policy=zero3.ShardingPolicy(offload=place, **policy)) for layer in layers])


def backward(model: nn.Module, width: int = 100) -> None:
    model(torch.ones(2, width, dtype=torch.float64)).pow(2).sum().backward()


def wait_for(optimizer: Any) -> None:
    """Until the threads have nothing more to do."""
    traffic = inspect.getclosurevars(optimizer.step.__func__.__wrapped__).nonlocals["turns"].traffic
    traffic.end_step().result()
    for future in traffic._writing:
        future.result()


def disk_is_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
