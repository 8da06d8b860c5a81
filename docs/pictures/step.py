"""Draws step.svg: what one rank holds over a training step, and what its lanes do. Needs matplotlib.

    python docs/pictures/step.py

The step is a real one, of `zero3.shard` on rank 0 of 4, and the bytes are those of live tensors' storages. Two things are made
up. The other ranks are thought to hold what this one holds. The clock goes by what is done: a matrix product takes its
operations, a transfer the bytes that the rank receives, anything else its bytes. So the picture is the same on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
sys.path.insert(0, str(Path(__file__).parent))  # or by a test
from step_machine import BLOCKS, COLORS, LAYER, RANKS, Recorded
from step_recording import record

BARS = {"forward": "#1f77b4", "backward": "#4d9bd6", "step": "#7f7f7f", "wait": "#d62728", "fetch": "#ff9f40", "backup": "#e377c2"}
LANES = ("backup", "fetch", "compute")
TOLD = 1  # the layer whose numbers are written into the picture
AFTER = 0.4  # of the picture, behind the step
CLOSE = 0.3  # labels nearer than this would overlap


def draw_memory(axes: Any, recorded: Recorded) -> None:
    times, bands = recorded.memory()
    times.append(recorded.samples[-1][0] + AFTER)
    base = [0.0] * len(times)
    for kind, band in bands.items():
        top = [low + size / LAYER for low, size in zip(base, [*band, band[-1]], strict=True)]
        axes.fill_between(times, base, top, step="post", color=COLORS[kind], linewidth=0, label=kind)
        base = top
    axes.set(ylim=(0, 1.12 * max(base)), ylabel="bytes, in one layer's parameters")
    axes.set_title(f"What a rank holds over a step ({RANKS} ranks, {BLOCKS} layers, AdamW; a plain process: 16, and activations)")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", fontsize=8, ncols=2, frameon=False)


def draw_lanes(axes: Any, recorded: Recorded) -> None:
    for bar in recorded.bars:
        place, width = LANES.index(bar.lane), bar.end - bar.begin
        axes.broken_barh([(bar.begin, width)], (place - 0.38, 0.76), facecolor=BARS[bar.what], edgecolor="white", linewidth=0.5)
        text = f"{bar.what} {bar.layer}" if bar.layer is not None and bar.what != "wait" else bar.what
        axes.text((bar.begin + bar.end) / 2, place, text, ha="center", va="center", fontsize=7, color="white", clip_on=True)
    axes.set(ylim=(-0.6, 3.5), xlabel="time, counted in operations and bytes (a layer's forward is about 1)")
    axes.set_yticks(range(len(LANES)), LANES)


def draw_numbers(axes: Any, recorded: Recorded) -> None:
    """The numbers of one layer's calls, and of those that come once in a step."""
    once, told, found = {"F1", "F5", "B1", "B6", "S1", "S2"}, set[str](), dict[float, list[str]]()
    for number, layer, time in sorted(recorded.moments, key=lambda moment: moment.time):
        if (number in once and number not in told) or layer == TOLD:
            told.add(number)
            if number not in found.setdefault(time, []):
                found[time].append(number)
    places = [float("-inf"), *found, float("inf")]
    for before, time, after in zip(places, places[1:], places[2:], strict=False):
        side = "right" if after - time < CLOSE else "left" if time - before < CLOSE else "center"
        axes.axvline(time, color="#444444", linewidth=0.6, linestyle=":")
        axes.text(time, 2.5, "\n".join(found[time]), ha=side, va="bottom", fontsize=7, linespacing=0.95)


def draw(path: Path, recorded: Recorded | None = None) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    recorded = recorded if recorded is not None else record()
    settings = {"svg.hashsalt": "zero3", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 10}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(11, 5.6), layout="constrained", facecolor="white")
        memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
        draw_memory(memory, recorded)
        draw_lanes(lanes, recorded)
        draw_numbers(lanes, recorded)
        lanes.set_xlim(0, recorded.samples[-1][0] + AFTER)
        for axes in (memory, lanes):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
