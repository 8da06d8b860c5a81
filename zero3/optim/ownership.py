"""Which slice of which chunk a parameter of an optimizer is: the way from an optimizer's state back to parameters' names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from ..access import states_of
from ..core.chunk import Chunk, Part
from ..core.layer_state import LayerState
from ..core.layout import Piece

__all__: list[str] = []


class Owned(NamedTuple):
    """A parameter that this rank's optimizer may hold: `part.start` to `part.stop` of `chunk`, in `part.parameter`'s shape."""

    state: LayerState
    chunk: Chunk
    part: Part

    def pieces(self) -> Iterator[tuple[Piece, slice]]:
        """The pieces of slots that it covers, each with where it lies in the flattened parameter. None is cut; padding has none."""
        for piece in self.chunk.layout.pieces(self.state.communicator.rank):
            if self.part.start <= piece.offset < self.part.stop:
                start = piece.offset - self.part.start
                yield piece, slice(start, start + piece.stop - piece.start)


def owned(model: nn.Module) -> dict[int, Owned]:
    """By the id of the parameter, trainable and frozen ones.

    Raises:
        ValueError: nothing in `model` is sharded.
    """
    return owned_by(states_of(model))


def owned_by(states: Iterable[LayerState]) -> dict[int, Owned]:
    return {id(part.parameter): Owned(state, chunk, part) for state in states for chunk in state.chunks for part in chunk.parts}
