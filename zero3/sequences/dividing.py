"""How a model is made one whose ranks hold parts of sequences."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..comm.factory import shares_sequences
from ..core.autograd import inside_backward, tensors_in
from ..core.layer_state import LayerState
from ..core.parameters import own_modules, plain_modules
from ..guards.module_overrides import Override
from ..layer import is_layer
from .attention import (
    attentions_of,
    check_model,
    enter_forward_of_transformers,
    text_config,
    use_registries,
)
from .parts import PARTS, Parts, check_whole, measured_by, parts_of

__all__: list[str] = []


def check_dividable(model: nn.Module, ranks: int, policies: Sequence[Any]) -> None:
    """
    Raises:
        ValueError: The sequences of a model, or with a policy, can't be divided.
    """
    for policy in policies:
        for name in ("expert_parallel", "dynamic"):
            if getattr(policy, name, False):
                raise ValueError(
                    f"{name}=True of the policy, and a mesh with sp: ranks that hold parts of the "
                    "same sequences would call different layers. Take one of them"
                )
    check_model(model, ranks)


def divide_sequences(model: nn.Module, root: LayerState, process_group: Any) -> None:
    """From now on each rank of the mesh's `sp` holds a part. All ranks call it, before the model
    gets its root.
    """
    parts = Parts(shares_sequences(process_group, root.communicator, root.device), root)
    of_transformers = text_config(model) is not None
    attentions = attentions_of(model) if of_transformers else {}
    for module in plain_modules(model):
        vars(module)[PARTS] = parts
    for module, name in attentions.items():
        Override(module, "forward", _Counted(parts, name))
    for _, module in own_modules(model, is_layer):
        if module is model or "input_ids" in inspect.signature(module.forward).parameters:
            around = enter_forward_of_transformers if of_transformers else enter_forward
            Override(module, "forward", around)
    if callable(getattr(type(model), "generate", None)):
        Override(model, "generate", _refuse_outside_of_resident)
    if of_transformers:
        use_registries(model)


class _Counted:
    """An attention notes that it runs."""

    def __init__(self, parts: Parts, name: str) -> None:
        self._parts, self._name = parts, name

    def __call__(self, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._parts.ran[module] = self._name
        return forward(*args, **kwargs)


def _refuse_outside_of_resident(
    model: nn.Module, generate: Any, /, *args: Any, **kwargs: Any
) -> Any:
    parts = parts_of(model)
    if parts is not None and parts.active:
        raise ValueError(
            "generate of a model whose ranks hold parts of sequences (sp): put it inside of `with "
            "zero3.resident(model):`, where each rank has whole sequences"
        )
    return generate(*args, **kwargs)


def enter_forward(module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Around a forward of a model of one's own, whose first tensor is `[B, part, ...]`."""
    parts = parts_of(module)
    if parts is None or parts.depth or inside_backward():
        return forward(*args, **kwargs)
    tensors = tensors_in((args, kwargs))
    if not parts.active:
        check_whole(tensors)
        return forward(*args, **kwargs)
    error = None
    if not tensors or tensors[0].dim() < 2:
        error = ValueError(
            f"{type(module).__name__} was called without a tensor [B, part, ...], and its ranks "
            "hold parts of sequences (sp)"
        )
    rows, part = tensors[0].shape[:2] if error is None else (0, 0)
    measured = measured_by(parts, rows, part, None, None, error)
    with parts.forward(measured, None):
        output = forward(*args, **kwargs)
    parts.check_exchanged(type(module).__name__)
    parts.come_back(output)
    return output
