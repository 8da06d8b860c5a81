"""torch.compile around sharded modules: its graphs end where layers are fetched and released, so
one graph of a model is refused.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

__all__: list[str] = []

F = TypeVar("F", bound=Callable[..., Any])

_INSTEAD = (
    "layers are fetched and released between graphs. Leave fullgraph out, or compile each block "
    "with it before sharding: block.compile(fullgraph=True), then zero3.shard(model)"
)
REASON = f"zero3: {_INSTEAD}"


def leave_untraced() -> None:
    """Tells torch.compile, if it is in use, that it traces no function of zero3: its graphs end
    there. Nor how Triton starts the kernels of ours: inductor would start them with other options.
    """
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and not rules.check_file(sys.modules["zero3"].__file__).skipped:
        rules.add("zero3")
        rules.add("triton")  # if it is there


class OneGraph(RuntimeError, AssertionError):
    """`fullgraph=True` around what ends graphs. torch.compile puts any RuntimeError into one of its
    own, but no AssertionError.
    """


class Untraced(str):
    """Why torch.compile does not trace a function, as torch's own errors and logs say it. With
    `fullgraph=True` it is the error.
    """

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        if torch._guards.TracingContext.try_get() is not None:
            _check_one_graph(str(self))
        return super().__format__(spec)


def end_graph(reason: str) -> None:
    """Ends the graph that torch.compile is tracing before what has called this. Without such a
    graph it does nothing.
    """
    if torch._guards.TracingContext.try_get() is not None:
        _check_one_graph(reason)
        raise sys.modules["torch._dynamo.exc"].Unsupported(reason)


def _check_one_graph(reason: str) -> None:
    tracer = sys.modules["torch._dynamo.symbolic_convert"].InstructionTranslator.current_tx()
    if getattr(tracer, "one_graph", False):
        raise OneGraph(reason)


def ends_graphs(function: F) -> F:
    """Marks a function that torch.compile does not trace. Its error for `fullgraph=True` around any
    caller then gives the reason.
    """
    # `torch.compiler.disable` costs time
    marks = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": Untraced(REASON)}
    vars(function).update(marks)
    return function


def compile_in_parts(
    module: nn.Module, compile_it: Callable[..., None], /, *args: Any, **kwargs: Any
) -> None:
    """Replaces `module.compile()`: what fetches and releases layers stays outside of the graphs."""
    if kwargs.get("fullgraph"):
        raise _refused("", module)
    importlib.import_module("torch._dynamo.trace_rules")
    leave_untraced()
    compile_it(*args, **kwargs)


def check_compiled(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises if one of `modules`, which will call layers, was compiled to be one graph."""
    for name, module in modules:
        call = vars(module).get("_compiled_call_impl")
        code, cells = getattr(call, "__code__", None), getattr(call, "__closure__", None) or ()
        closed = (
            {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
            if code is not None
            else {}
        )
        if any(
            getattr(context, "fullgraph", False)
            for context in (vars(module).get("dynamo_ctx"), closed.get("self"))
        ):
            raise _refused(name, module)


def _refused(name: str, module: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"compile(fullgraph=True) of {f'{name!r}, ' * bool(name)}a {type(module).__name__} in a "
        f"sharded model: {_INSTEAD}"
    )
