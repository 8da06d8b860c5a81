"""A chunk's gradient: its type, which refuses what needs all of the model's gradients, and how it grows."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..comm.communicator import Communicator
from .autograd import around_accumulation, as_plain_tensors

__all__: list[str] = []

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
    def of(cls, gradient: Tensor, communicator: Communicator) -> Self:
        guarded = gradient.as_subclass(cls)
        guarded.communicator = communicator
        return guarded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            cls._before_norm(sys._getframe(1))
        if func is _UNSCALE:
            cls._before_unscale(args[0])
        with as_plain_tensors():
            result = func(*args, **(kwargs or {}))
        if func in _STILL_A_SLICE:
            return cls.of(result, args[0].communicator)
        if func is _UNSCALE:
            next(g for g in args[0] if isinstance(g, cls)).communicator.all_reduce(args[1], maximum=True)
        return result

    @classmethod
    def _before_norm(cls, caller: FrameType | None) -> None:
        raise RuntimeError(
            "a norm of a chunk's gradient is that of one rank's slice, different on every rank: use "
            "zero3.clip_grad_norm_(model, max_norm) to clip, or zero3.clip_grad_norm_(model, float('inf')) to read "
            "the global norm; zero3.parameter_norms(model) for those of parameters. (The slice's own norm: "
            "chunk.grad.as_subclass(torch.Tensor).norm().)"
        )

    @classmethod
    def _before_unscale(cls, gradients: Sequence[Tensor]) -> None:
        """Nothing to say of chunks: every rank has the same number of them, so each joins in the all-reduce."""


class PieceGradient(ShardGradient):
    """That of a part of a chunk. Ranks have different numbers of them, some none: an all-reduce in here would wait for ever."""

    @classmethod
    def _before_unscale(cls, gradients: Sequence[Tensor]) -> None:
        raise RuntimeError(
            "torch.amp.GradScaler looks for inf and nan on each rank by itself, and after zero3.param_groups not every rank has a "
            "part of every gradient, so ranks would step differently: use zero3.GradScaler, which takes the same arguments"
        )


class WholeGradient(PieceGradient):
    """That of a parameter in its own shape: an optimizer's norm of it is right. A total over parameters is still one rank's."""

    @classmethod
    def _before_norm(cls, caller: FrameType | None) -> None:
        if caller is not None and caller.f_globals.get("__name__") == torch.nn.utils.clip_grad.__name__:
            super()._before_norm(caller)


class NotReducedError(RuntimeError):
    """A gradient was needed that is not known yet: the caller's mistake, and no failure of a micro-batch."""


class DefersReductions(Protocol):
    """A layer whose gradients wait to be reduced."""

    def reduce_deferred(self) -> bool:
        """Reduces what is deferred; False where that may not be yet."""
        ...


