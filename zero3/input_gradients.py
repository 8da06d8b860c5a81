"""Warns if the output of frozen embeddings is made to need gradients: then backward goes through all layers, below adapters too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from .core.module_overrides import Override
from .core.parameters import parameters_of
from .layer import Zero3Layer

__all__: list[str] = []

_log = logging.getLogger("zero3")

_ENABLE = "enable_input_require_grads"  # transformers' name of the method
_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")  # transformers' and peft's names of the hooks


def watch_input_gradients(module: nn.Module, *, is_root: bool) -> None:
    """Warns now if the whole model (`is_root`) has a hook that does it, and later when `module` is told to put one there."""
    if is_root:
        _warn(module)
    if callable(getattr(type(module), _ENABLE, None)):
        Override(module, _ENABLE, _enable)


def _enable(module: nn.Module, enable: Callable[[], Any]) -> None:
    enable()
    _warn(module)


def _warn(model: nn.Module) -> None:
    hooked = [_plain(m) for m in model.modules() if any(getattr(hook, "__name__", "") in _HOOKS for hook in m._forward_hooks.values())]
    frozen = [module for module in hooked if not any(p.requires_grad for _, p in parameters_of(module) if p is not None)]
    if frozen and not any(_recomputes_reentrantly(module) for module in model.modules()):
        _log.warning(
            "%s: the output of its frozen embeddings needs gradients (%s). So backward gathers and differentiates all layers, also those "
            "below the first one that trains, for gradients that nobody uses. Only reentrant checkpointing needs that: call "
            "model.disable_input_require_grads() after gradient_checkpointing_enable() with use_reentrant=False.",
            type(model).__name__, _ENABLE,
        )  # fmt: skip


def _plain(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, Zero3Layer) else module


def _recomputes_reentrantly(module: nn.Module) -> bool:
    """Whether transformers checkpoints the module in the reentrant way, which is torch's default."""
    function = getattr(module, "_gradient_checkpointing_func", None) if vars(module).get("gradient_checkpointing") else None
    return function is not None and bool(getattr(function, "keywords", {}).get("use_reentrant", True))
