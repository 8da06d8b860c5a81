"""How a rank without data takes part in the collectives of the other ranks."""

from __future__ import annotations

from ..comm.agreement import agree
from ..core.comparison import drop_stale
from ..core.coordination import Action
from ..core.layer_state import LayerState
from ..core.runtime import Runtime

__all__: list[str] = []


def help_with(action: Action, state: LayerState, runtime: Runtime) -> None:
    """Takes part in an announced collective: in a gather with its chunks, in a reduction with
    zeros, in a comparison as a listener.

    Raises:
        ValueError, TypeError, RuntimeError: The same error as on the other ranks.
    """
    if action is Action.GATHER:
        state.take_part_in_fetch()
    elif action is Action.REDUCE:
        runtime.backward.reduce(state)
    elif action is Action.KEEP:
        state.gradients.defer(1, replicas_only=True)
        try:
            runtime.backward.reduce(state)
        finally:
            state.gradients.defer(-1, replicas_only=True)
    elif action is Action.SETTLE:
        runtime.backward.drain_backups()
    elif action is Action.LOOK:
        drop_stale(runtime.communicator, runtime.layers)
    elif action is Action.AGREE:
        agree(runtime.communicator, state.device, "what comes next", [], absent=True)
