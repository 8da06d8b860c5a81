"""What a rank without data does in the collectives of those that have some. See `shadow`."""

from __future__ import annotations

from ..comm.agreement import agree
from ..core.coordination import Action
from ..core.layer_state import LayerState
from ..core.runtime import Runtime

__all__: list[str] = []


def help_with(action: Action, state: LayerState, runtime: Runtime) -> None:
    """Takes part: in a gather with its chunks, in a reduction with zeros, in a comparison by listening.

    Raises:
        ValueError, TypeError, RuntimeError: what the others raise.
    """
    if action is Action.GATHER:
        state.take_part_in_fetch()
    elif action is Action.REDUCE:
        runtime.take_part_in_backup(state)
    elif action is Action.LOOK:
        runtime.drop_stale()
    elif action is Action.AGREE:
        agree(runtime.communicator, state.device, "what comes next", [], absent=True)
