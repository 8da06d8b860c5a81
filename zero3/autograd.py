"""The few doors into torch's autograd engine that a sharded model needs, in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def inside_backward() -> bool:
    """Whether this thread is running a backward (a recomputation under activation checkpointing is inside one)."""
    return torch._C._current_graph_task_id() != -1


def backward_task() -> int:
    """A number for the backward this thread runs: one nested in another (reentrant checkpointing) has a higher one."""
    return torch._C._current_graph_task_id()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Runs `callback` once the current backward is over. It does not run if that backward raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def accumulates_into(parameters: Iterable[Tensor]) -> bool:
    """Whether the current backward will write the `.grad` of any of `parameters` (`autograd.grad` does not)."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        return any(
            torch._C._will_engine_execute_node(parameter.view_as(parameter).grad_fn.next_functions[0][0])  # type: ignore[attr-defined,union-attr]
            for parameter in parameters
            if parameter.requires_grad
        )


def before_gradient_flows(outputs: Iterable[Tensor], callback: Callable[[], None]) -> None:
    """Runs `callback` before the backward of the graph that made `outputs` begins.

    The hook sits on the graph's nodes, not on tensors: a view that is modified in place gets a new node, but the
    node of its base stays in the graph. So both are hooked.
    """

    def prehook(_: Any) -> None:
        callback()

    nodes = {}
    for output in outputs:
        for tensor in (output, output._base):
            if tensor is not None and tensor.grad_fn is not None:
                nodes[tensor.grad_fn] = None
    for node in nodes:
        node.register_prehook(prehook)
