"""Attributes of the chunks and parameters of a sharded model: a reference to the layer, and
refusals for tools that misread them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..core.released import ReleasedParameter, refuse_values

__all__: list[str] = []


class StaysBehind:
    """A parameter's attribute. A copy of the parameter, or a pickle, has None instead."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class StateMemory(StaysBehind):
    """Where a parameter's state is to lie, and how to wait for what steps have changed.

    `place` gives memory, 1-D, of so many elements, or None, if there is none left. `land` returns
    when nothing is still to be written to a disk, or raises OSError.
    """

    def __init__(
        self, place: Callable[[int, torch.dtype], Tensor | None], land: Callable[[], None]
    ) -> None:
        self.place, self.land = place, land


class Owner(StaysBehind, weakref.ref[Any]):
    """A parameter's weak reference to what it belongs to: its layer's state, or an optimizer."""

    __slots__ = ()


def state_of(parameter: object) -> Any:
    """The state of the layer that a chunk, a part of one, or a parameter belongs to. None: it
    belongs to none that is there.
    """
    owner = getattr(parameter, "zero3_state", None)
    return owner() if isinstance(owner, Owner) else None


def _refuse_distributed_checkpoint(*_: object) -> NoReturn:
    """Replaces methods by which torch.distributed.checkpoint asks a tensor which part of a whole it
    is.
    """
    raise RuntimeError(
        "torch.distributed.checkpoint over a sharded model's chunks: every rank's slice has the "
        "same name, so one rank's would stand for all. Use zero3.save_checkpoint and "
        "zero3.load_checkpoint, or give it what zero3.full_state_dict(model) returns."
    )


def mark(parameter: nn.Parameter, state: Any) -> nn.Parameter:
    """Marks a chunk or a part of one, so that it leads to its layer, and is not mistaken for a
    whole tensor.
    """
    parameter.zero3_state = Owner(state)  # type: ignore[attr-defined]
    parameter.__create_write_items__ = _refuse_distributed_checkpoint  # type: ignore[attr-defined]
    parameter.__create_chunk_list__ = _refuse_distributed_checkpoint  # type: ignore[attr-defined]
    return parameter


def mark_ignored(parameter: nn.Parameter, state: object) -> bool:
    """Marks a parameter that is left alone, so that it leads to its layer. Returns False if it is
    another layer's already.
    """
    if ignored_by(parameter) is not None:
        return False
    parameter.__dict__.update(
        {"zero3_ignored_by": Owner(state), "__getstate__": _Method(_own_attributes, parameter)}
    )
    return True


def ignored_by(parameter: object) -> Any:
    """The state of the layer that leaves a parameter alone, or None."""
    owner = getattr(parameter, "zero3_ignored_by", None)
    return owner() if isinstance(owner, Owner) else None


class _Method:
    """A function of one parameter alone, as its attribute. It does not hold the parameter."""

    __slots__ = ("_function", "_parameter")

    def __init__(self, function: Callable[..., Any], parameter: nn.Parameter) -> None:
        self._function = function
        self._parameter = weakref.ref(parameter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._parameter(), *args, **kwargs)


def mark_sharded(parameter: nn.Parameter, name: str, state: object) -> None:
    """Gives a sharded parameter its name for errors, a weak reference to its layer, and two methods
    of its own.
    """
    attributes = {"zero3_name": name, "zero3_state": Owner(state)}
    attributes |= {
        "set_": _Method(_set_unless_itself, parameter),
        "__getstate__": _Method(_own_attributes, parameter),
    }
    parameter.__dict__.update(attributes)


def _set_unless_itself(parameter: nn.Parameter, /, *source: Any, **options: Any) -> Tensor:
    """`parameter.set_(parameter)` changes nothing, and so it must not count as a write.

    torch's `register_parametrization` does it, and peft registers one in every forward of fused
    experts. (A released parameter is asked here because torch does not send this operation through
    `__torch_function__`.)
    """
    if isinstance(parameter, ReleasedParameter):
        refuse_values(parameter, "set_")
    itself = len(source) == 1 and source[0] is parameter
    return parameter if itself else Tensor.set_(parameter, *source, **options)


def _own_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes that a pickle of the parameter keeps: those that the caller has
    set.
    """
    ours = ("zero3_name", "zero3_state", "zero3_ignored_by", "zero3_recipe", "set_", "__getstate__")
    return {name: value for name, value in vars(parameter).items() if name not in ours}
