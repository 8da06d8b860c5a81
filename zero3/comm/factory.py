"""From a process group to its communicator."""

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
    """The communicator of a process group (None: the default one, or no group at all for a single process).

    Raises:
        RuntimeError: no process group, though a launcher has started several processes.
        TypeError: something that is no process group.
        ValueError: a process group that this process is not a member of, or that does not serve `device`.
    """
    if process_group is not None and process_group is dist.GroupMember.NON_GROUP_MEMBER:  # new_group's answer to other ranks
        raise ValueError(_NOT_A_MEMBER)
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        if hasattr(process_group, "all_gather") and hasattr(process_group, "duplicate"):
            return process_group  # type: ignore[no-any-return]
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or None, found {type(process_group).__name__}")
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
        return GlooCommunicator(process_group, backend)
    return GroupCommunicator(process_group, backend)


def process_group_of(communicator: Communicator) -> Any:
    """For torch's own tools; None if there is none."""
    return communicator._group if isinstance(communicator, GroupCommunicator) else None


def give_memory_back(communicator: Communicator) -> None:
    """Frees the shared memory in which transfers lay that all have read. Waits for nobody.

    For callers whose next transfer is far off: it will have to ask for the memory anew.
    """
    if isinstance(communicator, GlooCommunicator):
        communicator.trim()


def shares_memory(communicator: Communicator) -> bool:
    """Whether all its ranks share a host and hand each other tensors through its memory. Every rank asks at the same place.

    Its `all_gather` then also takes a `full` of W rows that lie apart, and many short transfers cost no more than a long one.
    """
    return isinstance(communicator, GlooCommunicator) and communicator.shares_memory


def any_device_of(process_group: Any) -> torch.device:
    """A device whose tensors the group (None: the default one, or none) can move, for who has none of his own."""
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
    """Device type -> backend: one group may have several ("cpu:gloo,cuda:nccl")."""
    return dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))
