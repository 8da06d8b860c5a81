"""What goes wrong in a soak: each fault is injected into one call, and takes its trap away again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import disk
from zero3.comm import gloo

TRANSFERS = 17  # of a micro-batch of six layers: 6 gathers forward, 5 backward, 6 reductions


class Lost(Exception):
    pass


# kind -> on one rank (False: on all), what is raised. A guard drops what one rank fails in.
MICRO_BATCH: dict[str, tuple[bool, type[BaseException]]] = {
    "an exception in a forward": (True, Lost),
    "an exception in a backward": (True, Lost),
    "out of memory in a forward": (True, torch.OutOfMemoryError),
    "out of memory in a backward": (True, torch.OutOfMemoryError),
    "a batch that can't be loaded": (True, Lost),
    "nan in a batch": (True, Lost),
    "an exception in a forward, all ranks": (False, Lost),
    "an interrupt in a forward, all ranks": (False, KeyboardInterrupt),
    "an interrupt in a backward, all ranks": (False, KeyboardInterrupt),
    "a transfer that fails, all ranks": (False, RuntimeError),
    "an interrupted wait, all ranks": (False, KeyboardInterrupt),
}
STEP = (
    "clipping: its all-reduce fails, all ranks",
    "the optimizer, before it begins",
    "the optimizer, half way",
    "a save: the disk is full",
)
FAULTS = (*MICRO_BATCH, *STEP)


@contextmanager
def trap(owner: Any, method: str, number: int, error: BaseException) -> Iterator[list[str]]:
    """The call of that number (from 0) raises instead; what is yielded is empty until then."""
    original: Callable[..., Any] = getattr(owner, method)
    calls, sprung = itertools.count(), []

    def trapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            sprung.append(method)
            raise error
        return original(*args, **kwargs)

    with mock.patch.object(owner, method, trapped):
        yield sprung


def run_micro_batch(model: Any, x: Tensor, kind: str | None, where: int, number: int, share: int) -> float:
    """Forward and backward. `where`: in which layer; `number`: at which transfer; `share`: of how many micro-batches it is one."""
    error = MICRO_BATCH[kind][1] if kind is not None else Lost

    def fail(*_: Any) -> None:
        raise error("injected")

    if kind == "a batch that can't be loaded":
        fail()
    if kind == "nan in a batch":
        x = x * float("nan")
    module: nn.Module = model[where].module
    with _placed(kind, module, fail, number, error):
        y = model(x)
        loss = (y - x.roll(1, -1)).square().mean() / share
        loss.backward()
    if not loss.isfinite():
        raise Lost("nan")
    return loss.item()


@contextmanager
def _placed(kind: str | None, module: nn.Module, fail: Callable[..., None], number: int, error: type[BaseException]) -> Iterator[None]:
    if kind == "a transfer that fails, all ranks":
        with trap(gloo.GlooCommunicator, "_swap", number, error("injected")) as sprung:
            yield
        raise AssertionError(f"there is no transfer {number}: {sprung}")
    if kind == "an interrupted wait, all ranks":
        with trap(gloo._Transfers, "wait", number, error("injected")) as sprung:
            yield
        raise AssertionError(f"there is no wait {number}: {sprung}")
    if kind is not None and "in a forward" in kind:
        handle = module.register_forward_hook(fail)
    elif kind is not None and "in a backward" in kind:
        handle = module.register_forward_hook(lambda module, args, y: y.register_hook(fail) and None)
    else:
        yield
        return
    try:
        yield
    finally:
        handle.remove()


class HalfWay(TorchDispatchMode):
    """The optimizer has written some of what it writes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "addcdiv" in func.__name__:  # AdamW's last: by then the moments are new
            raise Lost("injected")
        return func(*args, **(kwargs or {}))


@contextmanager
def failing_step(optimizer: torch.optim.Optimizer, kind: str | None) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise Lost("injected")

    if kind == "the optimizer, half way":
        with HalfWay():
            yield
        return
    handle = optimizer.register_step_pre_hook(fail) if kind == "the optimizer, before it begins" else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()


def failing_save(number: int) -> Any:
    """The disk is full in the write of that number."""
    return trap(disk.file_operations, "write", number, OSError(28, "injected"))
