"""One process that plays rank 0 of any number, with collectives that do nothing, or take a time of our choosing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


class _Done:
    def wait(self, *_: object) -> bool:
        return True


_DONE = _Done()  # one for all: the transfers' own time would be counted


def _nothing(nbytes: int) -> None: ...


class Transfers:
    """Stands for the two collectives that sharding is made of. At first they are torch's own; after `replace`, `carry` is all they do.

    (torch's `fake` backend copies a rank's part W times, which takes as long as a step when W is 1024.)
    """

    def __init__(self) -> None:
        self._carry: Callable[[int], None] | None = None

    def replace(self, carry: Callable[[int], None] = _nothing) -> None:
        """`carry(nbytes)`, on the stream that a transfer is asked for on: what the rank receives of it."""
        self._carry = carry

    def around(self, name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def transfer(output: Tensor | None = None, input: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 (torch's name)
            output = kwargs.pop("output_tensor", output)
            source = kwargs.pop("input_tensor", input)
            if self._carry is None:
                return original(output, source, *args, **kwargs)
            # what ranks compare: all others say the same. A gathered layer lies in its place already
            if source.dtype == torch.uint8 and source.untyped_storage().data_ptr() != output.untyped_storage().data_ptr():
                output.view(-1, source.numel()).copy_(source)
            if self._carry is not _nothing:
                self._carry(abs(output.nbytes - source.nbytes))  # type: ignore[union-attr]
            return _DONE if kwargs.get("async_op") else None

        return transfer


@contextmanager
def rank_zero_of(world_size: int) -> Iterator[Transfers]:
    """The default group is one of `world_size` ranks of which only this one exists."""
    transfers = Transfers()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    names = ("all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor")
    patches = [patch.object(dist, name, transfers.around(name)) for name in names if hasattr(dist, name)]
    try:
        for each in patches:
            each.start()
        yield transfers
    finally:
        for each in patches:
            each.stop()
        dist.destroy_process_group()
