"""What a rank has asked of the others, in order: a rolling hash that must be theirs too, and the latest for errors to tell. No torch."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

__all__: list[str] = []

_MASK, _PRIME = (1 << 64) - 1, 1099511628211  # FNV-1a


class Named(Protocol):
    name: str


class Transfer(NamedTuple):
    """A gather or a reduction that a layer makes. Made once a layer, noted every time."""

    doing: str
    subject: Named
    identity: int  # the same on all ranks, and of no other transfer


class TransferLog:
    """One per model. Ranks that have made the same transfers have the same hash.

    A transfer costs one append to `entries`; the hash is brought up to date when somebody asks for it.
    """

    __slots__ = ("_digest", "_latest", "entries", "folded", "passes")

    def __init__(self) -> None:
        self.entries: list[Transfer] = []  # made since the hash was brought up to date
        self.passes = 0  # forwards of the whole model; ranks may differ, inside `resident`
        self.folded = 0  # transfers that the hash has
        self._digest = 14695981039346656037
        self._latest: deque[Transfer] = deque(maxlen=4)

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

    def summary(self) -> str:
        """For ranks to compare."""
        self.fold()
        return f"{self.folded} transfers, hash {self._digest:016x}, the latest: {self._recently()}"

    def where(self) -> str:
        """For errors."""
        self.fold()
        return f"This was in forward pass {self.passes} (or its backward), transfer {self.folded}; the latest: {self._recently()}."

    def _recently(self) -> str:
        return ", ".join(f"{doing} {subject.name.removeprefix('layer ')}" for doing, subject, _ in self._latest) or "none"
