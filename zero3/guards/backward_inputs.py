"""`backward(inputs=...)` with chunks: their gradients alone are computed and reduced.

No graph leads to a chunk: it leads to the parameters whose values are cut into chunks. So torch's
backward would find nothing to do for the chunk, and no hook could see it. It is given the
parameters instead. This is the one function of torch that zero3 replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..core.autograd import as_plain_tensors
from ..core.backward import Backward
from ..core.layer_state import LayerState
from ..guards.marks import state_of

__all__: list[str] = []


def know_chunks() -> None:
    """Lets torch's backward know chunks, from now on. What other libraries put around it stays."""
    around: Any = torch.autograd.backward
    while around is not None:
        if hasattr(around, "zero3_knows_chunks"):
            return
        around = getattr(around, "__wrapped__", None)
    torch.autograd.backward = _knowing(torch.autograd.backward)


def _knowing(backward: Callable[..., None]) -> Callable[..., None]:
    @wraps(backward)
    def with_chunks(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        chunks: dict[int, LayerState] = {}
        if inputs is not None:
            single = isinstance(inputs, (Tensor, GradientEdge))
            inputs = [inputs] if single else inputs if isinstance(inputs, Mapping) else list(inputs)
            given = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
            chunks = {id(each): state for each in given if (state := _layer_of(each)) is not None}
        if not chunks:
            return backward(
                tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs
            )
        states = list(dict.fromkeys(chunks.values()))
        inputs = [each for each in given if id(each) not in chunks]
        inputs += [edge for state in states for edge in _edges_of(state, chunks)]
        with _reaching_only(states):
            backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)

    with_chunks.zero3_knows_chunks = True  # type: ignore[attr-defined]
    return with_chunks


def _layer_of(given: object) -> LayerState | None:
    """The layer, if it is one of its chunks or a part of one."""
    state = state_of(given)
    if isinstance(state, LayerState) and any(
        part.parameter is given for chunk in state.chunks for part in chunk.parts
    ):
        return state
    return None


def _edges_of(state: LayerState, given: dict[int, LayerState]) -> list[GradientEdge]:
    trained = [chunk for chunk in state.chunks if chunk.shard.requires_grad]
    if any(chunk.parts[0].parameter is not chunk.shard for chunk in trained):
        raise ValueError(
            f"rank {state.communicator.rank}: backward(inputs=...) with parts of chunks of layer "
            f"{state.label}, which zero3.param_groups made: ranks have parts of different "
            "parameters, and would compute different gradients. Leave inputs out, and drop what "
            "you don't want (parameter.grad = None)."
        )
    missing = [chunk for chunk in trained if id(chunk.shard) not in given]
    if missing:
        raise ValueError(
            f"rank {state.communicator.rank}: backward(inputs=...) with "
            f"{len(trained) - len(missing)} of the {len(trained)} trainable chunks of layer "
            f"{state.label}: a layer's chunks are reduced together. Pass all that "
            "layer.get_trainable_chunk() returns."
        )
    with as_plain_tensors():  # the parameters are released
        return [
            get_gradient_edge(sharded.sites.parameter)
            for sharded in state.parameters
            if sharded.chunk in trained
        ]


@contextmanager
def _reaching_only(states: Sequence[LayerState]) -> Iterator[None]:
    backwards = {
        backward for state in states if isinstance(backward := state.gradients.backward(), Backward)
    }
    with ExitStack() as left:
        for backward in backwards:
            left.enter_context(backward.reach.for_some(states))
        yield
