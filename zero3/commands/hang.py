"""Says why a run hangs, from the last transfers that each rank has left in a file: who is behind,
in which layer and direction, and what the others wait for; or which transfers differ.

It works while the run hangs, and after its processes were killed. Where torch's flight recorder has
left dumps, it names their first collective that is not completed. The exit code is 0 if somebody is
named, 2 if all ranks have made the same transfers, and 1 if no rank has left any.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from ..comm.ring import MARKS, Read, directory
from ..diagnose.hang import Verdict, first_of, models_in
from ..formats import pickled
from ..planning.result import check_target

__all__: list[str] = []

NAME = "hang"
SUMMARY = "say who is behind in a run that hangs, or has hung"
_DUMP = re.compile(r".*rank_(\d{1,9})")  # of torch's flight recorder
_DRAWN = 200  # of a rank's last events
_LINES = 20
_COLORS = ("tab:green", "tab:purple", "tab:blue", "tab:red", "tab:gray", "tab:orange")
_KINDS = ("gathering", "reducing", "computing", "waiting", "outside", "step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="DIR",
        help="where the run's *.ring files lie, or are gathered from hosts (default: as in a run)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the same as JSON, for programs")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw each rank's last transfers over time"
    )


def run(options: argparse.Namespace) -> int:
    where = options.directory or directory()
    if where is None:
        raise ValueError("ZERO3_RING_DIR=0 keeps no transfers: name a directory")
    if options.picture is not None:
        try:
            check_target(options.picture)
        except RuntimeError as error:  # matplotlib is missing
            raise ValueError(str(error)) from None
    damaged: dict[str, str] = {}
    result, model = first_of(models_in(where, damaged))
    result |= {"recorder": _recorders(where, model, damaged), "damaged": damaged}
    if options.picture is not None:
        _draw(model, result, options.picture)
    print(json.dumps(result, indent=1) if options.json else "\n".join(_said(result)))
    return 2 if result["verdict"] == "together" else 0


def _recorders(
    where: Path, model: Mapping[int, Read], damaged: dict[str, str]
) -> dict[str, dict[str, Any] | None]:
    """By rank: the first collective that torch's flight recorder does not know to be completed."""
    found: dict[str, dict[str, Any] | None] = {}
    for path in sorted(where.rglob("*")):
        match = _DUMP.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_file():
            continue
        try:
            entries = _entries(path)
        except (ValueError, OSError, RecursionError) as error:
            damaged[str(path.relative_to(where))] = str(error)
            continue
        waits = next((e for e in entries if e["state"] != "completed"), None)
        ring, layer = model.get(int(match[1])), None
        if waits is not None and ring is not None:
            created = waits.get("time_created_ns")
            before = [e for e in ring.events if e.moves and e.when <= (created or 0)]
            layer = before[-1].layer if before else None
        found[str(int(match[1]))] = waits and {
            "collective": waits.get("collective_seq_id"),
            "doing": waits.get("profiling_name"),
            "state": waits["state"],
            "layer": layer,
        }
    return found


def _entries(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str, arguments: object) -> NoReturn:
        raise ValueError(f"it would call {name}")

    read = pickled.read(path.read_bytes(), path.name, refuse)
    entries = read.get("entries") if isinstance(read, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(each, dict)
        and isinstance(each.get("state"), str)
        and type(each.get("time_created_ns", 0)) is int
        and isinstance(each.get("profiling_name"), str | None)
        and isinstance(each.get("collective_seq_id"), int | None)
        for each in entries
    ):
        raise ValueError("it is no dump of torch's flight recorder")
    return entries