class DeferredGradient(Tensor):
    """Stands for a chunk's gradient while a part of what it will be is kept unreduced. It shows its shape, not its values.

    Optimizers may drop it or zero it, and then what was kept is dropped; it takes no memory. Whoever asks for its values has
    all deferred gradients reduced, and it becomes the result. Under `no_sync` that is an error, which comes before an
    optimizer changes anything: optimizers first ask whether a gradient is sparse.
    (`zero_grad` asks too, but after it has detached the gradient.)
    """

    zeroed: bool  # or about to be
    layer: Callable[[], DefersReductions | None]  # a weak reference: it would keep a deleted model alive
    reduced: Tensor | None  # what was there before, for the rest to join

    @classmethod
    def like(cls, parameter: Tensor, layer: Callable[[], DefersReductions | None]) -> DeferredGradient:
        """For `parameter`, which may have a gradient already."""
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        deferred = torch.Tensor._make_subclass(cls, nothing.expand(parameter.shape))  # no view: that would hold `nothing` for life
        deferred.zeroed, deferred.layer = False, layer
        before = parameter.grad
        deferred.reduced = before.earlier if isinstance(before, DeferredGradient) else before
        return deferred

    @property
    def earlier(self) -> Tensor | None:
        return None if self.zeroed else self.reduced

    def reduce_now(self) -> None:
        """Has it reduced: from now on it is an ordinary gradient.

        Raises:
            RuntimeError: under `no_sync`, where it has no values yet.
        """
        layer = self.layer()
        if layer is None or not layer.reduce_deferred() or isinstance(self, DeferredGradient):
            raise NotReducedError(
                "this gradient is not known yet: a zero3.step_guard(model) has not decided on it, or all backwards since the last step "
                "ran inside zero3.no_sync(model). Leave the guard, or run the last micro-batch's backward outside of no_sync; then clip "
                "and step."
            )

    def become(self, gradient: Tensor) -> None:
        """The same object from now on is `gradient`: an optimizer may have it in hand already."""
        with as_plain_tensors():
            self.data = gradient
        vars(self).clear()
        vars(self).update(vars(gradient))
        self.__class__ = type(gradient)  # type: ignore[assignment]

    def leave(self, parameter: Tensor, typed: Callable[[Tensor], Tensor]) -> None:
        """Nothing is deferred any more: the parameter has what it had before, or zeros."""
        if self.zeroed:
            self.become(typed(torch.zeros_like(parameter)))
        else:
            parameter.grad = self.earlier

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.zero_, torch._foreach_zero_):
            for gradient in args[0] if func is torch._foreach_zero_ else args[:1]:
                if isinstance(gradient, cls):
                    gradient.zeroed = True
                else:
                    gradient.zero_()
            return args[0]
        if func in (Tensor.requires_grad_, Tensor.detach_):
            args[0].zeroed = True
        if func not in _SEEN_WITHOUT_VALUES and not (func is _IS_SPARSE and args[0].zeroed):
            next(each for each in _flat(args) if isinstance(each, cls)).reduce_now()
            return func(*args, **(kwargs or {}))
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))


def accumulate_beside(parameter: nn.Parameter) -> Node | None:
    """From now on, while `parameter.grad` is deferred, autograd adds to what was there before: a penalty over chunks does that.

    It lasts as long as the caller keeps what is returned.
    """
    reference, put_aside = weakref.ref(parameter), list[DeferredGradient]()

    def before() -> None:
        leaf = reference()
        if leaf is not None and isinstance(leaf.grad, DeferredGradient):
            put_aside.append(leaf.grad)
            leaf.grad = leaf.grad.earlier

    def after() -> None:
        leaf = reference()
        if leaf is not None and put_aside:
            deferred = put_aside.pop()
            deferred.reduced, deferred.zeroed = leaf.grad, False
            leaf.grad = deferred

    return around_accumulation(parameter, before, after)


def reduce_deferred(gradients: Iterable[Tensor | None]) -> None:
    """Before somebody reads `gradients`: those that are deferred are reduced, on every rank.

    Raises:
        RuntimeError: under `no_sync`, where they have no values yet.
    """
    for gradient in gradients:
        if isinstance(gradient, DeferredGradient):
            gradient.reduce_now()


def _flat(values: Any) -> list[Any]:
    return [inner for value in values for inner in (_flat(value) if isinstance(value, (list, tuple)) else [value])]


# -- how a chunk's gradient grows

TOKENS = "_zero3_tokens"  # on a gradient: over how many tokens it is the mean, 0-dim, and its version then
_EXACT = "_zero3_exact"  # on a gradient: what it was rounded from, and its version then


def accumulate(parameter: nn.Parameter, gradient: Tensor, exact: Tensor | None) -> None:
    """[backup 4] Adds `gradient` to the parameter's, as autograd would. The parameter is in no graph, so its hooks are called here.

    `exact`: the gradient in a wider dtype. It stays with the parameter's gradient, and sums are made in it, so that
    micro-batches round once and not each. It dies with that gradient, and does not count if somebody changed it.
    """
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient, exact = (gradient, exact) if changed is None else (changed, None)
    deferred = parameter.grad if isinstance(parameter.grad, DeferredGradient) else None
    if deferred is not None:
        parameter.grad = deferred.earlier
    if parameter.grad is None:
        parameter.grad = gradient
    elif exact is None:
        parameter.grad.add_(gradient)
    else:
        earlier, version = getattr(parameter.grad, _EXACT, (exact, -1))
        # The sum stays in the older tensor: the newer one is held by its backup until compute has waited for it.
        exact = earlier.add_(exact) if version == parameter.grad._version else exact.add_(parameter.grad)
        parameter.grad.copy_(exact)
    if deferred is not None:
        deferred.become(parameter.grad)
        parameter.grad = deferred
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
