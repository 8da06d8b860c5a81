"""torch's `Join` on ranks that are threads: they have no process group, so what `Join` asks of torch.distributed is answered here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.algorithms import join

import zero3
from zero3.comm.communicator import Communicator
from zero3.comm.factory import process_group_of


@contextmanager
def joined(one: Any, step: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    uneven = zero3.joinable(one.model, step)
    with join.Join([uneven]):
        yield uneven.step


class _Done:
    def wait(self) -> None: ...


def _all_reduce(tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
    if not hasattr(group, "duplicate"):
        return torch.distributed.all_reduce(tensor, group=group, async_op=async_op)
    group.all_reduce(tensor)
    return _Done()


def _rank(group: Any) -> int:
    return group.rank if hasattr(group, "duplicate") else torch.distributed.get_rank(group)


def _group_of(communicator: Communicator) -> Any:
    return communicator if not hasattr(communicator, "_group") else process_group_of(communicator)


@contextmanager
def on_threads() -> Iterator[None]:
    """Inside, a model on threads can be joined."""
    asked = SimpleNamespace(all_reduce=_all_reduce, get_rank=_rank)
    with patch.object(join, "dist", asked), patch("zero3.uneven.joinable.process_group_of", _group_of):
        yield
