"""The layer's side of torch's autograd: tensors in a call's outputs, the graph nodes behind them,
and hooks of the engine.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from inspect import unwrap
from types import FrameType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import CheckpointFunction, checkpoint

__all__: list[str] = []

# Copies each of some values into its place. On a GPU it is a kernel for many of them, if each has
# the strides of its place.
copy_together: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_

# A tensor of a class of tensors, over the memory of another one. It is no view of that.
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass

# Zeroes some values. (`zero_grad` calls it.)
zero_together: Callable[..., Any] = torch._foreach_zero_

_MARK = "zero3"  # key in a node's metadata
_MAX_DEPTH = 8  # of nested outputs; deeper than any model returns
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, nn.Module)


def can_show(parameter: nn.Parameter, values: Tensor) -> bool:
    """Whether `parameter.data = values` is allowed. torch refuses it between the meta device, or an
    out-of-tree one, and any other.
    """
    return bool(torch._has_compatible_shallow_copy_type(parameter, values))


def inside_backward() -> bool:
    """Whether this thread runs a backward. A recomputation under activation checkpointing is inside
    one.
    """
    return torch._C._current_graph_task_id() != -1


def note_in_thread(key: str, value: object) -> None:
    """torch keeps a note for this thread, and for those that run the backwards that it begins."""
    if _TAKES_NOTES:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


def _takes_notes() -> bool:
    """Whether torch takes its caller's reference to a note, as torch 2.11 does, and gives it back
    in the end, so that what nobody else holds would be freed at once.
    """
    probe = object()
    before = sys.getrefcount(probe)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    torch._C._stash_obj_in_tls("zero3", probe)
    return sys.getrefcount(probe) == before + 1


_TAKES_NOTES = _takes_notes()


def noted_in_thread(key: str) -> Any:
    """None: nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


# The functions that follow are torch's own, since each layer asks them.

# The number of this thread's backward. A backward inside another one (reentrant checkpointing) has
# a higher number.
backward_task: Callable[[], int] = torch._C._current_graph_task_id

# A number that grows with every graph node. Nodes that this thread makes from now on have this
# number or a higher one.
graph_clock: Callable[[], int] = torch._C._autograd._get_sequence_nr

# The graph node that this thread's backward runs, or None. While a checkpoint recomputes, it is one
# of those that need its values.
current_node: Callable[[], Node | None] = torch._C._current_autograd_node

# Whether the present backward writes the `.grad` of every leaf that it reaches, as a plain
# `.backward()` does.
accumulates_everywhere: Callable[[], bool] = torch.autograd._is_checkpoint_valid

# Context in which subclasses of Tensor behave as plain tensors: their `__torch_function__` is not
# called.
as_plain_tensors: Callable[[], AbstractContextManager[object]] = (
    torch._C.DisableTorchFunctionSubclass
)

# Sets the versions of tensors that have their old values again, so that graphs which saved them are
# valid again.
restore_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = (
    torch._C._autograd._unsafe_set_version_counter
)

# Gives tensors new versions, so that graphs which saved them are no longer valid.
renew_versions: Callable[[Iterable[Tensor]], None] = torch._C._increment_version

# Whether autocast is on, for any kind of device. Inside, `torch.cat` raises for tensors of 16 bits
# that are not of autocast's dtype.
autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled

# How many of torch.func's transforms (grad, vjp, jvp, vmap, ...) are under way, or None.
transforms_under_way: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def checkpoint_around() -> object | None:
    """What stands for the outermost checkpoint whose function runs now, or None. Of those that
    hooks put on modules it is the innermost.
    """
    frame: FrameType | None = sys._getframe()
    found: object | None = None
    while frame is not None:
        if (name := _CHECKPOINTS.get(frame.f_code)) is not None:
            found = frame.f_locals.get(name, found)
        frame = frame.f_back
    if found is None:  # one that is put on a module by hooks
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
        hooks = top(True)
        if hooks and getattr(hooks[0], "__qualname__", "").startswith("_checkpoint_hook."):
            found = hooks[1]
    return found


# what runs a checkpoint's function -> its variable that is another in each checkpoint. From torch
# 2.15 on, `checkpoint` leaves that to a function of its own
_RUNS_IT = vars(torch.utils.checkpoint).get("_checkpoint_impl", unwrap(checkpoint))
_CHECKPOINTS = MappingProxyType(
    {CheckpointFunction.forward.__code__: "ctx", _RUNS_IT.__code__: "gen"}
)


def grouped_products() -> tuple[Callable[..., Any], ...]:
    """The functions that multiply groups of rows by a matrix each, as far as this version of torch
    has them.
    """
    return tuple(
        f
        for f in (
            getattr(torch.nn.functional, "grouped_mm", None),
            getattr(torch, "_grouped_mm", None),
        )
        if f is not None
    )


class EndOfBackward:
    """Calls a function at the end of a backward. If the backward raises instead, `missed` tells it
    afterwards.
    """

    def __init__(self) -> None:
        # torch holds the callback, and drops it if the backward raises
        self._callback: weakref.ref[partial[None]] | None = None

    def wait(self, then: Callable[[], None] | None = None) -> None:
        """Calls `then` when this thread's backward is over."""
        # only torch holds it after this returns, so no error's traceback keeps it alive
        callback = partial(self._come, then)
        self._callback = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    @property
    def awaited(self) -> bool:
        callback = self._callback
        return callback is not None and callback() is not None and backward_task() != -1

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


