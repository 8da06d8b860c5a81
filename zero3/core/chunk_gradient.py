"""A chunk's gradient: how it grows, and what stands for it while a part of it is kept unreduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .autograd import around_accumulation, as_plain_tensors, make_subclass, zero_together
from .flat import not_a_number
from .sites import become

__all__: list[str] = []

_T = TypeVar("_T", bound=Tensor)

SEEN_WITHOUT_VALUES = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "requires_grad", "grad_fn", "is_leaf")
    }
    | {
        Tensor._version.__get__,  # type: ignore[attr-defined]
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.element_size,
        Tensor.stride,
    }
    | {Tensor.requires_grad_, Tensor.detach_}
)


_IS_SPARSE = Tensor.is_sparse.__get__  # type: ignore[attr-defined]


class CallersMistake(RuntimeError):
    """An error that `step_guard` does not catch: every rank raises it."""


class WrongCallError(CallersMistake, ValueError):
    """A call that can't be made there."""


class NotReducedError(CallersMistake):
    """A gradient was used before it was reduced."""


class DefersReductions(Protocol):
    """A layer that may keep gradients for a later reduction."""

    holds: int  # how many `step_guard`s are open around it

    def reduce_deferred(self) -> bool:
        """Reduces the deferred gradients. Returns False if that is not allowed yet."""
        ...

    def chunk_changed(self, label: str) -> None:
        """Inside a backward, before it was over. `label`: the layer's."""
        ...


class DeferredGradient(Tensor):
    """A chunk's gradient while a part of it is kept unreduced. It has a shape and no values, and
    takes no memory.

    It may be dropped or zeroed; then the kept gradients are dropped. Any operation that needs its
    values reduces all deferred gradients first, and the object becomes the reduced gradient. Under
    `no_sync` this is an error. The error comes before an optimizer changes anything, because
    optimizers begin with `gradient.is_sparse`. (`zero_grad` reads `is_sparse` too, but detaches the
    gradient first.)
    """

    zero3_stands_in = True  # for values that are not in its memory
    zeroed: bool  # whether it is zeroed, or detached, which `zero_grad` does before it zeroes
    # a weak reference, which does not keep a deleted model alive
    layer: Callable[[], DefersReductions | None]
    reduced: Tensor | None  # the reduced gradient of earlier backwards
    stands_for: Tensor | None  # a gradient that comes back into its place

    @classmethod
    def like(
        cls,
        parameter: Tensor,
        layer: Callable[[], DefersReductions | None],
        nothing: Tensor | None = None,
        *,
        stands_in: bool = False,
    ) -> DeferredGradient:
        """A deferred gradient for `parameter`, which may have a gradient already. `nothing`: 0-dim,
        memory for it, which nobody reads. `stands_in`: the one that is there will come back.
        """
        if nothing is None:
            nothing = no_values_for(parameter)
        # as_subclass would make a view of `nothing`. `data`: it has a version of its own
        deferred: DeferredGradient = make_subclass(cls, nothing.expand(parameter.shape).data)
        deferred.zeroed, deferred.layer = False, layer
        before = parameter.grad
        deferred.reduced = before.earlier if isinstance(before, DeferredGradient) else before
        deferred.stands_for = before if stands_in else None
        return deferred

    @property
    def earlier(self) -> Tensor | None:
        return None if self.zeroed else self.reduced

    def count_as_zeroed(self, zeroed: bool) -> None:
        self.zeroed = zeroed

    def tell_of_change(self, label: str) -> None:
        """See `DefersReductions.chunk_changed`."""
        if (layer := self.layer()) is not None:
            layer.chunk_changed(label)

    def reduce_now(self) -> None:
        """Reduces this and all other deferred gradients of the model. This object becomes an
        ordinary gradient.

        Raises:
            NotReducedError: It can't be reduced yet, under `no_sync` or in a `step_guard`.
        """
        layer = self.layer()
        if layer is not None and layer.holds:
            raise NotReducedError(
                "an optimizer stepped inside zero3.step_guard, or a gradient was read there (by "
                "clipping, or for a log), before the ranks agreed on the gradients. Put "
                "backwards into the guard; clip and step after it."
            )
        if layer is None or not layer.reduce_deferred() or isinstance(self, DeferredGradient):
            raise NotReducedError(
                "this gradient is not known yet: the backwards since the last step ran inside "
                "zero3.no_sync(model), or zero3.step_guard has dropped the one that would have "
                "reduced. Call zero3.reduce_gradients(model) on every rank, outside of no_sync "
                "(or run the last micro-batch's backward outside of it); then clip and step."
            )

    def become(self, gradient: Tensor) -> None:
        """Makes this very object the same as `gradient`, because an optimizer may hold a reference
        to it already.
        """
        with as_plain_tensors():
            self.data = gradient
        vars(self).clear()
        vars(self).update(vars(gradient))
        become(self, type(gradient))

    def leave(self, parameter: Tensor, typed: Callable[[Tensor], Tensor]) -> None:
        """Ends the deferral, after kept gradients were dropped: the parameter gets its earlier
        gradient back, or zeros.
        """
        if self.zeroed:
            note = vars(self).get(TOKENS)
            self.become(typed(torch.zeros_like(parameter, dtype=parameter.grad_dtype)))
            if note is not None:
                # with no tensor's version, so that `zero3.backward` sees that it was zeroed
                note_tokens(self, note[0], -1)
        else:
            parameter.grad = self.earlier

    def as_subclass(self, cls: type[_T]) -> _T:
        """As torch's, which asks no `__torch_function__`."""
        self.reduce_now()
        return self.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (Tensor.zero_, zero_together):
            for gradient in args[0] if func is zero_together else args[:1]:
                if isinstance(gradient, cls):
                    gradient.zeroed = True
                else:
                    gradient.zero_()
            return args[0]
        if func in (Tensor.requires_grad_, Tensor.detach_):
            args[0].zeroed = True
        if func not in SEEN_WITHOUT_VALUES and not (func is _IS_SPARSE and args[0].zeroed):
            given = each_in([*args, *(kwargs or {}).values()])
            next(each for each in given if isinstance(each, cls)).reduce_now()
            return func(*args, **(kwargs or {}))
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))


