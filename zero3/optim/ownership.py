"""Finds the slice of a chunk that an optimizer's parameter is, and with it the names of the model's parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..core.chunk import Chunk, Part
from ..core.layer_state import LayerState
from ..core.layout import Piece

__all__: list[str] = []


class Owned(NamedTuple):
    """A parameter that this rank's optimizer may hold. `part.parameter` is elements `part.start` to `part.stop` of `chunk`."""

    state: LayerState
    chunk: Chunk
    part: Part

    def pieces(self) -> Iterator[tuple[Piece, slice]]:
        """Yields the pieces of slots that the parameter covers, each with its place in the flattened parameter. Padding has no piece."""
        for piece in self.chunk.layout.pieces(self.state.communicator.rank):
            if self.part.start <= piece.offset < self.part.stop:
                start = piece.offset - self.part.start
                yield piece, slice(start, start + piece.stop - piece.start)


def owned_by(states: Iterable[LayerState]) -> dict[int, Owned]:
    """Returns all parameters that this rank's optimizers may hold, trainable and frozen, by id."""
    return {id(part.parameter): Owned(state, chunk, part) for state in states for chunk in state.chunks for part in chunk.parts}
