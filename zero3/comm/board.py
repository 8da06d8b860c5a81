"""What ranks tell each other without a collective: texts in the store that all ranks of the job can
reach.

No step uses it. Ranks meet here before the first collective of new layers, so that those who were
given different process groups hear of it and do not wait for each other. And where a transfer has
failed, each rank leaves here what it was doing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from threading import Thread
from typing import Any, NamedTuple

__all__: list[str] = []

# seconds; who waits longer begins the collective, which notices it if a rank has died
_MEETING = 3.0
_LOOKS = 1.0  # seconds until a rank asks where the others are
# all but the first ranks of a group look later: most often the first have told them then
_OTHERS_LOOK, _LOOKERS = 2.0, 8
# seconds in which ranks whose transfers time out together can read what each was doing
_TELLING = 2.0
_NOTES = 64  # read at most: a store has to serve all ranks


class _Claim(NamedTuple):
    """What a rank is waiting for."""

    what: str
    place: str  # of the meeting; "": it failed, and waits for nobody
    members: list[int]
    token: str  # a new one for each meeting
    caller: str = ""  # the function that failed


class Board:
    """The texts of one communicator's ranks. `members`: their numbers in the job. `rank`: this
    rank's number among them.
    """

    def __init__(self, store: Any, what: str, members: Sequence[int], rank: int) -> None:
        self._store, self._what, self._members, self._rank = store, what, list(members), rank
        self._place = f"zero3/{sha256(what.encode()).hexdigest()[:16]}"

    def post(self, key: str, text: str) -> None:
        """Leaves a text where other ranks can read it, also when this rank makes no collective any
        more.
        """
        self._store.set(f"zero3/{key}", text)

    def posted(self, key: str) -> str:
        """What any rank has posted under `key`; "" if nothing, or if the process that keeps it is
        gone.
        """
        with suppress(RuntimeError):
            return self._read(f"zero3/{key}")
        return ""

    # -- before the first collective

    @contextmanager
    def meeting(self, error: Exception | None = None) -> Iterator[None]:
        """Context for a first collective. It begins when all members are here, or after some time,
        if it is not known that they can't come.

        Args:
            error: A mistake that this rank has found. It may be why the ranks have come to
                different places.

        Raises:
            ValueError: Ranks wait for each other in different groups. All of them raise it.
        """
        me, token, said = self._members[self._rank], os.urandom(8).hex(), ""
        # some stores of tests keep nothing, and then the collective has to find out
        with suppress(RuntimeError):
            what = self._what if error is None else f"{type(error).__name__}: {error}"
            self._store.set(
                f"zero3/claim/{me}", json.dumps(_Claim(what, self._place, self._members, token))
            )
            self._store.set(f"{self._place}/{me}", token)
            said = self._wait(token)
        try:
            if said:
                raise ValueError(said)
            yield
        finally:
            with suppress(RuntimeError):
                self._store.set(f"zero3/over/{token}", "")

    def decline(self, caller: str, reason: str) -> None:
        """This rank was to make new layers, and raises `reason` alone, because it can't know with
        whom it should.
        """
        with suppress(RuntimeError):
            self._store.set(
                f"zero3/claim/{self._members[self._rank]}",
                json.dumps(_Claim(reason, "", [], "", caller)),
            )

    def _wait(self, token: str) -> str:
        """Returns "" when all are here, or when it is time to begin; or why they can't come."""
        begin, pause = time.monotonic(), 1e-3
        look = _LOOKS if self._rank < _LOOKERS else _OTHERS_LOOK
        # most often: errors may have brought it out of step
        last = self._store.add(f"{self._place}/count", 1) % len(self._members) == 0
        while not (last and self._all_here()) and not self._store.check([f"zero3/over/{token}"]):
            last = False
            if wrong := self._read(f"zero3/wrong/{token}"):
                return str(json.loads(wrong)[0])
            if (waited := time.monotonic() - begin) > _MEETING:
                break
            if waited > look:
                look = 2 * waited
                if self._all_here():
                    break
                if said := self._came_late():
                    return said
                ahead, waits = self._ahead()
                if stuck := _on_circles(waits):
                    return self._tell({rank: ahead[rank] for rank in stuck})
                if any(not other.place for other in ahead.values()):
                    # the collective fails as soon as that rank ends; if it does not, it may come
                    # yet
                    break
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return ""

    def _all_here(self) -> bool:
        """Ends the meeting for all, if all are here."""
        here = self._here(self._place, self._members)
        if len(here) == len(self._members):
            for token in here.values():
                self._store.set(f"zero3/over/{token}", "")
            return True
        return False

    def _here(self, place: str, members: Iterable[int]) -> dict[int, str]:
        """The members that wait at the place, and their tokens."""
        came = {member: self._read(f"{place}/{member}") for member in members}
        return {
            member: token
            for member, token in came.items()
            if token and not self._store.check([f"zero3/over/{token}"])
        }

    def _came_late(self) -> str:
        """What others were told here before this rank came; it is told once."""
        for member in self._members:
            key = f"zero3/wrong/{self._read(f'{self._place}/{member}')}"
            if wrong := self._read(key):
                said, told = json.loads(wrong)
                if self._members[self._rank] not in told:
                    self._store.set(key, json.dumps([said, [*told, self._members[self._rank]]]))
                    return str(said)
        return ""

    def _ahead(self) -> tuple[dict[int, _Claim], dict[int, set[int]]]:
        """The claims of this rank, of those that it waits for, of those that they wait for, ...;
        and which these are.
        """
        absent: dict[str, set[int]] = {"": set()}
        found: dict[int, _Claim] = {}
        ahead = {self._members[self._rank]}
        while ahead:
            rank = ahead.pop()
            if (claim := self._claim_of(rank)) is None:
                continue
            found[rank] = claim
            if claim.place not in absent:
                absent[claim.place] = (
                    set(claim.members) - self._here(claim.place, claim.members).keys()
                )
            ahead |= absent[claim.place] - found.keys()
        return found, {rank: absent[claim.place] for rank, claim in found.items()}

    def _claim_of(self, rank: int) -> _Claim | None:
        """What the rank waits for, or why it does not come; None if it has other things to do."""
        if not (text := self._read(f"zero3/claim/{rank}")):
            return None
        claim = _Claim(*json.loads(text))
        return None if claim.place and self._store.check([f"zero3/over/{claim.token}"]) else claim

    def _tell(self, stuck: Mapping[int, _Claim]) -> str:
        """Tells all that wait where `stuck` ranks do. The first rank that does this chooses the
        words.
        """
        places = {claim.place for claim in stuck.values()}
        met = {
            member: self._claim_of(member) for claim in stuck.values() for member in claim.members
        }
        told = {
            rank: claim
            for rank, claim in sorted(met.items())
            if claim is not None and claim.place in places
        }
        differing = by_rank({rank: claim.what for rank, claim in told.items()})
        said = (
            f"ranks differ in process_group: {differing}. All ranks that share a model must "
            "pass the same group, or mesh."
        )
        chosen = self._store.compare_set(
            f"zero3/wrong/{stuck[min(stuck)].token}", "", json.dumps([said, list(told)])
        ).decode()
        for claim in told.values():
            self._store.set(f"zero3/wrong/{claim.token}", chosen)
        return str(json.loads(chosen)[0])

    # -- after a failure

    def where(self, caller: str, doing: str, *, timed_out: bool) -> str:
        """Leaves what this rank was doing when a transfer failed. Returns a sentence about a
        function that not all ranks have called.

        It takes a connection of its own and a thread: if the store's host is cut off, its answer
        never comes.

        Args:
            caller: The public function; "" in a step.
            doing: What else this rank was doing.
            timed_out: Others have not come. Then those that have left nothing have not called it;
                else they may have died in it.
        """
        said: list[str] = []

        def ask() -> None:
            with suppress(RuntimeError):
                board = Board(self._store.clone(), self._what, self._members, self._rank)
                said.append(board._ask(caller, doing, timed_out))

        asking = Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * _TELLING)
        return said[0] if said else ""

    def _ask(self, caller: str, doing: str, timed_out: bool) -> str:
        found: dict[int, tuple[str, str]] = {}
        with suppress(RuntimeError):
            # of a meeting that is not over: this was its collective
            own = self._claim_of(self._members[self._rank])
            if own is not None and (wrong := self._read(f"zero3/wrong/{own.token}")):
                return str(json.loads(wrong)[0])  # the others came later, and were told
            found = self._others(
                caller, doing, time.monotonic() + (_TELLING if timed_out else _TELLING / 4)
            )
        found[self._rank] = (caller, doing)
        wanted = next((called for _, (called, _) in sorted(found.items()) if called), "")
        missing = [
            rank
            for rank in range(len(self._members))
            if rank not in found or found[rank][0] != wanted
        ]
        said = {
            rank: found[rank][0] or found[rank][1]
            if rank in found
            else self._declined(rank, wanted)
            for rank in missing
        }
        if not wanted or not missing or not (timed_out or any(said.values())):
            return ""
        was = (
            by_rank({rank: what for rank, what in said.items() if what})
            if len(missing) > 1
            else said[missing[0]]
        )
        where = f" (found at: {was})" if was else ""
        return (
            f"Every rank has to call {wanted}; {_ranks(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} not{where}."
        )

    def _others(self, caller: str, doing: str, end: float) -> dict[int, tuple[str, str]]:
        """What the ranks have left that were in a transfer that failed: each one's function, and
        what else it was doing.
        """
        failed = f"{self._place}/failed"
        if self._store.add(f"{failed}/times/{self._rank}", 1) > 1:
            # this rank has waited once, and what it awaits after a failure may be many transfers
            end = 0.0
        self._store.set(
            f"{failed}/{self._store.add(failed, 1)}", json.dumps([self._rank, caller, doing])
        )
        while True:
            count = self._store.add(failed, 0)
            left = [
                self._read(f"{failed}/{number}")
                for number in range(max(1, count - _NOTES + 1), count + 1)
            ]
            found = {
                rank: (called, did) for rank, called, did in map(json.loads, filter(None, left))
            }
            if len(found) >= min(len(self._members), _NOTES) or time.monotonic() > end:
                return found
            time.sleep(0.05)

    def _declined(self, rank: int, function: str) -> str:
        with suppress(RuntimeError):
            claim = self._claim_of(self._members[rank])
            if claim is not None and not claim.place and claim.caller == function:
                return claim.what
        return ""

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


