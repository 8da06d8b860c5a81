"""What a rank has asked of the others, in order: a rolling hash that must be theirs too, and the latest for errors to tell. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

__all__: list[str] = []

_MASK, _PRIME = (1 << 64) - 1, 1099511628211  # FNV-1a


class Named(Protocol):
    name: str


class Told(Protocol):
    """What all ranks say, on its way: see `communicator`."""

    def ready(self) -> bool: ...

    def read(self) -> list[bytes]: ...


class Tells(Protocol):
    def exchange_later(self, payload: bytes, device: Any) -> Told: ...


class Transfer(NamedTuple):
    """A gather or a reduction that a layer makes. Made once a layer, noted every time."""

    doing: str
    subject: Named
    identity: int  # the same on all ranks, and of no other transfer


class TransferLog:
    """One per model. Ranks that have made the same transfers have the same hash.

    A transfer costs one append to `entries`; the hash is brought up to date when somebody asks for it.
    """

    __slots__ = ("_digest", "_latest", "_said", "_told", "entries", "folded", "passes")

    def __init__(self) -> None:
        self.entries: list[Transfer] = []  # made since the hash was brought up to date
        self.passes = 0  # forwards of the whole model; ranks may differ, inside `resident`
        self.folded = 0  # transfers that the hash has
        self._digest = 14695981039346656037
        self._latest: deque[Transfer] = deque(maxlen=4)
        self._told: Told | None = None  # what all ranks said of their logs at the last forward
        self._said: tuple[int, list[Transfer]] = (0, [])  # the forward, and this rank's latest transfers then

    def fold(self) -> None:
        """Brings the hash up to date."""
        for transfer in self.entries:
            self._digest = ((self._digest ^ transfer.identity) * _PRIME) & _MASK
        self.folded += len(self.entries)
        self._latest.extend(self.entries[-4:])
        self.entries.clear()

    @property
    def count(self) -> int:
        """How many transfers were made."""
        return self.folded + len(self.entries)

    @property
    def digest(self) -> int:
        """64 bits."""
        self.fold()
        return self._digest

    def tell(self, communicator: Tells, device: Any) -> None:
        """Sends count and hash to the other ranks. `look` compares them, later: nobody waits."""
        self.fold()
        payload = self._digest.to_bytes(8, "little") + self.folded.to_bytes(8, "little")
        self._said = (self.passes + 1, list(self._latest))
        self._told = communicator.exchange_later(payload, device)

    def look(self, *, wait: bool = True) -> None:
        """Compares what ranks told each other last. Not `wait`: if the host need not wait for it.

        Raises:
            ValueError: ranks had made different transfers. They all see it.
        """
        if self._told is None or not (wait or self._told.ready()):
            return
        told, self._told = self._told, None
        found = told.read()
        if len(set(found)) == 1:
            return
        known = [f"rank {rank}: {int.from_bytes(each[8:], 'little')} with hash {each[:8].hex()}" for rank, each in enumerate(found)]
        passes, latest = self._said
        raise ValueError(
            f"ranks differ in the transfers made before forward pass {passes}: {'; '.join(known)}. The latest of this rank were: "
            f"{_names(latest)}. Numbers may be wrong since then: load a checkpoint. All ranks must call the same layers in the same "
            "order; an exception that one rank alone caught breaks that (zero3.step_guard is for those). "
            "ShardingPolicy(compare_every=1) finds the first transfer that differs."
        )

    def summary(self) -> str:
        """For ranks to compare."""
        self.fold()
        return f"{self.folded} transfers, hash {self._digest:016x}, the latest: {self._recently()}"

    def where(self) -> str:
        """For errors."""
        self.fold()
        return f"This was in forward pass {self.passes} (or its backward), transfer {self.folded}; the latest: {self._recently()}."

    def _recently(self) -> str:
        return _names(self._latest)


def _names(transfers: Iterable[Transfer]) -> str:
    return ", ".join(f"{doing} {subject.name.removeprefix('layer ')}" for doing, subject, _ in transfers) or "none"
