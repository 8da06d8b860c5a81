"""Reads any range of a parameter from a checkpoint's files, however the ranks that saved it divided
the parameter.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from .safetensors_files import SafetensorsFiles, Stored, bytes_of

__all__: list[str] = []

_COMPARED = 1 << 19  # elements at a time
# `parameter:NAME[0:12]`, `state:KEY:NAME[0:12]`: a key has no colon
_RANGE = re.compile(r"(parameter|state:[^:]*):(.*)\[(\d+):(\d+)\]", re.DOTALL)

# what was in no chunk lies whole: buffers, and what a policy's `ignored` left alone
_PLAIN = "other:0:"


class Range(NamedTuple):
    """Elements `[start, stop)` of a parameter or of a state tensor, and the stored tensor that
    holds them.
    """

    start: int
    stop: int
    stored: Stored


class Ranges:
    """The ranges that a checkpoint's files hold, in order, by kind (`parameter`, `state:exp_avg`)
    and parameter's name.
    """

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files
        self._ranges: dict[tuple[str, str], list[Range]] = {}
        for name, stored in files.tensors.items():
            if (match := _RANGE.fullmatch(name)) is not None:
                kind, of, start, stop = match.groups()
                range_ = Range(int(start), int(stop), stored)
            elif name.startswith(_PLAIN):
                kind, of = "parameter", name.removeprefix(_PLAIN)
                range_ = Range(0, stored.numel, stored)
            else:
                continue
            self._ranges.setdefault((kind, of), []).append(range_)
        for ranges in self._ranges.values():
            ranges.sort(key=lambda range_: range_[:2])

    def holds(self, kind: str, name: str) -> bool:
        """Whether anything is there, in ranges."""
        return (kind, name) in self._ranges

    def files_of(self, name: str, numel: int, start: int, stop: int) -> set[str]:
        """The files that hold anything of elements `[start, stop)` of a parameter of `numel`, or of
        its optimizer's state.
        """
        found = {
            stored.file
            for stored in self._files.tensors.values()
            if stored.name.startswith("whole:") and stored.name.endswith(f":{name}")
        }
        for (_, other), ranges in self._ranges.items():
            if other == name:  # what is counted otherwise, as blocks are, is taken whole
                alike = ranges[-1].stop == numel
                found |= {
                    each.stored.file
                    for each in ranges
                    if not alike or (each.start < stop and start < each.stop)
                }
        return found

    def check(self, kind: str, name: str, numel: int, dtype: str) -> None:
        """Raises ValueError unless the ranges cover all `numel` elements, each once."""
        end = 0
        for start, stop, stored in self._ranges.get((kind, name), []):
            described = start, stored.numel, str(stored.dtype)
            if described != (end, stop - start, f"torch.{dtype}"):
                found = f"{stored.name!r} with {stored.numel} elements of {stored.dtype}"
                raise ValueError(
                    f"{stored.file}: {found} does not continue at element {end} ({dtype})"
                )
            end = stop
        if end != numel:
            raise ValueError(
                f"{self._files.directory} has {end} of the {numel} elements of {name} ({kind})"
            )

    def read(self, kind: str, name: str, start: int, target: Tensor) -> None:
        """Reads elements `[start, start + n)` into `target` `[n]`."""
        stop = start + target.numel()
        for range_ in self._ranges.get((kind, name), []):
            low, high = max(start, range_.start), min(stop, range_.stop)
            if low < high:
                self._files.read(
                    range_.stored, low - range_.start, target[low - start : high - start]
                )

    def same(self, kind: str, first: str, second: str, numel: int) -> bool:
        """Whether two names have the same bytes."""
        for start in range(0, numel, _COMPARED):
            found = []
            for name in (first, second):
                dtype = self._ranges[kind, name][0].stored.dtype
                value = torch.empty(min(_COMPARED, numel - start), dtype=dtype)
                self.read(kind, name, start, value)
                found.append(bytes_of(value))
            if found[0] != found[1]:
                return False
        return True
