"""What a rank has asked of the others, in order: a rolling hash that must be theirs too, and the latest for errors to tell. No torch."""

from __future__ import annotations

from collections import deque

__all__: list[str] = []

_MASK, _PRIME = (1 << 64) - 1, 1099511628211  # FNV-1a


class Journal:
    """One per model. Ranks that have made the same transfers have the same `digest`."""

    __slots__ = ("_compared", "_latest", "count", "digest", "passes")

    def __init__(self) -> None:
        self.count = 0  # transfers
        self.digest = 14695981039346656037
        self.passes = 0  # forwards of the whole model; ranks may differ, inside `resident`
        self._compared = 0
        self._latest: deque[tuple[str, str]] = deque(maxlen=4)

    def note(self, doing: str, name: str, identity: int) -> None:
        """A transfer is about to be made. `identity` is the layer's, the same on all ranks."""
        self.count += 1
        self.digest = ((self.digest ^ (2 * identity + (doing == "gathering"))) * _PRIME) & _MASK
        self._latest.append((doing, name))

    def due(self, every: int) -> bool:
        """Whether `every` transfers or more were made since this last said so. 0: never; 1: they are compared one by one."""
        if every < 2 or self.count - self._compared < every:
            return False
        self._compared = self.count
        return True

    def summary(self) -> str:
        """For ranks to compare."""
        return f"{self.count} transfers, hash {self.digest:016x}, the latest: {self._recently()}"

    def where(self) -> str:
        """For errors."""
        return f"This was in forward pass {self.passes} (or its backward), transfer {self.count}; the latest: {self._recently()}."

    def _recently(self) -> str:
        return ", ".join(f"{doing} {name}" for doing, name in self._latest) or "none"
