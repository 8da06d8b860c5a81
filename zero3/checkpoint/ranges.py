"""Reads any range of a parameter from a checkpoint's files, however the ranks that saved it divided
the parameter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..comm.plain_values import dtype_named
from .lazy import Lazy, joined
from .safetensors_files import SafetensorsFiles

__all__: list[str] = []

# `parameter:NAME[0:12]`, `state:KEY:NAME[0:12]`: a key has no colon
_RANGE = re.compile(r"(parameter|state:[^:]*):(.*)\[(\d+):(\d+)\]", re.DOTALL)
# `other:0:NAME`, `whole:KEY:NAME`: what was in no chunk (buffers, and what a policy's `ignored`
# left alone), and state of another shape than its parameter's
_WHOLE = re.compile(r"(other:0|whole:[^:]*):(.*)", re.DOTALL)


class Range(NamedTuple):
    """Elements `[start, stop)` of a parameter or of a state tensor, and the stored tensor that
    holds them.
    """

    start: int
    stop: int
    stored: Lazy


class Ranges:
    """The ranges that a checkpoint's files hold, in order, by kind (`parameter`, `state:exp_avg`)
    and parameter's name.
    """

    def __init__(self, files: SafetensorsFiles) -> None:
        self._directory = files.directory
        self._ranges: dict[tuple[str, str], list[Range]] = {}
        for name, stored in files.tensors.items():
            if (match := _RANGE.fullmatch(name)) is not None:
                kind, of, start, stop = match.groups()
                range_ = Range(int(start), int(stop), stored)
            elif (match := _WHOLE.fullmatch(name)) is not None:
                kind, of = match.groups()
                kind = "parameter" if kind == "other:0" else kind.replace("whole:", "state:", 1)
                range_ = Range(0, stored.numel, stored)
            else:
                continue
            self._ranges.setdefault((kind, of), []).append(range_)
        for ranges in self._ranges.values():
            ranges.sort(key=lambda range_: range_[:2])

    def files_of(self, name: str, numel: int, start: int, stop: int) -> set[str]:
        """The files that hold anything of elements `[start, stop)` of a parameter of `numel`, or of
        its optimizer's state.
        """
        found = set()
        for (_, other), ranges in self._ranges.items():
            if other == name:  # what is counted otherwise, as blocks are, is taken whole
                alike = ranges[-1].stop == numel
                found |= {
                    each.stored.file
                    for each in ranges
                    if not alike or (each.start < stop and start < each.stop)
                }
        return found

    def tensor(self, kind: str, name: str, shape: Sequence[int], dtype: str) -> Lazy:
        """Raises ValueError unless the ranges cover all its elements, each once."""
        end, parts = 0, []
        for start, stop, stored in self._ranges.get((kind, name), []):
            described = start, stored.numel, str(stored.dtype)
            if described != (end, stop - start, f"torch.{dtype}"):
                found = f"{stored.name!r} with {stored.numel} elements of {stored.dtype}"
                raise ValueError(
                    f"{stored.file}: {found} does not continue at element {end} ({dtype})"
                )
            end = stop
            parts.append(stored)
        if end != (numel := math.prod(shape)):
            raise ValueError(
                f"{self._directory} has {end} of the {numel} elements of {name} ({kind})"
            )
        return joined(dtype_named(dtype), tuple(shape), parts)
