"""Makes the communicator for a process group."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .board import numbered
from .communicator import Communicator, SoloCommunicator
from .gloo import IDENTITY_BYTES as IDENTITY_BYTES
from .gloo import GlooCommunicator
from .log import History
from .mesh import BlocksCommunicator, MeshCommunicator, shards_of
from .plain_values import integer
from .process_group import GroupCommunicator, board_of

__all__: list[str] = []

_MESH = ("dp_replicate", "dp_shard")
_DEALT = ("dp_shard", "ep")
_PARTS = ("dp_shard", "sp")
_REPEATED_PARTS = ("dp_replicate", *_PARTS)
_NOT_A_MEMBER = (
    "this process is not a member of the process_group it passed: only members may build the layer"
)


class WrongMesh(ValueError):
    """A mesh that is no mesh of replicas and shards. Every rank has made it, so every rank finds
    it.
    """


def communicator_for(process_group: Any, device: torch.device) -> Communicator:
    """The communicator for a process group or a mesh. None: the default group, or this process
    alone if there is no default group.

    Raises:
        RuntimeError: There is no process group, but a launcher has started several processes.
        TypeError: `process_group` is neither a process group nor a mesh.
        WrongMesh: The mesh has other dimensions than are expected.
        ValueError: This process is not a member of the group, or the group does not support
            `device`.
    """
    if isinstance(process_group, DeviceMesh):
        return _of_mesh(process_group, device)
    # new_group returns it on other ranks
    if process_group is not None and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NOT_A_MEMBER)
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        if hasattr(process_group, "all_gather") and hasattr(process_group, "duplicate"):
            return _completed(process_group)
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup, a DeviceMesh or None, found "
            f"{type(process_group).__name__}"
        )
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return _alone()
        process_group = dist.group.WORLD
    if dist.get_rank(process_group) < 0:
        raise ValueError(_NOT_A_MEMBER)
    served = _backends(process_group)
    if device.type not in served:
        raise ValueError(
            f"the layer is on {device}, but its process group moves only tensors on "
            f"{' and '.join(served)}: pass device= to say where the layer computes, or give "
            "init_process_group a backend for each device ('cpu:gloo,cuda:nccl')"
        )
    backend = served[device.type]
    if dist.get_world_size(process_group) == 1:
        return SoloCommunicator(process_group)
    if backend == "gloo":
        return GlooCommunicator(process_group, backend, device)
    return GroupCommunicator(process_group, backend, device)


def is_dealt(process_group: Any) -> bool:
    """Whether it is a mesh whose last dimension is the one over which experts are dealt."""
    return isinstance(process_group, DeviceMesh) and process_group.mesh_dim_names == _DEALT


class Dealing(NamedTuple):
    """Ranks among whom a layer's parameters are dealt in blocks, and who share a block."""

    ranks: Communicator  # all of them, in their order
    whole: Communicator  # the same; slices in the order of blocks
    at: Communicator  # the ranks that share this rank's block, and its replicas
    among: Communicator  # those among whom blocks are dealt
    block: int  # which is this rank's


class Dealer:
    """Finds them for each layer of a model. Where transfers have streams, layers share `among`: it
    has a communicator of its own.
    """

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        self._twin: Communicator | None = None

    def blocks(self, device: torch.device) -> int:
        """The number of blocks."""
        if is_dealt(self._group):
            return int(self._group.size(1))
        return communicator_for(self._group, device).shards

    def deal(self, whole: Communicator, device: torch.device) -> Dealing:
        """For a layer whose communicator, of all ranks, is `whole`, if there are blocks."""
        at: Communicator = SoloCommunicator()
        among = ranks = whole
        if is_dealt(self._group):
            at, among = (communicator_for(self._group.get_group(dim), device) for dim in (0, 1))
            blocks = among.world_size
            whole = whole if at.world_size == 1 else BlocksCommunicator(whole, blocks)
        elif isinstance(whole, MeshCommunicator):
            at, among = whole.of_one_shard(), whole.row
        block = among.rank
        if self._twin is not None:
            return Dealing(ranks, whole, at, self._twin, block)
        own = among.duplicate()
        self._twin = None if own is among else own
        return Dealing(ranks, whole, at, own, block)


class Shared(NamedTuple):
    """The ranks that hold parts of the same sequences. They are consecutive."""

    group: Communicator
    part: int  # which is this rank's
    members: tuple[int, ...]  # their numbers among all ranks


