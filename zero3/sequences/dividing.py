"""How a model is made one whose ranks hold parts of sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..comm.factory import shares_sequences
from ..core.autograd import tensors_in
from ..core.layer_state import LayerState
from ..guards.module_overrides import Override
from ..layer import is_layer
from ..modules import own_modules, plain_modules
from .attention import (
    attentions_of,
    check_model,
    read_of_transformers,
    text_config,
    use_registries,
)
from .parts import Beginning, Measure, Parts, active_parts_of, check_whole, parts_of

__all__: list[str] = []


def check_dividable(model: nn.Module, ranks: int, policies: Sequence[Any]) -> None:
    """Raises ValueError if the sequences of a model, or with a policy, can't be divided."""
    for policy in policies:
        for name in ("expert_parallel", "dynamic"):
            if getattr(policy, name, False):
                raise ValueError(
                    f"{name}=True of the policy, and a mesh with sp: ranks that hold parts of the "
                    "same sequences would call different layers. Take one of them"
                )
    check_model(model, ranks)


def divide_sequences(model: nn.Module, root: LayerState, process_group: Any) -> None:
    """Each rank of `sp` holds a part from now on. All ranks call it, before there is a root."""
    parts = Parts(shares_sequences(process_group, root.communicator, root.device), root)
    of_transformers = text_config(model) is not None
    attentions = attentions_of(model) if of_transformers else {}
    for module in plain_modules(model):
        module._zero3_parts = parts  # type: ignore[assignment]
    for module, name in attentions.items():
        Override(module, "forward", partial(_note_run, parts, name))
    for _, module in own_modules(model, is_layer):
        if module is model or "input_ids" in inspect.signature(module.forward).parameters:
            read = read_of_transformers if of_transformers else read_own
            Override(module, "forward", partial(enter_forward, read))
    if callable(getattr(type(model), "generate", None)):
        Override(model, "generate", _refuse_outside_of_resident)
    if of_transformers:
        use_registries(model)


def _note_run(
    parts: Parts, name: str, module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Around an attention's forward."""
    parts.ran[module] = name
    return forward(*args, **kwargs)


def _refuse_outside_of_resident(
    model: nn.Module, generate: Any, /, *args: Any, **kwargs: Any
) -> Any:
    if active_parts_of(model) is not None:
        raise ValueError(
            "generate of a model whose ranks hold parts of sequences (sp): put it inside of `with "
            "zero3.resident(model):`, where each rank has whole sequences"
        )
    return generate(*args, **kwargs)


def enter_forward(
    read: Callable[..., Beginning], module: nn.Module, forward: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Around a forward. `read(module, forward, args, kwargs)` tells what of the whole it needs."""
    parts = parts_of(module)
    if parts is None or parts.depth or parts.is_recomputed:
        return forward(*args, **kwargs)
    if not parts.active:
        check_whole(tensors_in((args, kwargs)))
        return forward(*args, **kwargs)
    begins, error = Beginning(), None
    try:
        begins = read(module, forward, args, kwargs)
    except ValueError as caught:  # the other ranks of the group wait to hear of it
        error = caught
    root = parts.layer()
    measured = root.conductor.conduct(Measure(root, parts, (begins, error)))
    with parts.forward(measured):
        output = begins.run(measured)
    parts.check_exchanged(type(module).__name__)
    parts.come_back(output)
    return output


def read_own(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Beginning:
    """Of a model of one's own. Raises ValueError if its first tensor is not `[B, part, ...]`."""
    tensors = tensors_in((args, kwargs))
    if not tensors or tensors[0].dim() < 2:
        raise ValueError(
            f"{type(module).__name__} was called without a tensor [B, part, ...], and its ranks "
            "hold parts of sequences (sp)"
        )
    return Beginning(lambda _: forward(*args, **kwargs), *tensors[0].shape[:2])
