"""Between a layer and torch's autograd: the tensors that a call leaves, the nodes behind them, and the few doors into the engine."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

__all__: list[str] = []

_MARK = "zero3"
_MAX_DEPTH = 8  # deeper than any output in use
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, nn.Module)


def inside_backward() -> bool:
    """Whether this thread is running a backward (a recomputation under activation checkpointing is inside one)."""
    return torch._C._current_graph_task_id() != -1


def backward_task() -> int:
    """A number for the backward this thread runs: one nested in another (reentrant checkpointing) has a higher one."""
    return torch._C._current_graph_task_id()


class EndOfBackward:
    """The end of a backward, to be awaited inside it: it comes, or the backward raises, which is known afterwards."""

    def __init__(self) -> None:
        self._callback: weakref.ref[partial[None]] | None = None  # torch holds it, and drops it if the backward raises

    def wait(self, then: Callable[[], None] | None = None) -> None:
        """Runs `then` once the backward that this thread runs is over."""
        callback = partial(self._come, then)  # a new object, to which no frame refers: a kept traceback does not keep it alive
        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    @property
    def awaited(self) -> bool:
        return self._callback is not None and self._callback() is not None and inside_backward()

    @property
    def missed(self) -> bool:
        """Whether the backward raised."""
        return self._callback is not None and not self.awaited

    def forget(self) -> None:
        self._callback = None

    def _come(self, then: Callable[[], None] | None) -> None:
        if then is not None:
            then()
        self._callback = None


def as_plain_tensors() -> AbstractContextManager[object]:
    """Inside, subclasses of Tensor pass for plain tensors: their `__torch_function__` is not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def accumulates_everywhere() -> bool:
    """Whether the current backward writes the `.grad` of every leaf it comes to: a plain `.backward()`, nested or not."""
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]


def restore_versions(tensors: Iterable[Tensor], versions: Iterable[int]) -> None:
    """Makes graphs that saved these tensors at these versions valid again: they hold the same values as then."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def accumulates_into(parameters: Iterable[Tensor]) -> bool:
    """Whether the current backward will write the `.grad` of any of `parameters` (`autograd.grad` does not)."""
    with as_plain_tensors(), torch.enable_grad():
        views = (parameter.view_as(parameter) for parameter in parameters if parameter.requires_grad)
        accumulators = (view.grad_fn.next_functions[0][0] for view in views if view.grad_fn is not None)
        return any(node is not None and torch._C._will_engine_execute_node(node) for node in accumulators)


def graph_clock() -> int:
    """Goes up with every node: those that this thread's graphs get from now on have this number or a higher one."""
    return torch._C._autograd._get_sequence_nr()


def nodes_since(clock: int, tensors: Iterable[Tensor]) -> set[Node]:
    """The nodes of the graph that made `tensors`, as far as they are not older than `clock`.

    A view that is modified in place gets a new node, but the node of its base stays in the graph: so it is among them.
    """
    nodes: set[Node] = set()
    for given in tensors:
        for tensor in (given, given._base):
            if tensor is not None and tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= clock:
                nodes.add(tensor.grad_fn)
    return nodes


def before_gradient_flows(nodes: Iterable[Node], callback: Callable[[], None], mark: object) -> None:
    """Runs `callback` before a gradient flows into one of `nodes`. `mark` is left on them for `mark_upstream`.

    A hook on a tensor would not do: it is lost when the tensor is a view that is later modified in place.
    """

    def prehook(_: Any) -> None:
        callback()

    for node in nodes:
        node.register_prehook(prehook)
        _notes_on(node)[_MARK] = weakref.ref(mark)


def around_accumulation(leaf: Tensor, before: Callable[[], None], after: Callable[[], None]) -> Node | None:
    """Runs the two around each accumulation of autograd into `leaf.grad`, for as long as the caller keeps what is returned."""
    with torch.enable_grad():
        view = leaf.view_as(leaf)
    node = view.grad_fn.next_functions[0][0] if view.grad_fn is not None else None
    if node is not None:
        node.register_prehook(lambda _: before())
        node.register_hook(lambda *_: after())
    return node


def mark_upstream(tensors: Iterable[Tensor], limit: int = 1000) -> object | None:
    """The mark of a nearest layer whose outputs `tensors` were computed from, looking at no more than `limit` nodes."""
    nodes: deque[Node | None] = deque(tensor.grad_fn for tensor in tensors)
    seen: set[Node] = set()
    while nodes and len(seen) < limit:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        mark: weakref.ref[object] | None = _notes_on(node).get(_MARK)
        if mark is not None and (found := mark()) is not None:
            return found
        nodes.extend(following for following, _ in node.next_functions)
    return None


def _notes_on(node: Node) -> dict[str, Any]:
    return node.metadata  # type: ignore[return-value]  # declared as a method, but is a property


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a nest of lists, tuples, dicts, dataclasses and plain objects (caches, model outputs).

    Level by level, and each object once, so that a web of objects that know each other costs no more than its size.
    """
    found: list[Tensor] = []
    level, seen = [value], set[int]()
    for _ in range(_MAX_DEPTH + 1):
        following: list[Any] = []
        for item in level:
            if item is None or id(item) in seen:
                continue
            if isinstance(item, Tensor):
                seen.add(id(item))
                found.append(item)
            elif not isinstance(item, _LEAVES):
                seen.add(id(item))
                following.extend(_held_by(item))
        if not following:
            break
        level = following
    return found


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (dict, Mapping)):  # the first is quick to tell
        return value.values()
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]


def profiler_label(name: str) -> AbstractContextManager[None]:
    """A span of that name in torch.profiler's traces. Made once, entered often: a tenth of a microsecond where no profiler runs."""
    return torch._C._profiler._RecordFunctionFast(name)


class uncached_autocast:
    """Inside, autocast keeps no cast copies of parameters: they would outlive a layer's full parameters, and a step."""

    __slots__ = ("_enabled",)

    def __enter__(self) -> None:
        self._enabled = torch.is_autocast_cache_enabled()
        if self._enabled:
            torch.set_autocast_cache_enabled(False)

    def __exit__(self, *exc: object) -> None:
        if self._enabled:
            torch.set_autocast_cache_enabled(True)