def no_values_for(parameter: Tensor) -> Tensor:
    """What a deferred gradient shows of itself to whoever reads memory without asking."""
    return not_a_number(parameter.grad_dtype or parameter.dtype, parameter.device)


def accumulate_beside(
    parameter: nn.Parameter, layer: Callable[[], DefersReductions | None]
) -> Node | None:
    """Lets autograd add to `parameter.grad` while it is deferred, as a penalty over chunks does: it
    adds to the reduced part.

    This works as long as the caller keeps the returned node.
    """
    reference, put_aside = weakref.ref(parameter), list[DeferredGradient]()

    def before() -> None:
        leaf = reference()
        gradients = layer()
        if gradients is not None and gradients.holds:
            raise NotReducedError(
                "a gradient flows straight into a chunk inside zero3.step_guard (from a "
                "penalty over model.parameters()?). The guard could not take it back: run that "
                "backward after the guard"
            )
        if leaf is not None and isinstance(leaf.grad, DeferredGradient):
            if not leaf.grad.zeroed:  # zeroed gradients are not added to
                put_aside.append(leaf.grad)
            leaf.grad = leaf.grad.earlier

    def after() -> None:
        leaf = reference()
        if leaf is not None and put_aside:
            deferred = put_aside.pop()
            deferred.reduced = leaf.grad
            leaf.grad = deferred

    return around_accumulation(parameter, before, after)


def reduce_deferred(gradients: Iterable[Tensor | None]) -> None:
    """Reduces those of `gradients` that are deferred, so that their values can be read. All ranks
    call it.

    Raises:
        NotReducedError: They can't be reduced yet, under `no_sync`.
    """
    for gradient in gradients:
        if isinstance(gradient, DeferredGradient):
            gradient.reduce_now()


def each_in(values: Any) -> list[Any]:
    """The arguments of an operation, and those in lists of them."""
    return [
        inner
        for value in values
        for inner in (each_in(value) if isinstance(value, (list, tuple)) else [value])
    ]


# -- accumulation

# attribute of a gradient: (the number of tokens it is the mean over, 0-dim; its version then)
TOKENS = "zero3_tokens"


def note_tokens(gradient: Tensor, total: Tensor, version: int) -> None:
    """Notes that the gradient, at that version, is the mean over `total` tokens, 0-dim."""
    gradient.zero3_tokens = (total, version)  # type: ignore[attr-defined]


def accumulate(
    parameter: nn.Parameter, gradient: Tensor, exact: Tensor | None, *, hooks: bool = True
) -> None:
    """[backup 4] Adds `gradient` to the parameter's gradient, and calls the parameter's hooks, as
    autograd would. `hooks`: whether it is of anything; otherwise none is called.

    `exact` is the gradient in a wider dtype. It stays with the parameter's gradient, and later
    micro-batches are added to it, so that the sum is rounded only once. It is freed with that
    gradient. If the caller changes the gradient, it is not used again.
    """
    for hook in (parameter._backward_hooks or {}).values() if hooks else ():
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
        earlier, version = getattr(parameter.grad, "zero3_exact", (exact, -1))
        # The sum is made in the older tensor, because the newer one belongs to a backup that is
        # still waited for.
        exact = (
            earlier.add_(exact)
            if version == parameter.grad._version
            else exact.add_(parameter.grad)
        )
        parameter.grad.copy_(exact)
    if deferred is not None:
        deferred.become(parameter.grad)
        parameter.grad = deferred
    vars(parameter.grad).pop(TOKENS, None)
    if exact is not None:
        # (the wider tensor that it was rounded from; its version then)
        parameter.grad.zero3_exact = exact, parameter.grad._version  # type: ignore[attr-defined]
    for after in (parameter._post_accumulate_grad_hooks or {}).values() if hooks else ():
        after(parameter)


def has_hooks(parameter: nn.Parameter) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def scale_gradient(gradient: Tensor, factor: Tensor) -> None:
    """Multiplies a gradient, and the wider tensor that it was rounded from, by the 0-dim
    `factor`.
    """
    exact, version = getattr(gradient, "zero3_exact", (None, -1))
    factor = factor.to(gradient.device)  # the host waits for it where the gradient rests there
    if exact is not None and version == gradient._version:
        gradient.copy_(exact.mul_(factor))
        gradient.zero3_exact = exact, gradient._version  # type: ignore[attr-defined]
    else:
        gradient.mul_(factor)
