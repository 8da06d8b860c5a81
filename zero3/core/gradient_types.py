"""The type of a chunk's gradient: a slice of the model's, on which operations that need all of it must not pass for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from .autograd import as_plain_tensors

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


class DeferredGradient(Tensor):
    """In place of a chunk's gradient while a part of what it will be is kept unreduced. Its shape can be seen, its values can't.

    It stands in nobody's way (optimizers may drop it or zero it, and then what was kept is dropped) and takes no memory.
    Whoever looks at its values has them reduced, and it becomes what comes of that; under `no_sync` he is told that it is
    too early, and that when he asks whether the gradient is sparse: optimizers do that before they change anything.
    (`zero_grad` does too, but after it has detached the gradient.)
    """

    zeroed: bool  # or about to be
    look: Callable[[], bool]  # has it reduced; whether that may be
    reduced: Tensor | None  # what was there before, for the rest to join

    @classmethod
    def like(cls, parameter: Tensor, look: Callable[[], bool]) -> DeferredGradient:
        """For `parameter`, which may have a gradient already."""
        nothing = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        awaited = torch.Tensor._make_subclass(cls, nothing.expand(parameter.shape))  # no view: that would hold `nothing` for life
        awaited.zeroed, awaited.look = False, look
        before = parameter.grad
        awaited.reduced = before.earlier if isinstance(before, DeferredGradient) else before
        return awaited

    @property
    def earlier(self) -> Tensor | None:
        return None if self.zeroed else self.reduced

    def become(self, gradient: Tensor) -> None:
        """The same object from now on is `gradient`: an optimizer may have it in hand already."""
        with as_plain_tensors():
            self.data = gradient
        vars(self).clear()
        vars(self).update(vars(gradient))
        self.__class__ = type(gradient)  # type: ignore[assignment]

    def leave(self, parameter: Tensor, guard: Callable[[Tensor], Tensor]) -> None:
        """Nothing is awaited any more: the parameter has what it had before, or zeros."""
        if self.zeroed:
            self.become(guard(torch.zeros_like(parameter)))
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
            awaited = next(each for each in _flat(args) if isinstance(each, cls))
            if awaited.look() and not isinstance(awaited, cls):
                return func(*args, **(kwargs or {}))
            raise RuntimeError(
                "this gradient is not known yet: all backwards since the last step ran inside zero3.no_sync(model). Run the last "
                "micro-batch's backward outside of it, then clip and step."
            )
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))


def _flat(values: Any) -> list[Any]:
    return [inner for value in values for inner in (_flat(value) if isinstance(value, (list, tuple)) else [value])]
