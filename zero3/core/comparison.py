"""Comparisons between ranks: of a layer whose call was not predicted, and of the transfers that they have made."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ..comm.agreement import agree
from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from .coordination import Action
from .layer_state import LayerState

__all__: list[str] = []

FOLD_EVERY = 1000  # transfers; if they are not compared, the log is folded this often, so that it stays short


def compare_call(communicator: Communicator, state: LayerState, number: int) -> None:
    """Compares the layer that is called as number `number` of a forward.

    Raises:
        ValueError: Another rank calls another layer. Every rank raises it.
    """
    place = f"the layer called as number {number} of a forward"
    with state.gate.compare(state, place, [state.name_among_ranks]):
        agree(communicator, state.device, place, [state.name_among_ranks])


def compare_logs(communicator: Communicator, first: LayerState, every: int) -> None:
    """Compares the transfers of all layers so far. If `every` is 1, `ComparingGate` does it before each gather.

    Raises:
        ValueError: Ranks have made different transfers. Every rank raises it.
    """
    if every > 1:
        with first.gate.passing(Action.AGREE, first):
            agree(communicator, first.device, "the transfers made so far", [first.log.summary()])


def drop_stale(communicator: Communicator, layers: Sequence[LayerState]) -> None:
    """Releases kept layers (stages 1 and 2) whose chunk has changed on any rank, so that they are gathered again."""
    whole = [state for state in layers if state.stays_whole and not state.resident and not all(chunk.resident for chunk in state.chunks)]
    if not whole:
        return
    stale = torch.stack([state.is_stale() for state in whole]).to(torch.uint8)
    naming = NamingFailures(communicator, "comparing", Subject("which layers have changed"))
    with layers[0].gate.passing(Action.LOOK, layers[0]), naming:
        communicator.all_reduce(stale, maximum=True)
    for state, flag in zip(whole, stale.tolist(), strict=True):
        if flag:
            state.release()


def states_within(module: nn.Module, layers: Sequence[LayerState]) -> list[LayerState]:
    """Returns the layers that a call of `module` may call: those in it, and the root's own layer if its `forward` enters that."""
    found = [state for inner in module.modules() if isinstance(state := vars(inner).get("_state"), LayerState)]
    root = getattr(vars(module).get("forward"), "root", None)
    state = root() if root is not None else None
    return [*found, *([] if state is None else [state])] or list(layers)
