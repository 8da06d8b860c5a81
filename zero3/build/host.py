"""What layers use of a machine, beside tensors on their device: the places where chunks rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..comm.streams import has_streams
from ..policy import ShardingPolicy, directory_of
from ..scratch.nameless_file import nameless_file, room_on_disk
from ..stores.files import Files
from ..stores.pinned import Pinned
from ..stores.resting import Resting

__all__: list[str] = []


@runtime_checkable
class Host(Protocol):
    """A machine, or a communicator whose ranks are on no machine."""

    on_paper: bool  # whether layers may compute on the meta device

    def place_for(self, policy: ShardingPolicy, device: torch.device) -> Resting | None:
        """The place of a new chunk. None: it stays on `device`, where its layer computes."""
        ...

    def check_place(self, policy: ShardingPolicy, device: torch.device) -> None:
        """
        Raises:
            ValueError: Chunks of a layer on `device` can't rest where the policy says.
        """
        ...

    def room_on_disk(self, directory: str, nbytes: int) -> AbstractContextManager[object]:
        """So many bytes of a disk, until it is closed."""
        ...


class ThisMachine:
    on_paper = False

    def place_for(self, policy: ShardingPolicy, device: torch.device) -> Resting | None:
        if (directory := directory_of(policy)) is not None:
            return Files(directory, far=has_streams(device))
        return Pinned() if policy.offload is not None and has_streams(device) else None

    def check_place(self, policy: ShardingPolicy, device: torch.device) -> None:
        if (directory := directory_of(policy)) is None:
            return
        if device.type != "cpu" and not has_streams(device):
            raise ValueError(
                f"offload={directory!r}: files are for layers on the CPU, or on CUDA and its "
                f"like, found a layer on {device}"
            )
        nameless_file(directory).close()

    def room_on_disk(self, directory: str, nbytes: int) -> AbstractContextManager[object]:
        return room_on_disk(directory, nbytes)


def host_of(group: object) -> Host:
    """The host of the layers of a process group, or of a communicator."""
    return group if isinstance(group, Host) else ThisMachine()


def memory_for(
    place: Resting | None,
    numel: int,
    stored: torch.dtype,
    device: torch.device,
    gradients: Sequence[torch.dtype],
) -> Tensor:
    """Memory for a chunk's values. Also makes sure of the memory of what is kept of its gradient,
    in these dtypes.
    """
    if place is None:
        return torch.empty(numel, dtype=stored, device=device)
    values = place.allocate(numel, stored)
    if gradients:
        place.reserve(numel, gradients)
    return values
