"""What ranks compare before they rely on it: a layer whose call was not predicted, and the transfers that they have made."""

from __future__ import annotations

from ..comm.agreement import agree
from ..comm.communicator import Communicator
from .coordination import Action
from .layer_state import LayerState

__all__: list[str] = []

FOLD_EVERY = 1000  # transfers; if they are not compared, the log is folded this often, so that it stays short


def compare_call(communicator: Communicator, state: LayerState, number: int) -> None:
    """`state` is the layer called as number `number` of a forward.

    Raises:
        ValueError: on another rank it is another layer; on every rank.
    """
    place = f"the layer called as number {number} of a forward"
    with state.gate.compare(state, place, [state.name_among_ranks]):
        agree(communicator, state.device, place, [state.name_among_ranks])


def compare_logs(communicator: Communicator, first: LayerState, every: int) -> None:
    """Compares the transfers of all layers so far. At `every` 1, `ComparingGate` does it before each gather.

    Raises:
        ValueError: ranks have made different transfers; on every rank.
    """
    if every > 1:
        with first.gate.passing(Action.AGREE, first):
            agree(communicator, first.device, "the transfers made so far", [first.log.summary()])
