"""Bytes, counted: what of live tensors rests between steps and what does not, and what a step brings in from files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common.counters import LiveBytes
from benchmarks.common.model import Size

from .runs import build, step, warm_up


class Apart(LiveBytes):
    """Leaves out what rests in files, and counts what `resting` lists apart from all else."""

    def __init__(self, is_mapped: Callable[[int], bool], resting: Callable[[], list[Tensor]]) -> None:
        super().__init__()
        self._is_mapped, self._list = is_mapped, resting
        self.resting = self.others = 0

    def _note(self, storage: torch.UntypedStorage) -> None:
        if not self._is_mapped(storage.data_ptr()):
            super()._note(storage)
            self.look()

    def look(self) -> None:
        """Divides what is alive now."""
        resting = sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._list() if not self._is_mapped(t.data_ptr())}.values()
        )
        self.resting, self.others = max(self.resting, resting), max(self.others, self.now - resting)


@contextmanager
def mapped_addresses() -> Iterator[dict[int, int]]:
    """Yields the addresses of all regions that files have given out, and the bytes of the last tensor in each."""
    from zero3.scratch.mapped_files import MappedFiles

    found: dict[int, int] = {}
    empty = MappedFiles.empty

    def noted(files: Any, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = empty(files, numel, dtype)
        found[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor

    with patch.object(MappedFiles, "empty", noted):
        yield found


def is_used(gradient: Tensor) -> bool:
    """Whether it has no values any more, because its chunk is stepped."""
    from zero3.core.chunk_gradient import DeferredGradient

    return isinstance(gradient, DeferredGradient)


def count(rank: int, world_size: int, system: str, size: Size, directory: str) -> dict[str, Any]:
    """Two steps; the second is counted, when state is there."""
    warm_up(directory)
    from zero3.scratch.mapped_files import MappedFiles

    moved: Counter[str] = Counter()
    kinds: dict[int, str] = {}
    bring = MappedFiles.bring

    def brought(files: Any, tensor: Tensor, *, to_write: bool) -> None:
        if tensor in files:
            moved[kinds.get(tensor.data_ptr(), "gradients")] += tensor.nbytes
        bring(files, tensor, to_write=to_write)

    with mapped_addresses() as mapped:
        live = Apart(mapped.__contains__, lambda: resting)
        resting: list[Tensor] = []
        with live:
            training = build(system, size, directory, fused=False)
            chunks = list(training.model.parameters())
            step(training, size, 0, rank, "clipped" in system)
            state = [value for kept in training.optimizer.state.values() for value in kept.values() if value.ndim]
            kinds |= {chunk.data_ptr(): "values" for chunk in chunks} | {value.data_ptr(): "state" for value in state}
            resting += [chunk.data for chunk in chunks] + state
            for chunk in chunks if "clipped" not in system else ():  # whoever has hooks may hold gradients, so clipping reads them
                chunk.register_post_accumulate_grad_hook(lambda leaf: None if is_used(leaf.grad) else resting.append(leaf.grad))
            live.restart()
            live.resting = live.others = 0
            with patch.object(MappedFiles, "bring", brought):
                step(training, size, 1, rank, "clipped" in system)
    numel = sum(chunk.numel() for chunk in chunks)
    sizes = {"values": 4 * numel, "gradients": 4 * numel, "state": 8 * numel}
    return {"resting": live.resting, "others": live.others, "moved": {kind: moved[kind] for kind in sizes}, "size": sizes}
