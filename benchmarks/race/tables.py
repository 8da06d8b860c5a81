"""The race's tables, from figures alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.common.report import markdown
from benchmarks.race.machines import CAPACITY, GIB, LINKS, MACHINES
from benchmarks.race.runs import LONG, Run
from tests.device.clock import HOSTS

SIMULATED = "Simulated; no GPU was used."
EQUAL = 1.02  # ratios of times up to it are called equal
MAIN = next(iter(MACHINES))
OURS, AT_HOME = "zero3", "expert_parallel"
SYSTEMS: dict[str, tuple[str, tuple[str, ...]]] = {  # a system, and what is chosen of it
    "zero3": (OURS, ()),
    "zero3, experts at home": (OURS, (AT_HOME,)),
    "zero3, parts of sequences": (OURS, (LONG,)),
    "FSDP2": ("fsdp2", ()),
    "FSDP2, last layer kept": ("fsdp2", ("keep_last",)),
    "FSDP1": ("fsdp1", ()),
    "DDP": ("ddp", ()),
    "plain": ("plain", ()),
}
RIVALS, OTHERS = ("FSDP2", "FSDP2, last layer kept"), ("FSDP1", "DDP", "plain")
Figures = dict[str, Any]
Results = dict[tuple[Run, str], Figures]


def step(found: Figures, link: int = 400, host: str = "launches", machine: str = MAIN) -> Figures:
    return dict(found["steps"][f"{machine}, {link}, {host}"])


def memory(found: Figures) -> Figures:
    """(It stands with the first machine and link, and a host that is free.)"""
    return step(found, 400, "free")


def ratio(value: float, allowed: float = EQUAL) -> str:
    """Above what is `allowed` it is bold. From 1 to there it is printed as equal."""
    return f"**{value:.3f}**" if value > allowed else f"{value:.3f}" + (" (equal)" if value > 1 else "")


def gibibytes(nbytes: float, machine: str = MAIN) -> str:
    """Of reserved memory: with a word where the GPU has less."""
    return f"{nbytes / GIB:.2f}" + ("" if nbytes / GIB <= CAPACITY[machine] else f", **does not fit** ({CAPACITY[machine]:.0f})")


def _rivals(results: Results, cell: Run) -> list[Figures]:
    return [found for name in RIVALS if "error" not in (found := results[cell, name])]


def of_same_gathers(ours: Figures, theirs: list[Figures]) -> Figures:
    """The one that gathers as much; memory is compared with it."""

    def gathered(found: Figures) -> int:
        return int(memory(found)["moved"]["all_gather"])

    return min(theirs, key=lambda found: abs(gathered(found) - gathered(ours)))


WAYS = [*product([MAIN], LINKS, ("free", "launches")), (MAIN, 400, "python"), *product([*MACHINES][1:], LINKS, ("launches",))]


def comparison(results: Results, of: list[Run]) -> str:
    """zero3's step over FSDP2's, the better of its settings. Memory has no "equal": its goal is 1.00."""
    rows = []
    for cell in of:
        ours, theirs = results[cell, "zero3"], _rivals(results, cell)
        if "error" in ours or not theirs:
            rows.append([cell.cell, ours.get("error") or results[cell, RIVALS[0]]["error"]])
            continue
        row = [cell.cell]
        for machine, link, host in WAYS:
            best = min(step(found, link, host, machine)["seconds"] for found in theirs)
            row.append(ratio(step(ours, link, host, machine)["seconds"] / best))
        mine, same = memory(ours), memory(of_same_gathers(ours, theirs))
        allocated = f"{mine['allocated'] / GIB:.2f} ({ratio(mine['allocated'] / same['allocated'], 1.0)})"
        rows.append([*row, allocated, f"{gibibytes(mine['reserved'])} ({ratio(mine['reserved'] / same['reserved'], 1.0)})"])
    columns = [f"{link}, {host}" if machine == MAIN else f"{link}, data sheet" for machine, link, host in WAYS]
    return f"{SIMULATED}\n\n" + markdown(["model, W, batch, checkpoints", *columns, "allocated GiB", "reserved GiB"], rows)


# What zero3 takes of each, at 400 Gbit/s; and what must be below FSDP2's, by the name of the column.
COUNTED = {
    "launches": lambda one: one["launches"],
    "collectives": lambda one: sum(one["collectives"].values()),
    "received GB": lambda one: sum(one["moved"].values()) / 1e9,
    "copies in compute": lambda one: one["copies"][0],
    "copied in compute, GB": lambda one: one["copied"][0] / 1e9,
    "exposed ms": lambda one: 1e3 * one["exposed"],
    "standing still for the host, ms": lambda one: 1e3 * one["starved"],
    "host waits": lambda one: one["host_waits"],
    "step ms": lambda one: 1e3 * one["seconds"],
}
IN_MEMORY = {"asked for GiB": "requested", "allocated GiB": "allocated", "reserved GiB": "reserved"}


def behind(results: Results, cell: Run) -> dict[str, tuple[float, float]]:
    """Of each figure in which zero3 takes more than FSDP2: both. The rival is the one with as many gathers; for times, the faster one."""
    ours, theirs = results[cell, "zero3"], _rivals(results, cell)
    if "error" in ours or not theirs:
        return {}
    same, fastest = of_same_gathers(ours, theirs), min(theirs, key=lambda found: float(step(found)["seconds"]))
    found = {}
    for name, take in COUNTED.items():
        rival = fastest if name == "step ms" else same
        found[name] = take(step(ours)), take(step(rival))
    for name, key in IN_MEMORY.items():
        found[name] = memory(ours)[key] / GIB, memory(same)[key] / GIB
    return {name: (mine, rivals) for name, (mine, rivals) in found.items() if mine > rivals * (1 + 1e-9)}


def ahead(results: Results, of: list[Run]) -> str:
    """Where zero3 is not: all of it."""
    rows = [
        [name, cell.cell, f"{mine:.6g}", f"{rivals:.6g}", f"{mine / rivals:.4f}" if rivals else ""]
        for cell in of
        for name, (mine, rivals) in behind(results, cell).items()
    ]
    faster = [
        [name, cell.cell, f"{1e3 * step(results[cell, 'zero3'])['seconds']:.1f} ms", f"{1e3 * step(found)['seconds']:.1f} ms", ""]
        for cell in of
        for name in OTHERS[:2]
        if "steps" in (found := results.get((cell, name), {}))
        and "steps" in results[cell, "zero3"]
        and step(found)["seconds"] < step(results[cell, "zero3"])["seconds"]
    ]
    columns = ["figure, or who is faster", "cell", "zero3", "FSDP2 at the same gathers, or who is faster", "ratio"]
    return f"{SIMULATED} {MAIN}, 400 Gbit/s, 5 us a launch.\n\n" + markdown(columns, sorted(rows) + faster)


COLUMNS = [
    "system", *(f"step ms, host {host}" for host in HOSTS), "tokens/s", "exposed ms", "waits for host ms", "launches", "collectives",
    "received GB", "copies in compute", "copies beside", "host waits", "allocated", "reserved GiB", "forward, backward, clip, optimizer ms",
]  # fmt: skip


def columns_of(cell: Run, found: Figures, name: str) -> list[str]:
    if "error" in found:
        return [name, found["error"], *[""] * (len(COLUMNS) - 2)]
    one = step(found)
    ends = [one["phases"][mark] for mark in ("backward", "clip", "optimizer")]
    tokens = replace(cell, chosen=SYSTEMS[name][1]).tokens
    phases = [end - begin for begin, end in zip([0.0, *ends], [*ends, one["seconds"]], strict=True)]
    kinds = ", ".join(f"{count} {kind}" for kind, count in one["collectives"].items())
    copies = [f"{count} ({nbytes / 1e9:.1f} GB)" for count, nbytes in zip(one["copies"], one["copied"], strict=True)]
    return [
        name, *(f"{1e3 * step(found, 400, host)['seconds']:.1f}" for host in HOSTS), f"{tokens / one['seconds']:.0f}",
        f"{1e3 * one['exposed']:.1f}", f"{1e3 * one['starved']:.1f}", str(one["launches"]), kinds or "none",
        f"{sum(one['moved'].values()) / 1e9:.1f}", *copies, f"{one['host_waits']} {', '.join(one['waits'])}".strip(),
        f"{memory(found)['allocated'] / GIB:.2f}", gibibytes(memory(found)["reserved"]), ", ".join(f"{1e3 * each:.1f}" for each in phases),
    ]  # fmt: skip


def per_cell(results: Results, of: list[Run]) -> str:
    texts = []
    for cell in of:
        rows = [columns_of(cell, results[cell, name], name) for name in SYSTEMS if (cell, name) in results]
        texts.append(f"### {cell.cell}; {MAIN}, 400 Gbit/s, 5 us a launch\n\n{SIMULATED}\n\n{markdown(COLUMNS, rows)}")
    return "\n\n".join(texts)
