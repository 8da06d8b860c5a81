"""A chunk's gradient: a slice of the model's, on which operations that need all of it must not pass for it; and how sums are made in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .autograd import as_plain_tensors
from .collectives import Communicator

__all__: list[str] = []

TOKENS = "_zero3_tokens"  # on a gradient: over how many tokens it is the mean, 0-dim, and its version then
_EXACT = "_zero3_exact"  # on a gradient: what it was rounded from, and its version then

_NORMS = frozenset({torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm})
_STILL_A_SLICE = frozenset({Tensor.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


_SEEN_WITHOUT_VALUES = frozenset(
    {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf")}
    | {Tensor._version.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.element_size, Tensor.stride}  # type: ignore[attr-defined]
    | {Tensor.requires_grad_, Tensor.detach_}
)


_IS_SPARSE = Tensor.is_sparse.__get__  # type: ignore[attr-defined]


class ShardGradient(Tensor):
    """A gradient `[S]` of one rank's chunk; every operation but those below sees a plain tensor.

    * A norm is this rank's alone: `torch.nn.utils.clip_grad_norm_` on chunks would clip each rank by another factor.
      It raises and names `zero3.clip_grad_norm_`; also by way of `.data` or `.detach()`.
    * `torch.amp.GradScaler` looks for inf and nan in it: what one rank finds, all ranks are told, or they would step
      differently. (One scalar all-reduce; every rank unscales.)
    """

    communicator: Communicator

    @classmethod
    def of(cls, gradient: Tensor, communicator: Communicator) -> ShardGradient:
        guarded = gradient.as_subclass(cls)
        guarded.communicator = communicator
        return guarded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            raise RuntimeError(
                "a norm of a chunk's gradient is that of one rank's slice, different on every rank: use "
                "zero3.clip_grad_norm_(model, max_norm) to clip, or zero3.clip_grad_norm_(model, float('inf')) to read "
                "the global norm. (The slice's own norm: chunk.grad.as_subclass(torch.Tensor).norm().)"
            )
        with as_plain_tensors():
            result = func(*args, **(kwargs or {}))
        if func in _STILL_A_SLICE:
            return cls.of(result, args[0].communicator)
        if func is _UNSCALE:
            found_inf = args[1]
            next(g for g in args[0] if isinstance(g, cls)).communicator.all_reduce(found_inf, maximum=True)
        return result


class AwaitedGradient(Tensor):
    """In place of a chunk's gradient while `no_sync` keeps what it will be. Its shape can be seen, its values can't.

    It stands in nobody's way (optimizers may drop it or zero it, and then what was kept is dropped) and takes no memory;
    a step that would use it comes too early, and is told so when it asks whether the gradient is sparse: optimizers do that
    before they change anything. (`zero_grad` does too, but after it has detached the gradient.)
    """

    zeroed: bool  # or about to be

    @classmethod
    def like(cls, parameter: Tensor) -> AwaitedGradient:
        awaited = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape).as_subclass(cls)
        awaited.zeroed = False
        return awaited

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.zero_, torch._foreach_zero_):
            for gradient in args[0] if func is torch._foreach_zero_ else args[:1]:
                if not isinstance(gradient, cls):
                    gradient.zero_()
            return args[0]
        if func in (Tensor.requires_grad_, Tensor.detach_):
            args[0].zeroed = True
        if func not in _SEEN_WITHOUT_VALUES and not (func is _IS_SPARSE and args[0].zeroed):
            raise RuntimeError(
                "this gradient is not known yet: all backwards since the last step ran inside zero3.no_sync(model). Run the last "
                "micro-batch's backward outside of it, then clip and step."
            )
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))


def accumulate(parameter: nn.Parameter, gradient: Tensor, exact: Tensor | None) -> None:
    """As autograd would: the parameter is in no graph, so its hooks are called here.

    `exact`: the gradient in a wider dtype. It stays with the parameter's gradient, and sums are made in it, so that
    micro-batches round once and not each; it dies with that gradient, and does not count if somebody changed it.
    """
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient, exact = (gradient, exact) if changed is None else (changed, None)
    if parameter.grad is None or isinstance(parameter.grad, AwaitedGradient):
        parameter.grad = gradient
    elif exact is None:
        parameter.grad.add_(gradient)
    else:
        earlier, version = getattr(parameter.grad, _EXACT, (exact, -1))
        # The sum stays in the older tensor: the newer one is held by its backup until compute has waited for it.
        exact = earlier.add_(exact) if version == parameter.grad._version else exact.add_(parameter.grad)
        parameter.grad.copy_(exact)
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
