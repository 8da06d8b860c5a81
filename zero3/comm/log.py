"""The log of a rank's transfers: a rolling hash, which must be the same on all ranks, and the
latest ones for errors. No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from struct import pack
from typing import Any, NamedTuple, Protocol

__all__: list[str] = []

_MASK, _PRIME = (1 << 64) - 1, 1099511628211  # FNV-1a


class Labelled(Protocol):
    label: str


class Told(Protocol):
    """The result of an exchange that is under way."""

    def ready(self) -> bool:
        """Whether `read` would return without a wait of the host."""
        ...

    def read(self) -> list[bytes]:
        """Returns every rank's payload, in rank order. Blocks the host until they are there."""
        ...


class Tells(Protocol):
    def exchange_later(self, payload: bytes, device: Any) -> Told: ...


class Keeps(Protocol):
    """What keeps the latest transfers for after the process's end."""

    def code(self, doing: str) -> int: ...

    def turn(self, direction: int) -> None: ...

    def put(self, code: int, forward: int, moves: int = 1) -> int: ...


class Entry(NamedTuple):
    """The gather or the reduction of a layer. Each layer makes one object of each, and logs it for
    every transfer.
    """

    doing: str
    subject: Labelled
    identity: int  # the same number on all ranks, and different for every layer and kind


@dataclass(slots=True)
class Noted:
    """What a collective that is no layer's is for."""

    label: str


class History:
    """What a rank has transferred, as a rolling hash. Ranks that have made the same transfers have
    the same hash.

    Where no message says which layer it is of, all models over the same ranks share one: if some
    ranks use them in another order, each model gets the other one's numbers.
    """

    __slots__ = ("_wider", "digest", "entries", "folded", "latest")

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # transfers that are not in the hash yet
        self.folded = 0  # the number of transfers in the hash
        self.digest = 14695981039346656037
        self.latest: deque[Entry] = deque(maxlen=4)
        self._wider: dict[tuple[int, ...], History] = {}

    def fold(self) -> None:
        """Adds the new transfers to the hash."""
        for transfer in self.entries:
            self.digest = ((self.digest ^ transfer.identity) * _PRIME) & _MASK
        self.folded += len(self.entries)
        self.latest.extend(self.entries[-4:])
        self.entries.clear()

    def among(self, members: Iterable[int]) -> History:
        """That of a mesh of these ranks, of which this one's ranks are a column."""
        return self._wider.setdefault(tuple(members), History())


class TransferLog:
    """The transfers of one model, and of those that share them with it.

    A transfer costs only one append to `entries`. The hash is computed later, when it is needed.
    """

    __slots__ = ("_identity", "_said", "_told", "entries", "history", "passes", "ring")

    def __init__(self, history: History, identity: int) -> None:
        """`identity`: the model's, the same number on all ranks."""
        self.history, self._identity = history, identity
        self.entries = history.entries
        self.ring: Keeps | None = None  # whoever conducts a transfer writes it there, too
        self.passes = 0  # forwards of the whole model; inside `resident` ranks may differ
        self._told: Told | None = None  # the hashes of all ranks at the last `tell`
        # the forward of the last `tell`, and this rank's latest transfers then
        self._said: tuple[int, list[Entry]] = (0, [])

    def begin_pass(self) -> None:
        """A forward of the whole model begins."""
        self.passes += 1

    def note(self, doing: str, what: str, *numbers: float) -> None:
        """Logs a collective that is no layer's, with `numbers` that must be the same on all
        ranks.
        """
        self.entries.append(Entry(doing, Noted(what), hash((self._identity, *numbers))))
        self.keep(doing)

    def keep(self, doing: str) -> None:
        """Something begins that is no layer's, and that no conductor of the ring hears of."""
        if self.ring is not None:
            self.ring.put(self.ring.code(doing), self.passes)

    def keep_in(self, ring: Keeps | None) -> None:
        self.ring = ring

    def step(self, direction: int, mark: str) -> None:
        """An optimizer's step begins, or is over."""
        if self.ring is not None:
            self.ring.turn(direction)
            self.ring.put(self.ring.code(mark), self.passes, 0)

    @property
    def count(self) -> int:
        """The number of transfers so far."""
        return self.history.folded + len(self.entries)

    @property
    def digest(self) -> int:
        """The hash of all transfers so far, 64 bits."""
        self.history.fold()
        return self.history.digest

    def tell(self, communicator: Tells, device: Any) -> None:
        """Sends the count and the hash to the other ranks, without a wait. `look` compares them
        later.
        """
        self.history.fold()
        payload = pack("<QQ", self.history.digest, self.history.folded)
        self._said = (self.passes + 1, list(self.history.latest))
        self._told = communicator.exchange_later(payload, device)

    def look(self, *, wait: bool = True) -> None:
        """Compares the hashes of the last `tell`. With `wait=False` only if they are there already.

        Raises:
            ValueError: Ranks had made different transfers. All ranks raise it.
        """
        if self._told is None or not (wait or self._told.ready()):
            return
        told, self._told = self._told, None
        found = told.read()
        if len(set(found)) == 1:
            return
        known = [
            f"rank {rank}: {int.from_bytes(each[8:], 'little')} with hash {each[:8].hex()}"
            for rank, each in enumerate(found)
        ]
        passes, latest = self._said
        raise ValueError(
            f"ranks differ in the transfers made before forward pass {passes}: "
            f"{'; '.join(known)}. The latest of this rank were: {_names(latest)}. Numbers may be "
            "wrong since then: load a checkpoint. All ranks must call the same layers in the "
            "same order. An exception that only one rank catches breaks this: use "
            "zero3.step_guard for that. ShardingPolicy(compare_every=1) finds the first transfer "
            "that differs."
        )

    def summary(self) -> str:
        """A text that ranks compare."""
        return f"{self.count} transfers, hash {self.digest:016x}, the latest: {self._recently()}"

    def where(self) -> str:
        """A sentence for errors."""
        return (
            f"This was in forward pass {self.passes} (or its backward), transfer "
            f"{self.count}; the latest: {self._recently()}."
        )

    def _recently(self) -> str:
        self.history.fold()
        return _names(self.history.latest)


def _names(transfers: Iterable[Entry]) -> str:
    return ", ".join(f"{doing} {subject.label}" for doing, subject, _ in transfers) or "none"
