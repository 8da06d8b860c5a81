"""Makes the communicator for a process group."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from .communicator import Communicator, SoloCommunicator
from .gloo import IDENTITY_BYTES as IDENTITY_BYTES
from .gloo import GlooCommunicator
from .process_group import GroupCommunicator

__all__: list[str] = []

_NOT_A_MEMBER = "this process is not a member of the process_group it passed: only members may build the layer"


def communicator_for(process_group: Any, device: torch.device) -> Communicator:
    """The communicator for a process group. None: the default group, or this process alone if there is no default group.

    Raises:
        RuntimeError: There is no process group, but a launcher has started several processes.
        TypeError: `process_group` is not a process group.
        ValueError: This process is not a member of the group, or the group does not support `device`.
    """
    if process_group is not None and process_group is dist.GroupMember.NON_GROUP_MEMBER:  # new_group returns it on other ranks
        raise ValueError(_NOT_A_MEMBER)
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        if hasattr(process_group, "all_gather") and hasattr(process_group, "duplicate"):
            return process_group  # type: ignore[no-any-return]
        kind = type(process_group).__name__
        mesh = " (of a mesh of one dimension, pass mesh.get_group())" if kind == "DeviceMesh" else ""
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or None, found {kind}{mesh}")
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return _alone()
        process_group = dist.group.WORLD
    if dist.get_rank(process_group) < 0:
        raise ValueError(_NOT_A_MEMBER)
    served = _backends(process_group)
    if device.type not in served:
        raise ValueError(
            f"the layer is on {device}, but its process group moves only tensors on {' and '.join(served)}: pass device= to say where "
            "the layer computes, or give init_process_group a backend for each device ('cpu:gloo,cuda:nccl')"
        )
    backend = served[device.type]
    if backend == "gloo" and dist.get_world_size(process_group) > 1:
        return GlooCommunicator(process_group, backend, device)
    return GroupCommunicator(process_group, backend, device)


def process_group_of(communicator: Communicator) -> Any:
    """The process group of a communicator, for torch's own tools. None if it has no group."""
    return communicator._group if isinstance(communicator, GroupCommunicator) else None


def give_memory_back(communicator: Communicator) -> None:
    """Frees the shared memory of transfers that all ranks have read. It does not wait.

    The next transfer has to allocate the memory again, so this is for callers that make no transfer for a while.
    """
    if isinstance(communicator, GlooCommunicator):
        communicator.trim()


def shares_memory(communicator: Communicator) -> bool:
    """Whether all ranks share a host, and exchange tensors through shared memory. All ranks call it together.

    If so, `all_gather` also accepts a `full` of W rows with gaps between them, and many short transfers cost no more than a long one.
    """
    return isinstance(communicator, GlooCommunicator) and communicator.shares_memory


def any_device_of(process_group: Any) -> torch.device:
    """Any device that the group supports, for a caller without a device. None: the default group, or no group."""
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device("cpu")
    known = isinstance(process_group, dist.ProcessGroup)
    return torch.device(next(iter(_backends(process_group if known else dist.group.WORLD))))


def _alone() -> Communicator:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        raise RuntimeError(
            f"a launcher started WORLD_SIZE={launched} processes, but there is no process group: each would train alone. "
            "Call torch.distributed.init_process_group() before wrapping layers."
        )
    return SoloCommunicator()


def _backends(group: Any) -> dict[str, str]:
    """Device type -> backend. One group may have several ("cpu:gloo,cuda:nccl")."""
    return dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))
