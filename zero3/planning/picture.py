"""The picture of a plan: what a rank holds over a step, part by part, by cause."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path

from .ledger import CAUSES, Moment

__all__: list[str] = []

_COLORS = ("tab:gray", "tab:green", "tab:purple", "tab:brown", "tab:blue", "tab:cyan", "tab:red")
_LABELS = 40  # at most, along the picture


def check_target(path: str | PathLike[str]) -> None:
    """Leaves nothing behind, and an existing file as it is.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: matplotlib knows no format with the suffix.
        OSError: The file can't be written.
    """
    if find_spec("matplotlib") is None:
        raise RuntimeError("a picture of a plan needs matplotlib: pip install matplotlib")
    file, canvas = Path(path), import_module("matplotlib.figure").Figure().canvas
    if file.suffix[1:].lower() not in (known := canvas.get_supported_filetypes()):
        raise ValueError(
            f"a picture's file must end in one of {', '.join(f'.{suffix}' for suffix in known)}, "
            f"found {str(path)!r}"
        )
    try:
        with file.open("ab") if file.exists() else tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise type(error)(
            f"the picture {str(path)!r} can't be written: {error.strerror}. Name a file in a "
            "directory that is there"
        ) from None


def draw(moments: Sequence[Moment], memory: int | None, path: str | PathLike[str]) -> None:
    """Draws a bar for each moment, as high as what was alive when it held most."""
    check_target(path)
    figure = import_module("matplotlib.figure").Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots()
    places = range(len(moments))
    bottoms = [0.0] * len(moments)
    for cause, color in zip(CAUSES, _COLORS, strict=True):
        heights = [moment.by_cause[cause] / 2**30 for moment in moments]
        if any(heights):
            label = cause.replace("_", " ")
            axes.bar(places, heights, width=1.0, bottom=bottoms, color=color, label=label)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    highest = max(places, key=lambda place: moments[place].peak)
    peak, top = f"{moments[highest].peak / 2**30:.2f} GiB", (highest, bottoms[highest])
    axes.annotate(peak, top, ha="center", va="bottom", fontsize=8)
    if memory is not None:
        axes.axhline(memory / 2**30, color="black", linestyle="--", linewidth=1, label="memory")
    shown = list(places)[:: max(1, -(-len(moments) // _LABELS))]
    axes.set_xticks(shown, [moments[place].name for place in shown], rotation=90, fontsize=6)
    axes.set_ylabel("GiB on a rank")
    axes.margins(x=0, y=0.12)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, 1.12),
        ncols=len(CAUSES) + 1,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=150)
