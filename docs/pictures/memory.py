"""Draws memory.svg: what lies where on each rank, and what a rank holds over a step. Needs matplotlib.

    python docs/pictures/memory.py

The bytes are those of docs/memory.md's table; a test compares them with the formula that is checked against live tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

RANKS, LAYERS, DEPTH = 4, 8, 1
COLORS = {
    "chunks": "#1f77b4",
    "optimizer state": "#7f7f7f",
    "gradients": "#9467bd",
    "full parameters": "#ff9f40",
    "full gradients": "#e377c2",
}


class Held(NamedTuple):
    """At one moment of a step: bytes that are not there all the time."""

    moment: str
    full_parameters: float
    full_gradients: float  # on their way to their owners
    gradients: float  # reduced


def step_of(chunks: list[float], ranks: int, depth: int) -> list[Held]:
    """Of a step whose layers have chunks of so many bytes: while each layer computes forward and backward, and after."""
    last = len(chunks) - 1
    full = [ranks * chunk for chunk in chunks]
    moments = [Held(f"forward {i}", sum(full[i : i + depth + 1]), 0, 0) for i in range(last + 1)]
    moments.append(Held("between", full[last], 0, 0))
    for i in reversed(range(last + 1)):
        sent = range(i + 1, min(i + depth, last) + 1)
        moving = sum(full[j] + chunks[j] for j in sent)
        moments.append(Held(f"backward {i}", sum(full[max(0, i - depth) : i + 1]), moving, sum(chunks[sent.stop :])))
    return [*moments, Held("clip, step", 0, 0, sum(chunks)), Held("zero_grad", 0, 0, 0)]


def draw_ranks(axes: Any) -> None:
    """Four layers on four ranks, while layer 1 computes in its forward and layer 2 is fetched."""
    layers, height = 4, 0.72
    for rank in range(RANKS):
        for layer in range(layers):
            left, bottom = 1.25 * rank, layers - 1 - layer
            fetched = layer in (1, 2)
            axes.add_patch(Rectangle((left, bottom), 1, height, facecolor=COLORS["full parameters"] if fetched else "#f2f2f2",
                                     alpha=1 if layer != 2 else 0.45, edgecolor="#b0b0b0", linewidth=0.6))  # fmt: skip
            axes.add_patch(Rectangle((left + rank / RANKS, bottom), 1 / RANKS, height, facecolor=COLORS["chunks"]))
        axes.text(1.25 * rank + 0.5, layers + 0.02, f"rank {rank}", ha="center", va="bottom")
    for layer, says in enumerate(("layer 0\nreleased", "layer 1\ncomputes", "layer 2\nis fetched", "layer 3\nreleased")):
        axes.text(-0.15, layers - 1 - layer + height / 2, says, ha="right", va="center")
    axes.set(xlim=(-1.35, 1.25 * RANKS - 0.2), ylim=(-0.55, layers + 0.35))
    axes.text(1.25 * RANKS / 2 - 0.12, -0.12, "the optimizer sees the chunks, and nothing else", ha="center", va="top", style="italic")
    axes.set_title("What lies where, in forward")
    axes.axis("off")


def draw_step(axes: Any) -> None:
    """The bytes of one rank, in units of the model's parameters."""
    chunk = 1 / LAYERS / RANKS
    moments = step_of([chunk] * LAYERS, RANKS, DEPTH)
    places, base = range(len(moments)), [0.0] * len(moments)
    bands = {
        "chunks": [LAYERS * chunk] * len(moments),
        "optimizer state": [2 * LAYERS * chunk] * len(moments),
        "gradients": [each.gradients for each in moments],
        "full parameters": [each.full_parameters for each in moments],
        "full gradients": [each.full_gradients for each in moments],
    }
    for name, band in bands.items():
        axes.bar(places, band, width=1.0, bottom=base, color=COLORS[name], edgecolor="white", linewidth=0.4)
        base = [low + more for low, more in zip(base, band, strict=True)]
    axes.axhline(4, color="black", linestyle="--", linewidth=1)
    axes.text(len(moments) / 2 - 0.5, 3.93, "a plain process, also under DDP: parameters, gradients, AdamW's state", ha="center", va="top")
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    axes.text(-0.3, 1.04, "a quarter of it", ha="left", va="bottom")
    axes.set_xticks([(LAYERS - 1) / 2, LAYERS + LAYERS / 2 + 0.5, 2 * LAYERS + 1.5], ["forward", "backward", "step"])
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(-0.5, len(moments) - 0.5), ylim=(0, 4.25), ylabel="bytes, in units of the parameters'")
    axes.set_title(f"What a rank holds over a step, beside activations ({RANKS} ranks, {LAYERS} layers)")
    axes.spines[["top", "right"]].set_visible(False)


def draw(path: Path) -> None:
    settings = {"svg.hashsalt": "zero3", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 10}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(10, 3.7), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
        draw_ranks(left)
        draw_step(right)
        handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(COLORS), frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
