"""The log of a rank's transfers: a rolling hash, which must be the same on all ranks, and the
latest ones for errors. No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from struct import pack
from threading import Lock
from typing import Any, NamedTuple, Protocol

__all__: list[str] = []

MOST_BEHIND = 3  # of what was told: a forward looks at the rest, however many models there are
_MASK, _PRIME = (1 << 64) - 1, 1099511628211  # FNV's


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
    # the same number on all ranks, and different for every layer and kind. None: not all ranks have
    # a part in it, and only errors tell it
    identity: int | None


@dataclass(slots=True)
class Noted:
    """What a collective that is no layer's is for."""

    label: str


class History:
    """What a rank has transferred, as a rolling hash: a polynomial, so that the hash of what came
    after a point is known from the hash there.

    Where no message says which layer it is of, all models over the same ranks share one: if some
    ranks use them in another order, each model gets the other one's numbers.
    """

    __slots__ = (
        "_digest",
        "_folded",
        "_lock",
        "_models",
        "_wider",
        "behind",
        "entries",
        "latest",
        "told",
    )

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # transfers that are not in the hash yet
        self._folded = self._digest = 0  # the number of transfers in the hash, and the hash
        self.latest: deque[Entry] = deque(maxlen=4)
        # what ranks have told each other, and nobody has looked at, in order: the hashes of all
        # ranks, the forward, and this rank's latest transfers then
        self.told: deque[tuple[Told, int, list[Entry]]] = deque()
        self._models = 0  # that have told anything
        # how many of them a forward leaves alone, so that nobody waits: one for each other model
        # that there has been
        self.behind = 0
        self._wider: dict[tuple[int, ...], History] = {}
        self._lock = Lock()

    def fold(self, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        """Adds the new transfers to the hash. Returns the number and the hash of all since
        `before`, which is what it has returned then.
        """
        with self._lock:
            new = self.entries[:]  # another thread may add to them
            for _, _, identity in new:
                if identity is not None:
                    self._digest = (self._digest * _PRIME + identity) & _MASK
                    self._folded += 1
            self.latest.extend(new[-4:])
            del self.entries[: len(new)]
            count = self._folded - before[0]
            return count, (self._digest - before[1] * pow(_PRIME, count, _MASK + 1)) & _MASK

    def add_model(self) -> None:
        """One more tells others."""
        self._models += 1
        self.behind = min(self._models - 1, MOST_BEHIND)

    def among(self, members: Iterable[int]) -> History:
        """That of a mesh of these ranks, of which this one's ranks are a column."""
        return self._wider.setdefault(tuple(members), History())


class TransferLog:
    """The transfers of one model since it was made, and of those that share their history with it.

    A transfer costs only one append to `entries`. The hash is computed later, when it is needed.
    """

    __slots__ = (
        "_before",
        "_has_told",
        "_identity",
        "entries",
        "history",
        "passes",
        "ring",
    )

    def __init__(self, history: History, identity: int) -> None:
        """`identity`: that of the model's first layer, the same number on all ranks."""
        self.history, self._identity = history, identity
        self.entries = history.entries
        # ranks may have come apart before, and have begun anew with this model
        self._before = history.fold()
        self.ring: Keeps | None = None  # whoever conducts a transfer writes it there, too
        self.passes = 0  # forwards of the whole model; inside `resident` ranks may differ
        self._has_told = False

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
        return self.history.fold(self._before)[0]

    @property
    def digest(self) -> int:
        """The hash of all transfers so far, 64 bits."""
        return self.history.fold(self._before)[1]

    def tell(self, communicator: Tells, device: Any) -> None:
        """Sends the count and the hash to the other ranks, without a wait. `look` compares them
        later.
        """
        payload = pack("<QQ", *self.history.fold(self._before))
        told = communicator.exchange_later(payload, device)
        self.history.told.append((told, self.passes + 1, list(self.history.latest)))
        if not self._has_told:
            self._has_told = True
            self.history.add_model()

    def look(self, *, wait: bool = True, but_last: int = 0) -> None:
        """Compares the hashes that were told, but for the last ones. With `wait=False` only if they
        are there already.

        Raises:
            ValueError: Ranks had made different transfers. All ranks raise it.
        """
        told = self.history.told
        while len(told) > but_last and (wait or told[0][0].ready()):
            hashes, passes, latest = told.popleft()
            found = hashes.read()
            if len(set(found)) == 1:
                continue
            told.clear()  # a model that is made next has no part in it
            known = [
                f"rank {rank}: {int.from_bytes(each[:8], 'little')} with hash {each[8:].hex()}"
                for rank, each in enumerate(found)
            ]
            raise ValueError(
                f"ranks differ in the transfers made before forward pass {passes}: "
                f"{'; '.join(known)}. The latest of this rank were: {_names(latest)}. Numbers may "
                "be wrong since then: load a checkpoint. All ranks must call the same layers in "
                "the same order, of all models. An exception that only one rank catches breaks "
                "this: use zero3.step_guard for that. ShardingPolicy(compare_every=1) finds the "
                "first transfer that differs."
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