def mesh_of_parts(parts: int, device: torch.device) -> Any:
    """A mesh of all ranks, each `parts` of which, one after another, share sequences.

    Raises:
        ValueError: The ranks can't be divided so.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    size = integer(parts)
    if size is None or size < 1 or ranks % size:
        raise ValueError(
            f"sequence_parallel={parts!r}: {ranks} ranks can't be divided into groups of so many"
        )
    return init_device_mesh(device.type, (ranks // size, size), mesh_dim_names=_PARTS)


def parts_over(process_group: Any) -> int:
    """Over how many ranks a mesh divides sequences."""
    names = getattr(process_group, "mesh_dim_names", None) or ()
    if isinstance(process_group, DeviceMesh):
        return int(process_group.size(process_group.ndim - 1)) if names[-1:] == ("sp",) else 1
    group = getattr(process_group, "sequence_group", None)  # of a communicator of the caller's own
    return 1 if group is None else int(group.world_size)


def divided_beside(process_group: Any) -> str:
    """What a mesh divides beside chunks, of which the communicator of its ranks does not tell."""
    if is_dealt(process_group):
        return f"a mesh that deals experts over an 'ep' of size {process_group.size(1)}"
    if (parts := parts_over(process_group)) > 1:
        return f"a mesh that divides sequences over an 'sp' of size {parts}"
    return "a group, or a mesh that divides neither experts nor sequences"


def make_groups(process_group: Any) -> None:
    """Makes the group of shards that a mesh lacks. All ranks of the job take part in that, so those
    of the mesh meet before.

    Raises:
        ValueError: Ranks wait for each other with other groups or meshes. All of them raise it.
    """
    names = getattr(process_group, "mesh_dim_names", None)
    if names not in (_DEALT, _PARTS, _REPEATED_PARTS) or process_group.get_coordinate() is None:
        return
    members, shape = process_group.mesh.flatten().tolist(), process_group.mesh.shape
    if len(members) == dist.get_world_size() and (len(shape) == 2 or shape[0] == 1):
        return
    what = f"a mesh of {' x '.join(map(str, shape))} {names} of {numbered(members)}"
    board = board_of(what, members, members.index(dist.get_rank()))
    # a mistake in the mesh is found again, and then told
    with nullcontext() if board is None else board.meeting(), suppress(ValueError):
        communicator_for(process_group, any_device_of(process_group))


def shares_sequences(process_group: Any, model: Communicator, device: torch.device) -> Shared:
    """`model`: the communicator of all ranks, those of `process_group`. All ranks call it."""
    if isinstance(process_group, DeviceMesh):
        group = communicator_for(process_group.get_group("sp"), device)
    else:
        group = process_group.sequence_group
    if group.same_ranks(shards_of(model)):  # then gathers and reductions go another way
        group = group.duplicate()
    first = model.rank - group.rank
    return Shared(group, group.rank, tuple(range(first, first + group.world_size)))


def process_group_of(communicator: Communicator) -> Any:
    """The process group of a communicator's ranks, for torch's own tools. None if it has no
    group.
    """
    if (
        isinstance(communicator, MeshCommunicator)
        and communicator.world_size == dist.get_world_size()
    ):
        return dist.group.WORLD
    if isinstance(communicator, SoloCommunicator):
        return communicator.group()
    return communicator._group if isinstance(communicator, GroupCommunicator) else None


def divide_alike(one: Communicator, other: Communicator) -> bool:
    """Whether both cut chunks over the same ranks, and repeat them over the same, by whichever
    groups.
    """
    with suppress(RuntimeError, KeyError):  # destroyed, or in a forked child: transfers say so
        return one.same_ranks(other) or _division(one) == _division(other)
    return True


def _division(communicator: Communicator) -> tuple[int, int, list[int]]:
    members: list[int] = []  # of the job's ranks
    if isinstance(communicator, BlocksCommunicator):  # their slices in another order
        return _division(communicator.inner)
    if isinstance(communicator, MeshCommunicator):
        members = list(communicator.members)
    elif isinstance(communicator, GroupCommunicator):
        members = dist.get_process_group_ranks(communicator._group)
    return communicator.shards, communicator.world_size, members


def decline(caller: str, error: Exception) -> None:
    """This rank raises `error` alone, because it can't know with whom it was to make layers. Others
    hear of it if they wait for it.
    """
    if (
        dist.is_available()
        and dist.is_initialized()
        and (board := board_of("", [dist.get_rank()], 0)) is not None
    ):
        board.decline(caller, f"{type(error).__name__}: {error}")


def give_memory_back(communicator: Communicator) -> None:
    """Frees the shared memory of transfers that all ranks have read. It does not wait.

    The next transfer has to allocate the memory again, so this is for callers that make no transfer
    for a while.
    """
    if isinstance(communicator, BlocksCommunicator):
        communicator = communicator.inner
    if isinstance(communicator, GlooCommunicator):
        communicator.trim()


def shares_memory(communicator: Communicator) -> bool:
    """Whether all ranks share a host, and exchange tensors through shared memory. All ranks call it
    together.

    If so, `all_gather` also accepts a `full` of W rows with gaps between them, and many short
    transfers cost no more than a long one.
    """
    return isinstance(communicator, GlooCommunicator) and communicator.shares_memory


def host_communicator(communicator: Communicator, device: torch.device) -> Communicator:
    """By which the ranks of a model on `device` exchange bytes on the host, which never waits for
    the device. All ranks call it, since it may make a group. The model's own, on a CPU.
    """
    if device.type == "cpu" or communicator.world_size == 1:
        return communicator
    group = process_group_of(communicator)
    if isinstance(communicator, MeshCommunicator):
        members = [*communicator.members]
    elif group is not None:
        members = dist.get_process_group_ranks(group)
    else:  # a user's own
        return communicator
    if group is None or "cpu" not in _backends(group):
        group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return communicator_for(group, torch.device("cpu"))


def in_memory(communicator: Communicator) -> Communicator:
    """One for the same ranks, whose exchanges go through shared memory if they can."""
    return communicator.in_memory() if isinstance(communicator, GlooCommunicator) else communicator


def any_device_of(process_group: Any) -> torch.device:
    """Any device that the group supports, for a caller without a device. None: the default group,
    or no group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device("cpu")
    known = isinstance(process_group, dist.ProcessGroup)
    return torch.device(next(iter(_backends(process_group if known else dist.group.WORLD))))


