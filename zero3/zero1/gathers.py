"""Sends each rank's updated shares to all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..comm.errors import NamingFailures
from ..comm.factory import give_memory_back, shares_memory
from ..comm.streams import Pending
from .division import Bucket, Packing, Share, Spread, packed
from .ranks import Ranks

__all__: list[str] = []

UNDER_WAY = 8  # transfers at once at most, because each takes memory
# of this rank's slice are in one transfer, if ranks share memory: larger transfers are cut
PIECE_BYTES = 2**20
# of such pieces are under way at once, so that the shared memory stays small, and in the
# processor's cache
PIECES_BYTES = 2**21


class Gathers:
    """The transfers of a step. Those without copies may still be under way when `start` returns;
    `finish` waits for them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # first the bytes that this rank sends
        self._pending: deque[tuple[int, Pending, NamingFailures]] = deque()

    def start(self, buckets: Iterable[Bucket]) -> None:
        """All-gathers the buckets."""
        staged: dict[tuple[torch.device, torch.dtype], list[Bucket]] = {}
        for bucket in buckets:
            if (full := bucket.full) is None:
                staged.setdefault(bucket.kind, []).append(bucket)
            else:
                self._gather_in_place(bucket, full)
        for same in staged.values():
            for together in packed(same, lambda bucket: bucket.nbytes, Packing.STAGED):
                self._gather_copies(together)

    def broadcast(self, spreads: Iterable[Spread]) -> None:
        """Sends each parameter that one rank updates from there to the other ranks."""
        for spread in spreads:
            parameter = spread.parameter.detach()
            if spread.whole and parameter.numel():
                owner = spread.shares[0].index
                what = f"{spread.name} of ZeroRedundancyOptimizer, which rank {owner} has updated,"
                self._ranks.broadcast(parameter, owner, "broadcasting", what)

    def finish(self) -> None:
        """Waits for what `start` began, and gives back the shared memory until the next step."""
        while self._pending:
            self._wait_for_oldest()
        for communicator in self._ranks.on.values():
            give_memory_back(communicator)

    def drop(self) -> None:
        """Forgets the gathers under way, after an exception."""
        self._pending.clear()

    def _wait_for_oldest(self) -> None:
        _, gather, naming = self._pending.popleft()
        with naming:
            gather.wait()

    def _gather_in_place(self, bucket: Bucket, full: Tensor) -> None:
        communicator, runs = self._ranks.on[full.device], full.view(self._ranks.count, -1)
        in_pieces = shares_memory(communicator)
        length = PIECE_BYTES // full.element_size() if in_pieces else runs.shape[1]
        naming = self._ranks.naming("gathering", bucket.name)
        for start in range(0, runs.shape[1], length):
            piece = runs[:, start : start + length]
            own = piece[self._ranks.index]
            while len(self._pending) == UNDER_WAY or (
                in_pieces and self._sent + own.nbytes > PIECES_BYTES
            ):
                self._wait_for_oldest()
            with naming:
                gather = communicator.all_gather(piece if in_pieces else full, own)
            self._pending.append((own.nbytes, gather, naming))

    @property
    def _sent(self) -> int:
        return sum(nbytes for nbytes, _, _ in self._pending)

    def _gather_copies(self, buckets: Sequence[Bucket]) -> None:
        (device, dtype), own = buckets[0].kind, self._ranks.index
        length = sum(bucket.layout.shard_numel for bucket in buckets)
        runs = torch.empty(self._ranks.count, length, dtype=dtype, device=device)
        for spread, share, place in _along(buckets, own):
            runs[own, place].copy_(spread.flat[share.start : share.stop])
        what = buckets[0].name if len(buckets) == 1 else f"{buckets[0].name}, and what follows,"
        with self._ranks.naming("gathering", what):
            self._ranks.on[device].all_gather(runs.view(-1), runs[own]).wait()
        for index, run in enumerate(runs):
            if index != own:
                for spread, share, place in _along(buckets, index):
                    spread.flat[share.start : share.stop].copy_(run[place])


def _along(buckets: Iterable[Bucket], index: int) -> Iterator[tuple[Spread, Share, slice]]:
    """Yields a rank's shares, with their places in a buffer that holds its runs side by side."""
    begin = 0
    for bucket in buckets:
        for spread, share in bucket.runs[index]:
            place = begin + share.offset
            yield spread, share, slice(place, place + share.stop - share.start)
        begin += bucket.layout.shard_numel
