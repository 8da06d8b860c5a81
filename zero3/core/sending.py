"""What the ranks send each other to reduce the gradients of a chunk."""

from __future__ import annotations

from torch import Tensor

from ..comm.communicator import Bounds, Communicator
from ..comm.streams import Done, Pending

__all__: list[str] = []


class Sending:
    """One reduction, and all the memory that it needs."""

    __slots__ = ("full", "landed", "pieces", "summed")

    def __init__(self, pieces: list[list[Tensor]] | None, full: Tensor | None, summed: Tensor, landed: Tensor) -> None:
        self.pieces = pieces  # what is sent to each rank, as it lies in autograd's gradients; otherwise it is in `full`
        self.full = full  # 1-D [W*S]
        self.summed = summed  # 1-D [S], takes the sum over ranks; where there is one shard it is `full`
        self.landed = landed  # 1-D [S], takes the mean in the dtype of the chunk's gradient

    def start(self, communicator: Communicator, bounds: Bounds) -> Pending:
        """[backup 2] Starts to sum over ranks, in the lane that is current."""
        if self.pieces is not None:
            return communicator.reduce_pieces(self.summed, self.pieces)
        if self.full is None or self.full is self.summed:
            return Done()
        return communicator.reduce_scatter(self.summed, self.full, bounds)

    @property
    def travelling(self) -> object:
        """What has to stay in memory until compute has waited for the sum, besides the results."""
        return self.full