def _on_circles(waits: Mapping[int, Iterable[int]]) -> set[int]:
    """The ranks that wait for each other, each perhaps by way of others."""
    left = set(waits)

    def drop(has_no: Callable[[int], bool]) -> bool:
        gone = {rank for rank in left if has_no(rank)}
        left.difference_update(gone)
        return bool(gone)

    while drop(lambda rank: not left.intersection(waits[rank])) or drop(
        lambda rank: all(rank not in waits[other] for other in left)
    ):
        pass
    return left


def board_for(communicator: object) -> Board | None:
    """The board of a communicator's ranks. None: there is no store that all of them can reach, or
    it is a user's own communicator.
    """
    own: Callable[[], Board | None] | None = getattr(communicator, "message_board", None)
    return None if own is None else own()


def numbered(members: Sequence[int]) -> str:
    if len(members) > 2 and list(members) == [*range(members[0], members[0] + len(members))]:
        return f"the ranks {members[0]} to {members[-1]}"
    return f"the ranks {', '.join(map(str, members))}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def by_rank(values: Mapping[int, object]) -> str:
    """A text for errors: "rank 0: one value; ranks 1, 2: another"."""
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(str(value), []).append(rank)
    return "; ".join(f"{_ranks(ranks)}: {value}" for value, ranks in groups.items())
