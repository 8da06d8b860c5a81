"""How a chunk's gradient grows: as autograd would have it, and rounded once where it is added up in a wider dtype."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__: list[str] = []

TOKENS = "_zero3_tokens"  # on a gradient: over how many tokens it is the mean, 0-dim, and its version then
_EXACT = "_zero3_exact"  # on a gradient: what it was rounded from, and its version then


def accumulate(parameter: nn.Parameter, gradient: Tensor, exact: Tensor | None) -> None:
    """The parameter is in no graph, so its hooks are called here.

    `exact`: the gradient in a wider dtype. It stays with the parameter's gradient, and sums are made in it, so that
    micro-batches round once and not each; it dies with that gradient, and does not count if somebody changed it.
    """
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient, exact = (gradient, exact) if changed is None else (changed, None)
    awaited: Any = parameter.grad if hasattr(parameter.grad, "become") else None
    if awaited is not None:
        parameter.grad = awaited.earlier
    if parameter.grad is None:
        parameter.grad = gradient
    elif exact is None:
        parameter.grad.add_(gradient)
    else:
        earlier, version = getattr(parameter.grad, _EXACT, (exact, -1))
        # The sum stays in the older tensor: the newer one is held by its backup until compute has waited for it.
        exact = earlier.add_(exact) if version == parameter.grad._version else exact.add_(parameter.grad)
        parameter.grad.copy_(exact)
    if awaited is not None:
        awaited.become(parameter.grad)
        parameter.grad = awaited
    vars(parameter.grad).pop(TOKENS, None)
    if exact is not None:
        setattr(parameter.grad, _EXACT, (exact, parameter.grad._version))
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)


def scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies it, and what it was rounded from, by `factor`, 0-dim."""
    exact, version = getattr(gradient, _EXACT, (None, -1))
    if exact is not None and version == gradient._version:
        gradient.copy_(exact.mul_(factor))
        setattr(gradient, _EXACT, (exact, gradient._version))
    else:
        gradient.mul_(factor)
