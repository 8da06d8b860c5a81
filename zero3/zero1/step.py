"""One update by all ranks together. Ranks without data take part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import agree
from .buckets import Entry, flat, is_gapless, laid_out_as, named
from .groups import Groups, options_of
from .local_step import step_locally
from .shards import Shards
from .state import broadcast_values

__all__: list[str] = []

_ACTIVE, _JOINED, _FAILED = range(3)


def step(
    shards: Shards, groups: Groups, kwargs: dict[str, Any], *, loss: Any = None, joined: bool = False, error: Exception | None = None
) -> None:
    """Updates the parameters that have a gradient. A rank that has joined (has no data any more) gets gradients from a rank with data.

    `loss`: the result of the caller's closure. `error`: a mistake that this rank has found. Every rank raises it.
    """
    present = [entry.parameter.grad is not None for entry in shards.entries]
    error = error or (None if joined else _unusable(shards.entries))
    ranks = roll_call(shards, [] if joined else _lines(shards.entries), joined=joined, error=error)
    if any(ranks):
        leader = ranks.index(False)
        told: dict[str, Any] = {"gradients": present, "options": [options_of(group) for group in groups], "kwargs": kwargs}
        told = broadcast_values(shards.communicator, shards.device, told, leader, "step() of ZeroRedundancyOptimizer")
        present, kwargs = told["gradients"], told["kwargs"]
        if joined:
            set_options(groups, told["options"])
    entries = [entry for entry, has_one in zip(shards.entries, present, strict=True) if has_one]
    shards.copy_options_in(groups)
    for entry in entries:
        gradient = _shared_gradient(shards, entry, leader, joined=joined) if any(ranks) else entry.parameter.grad
        shards.take(entry, gradient, copy=joined)
    step_locally(shards.optimizer, loss, kwargs)
    shards.drop_gradients(entries)
    try:
        shards.start_spreading(entries)
        shards.finish_spreading()
    except BaseException:
        shards.drop_spreading()
        raise
    shards.copy_options_out(groups)


def roll_call(shards: Shards, lines: list[str], *, joined: bool, error: Exception | None = None) -> list[bool]:
    """Returns which ranks have joined, after a comparison of `lines` among the others. Each rank sends 16 bytes; texts follow only if
    these differ.

    Raises:
        ValueError, TypeError, RuntimeError: The `error` of a rank, or the first line that differs. Every rank raises it.
    """
    state = _JOINED if joined else _ACTIVE if error is None else _FAILED
    digest = hashlib.sha256("\n".join(lines).encode()).digest()[:15]
    subject = "which parameters of ZeroRedundancyOptimizer have gradients"
    with named(shards.communicator, "comparing with the other ranks", subject, "ZeroRedundancyOptimizer.step"):
        headers = shards.communicator.exchange(digest + bytes([state]), shards.device)
    if any(header[-1] == _FAILED for header in headers) or len({header for header in headers if header[-1] != _JOINED}) > 1:
        agree(shards.communicator, shards.device, "which parameters have gradients", lines, error)
    return [header[-1] == _JOINED for header in headers]


def set_options(groups: Groups, options: Groups) -> None:
    """Sets the options of a rank with data on a rank that has joined, where schedules stand still."""
    for group, new in zip(groups, options, strict=True):
        group.update(new)


def _shared_gradient(shards: Shards, entry: Entry, leader: int, *, joined: bool) -> Tensor | None:
    """Sends a gradient to ranks that have joined. (They took part in DDP's reduction without its result.) Their `.grad` does not change."""
    parameter = entry.parameter
    sending = shards.communicator.rank == leader and parameter.grad is not None
    laid = laid_out_as(parameter.grad.detach(), parameter) if sending and parameter.grad is not None else torch.empty_like(parameter)
    values = flat(laid) if is_gapless(laid) else laid.contiguous().view(-1)
    if values.numel():
        communicator = shards.communicators[parameter.device]
        with named(communicator, "broadcasting", f"the gradient of {entry.name} of ZeroRedundancyOptimizer from rank {leader}"):
            communicator.broadcast(values, source=leader)
    if not joined:
        return parameter.grad
    return laid if is_gapless(laid) else values.view(parameter.shape)


def _lines(entries: Iterable[Entry]) -> list[str]:
    return [f"{entry.name}: {'a gradient' if entry.parameter.grad is not None else 'no gradient'}" for entry in entries]


def _unusable(entries: Iterable[Entry]) -> Exception | None:
    for entry in entries:
        gradient = entry.parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            return RuntimeError(f"the gradient of {entry.name} is sparse, which has no parts to spread over ranks: use dense gradients")
    return None
