"""Who is behind: the rings of a model's ranks, joined."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..comm.ring import FILE, Begun, Read, is_alive, read

__all__: list[str] = []

Verdict = dict[str, Any]
_VERDICTS = ("differ", "behind", "missing", "together")


def models_in(directory: Path, damaged: dict[str, str]) -> list[dict[int, Read]]:
    """The rings of the newest run below a directory, by rank, for each of its models. `damaged`
    takes what can't be read, and why.

    Raises:
        ValueError: There is none.
    """
    models: dict[str, dict[int, Read]] = {}
    for path in sorted(directory.rglob("*.ring")):
        try:
            if FILE.fullmatch(path.name):
                ring = read(path)
                of, rank = models.setdefault(ring.about["model"], {}), ring.about["rank"]
                if rank not in of or _began([ring]) >= _began([of[rank]]):
                    of[rank] = ring
        except (ValueError, OSError) as error:
            damaged[str(path.relative_to(directory))] = str(error)
    if not models:
        told = "".join(f"; {name}: {why}" for name, why in damaged.items())
        raise ValueError(
            f"{directory}: no rank's transfers are there{told}. They lie where ZERO3_RING_DIR says "
            "when a run begins; without it, in zero3-UID in the directory for temporary files"
        )
    newest = max(models.values(), key=lambda model: _began(model.values()))
    processes = {_process(ring) for ring in newest.values()}
    run = [m for m in models.values() if any(_process(ring) in processes for ring in m.values())]
    alive = [m for m in run if not all(ring.closed for ring in m.values())]
    return sorted(alive or run, key=lambda model: -_began(model.values()))


def _began(rings: Iterable[Read]) -> float:
    return max(float(ring.about["started"]) for ring in rings)


def _process(ring: Read) -> tuple[str, int]:
    return ring.about["host"], ring.about["pid"]


def first_of(models: Iterable[dict[int, Read]]) -> tuple[Verdict, dict[int, Read]]:
    """The verdict on the first of the models with which something is wrong."""
    judged = [(judge(model), model) for model in models]
    return min(judged, key=lambda each: _VERDICTS.index(each[0]["verdict"]))


def judge(model: Mapping[int, Read]) -> Verdict:
    """What the ranks of one model have made, and who is behind."""
    transfers = {rank: _transfers(ring) for rank, ring in model.items()}
    done = {rank: _done(ring) for rank, ring in model.items()}
    any_ring = next(iter(model.values()))
    size = any_ring.about["world_size"]
    result: Verdict = {
        "verdict": "together", "model": any_ring.about["model"], "world_size": size, "behind": [],
        "missing": sorted(set(range(size)) - set(model)), "layer": None, "direction": None,
        "forward": None, "last_common": None, "waiting_for": None, "made": None,
        "ranks": {str(rank): _rank(ring) for rank, ring in sorted(model.items())},
    }  # fmt: skip
    low = min(done.values())
    result["last_common"] = _shown(_anywhere(transfers, low[0]))
    for number in sorted(set.intersection(*map(set, transfers.values()))):
        made = {rank: transfers[rank][number] for rank in sorted(model)}
        if len({(each.doing, each.identity) for each in made.values()}) > 1:
            told = {str(rank): _shown(each) for rank, each in made.items()}
            before = _shown(_anywhere(transfers, number - 1))
            return result | {"verdict": "differ", "made": told, "last_common": before}
    behind = sorted(rank for rank in model if done[rank] == low)
    if len(behind) == len(model):
        return result | {"verdict": "missing" if result["missing"] else "together"}
    at = _shown(at_of(model[behind[0]])) or {"layer": None, "direction": None, "forward": 0}
    ahead = model[max(model, key=lambda rank: (done[rank], -rank))]
    where = {key: at[key] for key in ("layer", "direction", "forward")}
    waits = _shown(_after(ahead, *low))
    return result | where | {"verdict": "behind", "behind": behind, "waiting_for": waits}


def _transfers(ring: Read) -> dict[int, Begun]:
    """By number."""
    return {event.number: event for event in ring.events if event.moves}


def _done(ring: Read) -> tuple[int, int]:
    """The number of transfers, and of marks since."""
    last = ring.events[-1].number if ring.events else 0
    return last, sum(event.number == last for event in ring.events)


def _after(ring: Read, number: int, marks: int) -> Begun | None:
    """What comes after so many transfers, and so many events at the last of them."""
    later = [event for event in ring.events if event.number > number]
    same = [event for event in ring.events if event.number == number]
    return next(iter([*later, *same[marks:]]), None)


def at_of(ring: Read) -> Begun | None:
    """Where the rank is: the last of what moves nothing."""
    return next((each for each in reversed(ring.events) if not each.moves), None)


def _anywhere(transfers: Mapping[int, dict[int, Begun]], number: int) -> Begun | None:
    return next((each[number] for each in transfers.values() if number in each), None)


def _rank(ring: Read) -> dict[str, Any]:
    last = next((each for each in reversed(ring.events) if each.moves), None)
    return {
        "transfers": _done(ring)[0],
        "completed": ring.completed,
        "last": _shown(last),
        "at": _shown(at_of(ring)),
        "alive": is_alive(ring.about),
        "host": ring.about["host"],
        "pid": ring.about["pid"],
    }


def _shown(event: Begun | None) -> dict[str, Any] | None:
    keys = ("number", "doing", "layer", "direction", "forward")
    return None if event is None else {key: getattr(event, key) for key in keys}