def _said(result: Verdict) -> list[str]:
    made, behind, missing = result["made"], result["behind"], result["missing"]
    lines = [f"model {result['model']}, {result['world_size']} ranks"]
    if result["verdict"] == "differ":
        told = "; ".join(f"rank {rank}: {_event(each)}" for rank, each in made.items())
        lines.append(f"ranks have made different transfers: {told}")
    elif result["verdict"] == "behind":
        one = f"rank {behind[0]} is" if len(behind) == 1 else f"ranks {_numbers(behind)} are"
        lines.append(f"{one} behind: {_place(result['ranks'][str(behind[0])]['at'] or result)}")
        lines.append(f"the others wait for {_event(result['waiting_for'])}")
    elif result["verdict"] == "missing":
        lines.append(
            f"rank{'s' * (len(missing) > 1)} {_numbers(missing)} left no transfers: not here yet, "
            "on a host whose directory is not below this one, or not able to write"
        )
    else:
        lines.append("all ranks have made the same transfers: they wait for something else")
    lines.append(f"the last transfer of all: {_event(result['last_common'])}")
    ranks = [(int(rank), _state(each)) for rank, each in result["ranks"].items()]
    ranks.sort(key=lambda each: (each[0] not in behind, each[1], each[0]))
    for state, alike in groupby(ranks, key=lambda each: each[1]):
        lines.append(f"rank {_numbers([rank for rank, _ in alike])}: {state}")
    for rank, waits in result["recorder"].items():
        if waits is not None:
            layer = f", of layer {waits['layer']}" if waits["layer"] else ""
            doing = f"{waits['doing']} (number {waits['collective']}) is {waits['state']}{layer}"
            lines.append(f"rank {rank}, torch's flight recorder: {doing}")
    lines += [f"passed over {name}: {why}" for name, why in result["damaged"].items()]
    return [*lines[:_LINES], "... (--json tells all)"] if len(lines) > _LINES else lines


def _place(at: Mapping[str, Any]) -> str:
    if at["layer"]:
        return f"in layer {at['layer']}, {at['direction']} of forward {at['forward']}"
    where = "in the optimizer's step" if at["direction"] == "step" else "outside of the model"
    called = at.get("doing", MARKS[0])
    since = f", where it called {called}" if called not in MARKS else ""
    return f"{where}{since}, after forward {at['forward']}"


def _event(each: Mapping[str, Any] | None) -> str:
    if each is None:
        return "none"
    layer = f" layer {each['layer']}" if each["layer"] else ""
    direction = f"{each['direction']} of " if each["direction"] else ""
    return f"{each['doing']}{layer} (number {each['number']}, {direction}forward {each['forward']})"


def _state(rank: Mapping[str, Any]) -> str:
    at = rank["at"]
    doing = {"computing": "computes ", "waiting": "waits "}.get(at["doing"], "") if at else ""
    where = f"{doing}{_place(at)}" if at else "not yet in a forward"
    alive = {True: "", False: ", its process is gone", None: ""}[rank["alive"]]
    over = "" if rank["completed"] is None else f" ({rank['completed']} known to be over)"
    return f"{rank['transfers']} transfers{over}, {where}{alive}; on {rank['host']}"


def _numbers(ranks: list[int]) -> str:
    """Numbers in rows, as 0-6, 8."""
    rows: list[list[int]] = []
    for rank in sorted(ranks):
        if rows and rows[-1][-1] == rank - 1:
            rows[-1] = [rows[-1][0], rank]
        else:
            rows.append([rank])
    return ", ".join("-".join(map(str, row)) for row in rows)


def _draw(model: Mapping[int, Read], result: Verdict, path: Path) -> None:
    """A row for each rank: when it began what, and where it stands still."""
    height = min(40.0, 1.2 + 0.4 * len(model))
    figure = import_module("matplotlib.figure").Figure(figsize=(12, height), layout="constrained")
    axes = figure.subplots()
    last = max((ring.events[-1].when for ring in model.values() if ring.events), default=0)
    for place, rank in enumerate(sorted(model)):
        events = model[rank].events[-_DRAWN:]
        for event, end in zip(events, [*(e.when for e in events[1:]), last], strict=True):
            known = event.doing if event.doing in MARKS or event.moves else "outside"
            color = _COLORS[_KINDS.index(known)] if known in _KINDS else "tab:brown"
            begin = (event.when - last) / 1e9
            bar = (begin, max((end - event.when) / 1e9, 1e-6))
            axes.broken_barh([bar], (place - 0.4, 0.8), facecolor=color)
    labels = [f"rank {rank}{' (behind)' * (rank in result['behind'])}" for rank in sorted(model)]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("seconds before the last event of any rank")
    for kind, color in zip(_KINDS, _COLORS, strict=True):
        axes.broken_barh([], (0, 0), facecolor=color, label=kind)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=len(_KINDS), fontsize=8)
    figure.savefig(path, dpi=120)
