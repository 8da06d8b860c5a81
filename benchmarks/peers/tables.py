"""Tables and pictures of what benchmarks/peers measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.report import MEGABYTE, markdown, median, new_figure, save, spread
from benchmarks.common.systems import NO_COMMUNICATION

Found = dict[str, dict[str, Any]]


def seconds(found: Found, system: str) -> list[float]:
    return [second for run in found.get(system, {"runs": []})["runs"] for second in run["seconds"]]


def of_ranks(found: Found, system: str, what: str) -> float:
    """The median over repetitions and steps, of the rank that had most."""
    return median(
        [
            max(sum(rank[what]) / len(rank[what]) if isinstance(rank[what], tuple) else rank[what] for rank in run["ranks"])
            for run in found[system]["runs"]
        ]
    )


def tables(found: Found, losses: dict[str, list[float]]) -> str:
    return "\n\n".join(filter(None, [times(found), memory(found), agreement(found, losses)]))


def times(found: Found) -> str:
    floor = seconds(found, NO_COMMUNICATION)
    rows = []
    for system, entry in found.items():
        own = seconds(found, system)
        if not own:
            rows.append([system, entry["failed"] or "not measured", "", "", "", "", "", ""])
            continue
        ratios = [f"{median(own) / median(other):.2f}" if (other := seconds(found, peer)) else "" for peer in ("DDP", "FSDP2")]
        exposed = f"{(median(own) - median(floor)) * 1e3:.0f}" if floor else ""
        sent = of_ranks(found, system, "sent") / len(entry["runs"][0]["ranks"]) / MEGABYTE
        built = median([max(rank["construction"] for rank in run["ranks"]) for run in entry["runs"]])
        each = " / ".join(f"{median(run['seconds']) * 1e3:.0f}" for run in entry["runs"])
        rows.append([system, spread(own), each, *ratios, exposed, f"{sent:.1f}", f"{built:.2f}"])
    columns = ["system", "ms a step (least to most)", "medians of repetitions", "x DDP", "x FSDP2"]
    return markdown([*columns, "ms beyond no communication", "MB sent a step and rank", "s to build"], rows)


def memory(found: Found) -> str:
    rows = []
    for system, entry in found.items():
        if not entry["runs"]:
            continue
        live = ["", "", "", ""]
        if entry["check"]:
            names = ("live_construction_peak", "live_construction", "live_step", "live_peak")
            live = [f"{max(rank[name] for rank in entry['check']) / MEGABYTE:.1f}" for name in names]
        resident = [f"{of_ranks(found, system, what) / MEGABYTE:.0f}" for what in ("rss_construction", "rss_step")]
        rows.append([system, *live, *resident])
    columns = ["system", "live MB, peak while built", "built", "after a step", "peak of a step"]
    return markdown([*columns, "peak RSS above start MB, while built", "in steps"], rows)


def agreement(found: Found, losses: dict[str, list[float]]) -> str:
    rows = []
    for system, entry in found.items():
        if not entry["check"]:
            continue
        first = entry["check"][0]
        worst = [max(abs(a - b) for a, b in zip(first[name], losses[name], strict=True)) for name in ("adamw", "sgd")]
        differences = ["(half the batch)"] * 2 if system == NO_COMMUNICATION else [f"{value:.1e}" for value in worst]
        calls = ", ".join(f"{name} {count}" for name, count in sorted(first["collectives"].items()))
        rows.append([system, *differences, calls or "none"])
    columns = ["system", "largest difference of loss to one process, AdamW", "SGD", "collectives and messages a step"]
    return markdown(columns, rows) if rows else ""


def draw(found: Found, folder: Path) -> None:
    """Bars: one picture for time, one for memory."""
    systems = [system for system in found if found[system]["runs"]]
    made = new_figure(7, 0.5 * len(systems) + 1)
    if made is None or not systems:
        return
    figure, axes = made
    own = {system: [1e3 * second for second in seconds(found, system)] for system in systems}
    middle = [median(values) for values in own.values()]
    around = [
        [m - min(values) for m, values in zip(middle, own.values(), strict=True)],
        [max(v) - m for m, v in zip(middle, own.values(), strict=True)],
    ]
    axes.barh(systems, middle, xerr=around, color=["C0" if system == "zero3" else "C7" for system in systems], ecolor="black", capsize=2)
    axes.set_xlabel("ms a step: median, least and most")
    axes.invert_yaxis()
    save(figure, folder / "time.png")
    figure, axes = new_figure(8, 0.8 * len(systems) + 1)
    bars = {"peak RSS above start": [of_ranks(found, system, "rss_step") for system in systems]}
    if all(found[system]["check"] for system in systems):
        for name, what in (("peak of live tensors", "live_peak"), ("live after a step", "live_step")):
            bars[name] = [max(rank[what] for rank in found[system]["check"]) for system in systems]
    for number, (name, values) in enumerate(bars.items()):
        axes.barh([row + 0.25 * number for row in range(len(systems))], [value / MEGABYTE for value in values], height=0.25, label=name)
    axes.set_yticks([row + 0.25 for row in range(len(systems))], systems)
    axes.set_xlabel("MB on a rank")
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    save(figure, folder / "memory.png")
