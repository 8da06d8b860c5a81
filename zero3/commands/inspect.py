"""Shows what a checkpoint holds: step, number of ranks that wrote it, parameters, bytes, dtypes,
the optimizer's groups.

With --verify all files are read, and their hashes compared. The exit code is 1 if there is no
checkpoint, or if it was changed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from ..checkpoint import manifest
from ..checkpoint.progress import progress
from ..checkpoint.saved_optimizer import OptimizerContents
from ..comm.plain_values import dtype_named

__all__: list[str] = []

NAME = "inspect"
SUMMARY = "show what a checkpoint holds, and check its hashes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, metavar="CKPT", help="the directory that save_checkpoint wrote"
    )
    parser.add_argument("--verify", action="store_true", help="read everything and compare hashes")
    parser.add_argument("--parameters", action="store_true", help="list every parameter and buffer")
    parser.add_argument("--json", action="store_true", help="print the same as JSON, for programs")


def run(options: argparse.Namespace) -> None:
    found = manifest.read(options.checkpoint)
    if options.verify:
        nbytes = sum(written.nbytes for written in found.files.values())
        with progress(nbytes, "verifying") as advance:
            manifest.verify(found, found.files, advance=advance)
    with manifest.reading(found):
        facts = facts_of(found) | ({"verified": True} if options.verify else {})
        lines = _parameters(found) if options.parameters else []
    if options.json:
        listed = {"tensors": found.content["tensors"]} if options.parameters else {}
        print(json.dumps(facts | listed, indent=2))
        return
    for name, value in facts.items():
        if value is not None:
            print(f"{name.replace('_', ' '):<16} {_shown(value)}")
    if lines:
        print("", *lines, sep="\n")


def _parameters(found: manifest.Manifest) -> list[str]:
    lines = []
    for name, described in found.content["tensors"].items():
        also = f"  also {', '.join(described['also'])}" if "also" in described else ""
        stored = "" if described["stored"] else "  left out"
        lines.append(
            f"{name:<60} {described['dtype']:<10} {tuple(described['shape'])}{also}{stored}"
        )
    return lines


def facts_of(found: manifest.Manifest) -> dict[str, Any]:
    """Returns the facts to show, in their order."""
    tensors = found.content["tensors"]
    optimizer = found.content["optimizer"]
    extra = found.content["extra"]
    numels: Counter[str] = Counter()
    for described in tensors.values():
        numels[described["dtype"]] += math.prod(described["shape"])
    facts: dict[str, Any] = {
        "checkpoint": str(found.directory),
        "run": found.content.get("run"),
        "step": None,
        "world_size": found.content["world_size"],
        "tensors": len(tensors),
        "elements": sum(numels.values()),
        "dtypes": dict(numels),
        "left_out": sum(not described["stored"] for described in tensors.values()),
        "model_bytes": sum(n * dtype_named(dtype).itemsize for dtype, n in numels.items()),
        "file_bytes": sum(written.nbytes for written in found.files.values()),
        "files": len(found.files),
        "extra": None if extra is None else type(extra).__name__,
    }
    if isinstance(extra, dict):
        facts["extra"] = sorted(extra)
    if optimizer is not None:
        contents = OptimizerContents.from_json(optimizer)
        steps = {
            named.scalars["step"]["$tensor"][1]
            for named in contents.state.values()
            if isinstance(named.scalars.get("step"), dict)
        }
        facts["step"] = max(steps) if steps else None
        facts["optimizer"] = optimizer["class"]
        facts["groups"] = [
            {"parameters": len(names), "lr": options.get("lr")}
            for options, names in contents.groups
        ]
    if isinstance(extra, dict) and isinstance(extra.get("step"), int):
        facts["step"] = extra["step"]
    return facts


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(held)}" for key, held in value.items())
    if isinstance(value, list):
        return "; ".join(_shown(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "yes" if value is True else str(value)
