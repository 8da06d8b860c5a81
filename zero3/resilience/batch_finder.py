"""BatchFinder: cuts each batch into micro-batches that fit, of as many rows on all ranks."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from ..access import used
from ..comm.agreement import agreeing
from ..comm.communicator import is_first
from ..comm.plain_values import integer
from ..comm.streams import give_cache_back
from ..conductors.conducted import unconducted
from .replay import knows_transfers, refuse_where_nothing_repeats
from .step_guard import GuardedStep, step_guard

__all__: list[str] = []

# how an error for want of memory begins, or what it holds: torch's of a device, the CPU allocator's
_OUT_OF_MEMORY, _OF_THE_CPU = "OutOfMemoryError: ", "DefaultCPUAllocator: "


class BatchFinder:
    """Cuts batches into micro-batches. If one does not fit into some rank's memory, all ranks drop
    it, and go on from the same rows with half as many at once.

    The global batch stays: every row counts once, in order, and the gradient is the whole batch's
    if the loss is a mean over rows. (For a mean over tokens `zero3.backward` weighs, without
    `weight`.) A micro-batch costs what `step_guard` costs, a batch an exchange of 16 bytes.

    Args:
        model: Any model that contains zero3 layers, with `stage=3` and without `dynamic`.
        batch_size: Rows in a micro-batch of a rank, at first. None: the whole batch.

    Attributes:
        batch_size: Rows in a micro-batch of a rank now. It never grows by itself. It may be set
            between batches, on all ranks.

    Raises:
        TypeError: `batch_size` is no integer.
        ValueError: `batch_size` is below 1 or differs between ranks, nothing in `model` is sharded,
            or its policy has another `stage` or `dynamic`. All ranks raise it.

    Example::

        finder = zero3.BatchFinder(model)
        for batch in batches:
            for micro in finder.micro_batches(batch):
                with micro:
                    (loss_of(model, micro.data) * micro.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(self, model: nn.Module, batch_size: int | None = None) -> None:
        self._states = used(model, "BatchFinder")
        why = "it drops what did not fit, as zero3.step_guard"
        with agreeing(self._states[0], "BatchFinder") as lines:
            _check(batch_size)
            refuse_where_nothing_repeats(model, self._states, "BatchFinder", why)
            lines.append(f"batch_size: {batch_size}")
        self.model, self.batch_size = model, integer(batch_size)

    def micro_batches(self, batch: Any) -> Iterator[MicroBatch]:
        """Cuts a batch. Every rank calls it, and enters each micro-batch.

        Where the transfers of a micro-batch are not known yet, one row goes first.

        Args:
            batch: A tensor, or any nesting of lists, tuples and mappings. Tensors are cut along
                their first dimension. Those of no dimension, and other values, pass as they are.

        Returns:
            The micro-batches. After one that has failed, the same rows come again, in halves.

        Raises:
            ValueError: Tensors have different numbers of rows (the error tells where), there are no
                rows, ranks have different numbers of them, `batch_size` was set below 1, or the
                call is inside of the context of `joinable`. All ranks raise it.
            TypeError: `batch_size` was set to what is no integer. All ranks raise it.
            RuntimeError: One row does not fit: on all ranks. Or a micro-batch was not entered, or
                was entered twice.
        """
        first = used(self.model, "BatchFinder")[0]
        if unconducted(first.communicator) is not first.communicator:
            raise ValueError(
                "zero3.BatchFinder inside zero3.joinable's context: ranks cut as many rows at "
                "once, and a rank without data has none. Use zero3.step_guard there"
            )
        found = dict(_rows(batch, "batch"))
        numbers = set(found.values())
        with agreeing(first, "the batch of BatchFinder.micro_batches", "BatchFinder") as lines:
            lines += [f"rows: {numbers}", f"batch_size: {self.batch_size}"]
            _check(self.batch_size)
            if len(numbers) > 1:
                told = ", ".join(f"{where}: {rows}" for where, rows in found.items())
                raise ValueError(f"tensors of a batch have different numbers of rows ({told})")
            if not any(numbers):
                raise ValueError("a batch without rows: every rank needs at least one")
        return self._cut(batch, numbers.pop())

    def _cut(self, batch: Any, total: int) -> Iterator[MicroBatch]:
        done = 0
        while done < total:
            _check(self.batch_size)  # it may have been set meanwhile
            rows = min(integer(self.batch_size) or total, total - done)
            rows = rows if knows_transfers(self.model, self._states) else 1
            micro = MicroBatch(self.model, _part(batch, done, done + rows), rows, rows / total)
            yield micro
            if micro.errors is None:
                raise RuntimeError(
                    "a micro-batch of zero3.BatchFinder was not entered: put its forward and "
                    "backward inside `with micro:`"
                )
            if micro.failed:
                self._halve(micro)
            else:
                done += rows

    def _halve(self, micro: MicroBatch) -> None:
        self.batch_size = -(-micro.rows // 2)
        if is_first(self._states[0].communicator):
            logging.getLogger("zero3").warning(
                "micro-batches have at most %d rows from now on, instead of %d: %s",
                self.batch_size, micro.rows, micro.errors,
            )  # fmt: skip
        gc.collect()
        give_cache_back(self._states[0].device)


class MicroBatch:
    """Rows of a batch, and the context for their forward and backward.

    Attributes:
        rows: How many.
        weight: Their share of this rank's batch: `rows` / its rows. The loss is scaled by it.
        failed: After the context: whether the rows did not fit, on any rank, and were dropped.
    """

    def __init__(self, model: nn.Module, data: Any, rows: int, weight: float) -> None:
        self._data, self.rows, self.weight, self.failed = data, rows, weight, False
        self.errors: Mapping[int, str] | None = None  # None: it was not entered
        self._guard: AbstractContextManager[GuardedStep] = step_guard(model)

    @property
    def data(self) -> Any:
        """The batch, with these rows alone."""
        return self._data

    def __enter__(self) -> Self:
        if hasattr(self, "_guarded"):
            raise RuntimeError(
                "a micro-batch of zero3.BatchFinder was entered twice: put its forward and "
                "backward inside one `with micro:`"
            )
        self._guarded = self._guard.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        dropped = self._guard.__exit__(kind, error, trace) is True
        self.errors = self._guarded.errors
        if error is not None and not dropped:  # the guard could not help it
            return False
        others = {r: t for r, t in self.errors.items() if not _wants_memory(t)}
        if error is not None and not _wants_memory(f"{type(error).__name__}: {error}"):
            error.__traceback__ = trace  # which the guard has let go
            return False  # this rank's own
        if others:
            rank, text = next(iter(others.items()))
            raise RuntimeError(f"rank {rank}: {text}") from error
        self.failed = bool(self.errors)
        if self.failed and self.rows == 1:
            rank, text = next(iter(self.errors.items()))
            raise RuntimeError(f"rank {rank}: a micro-batch of one row does not fit: {text}")
        return dropped


def _check(batch_size: Any) -> None:
    if batch_size is not None and integer(batch_size) is None:
        expected = "batch_size must be an integer of at least 1, or None"
        raise TypeError(f"{expected}, found {batch_size!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, found {batch_size}")


def _wants_memory(text: str) -> bool:
    return text.startswith(_OUT_OF_MEMORY) or _OF_THE_CPU in text


def _rows(batch: Any, where: str) -> Iterator[tuple[str, int]]:
    """Where each tensor is that is cut, and its rows."""
    if isinstance(batch, Tensor):
        yield from [(where, batch.shape[0])] if batch.ndim else ()
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _rows(value, f"{where}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for number, value in enumerate(batch):
            yield from _rows(value, f"{where}[{number}]")


def _part(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim else batch
    if isinstance(batch, Mapping):
        parts = {key: _part(value, start, stop) for key, value in batch.items()}
        if isinstance(batch, MutableMapping) and type(batch) is not dict:
            made = copy.copy(batch)  # a class of the caller's, such as transformers' BatchEncoding
            made.update(parts)
            return made
        return parts
    if isinstance(batch, list | tuple):
        each = [_part(value, start, stop) for value in batch]
        return type(batch)(*each) if hasattr(batch, "_fields") else type(batch)(each)
    return batch
