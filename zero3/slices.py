"""The types of a chunk's gradient. It is one rank's slice, so each refuses what needs the gradients
of all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor

from .comm.communicator import Communicator
from .core.autograd import as_plain_tensors
from .core.chunk import Chunk, Part
from .core.flow import Among

__all__: list[str] = []

_NORMS = frozenset(
    {torch._foreach_norm, torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}
)
_STILL_A_SLICE = frozenset({Tensor.detach, Tensor.data.__get__})  # type: ignore[attr-defined]
# copies are plain tensors, as those of `clone` are
_COPIES = frozenset({Tensor.__deepcopy__, Tensor.__reduce_ex__})
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


class ShardGradient(Tensor):
    """The gradient `[S]` of one rank's chunk. It behaves as a plain tensor, with two exceptions.

    * A norm would be the norm of this rank's slice, so `torch.nn.utils.clip_grad_norm_` would clip
      each rank by another factor. It raises an error that names `zero3.clip_grad_norm_`, also for
      `.data` and `.detach()`.
    * `torch.amp.GradScaler` looks for inf and nan in the gradient. If one rank finds any, all ranks
      must skip the step, so the finding is reduced over ranks (one scalar; every rank unscales).
    """

    communicator: Communicator

    @classmethod
    def of(cls, gradient: Tensor, communicator: Communicator) -> Self:
        guarded = gradient.as_subclass(cls)
        guarded.communicator = communicator
        return guarded

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if getattr(kind, "zero3_stands_in", False):
                return NotImplemented  # torch asks the one that stands for other values
        if func in _NORMS:
            cls._before_norm(sys._getframe(1))
        if func in _COPIES:
            return func(args[0].as_subclass(Tensor), *args[1:])
        if func is _UNSCALE:
            cls._before_unscale(args[0])
            # torch copies the scale to the host without waiting for the copy
            if args[2].is_pinned():
                raise RuntimeError(
                    "gradients rest in host memory (offload=), where torch.amp.GradScaler would "
                    "unscale them by a number that may not have come yet: use zero3.GradScaler, "
                    "which takes the same arguments"
                )
        with as_plain_tensors():
            result = func(*args, **(kwargs or {}))
        if func in _STILL_A_SLICE:
            return cls.of(result, args[0].communicator)
        if func is _UNSCALE:
            next(g for g in args[0] if isinstance(g, cls)).communicator.all_reduce(
                args[1], maximum=True
            )
        return result

    @classmethod
    def _before_norm(cls, caller: FrameType | None) -> None:
        raise RuntimeError(
            "this is the norm of one rank's slice of a gradient, and every rank gets another: use "
            "zero3.clip_grad_norm_(model, max_norm) to clip, or zero3.clip_grad_norm_(model, "
            "float('inf')) to read the global norm; zero3.parameter_norms(model) for each "
            "parameter's norm. (The slice's own: chunk.grad.as_subclass(torch.Tensor).norm().)"
        )

    @classmethod
    def _before_unscale(cls, gradients: Sequence[Tensor]) -> None:
        """Chunks need no check: every rank has the same number of them, so every rank takes part in
        the all-reduce.
        """


class PieceGradient(ShardGradient):
    """The gradient of a part of a chunk. Some ranks have no part, so they would not take part in
    GradScaler's all-reduce.
    """

    @classmethod
    def _before_unscale(cls, gradients: Sequence[Tensor]) -> None:
        raise RuntimeError(
            "torch.amp.GradScaler looks for inf and nan on each rank by itself, and after "
            "zero3.param_groups not every rank has a part of every gradient, so ranks would step "
            "differently: use zero3.GradScaler, which takes the same arguments"
        )


class WholeGradient(PieceGradient):
    """The gradient of a parameter in its own shape. Its norm is right, but a total over parameters
    is still one rank's.
    """

    @classmethod
    def _before_norm(cls, caller: FrameType | None) -> None:
        # what stood for its values has passed the call on
        while caller is not None and caller.f_code.co_name == "__torch_function__":
            caller = caller.f_back
        if (
            caller is not None
            and caller.f_globals.get("__name__") == torch.nn.utils.clip_grad.__name__
        ):
            super()._before_norm(caller)


def typed(chunk: Chunk, among: Among, part: Part, gradient: Tensor) -> Tensor:
    """`gradient` in the type that the gradient of a part of the chunk has. `among`: the layer's."""
    if chunk.whole.layout.world_size == 1:
        return gradient
    cut = PieceGradient if chunk.parts.divided else ShardGradient
    return (WholeGradient if part.whole else cut).of(gradient, among.communicator)
