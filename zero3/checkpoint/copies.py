"""Copies of what a save in the background will write, made before it returns: in host memory, or in a file where chunks rest in files."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..core.layer_state import LayerState
from ..policy import directory_of
from ..scratch.mapped_files import MappedFiles
from .safetensors_writing import Entry

__all__: list[str] = []

_ALIGNMENT = 64  # bytes, so that any dtype may begin there


def place_of_copies(states: Iterable[LayerState]) -> str | None:
    """The directory for a file of copies, if the model may be larger than memory. None: they are in memory."""
    return next((directory for state in states if (directory := directory_of(state.policy)) is not None), None)


@torch.no_grad()
def copied(entries: list[Entry], directory: str | None) -> list[Entry]:
    """
    Raises:
        OSError: The disk has no room for them.
        ValueError: There is no such directory any more.
    """
    if directory is None:
        return [entry._replace(tensor=entry.tensor.detach().to("cpu", copy=True)) for entry in entries]
    files, sizes = MappedFiles(directory), [-(-entry.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for entry in entries]
    copies = []
    for entry, place in zip(entries, torch.split(files.empty(sum(sizes), torch.uint8), sizes), strict=True):
        tensor = entry.tensor.detach()
        copy = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        files.rest(copy)
        copies.append(entry._replace(tensor=copy))
    return copies
