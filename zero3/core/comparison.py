"""Comparisons between ranks: of a layer whose call was not predicted, of the transfers that they
have made, and of chunks that have changed while their full buffers stayed.

Which full buffers stay is chosen here too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.agreement import agree
from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from .coordination import Action
from .layer_state import LayerState

__all__: list[str] = []

# transfers; if they are not compared, the log is folded this often, so that it stays short
FOLD_EVERY = 1000


def compare_call(communicator: Communicator, state: LayerState, number: int) -> None:
    """Compares the layer that is called as number `number` of a forward.

    Raises:
        ValueError: Another rank calls another layer. Every rank raises it.
    """
    place = f"the layer called as number {number} of a forward"
    with state.gate.compare(state, place, [state.name_among_ranks]):
        agree(communicator, state.device, place, [state.name_among_ranks])


def compare_logs(communicator: Communicator, first: LayerState, every: int) -> None:
    """Compares the transfers of all layers so far. If `every` is 1, `ComparingGate` does it before
    each gather.

    Raises:
        ValueError: Ranks have made different transfers. Every rank raises it.
    """
    if every > 1:
        with first.gate.passing(Action.AGREE, first):
            agree(communicator, first.device, "the transfers made so far", [first.log.summary()])


def drop_stale(communicator: Communicator, layers: Sequence[LayerState]) -> None:
    """Finds full buffers that stay from step to step, but whose chunk has changed on any rank: they
    are gathered again.
    """
    staying = [
        (state, chunk)
        for state in layers
        if not state.resident
        for chunk in state.chunks
        if state.stays(chunk) and not chunk.resident
    ]
    if not staying:
        return
    stale = torch.stack([chunk.is_stale() for _, chunk in staying]).to(torch.uint8)
    if communicator.world_size > 1:
        naming = NamingFailures(communicator, "comparing", Subject("which layers have changed"))
        with layers[0].gate.passing(Action.LOOK, layers[0]), naming:
            communicator.all_reduce(stale, maximum=True)
    for (state, chunk), flag in zip(staying, stale.tolist(), strict=True):
        if flag:
            chunk.full.forget()
            state.release_or_keep()


def choose_residents(state: LayerState, room: int) -> int:
    """Chooses the layer's frozen chunks whose full buffers stay from step to step, in `room` bytes.
    Returns the room that is left.
    """
    for chunk in state.chunks:
        nbytes = chunk.layout.padded_numel * chunk.compute_dtype.itemsize
        chunk.stays = not chunk.shard.requires_grad and not chunk.resident and nbytes <= room
        room -= nbytes if chunk.stays else 0
    return room
