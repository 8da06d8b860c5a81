"""Collectives for gloo: by messages between hosts, and by shared memory between processes on one
host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from .communicator import Bounds
from .process_group import GroupCommunicator, cut, timeout_of
from .shared_memory.host_memory import Expected, HostMemory, host_memory
from .streams import Done, Pending

__all__: list[str] = []

# length of a layer's number; the number and two bits for the kind of transfer are a message's tag
IDENTITY_BYTES = 3
_GATHER, _REDUCE, _SCATTER, _SUM = range(4)
_SMALL_NBYTES = 1 << 14


class _Transfers:
    """Sends and receives under way, and a function that uses the received data. Holds all buffers
    until `wait`.
    """

    def __init__(self, works: list[Any], then: Callable[[], object]) -> None:
        self._works = works
        self._then: Callable[[], object] | None = then

    def wait(self) -> None:
        # if one fails, the others may still run, and need the buffers that this object holds
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()
        self._then = None  # it runs once: a second call would wait for data that is already read


def _copy_into(places: Sequence[Tensor] | Tensor, received: dict[int, Tensor]) -> None:
    """Copies what came through shared memory. What came in messages is in its place already."""
    for rank, tensor in received.items():
        if tensor.data_ptr() != places[rank].data_ptr():
            places[rank].copy_(tensor)


class GlooCommunicator(GroupCommunicator):
    """Collectives built from gloo's sends and receives on the CPU.

    They take half the time of gloo's all-gather and a third of its reduce-scatter, which runs an
    all-reduce inside and moves twice the bytes. Here each rank sends every other rank only that
    rank's slice, and adds the received slices in rank order. So the result is the same in every
    run. On 2 ranks it has the same bits as gloo's result; on more ranks the last bits may differ.

    Between ranks on one host, slices go through shared memory (`host_memory`), and no message is
    sent.

    Each message carries its layer's tag. If ranks gather different layers by mistake, they wait
    until the group's timeout; no rank takes one layer's weights for another's.
    """

    tags_messages = True
    _memory: HostMemory

    def __init__(self, group: Any, backend: str, device: torch.device) -> None:
        super().__init__(group, backend, device)
        self.exchanges_in_memory = False
        self.takes_pieces = device.type == "cpu"  # from a GPU, a buffer is copied to the host

    def __getattr__(self, name: str) -> Any:
        """Makes the memory at the first transfer, because all ranks take part in that. (In Python
        3.11 a cached_property has one lock for all objects: ranks that are threads would wait for
        it while others hold it.)
        """
        if name != "_memory":
            return super().__getattribute__(name)
        self._memory = host_memory(
            self._group,
            self.rank,
            self.world_size,
            timeout_of(self._group, "cpu"),
            partial(super().exchange, device=torch.device("cpu")),
        )
        return self._memory

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        if full.device.type != "cpu":
            return self._staged(partial(self.all_gather, bounds=bounds), full, shard)
        if not full.numel():
            return Done()
        slices, others = self._slices(full, bounds), self._others()
        incoming = {rank: slices[rank] for rank in others}
        outgoing = dict.fromkeys(others, (shard,))
        pending = self._swap(self._tag(_GATHER), incoming, outgoing, partial(_copy_into, slices))
        if slices[self.rank].data_ptr() != shard.data_ptr():
            slices[self.rank].copy_(shard)
        return pending

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        if full.device.type != "cpu":
            return self._staged(partial(self.reduce_scatter, bounds=bounds), shard, full)
        return self.reduce_pieces(shard, [[each] for each in self._slices(full, bounds)])

    def reduce_pieces(self, shard: Tensor, parts: Sequence[Sequence[Tensor]]) -> Pending:
        if not any(piece.numel() for pieces in parts for piece in pieces):
            return Done()
        others = self._others()
        far = sorted(rank for rank in others if rank not in self._memory.near)
        # the sum may overwrite its first summand
        room = [shard] if far[:1] == [min(others)] else []
        room += shard.new_empty((len(far) - len(room), shard.numel()))
        own = parts[self.rank]

        def sum_up(received: dict[int, Tensor]) -> None:
            stop = 0
            for piece in own:
                start, stop = stop, stop + piece.numel()
                first, second, *rest = (
                    piece if rank == self.rank else received[rank][start:stop]
                    for rank in range(self.world_size)
                )
                total = torch.add(first, second, out=shard[start:stop])
                for summand in rest:
                    total.add_(summand)

        incoming = dict.fromkeys(others, shard) | dict(zip(far, room, strict=True))
        return self._swap(
            self._tag(_REDUCE), incoming, {rank: parts[rank] for rank in others}, sum_up
        )

    def all_to_all(
        self, received: Tensor, sent: Tensor, bounds: Bounds = None, into: Bounds = None
    ) -> Pending:
        if sent.device.type != "cpu":
            swap = partial(self.all_to_all, bounds=bounds, into=into)
            return self._staged(swap, received, sent)
        if not sent.numel() and into is None:
            return Done()
        slices, others = self._slices(sent, bounds), self._others()
        places: Sequence[Tensor] | Tensor = (
            received.view(self.world_size, received.numel() // self.world_size)
            if into is None
            else cut(received, into)
        )
        incoming = {rank: places[rank] for rank in others}
        outgoing = {rank: (slices[rank],) for rank in others}
        pending = self._swap(self._tag(_REDUCE), incoming, outgoing, partial(_copy_into, places))
        places[self.rank].copy_(slices[self.rank])
        return pending

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Ranks that sum other shapes or dtypes than others wait. In gloo's own they would meet,
        get other numbers, or be ended.
        """
        if (
            tensor.device.type != "cpu"
            or self._device.type != "cpu"
            or not 0 < tensor.nbytes <= _SMALL_NBYTES
        ):
            super().all_reduce(tensor, maximum=maximum)
            return
        own, others = tensor.reshape(-1), self._others()

        def combine(received: dict[int, Tensor]) -> None:
            first, *rest = (
                own if rank == self.rank else received[rank] for rank in range(self.world_size)
            )
            total = first.clone()
            for other in rest:
                torch.maximum(total, other, out=total) if maximum else total.add_(other)
            tensor.copy_(total.view(tensor.shape))

        number = crc32(f"{tuple(tensor.shape)} {tensor.dtype} {maximum}".encode()) >> 8
        incoming = {rank: torch.empty_like(own) for rank in others}
        self._swap(4 * number + _SUM, incoming, dict.fromkeys(others, (own,)), combine).wait()

    def in_memory(self) -> GlooCommunicator:
        """One for the same ranks, whose exchanges go through shared memory as gathers do. It meets
        no other in them: ranks may use it where none can be elsewhere.
        """
        other = GlooCommunicator(self._group, self._backend, self._device)
        other.exchanges_in_memory = True
        return other

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        if device.type != "cpu" or not self.exchanges_in_memory:
            return super().exchange(payload, device)
        mine, found = torch.frombuffer(bytearray(payload), dtype=torch.uint8), {self.rank: payload}

        def take(received: dict[int, Tensor]) -> None:
            found.update((rank, bytes(each.tolist())) for rank, each in received.items())

        number = crc32(f"{len(payload)} bytes".encode()) >> 8
        incoming = {rank: torch.empty_like(mine) for rank in self._others()}
        self._swap(4 * number + _SUM, incoming, dict.fromkeys(incoming, (mine,)), take).wait()
        return [found[rank] for rank in range(self.world_size)]

    def all_reduce_later(self, tensor: Tensor) -> Pending:
        """Works as `all_reduce` for a sum, but only starts it. It adds in rank order."""
        if tensor.device.type != "cpu":
            return super().all_reduce_later(tensor)
        if self.world_size > 2:
            bounds = tuple(
                tensor.numel() * rank // self.world_size for rank in range(self.world_size + 1)
            )
            own = torch.empty_like(tensor[bounds[self.rank] : bounds[self.rank + 1]])
            return _Transfers(
                [self.reduce_scatter(own, tensor, bounds)],
                lambda: self.all_gather(tensor, own, bounds).wait(),
            )
        # each sends all: as many bytes, and no second message that waits for the first
        other = 1 - self.rank

        def add(received: dict[int, Tensor]) -> None:
            first, second = (tensor if rank == self.rank else received[rank] for rank in range(2))
            torch.add(first, second, out=tensor)

        return self._swap(
            self._tag(_REDUCE),
            {other: tensor if self.shares_memory else torch.empty_like(tensor)},
            {other: (tensor,)},
            add,
        )

    def _slices(self, full: Tensor, bounds: Bounds) -> list[Tensor]:
        return cut(full, bounds) if bounds is not None else list(full.view(self.world_size, -1))

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        if shard.device.type != "cpu" or not self.shares_memory:
            return super().scatter(shard, slices, bounds)
        if slices is None:
            return self._swap(
                self._tag(_SCATTER), {0: shard}, {}, lambda received: shard.copy_(received[0])
            )
        memory, tag = self._memory, self._tag(_SCATTER)
        number = memory.put(
            tag, memory.next_turn(tag), {rank: (slices[rank],) for rank in self._others()}
        )
        memory.begun(tag)
        shard.copy_(slices[self.rank])
        return _Transfers([], lambda: memory.await_receipts(number))

    @property
    def shares_memory(self) -> bool:
        """Whether all other ranks are on this host. All ranks ask together, because the first use
        is a collective.
        """
        return len(self._memory.near) == self.world_size - 1

    def trim(self) -> None:
        """Frees the group's shared memory, where all ranks have read the transfers."""
        # otherwise there was no transfer; to make the memory would take all ranks
        if "_memory" in self.__dict__:
            self._memory.trim()

    def _tag(self, kind: int) -> int:
        return 4 * self.channel + kind

    def _others(self) -> list[int]:
        """All other ranks, beginning with the next one, so that ranks do not all send to the same
        rank at once.
        """
        return [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]

    def _swap(
        self,
        tag: int,
        incoming: dict[int, Tensor],
        outgoing: Mapping[int, Sequence[Tensor]],
        then: Callable[[dict[int, Tensor]], object],
    ) -> Pending:
        """Sends the tensors `outgoing[r]`, side by side, to each rank r; calls `then` with the
        tensor received from each rank.

        Data from a far rank is received into `incoming[r]`. Data from a near rank is read in shared
        memory, which `then` may use while it runs. Messages are sent as bytes, so that every dtype
        works. Empty messages are sent too: torch's debug mode raises an error if ranks send
        different numbers of messages.
        """
        memory, group = self._memory, self._group
        near, turn = memory.near, memory.next_turn(tag)
        memory.put(
            tag, turn, {target: tensors for target, tensors in outgoing.items() if target in near}
        )
        works: list[Any] = [
            dist.irecv(place.view(torch.uint8), group=group, group_src=source, tag=tag)
            for source, place in incoming.items()
            if source not in near
        ]
        for target, tensors in outgoing.items():
            if target in near:
                continue
            parts = [tensor.view(torch.uint8) for tensor in tensors]
            if len(parts) != 1:  # there may be none
                parts = [torch.cat([torch.empty(0, dtype=torch.uint8), *parts])]
            works.append(dist.isend(parts[0], group=group, group_dst=target, tag=tag))
        memory.begun(tag)  # after everything that may fail, so that a failed start can be repeated
        expected = [Expected(memory, source, tag, turn) for source in incoming if source in near]

        def land() -> None:
            """Calls `then` while the data of near ranks is mapped."""
            with ExitStack() as lent:
                found = {
                    each.source: lent.enter_context(memory.look(each, incoming[each.source]))
                    for each in expected
                }
                then(incoming | found)

        return _Transfers(works, land)

    def _staged(
        self, collective: Callable[[Tensor, Tensor], Pending], output: Tensor, source: Tensor
    ) -> Pending:
        """Copies through host memory, and blocks. It is for tests of several ranks on one GPU,
        which NCCL does not allow.
        """
        if output.device.type == "cpu":
            return collective(output, source)
        host = torch.empty_like(output, device="cpu")
        collective(host, source.cpu()).wait()
        output.copy_(host)
        return Done()
