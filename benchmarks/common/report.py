"""Tables, files and pictures of what was measured, with the machine it was measured on."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

MEGABYTE = 2**20


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float], scale: float = 1e3, digits: int = 0) -> str:
    """Median (least to most), times `scale`."""
    ends = [f"{scale * value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return f"{ends[0]} ({ends[1]} to {ends[2]})"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(map(str, row))} |" for row in rows])


def machine() -> dict[str, Any]:
    """When, where and with what; goes into every file of results."""
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    versions = {name: import_module(name).__version__ for name in ("torch", "deepspeed") if name == "torch" or find_spec(name)}
    found = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found | {"python": platform.python_version(), **versions}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def write(folder: Path | None, name: str, results: dict[str, Any], table: str) -> None:
    """Prints the table; with a folder, leaves it there together with all that was measured."""
    print(table)
    leave(folder, name, results, table)


def leave(folder: Path | None, name: str, results: dict[str, Any], table: str) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps({"machine": machine(), **results}, indent=1))
        (folder / f"{name}.md").write_text(table + "\n")


def new_figure(width: float, height: float, columns: int = 1) -> Any:
    """(figure, axes) of matplotlib, without a window; None if it is not installed, and says so."""
    if find_spec("matplotlib") is None:
        progress("no pictures: matplotlib is not installed (pip install matplotlib)")
        return None
    figure = import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    progress(f"picture: {path}")
