"""The only door to torch.distributed. Collectives take flat tensors and know nothing of parameters."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from .communicator import Bounds, SoloCommunicator
from .communicator import Communicator as Communicator
from .host_memory import HostMemory, Parcel, host_memory
from .streams import Done, Lanes, Pending, lanes_for

__all__: list[str] = []

IDENTITY_BYTES = 3  # of the number by which ranks know a layer; with two bits for the kind of transfer it is a message's tag
_GATHER, _REDUCE, _SCATTER = 0, 1, 2
_NOT_A_MEMBER = "this process is not a member of the process_group it passed: only members may build the layer"


class GroupCommunicator:
    """A process group whose collectives are ordered by streams (NCCL) or by their handles (everything else)."""

    def __init__(self, group: Any, backend: str) -> None:
        # Weakly: torch keeps a group until it is destroyed, and gloo's threads must not outlive that because a model does.
        self._reference = weakref.ref(group)
        self._backend = backend
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.channel = 0
        self._on_streams = backend == "nccl"
        # torch 2.13 deprecates the old names, 2.11 has no others
        self._all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    @property
    def _group(self) -> Any:
        if (group := self._reference()) is None:
            raise RuntimeError("this model's process group was destroyed: train before that, or shard the model anew")
        return group

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        if bounds is None:
            return self._all_gather(full, shard, group=self._group, async_op=not self._on_streams) or Done()
        return dist.all_gather(list(_cut(full, bounds)), shard, group=self._group, async_op=not self._on_streams) or Done()

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        if bounds is None:
            return self._reduce_scatter(shard, full, group=self._group, async_op=not self._on_streams) or Done()
        return dist.reduce_scatter(shard, list(_cut(full, bounds)), group=self._group, async_op=not self._on_streams) or Done()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self._group)

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        if bounds is not None:
            self._scatter_padded(shard, slices, bounds)
        elif shard.numel():
            return dist.scatter(shard, slices, group=self._group, group_src=0, async_op=not self._on_streams) or Done()
        return Done()

    def _scatter_padded(self, shard: Tensor, slices: list[Tensor] | None, bounds: tuple[int, ...]) -> None:
        """No backend scatters slices of unequal length, and this is rare: whole models are loaded so, not trained."""
        longest = max(stop - start for start, stop in pairwise(bounds))
        if longest:
            padded = shard.new_empty(longest)
            equal = [pad(piece, (0, longest - piece.numel())) for piece in slices] if slices is not None else None
            dist.scatter(padded, equal, group=self._group, group_src=0)
            shard.copy_(padded[: shard.numel()])

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dist.broadcast(tensor, group=self._group, group_src=source)

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
        all_ranks = torch.empty(self.world_size * len(payload), dtype=torch.uint8, device=device)
        self._all_gather(all_ranks, mine, group=self._group)
        everything = bytes(all_ranks.tolist())
        return [everything[i : i + len(payload)] for i in range(0, len(everything), len(payload))]

    def twin(self) -> Communicator:
        if not self._on_streams:
            return self  # transfers that are ordered by handles do not queue behind each other
        ranks = dist.get_process_group_ranks(self._group)
        # unasked, a new group takes torch's default timeout and not that of the groups before
        group = dist.new_group(ranks, _timeout_of(self._group), backend=self._backend, use_local_synchronization=True)
        return GroupCommunicator(group, self._backend)

    def lanes(self, device: torch.device) -> Lanes:
        return lanes_for(device)

    def same_ranks(self, other: Communicator) -> bool:
        return isinstance(other, GroupCommunicator) and self._group == other._group


class _Transfers:
    """Sends and receives under way, and what to do with what came in. Holds its buffers until the wait."""

    def __init__(self, works: list[Any], then: Callable[[], object] | None = None) -> None:
        self._works = works
        self._then = then

    def wait(self) -> None:
        for work in self._works:  # if one fails the others may go on: whoever made the buffers leaves them to these works
            work.wait()
        if self._then is not None:
            self._then()


class GlooCommunicator(GroupCommunicator):
    """gloo on the CPU, by sends and receives: half the time of its all-gather, and a third of its reduce-scatter.

    Its reduce-scatter runs an all-reduce inside, which moves twice the bytes. Here every rank sends each other rank
    just that rank's slice, and sums what it received in rank order: on 2 ranks the same bits as gloo's own (a sum of
    two numbers does not depend on their order), on more the result may differ from it in the last place, and is the
    same in every run.

    To a rank of the same host only a note is sent, of where the slice lies in memory that both see (`host_memory`).

    Messages carry their layer's tag. So ranks that have come apart, and gather different layers of equal size, wait
    for each other in vain until the group's timeout, and don't take one layer's weights for another's.
    """

    @cached_property
    def _memory(self) -> HostMemory:
        """Made at the first transfer, which all ranks take part in."""
        return host_memory(self._group, self.rank, self.world_size, partial(self.exchange, device=torch.device("cpu")))

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        if full.is_cuda:
            return self._staged(partial(self.all_gather, bounds=bounds), full, shard)
        if not full.numel():
            return Done()
        slices = list(_cut(full, bounds)) if bounds is not None else list(full.view(self.world_size, -1))
        others = self._others()
        pending = self._swap(_GATHER, {rank: slices[rank] for rank in others}, dict.fromkeys(others, shard))
        if slices[self.rank].data_ptr() != shard.data_ptr():
            slices[self.rank].copy_(shard)
        return pending

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        if full.is_cuda:
            return self._staged(partial(self.reduce_scatter, bounds=bounds), shard, full)
        if not full.numel():
            return Done()
        outgoing = list(_cut(full, bounds)) if bounds is not None else list(full.view(self.world_size, -1))
        others = self._others()
        room = [shard, *full.new_empty((self.world_size - 2, shard.numel()))]  # the sum is written over its first summand
        incoming = dict(zip(sorted(others), room, strict=True))
        summands = [outgoing[rank] if rank == self.rank else incoming[rank] for rank in range(self.world_size)]

        def sum_up() -> None:
            torch.add(summands[0], summands[1], out=shard)
            for received in summands[2:]:
                shard.add_(received)

        return self._swap(_REDUCE, incoming, {rank: outgoing[rank] for rank in others}, sum_up)

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        if shard.is_cuda:
            return super().scatter(shard, slices, bounds)
        if slices is None:
            return self._swap(_SCATTER, {0: shard}, {}, acknowledged=True)
        shard.copy_(slices[self.rank])
        return self._swap(_SCATTER, {}, {rank: slices[rank] for rank in self._others()}, acknowledged=True)

    def _others(self) -> list[int]:
        """Every rank but this, the next first: so not all send to the same one at a time."""
        return [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def _swap(
        self,
        kind: int,
        incoming: dict[int, Tensor],
        outgoing: dict[int, Tensor],
        then: Callable[[], object] | None = None,
        *,
        acknowledged: bool = False,
    ) -> Pending:
        """Sends `outgoing[r]` to each rank r there and receives `incoming[r]` from it; bytes, so that any dtype goes.

        Empty ones too: torch's debug mode counts a rank's messages, and takes different numbers for ranks that came apart.
        `acknowledged`: the wait is over when what was sent has been received, as for a rank that receives nothing itself.
        """
        memory, tag = self._memory, 4 * self.channel + kind
        parcels = memory.put({rank: tensor for rank, tensor in outgoing.items() if rank in memory.near})
        notes = {rank: torch.empty(len(Parcel._fields), dtype=torch.int64) for rank in incoming if rank in memory.near}
        group, works = self._group, []
        for rank, tensor in incoming.items():
            into = notes[rank] if rank in notes else tensor.view(torch.uint8)
            works.append(dist.irecv(into, group=group, group_src=rank, tag=tag))
        for rank, tensor in outgoing.items():
            what = torch.tensor(parcels[rank]) if rank in parcels else tensor.view(torch.uint8)
            works.append(dist.isend(what, group=group, group_dst=rank, tag=tag))
            if acknowledged and rank in parcels:
                works.append(dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=rank, tag=tag))

        def land() -> None:
            while notes:
                rank, note = notes.popitem()
                memory.take(rank, Parcel(*note.tolist()), incoming[rank])
                if acknowledged:
                    dist.send(torch.zeros(1, dtype=torch.uint8), group=group, group_dst=rank, tag=tag)
            if then is not None:
                then()

        return _Transfers(works, land)

    def _staged(self, collective: Callable[[Tensor, Tensor], Pending], output: Tensor, source: Tensor) -> Pending:
        """Through host memory, blocking: for tests of several ranks on one GPU, which NCCL does not allow."""
        if not output.is_cuda:
            return collective(output, source)
        host = torch.empty_like(output, device="cpu")
        collective(host, source.cpu()).wait()
        output.copy_(host)
        return Done()


def _timeout_of(group: Any) -> timedelta | None:
    """None where torch does not tell, as when its debug mode wraps the backend."""
    try:
        return group._get_backend(torch.device("cuda")).options._timeout  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        return None


def _cut(full: Tensor, bounds: tuple[int, ...]) -> Iterator[Tensor]:
    return (full[start:stop] for start, stop in pairwise(bounds))


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
        if hasattr(process_group, "all_gather") and hasattr(process_group, "twin"):
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