def accumulates_into(parameters: Iterable[Tensor]) -> bool:
    """Whether the present backward will write the `.grad` of any of `parameters`. (`autograd.grad`
    does not.)
    """
    with as_plain_tensors(), torch.enable_grad():
        views = (
            parameter.view_as(parameter) for parameter in parameters if parameter.requires_grad
        )
        accumulators = (
            view.grad_fn.next_functions[0][0] for view in views if view.grad_fn is not None
        )
        return any(
            node is not None and torch._C._will_engine_execute_node(node) for node in accumulators
        )


def nodes_since(clock: int, tensors: Iterable[Tensor]) -> set[Node]:
    """The graph nodes behind `tensors` that are not older than `clock`, which is a value of
    `graph_clock`.

    The node of a view's base is included: a view that is modified in place gets a new node, but its
    base's node stays in the graph.
    """
    nodes: set[Node] = set()
    for given in tensors:
        for tensor in (given, given._base):
            if (
                tensor is not None
                and tensor.grad_fn is not None
                and tensor.grad_fn._sequence_nr() >= clock
            ):
                nodes.add(tensor.grad_fn)
    return nodes


def before_gradient_flows(
    nodes: Iterable[Node], hook: Callable[[object], None], mark: object
) -> None:
    """Calls `hook` with the gradients before they flow into one of `nodes`, and leaves `mark` on
    the nodes for `mark_upstream`.

    Hooks on tensors can't do this: a view that is modified in place later loses its hooks.
    """

    for node in nodes:
        node.register_prehook(hook)
        # declared as a method, but is a property
        node.metadata[_MARK] = weakref.ref(mark)  # type: ignore[index]


def around_accumulation(
    leaf: Tensor, before: Callable[[], None], after: Callable[[], None]
) -> Node | None:
    """Calls `before` and `after` around each accumulation into `leaf.grad`, as long as the caller
    keeps the returned node.
    """
    with torch.enable_grad():
        view = leaf.view_as(leaf)
    node = view.grad_fn.next_functions[0][0] if view.grad_fn is not None else None
    if node is not None:
        node.register_prehook(lambda _: before())
        node.register_hook(lambda *_: after())
    return node


def mark_upstream(tensors: Iterable[Tensor]) -> object | None:
    """The nearest mark in the graph of `tensors`: they were computed from the outputs of that
    layer. Visits at most 1000 nodes.
    """
    nodes: deque[Node | None] = deque(tensor.grad_fn for tensor in tensors)
    seen: set[Node] = set()
    while nodes and len(seen) < 1000:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        mark: weakref.ref[object] | None = node.metadata.get(_MARK)  # type: ignore[attr-defined]
        if mark is not None and (found := mark()) is not None:
            return found
        nodes.extend(following for following, _ in node.next_functions)
    return None


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested lists, tuples, dicts, dataclasses and plain objects (caches, model
    outputs).

    It goes level by level, and visits each object once, so that objects may refer to each other.
    """
    if type(value) is Tensor:
        return [value]
    found: list[Tensor] = []
    level, seen = [value], set[int]()
    for _ in range(_MAX_DEPTH + 1):
        following: list[Any] = []
        for item in level:
            kind = type(item)
            if kind in _PLAIN or id(item) in seen:
                continue
            if kind is tuple or kind is list or kind is dict:  # the usual ones, without a call
                seen.add(id(item))
                following += item.values() if kind is dict else item
            elif isinstance(item, Tensor):
                seen.add(id(item))
                found.append(item)
            elif not isinstance(item, _LEAVES):
                seen.add(id(item))
                following.extend(_held_by(item))
        if not following:
            break
        level = following
    return found


_PLAIN = frozenset({type(None), str, int, float, bool})
_PARTS = frozenset(
    {bool, int, float, str, dict, OrderedDict, set, type(None)}
)  # types of a module's ordinary attributes
_HOLDS = (list, tuple, Tensor)


def attributes_of(holder: nn.Module, without: type[nn.Module]) -> list[Any]:
    """Attributes in which modules may keep tensors of a forward, such as caches and auxiliary
    losses. Long lists are left out, and so are the modules in modules `without`.
    """
    found: list[Any] = []
    modules = [holder]
    for module in modules:
        values = module.__dict__.values()
        for kind in set(map(type, values)) - _PARTS:  # few, while attributes are many
            if issubclass(kind, _HOLDS) and not issubclass(kind, nn.Parameter):  # a hidden one
                alike = (value for value in values if type(value) is kind)
                found += [each for each in alike if isinstance(each, Tensor) or len(each) < 100]
        for child in module._modules.values():
            if child is not None and not isinstance(child, without):
                modules.append(child)
    return found


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (dict, Mapping)):  # dict first, because the check for Mapping is slow
        return value.values()
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    return [
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name, None) for name in names),
    ]


def profiler_label(name: str) -> AbstractContextManager[None]:
    """Context that shows as `name` in torch.profiler's traces. Made once and entered often: 0.1
    microseconds without a profiler.
    """
    return torch._C._profiler._RecordFunctionFast(name)
