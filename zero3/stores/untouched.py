"""A gradient in files, as long as nobody has asked for its values since it landed.

Nobody can have changed it, or have a view of it. So the norm that was taken when it landed still
holds, and if clipping scales it, that can wait for the optimizer, which has to bring it into memory
anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..core.autograd import around_accumulation, as_plain_tensors
from ..core.chunk_gradient import SEEN_WITHOUT_VALUES, DeferredGradient
from ..core.sites import become

__all__: list[str] = []

_T = TypeVar("_T", bound=Tensor)
# of what stands for the values while they are to be scaled
_SEEN = SEEN_WITHOUT_VALUES - {Tensor.stride}
Span = tuple[int, int]  # elements of a gradient, flat


@dataclass(slots=True)
class Landed:
    """What is known of a gradient since it landed."""

    kind: type[Tensor]  # what it was, and will be when it is touched
    order: float
    norms: Mapping[Span, Tensor]
    # autograd's own accumulation, as that of a penalty over chunks, shows in this alone
    version: int
    values: Tensor  # the same memory
    factor: Tensor | None = None  # 0-dim: what the values are still to be multiplied by


class UntouchedGradient(Tensor):
    """It is made by switching a gradient's class. If anything asks for its values, it is that
    gradient again, scaled.

    While it is to be scaled, its memory shows nan, for what reads memory without asking.
    """

    zero3_stands_in = True  # for the values that it will have
    landed: Landed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SEEN:
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        touch([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))

    def as_subclass(self, cls: type[_T]) -> _T:
        """As torch's, which asks no `__torch_function__`."""
        touch([self])
        return self.as_subclass(cls)


def watch(parameter: nn.Parameter, order: float, spans: Iterable[Span]) -> None:
    """Begins to watch a gradient that has just landed, and takes the norms of its `spans`. (A hook
    may hold it already.)
    """
    gradient = parameter.grad
    if (
        gradient is None
        or isinstance(gradient, DeferredGradient | UntouchedGradient)
        or not gradient.numel()
    ):
        return
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return
    with as_plain_tensors():
        values = gradient.data
    norms = {span: norm_of(values, span, order) for span in spans}
    gradient.landed = Landed(type(gradient), order, norms, gradient._version, values)  # type: ignore[attr-defined]
    become(gradient, UntouchedGradient)


def norm_of(values: Tensor, span: Span, order: float) -> Tensor:
    """The norm that torch takes of some elements, or of a whole gradient in its own shape."""
    part = values if span == (0, values.numel()) else values.reshape(-1)[slice(*span)]
    norm: Tensor = torch.linalg.vector_norm(part, order)
    return norm


def known_norm(gradient: Tensor, span: Span, order: float) -> Tensor | None:
    """The norm of some elements, if it is known and still holds."""
    if not isinstance(gradient, UntouchedGradient):
        return None
    landed = gradient.landed
    holds = landed.order == order and landed.version == gradient._version and landed.factor is None
    return landed.norms.get(span) if holds else None


def scale_later(gradient: Tensor, factor: Tensor) -> bool:
    """Leaves the multiplication by `factor`, 0-dim, for later. Returns False if somebody may have a
    view of the gradient.

    For gradients whose norm is known: others are touched when it is taken.
    """
    if not isinstance(gradient, UntouchedGradient):
        return False
    gradient.landed.factor = factor  # first, so that nothing is lost if an interrupt comes
    with as_plain_tensors():
        gradient.data = torch.full((), torch.nan, dtype=gradient.dtype).expand(gradient.shape)
    changed(gradient)
    return True


def touch_before_additions(parameter: nn.Parameter) -> Node | None:
    """Autograd's own accumulation, as that of a penalty over chunks, does not ask a gradient before
    it adds to its memory.

    It does from now on, as long as the caller keeps the returned node.
    """
    reference = weakref.ref(parameter)

    def before() -> None:
        gradient = leaf.grad if (leaf := reference()) is not None else None
        touch([gradient.earlier if isinstance(gradient, DeferredGradient) else gradient])

    return around_accumulation(parameter, before, lambda: None)


def changed(gradient: Tensor) -> None:
    """Tells whoever has noted the gradient's version that its values are others."""
    torch.autograd.graph.increment_version(gradient)


def touch(values: Any) -> None:
    """Makes all untouched gradients among `values`, and in lists of them, ordinary ones."""
    for value in values:
        if isinstance(value, (list, tuple)):
            touch(value)
        elif isinstance(value, UntouchedGradient):
            _become_ordinary(value)


def _become_ordinary(gradient: UntouchedGradient) -> None:
    landed = gradient.landed
    del gradient.landed
    become(gradient, landed.kind)
    if landed.factor is not None:
        with torch.no_grad(), as_plain_tensors():
            gradient.data = landed.values.mul_(landed.factor)


def to_bring(gradient: Tensor) -> tuple[Tensor, bool]:
    """A gradient's memory, as a plain tensor, and whether it is still to be written."""
    if isinstance(gradient, UntouchedGradient):
        return gradient.landed.values, gradient.landed.factor is not None
    return gradient.as_subclass(Tensor), False
