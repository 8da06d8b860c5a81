"""Where chunks and their gradients rest, if it is not where layers compute: in pinned memory of the
host, or in mapped files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Protocol

import torch
from torch import Tensor

from ..comm.streams import has_streams
from ..policy import ShardingPolicy, added_dtype, directory_of, landed_dtype
from ..scratch.mapped_files import MappedFiles
from ..scratch.nameless_file import GrowingFile, nameless_file, room_on_disk
from ..scratch.regions import PinnedRegions, pinned_nbytes

__all__: list[str] = []


class Residence(Protocol):
    """One chunk's place on the host. The memory of a gradient that is gone is that of the
    next one.
    """

    name: str  # in reports
    far: bool  # whether layers compute in other memory, to and from which values are copied
    # whether gradients of an accelerator land one by one, so that few of them pass through memory
    # at any time
    at_once: bool
    # whether a gradient is used up as soon as it has landed, so that it need not rest anywhere
    used_at_once: Callable[[], bool]
    # of memory, as the optimizer's thread has found: gradients had been dropped. So they are
    # written early
    is_short: bool

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D memory for values."""
        ...

    def taken(self, nbytes: int) -> int:
        """What so many bytes, values or a gradient, really take."""
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
        """A gradient, or one from `to_copy_into`, where it rests. It is called while other ranks
        wait, so it does not raise.
        """
        ...

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        """Brings values, or a gradient, into memory, and returns when they are there: for a thread
        beside compute.
        """
        ...

    def is_away(self, tensor: Tensor) -> bool:
        """Whether values, or a gradient, had to leave memory, because it is short."""
        ...

    def write(self, values: Tensor) -> None:
        """Values that have changed go where they rest. Returns when they are there: for a thread
        beside compute.
        """
        ...

    def rest(self, values: Tensor) -> None:
        """They are not needed for now."""
        ...

    def read_ahead(self, values: Tensor) -> None:
        """They are needed soon."""
        ...

    def rest_gradients(self) -> None: ...

    is_shared_by_forks: bool  # whether a forked child has the same memory, and no copy of it

    def check_process(self) -> None:
        """
        Raises:
            RuntimeError: This is a forked child of the process whose memory this is.
        """
        ...


def _never() -> bool:
    return False


class InPinnedMemory:
    """Host memory for an accelerator, which copies while the host goes on."""

    name = "host memory"
    far = True
    at_once = is_short = is_shared_by_forks = False

    def __init__(self) -> None:
        self.used_at_once: Callable[[], bool] = _never
        regions = PinnedRegions()
        self.empty = self.to_copy_into = regions.empty
        self.taken = pinned_nbytes

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        _ = [self.empty(numel, dtype) for dtype in dtypes]

    def keep(self, gradient: Tensor) -> Tensor:
        return gradient

    def to_copy_from(self, values: Tensor) -> Tensor:
        return values

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        return None

    def is_away(self, tensor: Tensor) -> bool:
        return False

    def rest(self, values: Tensor) -> None:
        return None

    read_ahead = write = rest

    def rest_gradients(self) -> None:
        return None

    check_process = rest_gradients


class InFiles:
    """Memory-mapped files in a directory."""

    name = "files"
    at_once = is_shared_by_forks = True

    def __init__(self, directory: str, *, far: bool) -> None:
        self.far = far
        self.used_at_once: Callable[[], bool] = _never
        self.is_short = False
        file = GrowingFile(directory)
        values, self._gradients = self._files = (
            MappedFiles(directory, file),
            MappedFiles(directory, file),
        )
        self._values = values
        self.empty, self.rest = values.empty, values.rest
        self.rest_gradients, self.check_process = self._gradients.rest_all, values.check_process

    def taken(self, nbytes: int) -> int:
        return nbytes

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        _ = [self._gradients.empty(numel, dtype) for dtype in dtypes]

    def read_ahead(self, tensor: Tensor) -> None:
        for files in self._files:
            files.read_ahead(tensor)

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        for files in self._files:
            files.bring(tensor, to_write=to_write)

    def is_away(self, tensor: Tensor) -> bool:
        return any(files.is_away(tensor) for files in self._files)

    def write(self, values: Tensor) -> None:
        self._values.write(values, wait=True)

    def to_copy_from(self, values: Tensor) -> Tensor:
        return values.pin_memory()

    def to_copy_into(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def keep(self, gradient: Tensor) -> Tensor:
        kept = None if self.used_at_once() else self._gradients.put(gradient, "a gradient")
        if kept is None:
            return gradient
        if self.is_short:
            with suppress(OSError):  # whoever needs the gradient will hear of it
                self._gradients.write(kept, wait=False)
        return kept


class Host:
    """What layers use of a machine, beside tensors on their device. A communicator whose ranks are
    on no machine is a host itself.
    """

    on_paper = False  # whether layers may compute on the meta device

    def residence_for(self, policy: ShardingPolicy, device: torch.device) -> Residence | None:
        """The residence of a new chunk. None: it stays on `device`, where its layer computes."""
        if (directory := directory_of(policy)) is not None:
            return InFiles(directory, far=has_streams(device))
        return InPinnedMemory() if policy.offload is not None and has_streams(device) else None

    def check_residence(self, policy: ShardingPolicy, device: torch.device) -> None:
        """
        Raises:
            ValueError: Chunks of a layer on `device` can't rest where the policy says.
        """
        if (directory := directory_of(policy)) is None:
            return
        if device.type != "cpu" and not has_streams(device):
            raise ValueError(
                f"offload={directory!r}: files are for layers on the CPU, or on CUDA and its "
                f"like, found a layer on {device}"
            )
        nameless_file(directory).close()

    def room_on_disk(self, directory: str, nbytes: int) -> AbstractContextManager[object]:
        """So many bytes of a disk, until it is closed."""
        return room_on_disk(directory, nbytes)


def host_of(group: object) -> Host:
    """The host of the layers of a process group, or of a communicator."""
    return group if isinstance(group, Host) else Host()


def memory_for(
    residence: Residence | None,
    numel: int,
    stored: torch.dtype,
    device: torch.device,
    trains: ShardingPolicy | None,
) -> Tensor:
    """Memory for a chunk's values. If it `trains`, by that policy, also makes sure of the memory of
    its gradient.
    """
    if residence is None:
        return torch.empty(numel, dtype=stored, device=device)
    values = residence.empty(numel, stored)
    if trains is not None:
        # a wider sum stays beside it
        residence.reserve(numel, list({landed_dtype(trains, stored), added_dtype(trains, stored)}))
    return values
