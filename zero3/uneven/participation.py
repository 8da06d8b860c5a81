"""What a rank without data does in the collectives of those that have some. See `shadow`."""

from __future__ import annotations

from ..comm.agreement import agree
from ..core.coordination import Action
from ..core.layer_state import LayerState
from ..core.policy_facts import shards_parameters
from ..core.runtime import Runtime

__all__: list[str] = []


def help_with(action: Action, state: LayerState, runtime: Runtime) -> None:
    """Takes part: in a gather with its chunks, in a reduction with zeros, in a comparison by listening.

    Raises:
        ValueError, TypeError, RuntimeError: what the others raise.
    """
    if action is Action.GATHER:
        _help_fetch(state)
    elif action is Action.REDUCE:
        runtime._backward.help_back_up(state)
    elif action is Action.LOOK:
        runtime._drop_stale()
    elif action is Action.AGREE:
        agree(runtime._communicator, state.device, "what comes next", [], absent=True)


def _help_fetch(state: LayerState) -> None:
    if shards_parameters(state.policy):
        for chunk in state.chunks:
            chunk.help_fetch()
    else:  # it stays whole here too
        state.fetch()
        state.release_or_keep()
