"""Fills tensors on the meta device that are in no chunk: with loaded values, or as the model itself
computes them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..comm.agreement import agreeing
from ..core.layer_state import LayerState
from ..core.parameters import ShardedParameter, parameters_of, released_in
from ..core.sites import put_into
from ..guards.marks import ignored_by, mark_ignored
from ..guards.module_overrides import GUARDED, Override
from ..modules import plain_modules, unwrapped, wrapped_in

__all__: list[str] = []

_log = logging.getLogger("zero3")


@torch.no_grad()
def put(model: nn.Module, old: Tensor, value: Tensor) -> None:
    """Copies `value` into `old`. If `old` is on meta, `value` replaces it in every module that has
    it.
    """
    if not old.is_meta:
        old.copy_(value)
        return
    is_parameter = isinstance(old, nn.Parameter)
    new = nn.Parameter(value, requires_grad=old.requires_grad) if is_parameter else value
    places = [
        (module, attribute)
        for module in plain_modules(model)
        for held in (module._parameters, module._buffers)
        for attribute, tensor in held.items()
        if tensor is old
    ]
    put_into(places, new)
    if isinstance(new, nn.Parameter) and (state := ignored_by(old)) is not None:
        state.gradients.leave_alone_instead(old, new)
        mark_ignored(new, state)


@contextmanager
def filling(
    model: nn.Module,
    states: list[LayerState],
    source: Path,
    parameters: Iterable[ShardedParameter],
    caller: str,
) -> Iterator[None]:
    """Context for reads from `source` into `parameters`. At its end the buffers that no file holds
    are computed, and have rank 0's values. Every rank enters it.

    If a rank raises, all do, and these parameters count as unloaded.
    """
    first = states[0]
    try:
        with agreeing(first, f"what {caller} filled", caller, first.log):
            try:
                yield
            except Exception as error:
                raise RuntimeError(
                    f"reading {source} failed: {error}. What it was to fill is unloaded now: load "
                    "again."
                ) from error
        # only now: who had read all would have them, and the others not, in the next attempt
        with agreeing(first, f"the buffers that {caller} computes", caller) as lines:
            computed = initialise(model, states)
            lines += [name for name, _ in computed]
    except Exception:
        for sharded in parameters:
            sharded.chunk.unloaded.add(sharded.index)
        raise
    for _, value in computed:
        if value.numel():
            first.communicator.broadcast(value)


# of a module's attributes: the buffer's name in errors, and its device
Wanted = dict[nn.Module, dict[str, tuple[str, torch.device]]]


def initialise(model: nn.Module, states: list[LayerState]) -> list[tuple[str, Tensor]]:
    """Gives values to the non-persistent buffers on meta (rotary frequencies, masks, positions),
    which no checkpoint holds.

    A module's hook computes them: `_init_weights` of the transformers model around the module or,
    without one, the module's own `reset_parameters`. If that leaves a buffer on meta, the hooks of
    the modules around it follow, because a module may set buffers that it has registered in modules
    inside it. Hooks run on the CPU, as in `from_pretrained`, and on a twin of the module, in which
    all other tensors are on meta.

    Returns:
        The name and the value of each buffer that could be computed.
    """
    hooks = hooks_of(model)
    filled: list[tuple[str, Tensor]] = []
    for owner, attributes in _on_meta(states).items():
        filled += _fill(owner, {owner: attributes}, hooks.get(owner))
    left = _on_meta(states)
    for around in reversed(list(plain_modules(model)) if left else []):  # inner before outer
        modules = [each for each in plain_modules(around) if each in left and each is not around]
        inside = {module: left[module] for module in modules}
        if inside and wrapped_in(around) is None:
            filled += _fill(around, inside, hooks.get(around))
            left = _on_meta(states)
    return filled


def _on_meta(states: list[LayerState]) -> Wanted:
    wanted: Wanted = {}
    for state in states:
        for owner, attribute, name in state.meta_buffers:
            buffer = owner._buffers.get(attribute)
            left_out = attribute in owner._non_persistent_buffers_set
            if buffer is not None and buffer.is_meta and left_out:
                place = f"{name} of layer {state.label}", state.device
                wanted.setdefault(owner, {})[attribute] = place
    return wanted


def hooks_of(model: nn.Module) -> dict[nn.Module, Callable[[nn.Module], Any]]:
    """Returns the `_init_weights` that counts for each module: that of the nearest model around it
    which has one.
    """
    hooks: dict[nn.Module, Callable[[nn.Module], Any]] = {}

    def walk(found: nn.Module, hook: Callable[[nn.Module], Any] | None) -> None:
        module = unwrapped(found)
        own = getattr(module, "_init_weights", None)
        hook = own if callable(own) else hook
        if hook is not None:
            hooks.setdefault(module, hook)
        for child in module.children():
            walk(child, hook)

    walk(model, None)
    return hooks


def _fill(
    root: nn.Module, wanted: Wanted, hook: Callable[[nn.Module], Any] | None
) -> list[tuple[str, Tensor]]:
    """Runs the hook of `root`, puts the `wanted` buffers that it has written in place, and returns
    them.
    """
    copies: dict[nn.Module, nn.Module] = {}
    blank: dict[tuple[nn.Module, str], Tensor] = {}
    try:
        copy = twin(root, copies)
        for owner, attributes in wanted.items():
            for attribute in attributes:
                blank[owner, attribute] = torch.empty_like(owner._buffers[attribute], device="cpu")  # type: ignore[arg-type]
                copies[owner]._buffers[attribute] = blank[owner, attribute]
        run_hook(hook, copy)
        values = {(owner, name): copies[owner]._buffers.get(name) for owner, name in blank}
        written = {place: v for place, v in values.items() if is_written(v, blank[place])}
    # the buffers stay on meta, and the first forward raises an error that names them
    except Exception as error:
        names = [name for attributes in wanted.values() for name, _ in attributes.values()]
        what = "%s: the buffers %s could not be computed: %s"
        _log.warning(what, type(root).__name__, ", ".join(names), error)
        return []
    filled: list[tuple[str, Tensor]] = []
    for (owner, attribute), value in written.items():
        (name, device), dtype = wanted[owner][attribute], blank[owner, attribute].dtype
        owner._buffers[attribute] = own = value.to(device=device, dtype=dtype)
        filled.append((name, own))
    return filled


def run_hook(hook: Callable[[nn.Module], Any] | None, copy: nn.Module) -> None:
    """Has a `twin` compute its tensors, on the CPU. None: by its own `reset_parameters`, if any."""
    run = getattr(copy, "reset_parameters", None) if hook is None else partial(hook, copy)
    if callable(run):
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            run()


def is_written(value: Tensor | None, blank: Tensor) -> TypeGuard[Tensor]:
    """Whether a hook has filled a new tensor, `blank`, or put `value` in its place."""
    return value is not None and not value.is_meta and (value is not blank or value._version > 0)


def twin(module: nn.Module, copies: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Copies the unwrapped module and the modules in it, with every tensor on meta. So code may
    write into the copy.

    `copies` receives the copy of each module; a module in several places has one. Layers and
    torch's wrappers are left out.
    """
    copies, module = {} if copies is None else copies, unwrapped(module)
    if module in copies:
        return copies[module]
    if (inner := wrapped_in(module)) is not None:
        return twin(inner, copies)
    copies[module] = copy = type(module).__new__(type(module))
    own = {
        name: value
        for name, value in vars(module).items()
        if name != GUARDED and not isinstance(value, Override)
    }
    for name, _ in released_in(module):
        del own[name]
    copy.__dict__ = own | {
        "_state_dict_pre_hooks": OrderedDict(),
        "_parameters": {
            name: value if value is None else nn.Parameter(_blank(value), requires_grad=False)
            for name, value in parameters_of(module)
            if not name.startswith(("trainable_chunk", "frozen_chunk"))
        },
        "_buffers": {n: b if b is None else _blank(b) for n, b in module._buffers.items()},
        "_modules": {n: m if m is None else twin(m, copies) for n, m in module._modules.items()},
    }
    return copy


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
