"""Where chunks and their gradients rest, if it is not where layers compute: in pinned memory of the host, or in mapped files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..comm.streams import has_streams
from ..policy import ShardingPolicy
from ..scratch.mapped_files import MappedFiles
from ..scratch.nameless_file import nameless_file
from ..scratch.regions import PinnedRegions
from .policy_facts import directory_of, gradient_dtype, landed_dtype

__all__: list[str] = []


class Residence(Protocol):
    """One chunk's place on the host. The memory of a gradient that is gone is that of the next one."""

    name: str  # in reports
    far: bool  # whether layers compute in other memory, to and from which values are copied
    at_once: bool  # whether gradients of an accelerator land one by one, so that few of them pass through memory at any time

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D memory for values."""
        ...

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        """Makes sure of the memory of gradients."""
        ...

    def to_copy_from(self, values: Tensor) -> Tensor:
        """`values`, or a copy, in memory that a device can read while the host goes on."""
        ...

    def to_copy_into(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a gradient that a device can write while the host goes on."""
        ...

    def keep(self, gradient: Tensor) -> Tensor:
        """A gradient, or one from `to_copy_into`, where it rests. It is called while other ranks wait, so it does not raise."""
        ...

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        """Brings values, or a gradient, into memory, and returns when they are there: for a thread beside compute."""
        ...

    def rest(self, values: Tensor) -> None:
        """They are not needed for now."""
        ...

    def read_ahead(self, values: Tensor) -> None:
        """They are needed soon."""
        ...

    def rest_gradients(self) -> None: ...


class InPinnedMemory:
    """Host memory for an accelerator, which copies while the host goes on."""

    name = "host memory"
    far = True
    at_once = False

    def __init__(self) -> None:
        regions = PinnedRegions()
        self.empty = self.to_copy_into = regions.empty

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        _ = [self.empty(numel, dtype) for dtype in dtypes]

    def keep(self, gradient: Tensor) -> Tensor:
        return gradient

    def to_copy_from(self, values: Tensor) -> Tensor:
        return values

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        return None

    def rest(self, values: Tensor) -> None:
        return None

    read_ahead = rest

    def rest_gradients(self) -> None:
        return None


class InFiles:
    """Memory-mapped files in a directory."""

    name = "files"
    at_once = True

    def __init__(self, directory: str, *, far: bool) -> None:
        self.far = far
        values, self._gradients = self._files = MappedFiles(directory), MappedFiles(directory)
        self.empty, self.rest, self.read_ahead = values.empty, values.rest, values.read_ahead
        self.rest_gradients = self._gradients.rest_all

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        _ = [self._gradients.empty(numel, dtype) for dtype in dtypes]

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        for files in self._files:
            files.bring(tensor, to_write=to_write)

    def to_copy_from(self, values: Tensor) -> Tensor:
        return values.pin_memory()

    def to_copy_into(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def keep(self, gradient: Tensor) -> Tensor:
        place = self._gradients.place(gradient.numel(), gradient.dtype, "a gradient")
        return gradient if place is None else place.copy_(gradient)


def residence_for(policy: ShardingPolicy, device: torch.device) -> Residence | None:
    """The residence of a new chunk. None: it stays on `device`, where its layer computes."""
    if (directory := directory_of(policy)) is not None:
        return InFiles(directory, far=has_streams(device))
    return InPinnedMemory() if policy.offload is not None and has_streams(device) else None


def memory_for(residence: Residence | None, numel: int, stored: torch.dtype, device: torch.device, trains: ShardingPolicy | None) -> Tensor:
    """Memory for a chunk's values. If it `trains`, by that policy, also makes sure of the memory of its gradient."""
    if residence is None:
        return torch.empty(numel, dtype=stored, device=device)
    values = residence.empty(numel, stored)
    if trains is not None:
        lands, reduced = landed_dtype(trains, stored), gradient_dtype(trains, stored)
        residence.reserve(numel, [lands, reduced] if reduced.itemsize > lands.itemsize else [lands])  # the wider sum stays beside it
    return values


def check_residence(policy: ShardingPolicy, device: torch.device) -> None:
    """
    Raises:
        ValueError: Chunks of a layer on `device` can't rest where the policy says.
    """
    if (directory := directory_of(policy)) is None or device.type == "meta":  # a plan's directory may be on another machine
        return
    if device.type != "cpu" and not has_streams(device):
        raise ValueError(f"offload={directory!r}: files are for layers on the CPU, or on CUDA and its like, found a layer on {device}")
    nameless_file(directory).close()
