"""Warns if the output of frozen embeddings is made to need gradients: then backward goes through
all layers, below adapters too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from .core.parameters import parameters_of, plain_modules, unwrapped
from .guards.module_overrides import Override

__all__: list[str] = []

_log = logging.getLogger("zero3")

_ENABLE = "enable_input_require_grads"  # transformers' name of the method
# transformers' and peft's names of the hooks
_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")


def watch_input_gradients(module: nn.Module, *, is_root: bool) -> None:
    """Warns now if the whole model (`is_root`) has a hook that does it, and later when `module` is
    told to put one there.
    """
    if is_root:
        _warn(module)
    if callable(getattr(type(module), _ENABLE, None)):
        Override(module, _ENABLE, _enable)


def _enable(module: nn.Module, enable: Callable[[], Any]) -> None:
    enable()
    _warn(module)


def _warn(model: nn.Module) -> None:
    hooked = [
        module
        for each in model.modules()
        for module in {each, unwrapped(each)}
        if _makes_require_grad(module)
    ]
    frozen = [
        module
        for module in map(unwrapped, hooked)
        if not any(p.requires_grad for _, p in parameters_of(module) if p is not None)
    ]
    if frozen and not any(_recomputes_reentrantly(module) for module in plain_modules(model)):
        _log.warning(
            "%s: the output of its frozen embeddings needs gradients (%s). So backward gathers "
"and differentiates all layers, also those below the first one that trains, for "
"gradients that nobody uses. Only reentrant checkpointing needs that: call "
"model.disable_input_require_grads() after gradient_checkpointing_enable() with "
"use_reentrant=False.",
            type(model).__name__, _ENABLE,
        )  # fmt: skip


def _makes_require_grad(module: nn.Module) -> bool:
    return any(getattr(hook, "__name__", "") in _HOOKS for hook in module._forward_hooks.values())


def _recomputes_reentrantly(module: nn.Module) -> bool:
    """Whether transformers checkpoints the module in the reentrant way, which is torch's
    default.
    """
    function = (
        getattr(module, "_gradient_checkpointing_func", None)
        if vars(module).get("gradient_checkpointing")
        else None
    )
    return function is not None and bool(
        getattr(function, "keywords", {}).get("use_reentrant", True)
    )