def _completed(communicator: Any) -> Communicator:
    """A communicator of the caller's own. It need not know of replicas."""
    for name, value in (
        ("shard_rank", communicator.rank),
        ("shards", communicator.world_size),
        ("replica", 0),
        ("history", History()),
    ):
        if not hasattr(communicator, name):
            setattr(communicator, name, value)
    return communicator  # type: ignore[no-any-return]


def _of_mesh(mesh: DeviceMesh, device: torch.device) -> Communicator:
    names = mesh.mesh_dim_names
    if is_dealt(mesh) or names == _PARTS:
        return communicator_for(_flat_group(mesh), device)
    parted = names == _REPEATED_PARTS
    if not parted and (mesh.ndim > 2 or (mesh.ndim == 2 and names != _MESH)):
        raise WrongMesh(
            f"process_group is a mesh of shape {tuple(mesh.mesh.shape)} with the dimensions "
            f"{names}. Expected is a mesh of one dimension, over which chunks are cut, or of two "
            f"named {_MESH}: chunks are cut over the second and repeated over the first. Or, with "
            f"expert_parallel=True, {_DEALT}: experts are dealt over the second. Or "
            f"{_PARTS} or {_REPEATED_PARTS}: sequences are divided over the last. "
            'Slice a larger mesh: mesh["dp_replicate", "dp_shard"]'
        )
    ranks = mesh.mesh.flatten(1) if mesh.ndim > 1 else mesh.mesh[None]
    if not all(bool((each.diff() > 0).all()) for each in (*ranks, *ranks.T)):
        raise WrongMesh(
            f"process_group is a mesh of the ranks {ranks.tolist()}, expected ranks that rise "
            "along each dimension, as in groups"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(_NOT_A_MEMBER)
    if parted:
        shards = _flat_group(mesh[_PARTS] if mesh.size(0) > 1 else mesh)
        return _of_replicas(ranks, (mesh.get_group(0), shards), device)
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    return _of_replicas(ranks, ([None, *groups] if mesh.ndim == 1 else groups), device)


def _of_replicas(ranks: torch.Tensor, groups: Any, device: torch.device) -> Communicator:
    """`ranks` `[replicas, shards]`; `groups`: among replicas, and among shards."""
    replicas, shards = ranks.shape
    if replicas == 1:
        return communicator_for(groups[1], device)
    column = communicator_for(groups[0], device)
    row = communicator_for(groups[1], device) if shards > 1 else SoloCommunicator()
    return MeshCommunicator(row, column, ranks.flatten().tolist())  # type: ignore[arg-type]  # the column is a group


def _flat_group(mesh: DeviceMesh) -> Any:
    """The group of all ranks of a mesh."""
    ranks = mesh.mesh.flatten()
    if not bool((ranks.diff() > 0).all()):
        raise WrongMesh(
            f"process_group is a mesh of the ranks {mesh.mesh.tolist()}, expected ranks that rise "
            "row by row, as in their group"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(_NOT_A_MEMBER)
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return mesh._flatten("_".join(mesh.mesh_dim_names or ())).get_group()


def _alone() -> Communicator:
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched > 1:
        raise RuntimeError(
            f"a launcher started WORLD_SIZE={launched} processes, but there is no process group: "
            "each would train alone. Call torch.distributed.init_process_group() before wrapping "
            "layers."
        )
    return SoloCommunicator()


def _backends(group: Any) -> dict[str, str]:
    """Device type -> backend. One group may have several ("cpu:gloo,cuda:nccl")."""
    return dict(entry.split(":") for entry in str(dist.get_backend_config(group)).split(","))
