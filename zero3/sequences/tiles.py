"""tile(): a module that looks at each token alone computes a few tokens at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..comm.plain_values import integer
from ..core.parameters import parameters_of
from ..guards.marks import state_of
from ..guards.module_overrides import Override
from ..layer import enter_root, layers_of, root_entered
from ..modules import unwrapped
from ..policy import gradient_dtype

__all__: list[str] = []

M = TypeVar("M", bound=nn.Module)


def tile(module: M, length: int | None) -> M:
    """From now on a module computes `length` tokens at a time, and again in backward. So of its
    inner activations one tile's are there, and none between forward and backward.

    It is for modules that look at each token alone, such as an MLP. zero3 sees whether the output
    has the tile's tokens, and no more: a BatchNorm, or a router whose experts have a capacity,
    mixes tokens and must not be tiled. Dropout is recomputed as it was.

    The module is gathered once and reduced once, whatever the tiles. The tiles' gradients of a
    weight are added up in the policy's `reduce_dtype`.

    Args:
        module: Any module whose first argument is `[..., S, H]`. It is cut along S; other arguments
            go to each tile. In a sharded model: a layer itself, or a module that has no layers
            inside. It may be sharded later, too.
        length: Tokens of a tile. None takes the tiles away.

    Returns:
        `module`, the same object.

    Raises:
        ValueError: `length` is below 1, or there are layers inside of the module. Later, in a call:
            the output is no single tensor `[..., S, *]` with the tile's S.
        TypeError: `length` is no integer, or `module` no module.

    Example::

        for block in model.model.layers:
            zero3.tile(block.mlp, 2048)

    Source: Bekman et al., Arctic Long Sequence Training, 2025 (TiledMLP).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, found {type(module).__name__}")
    tokens = None if length is None else integer(length)
    if length is not None and tokens is None:
        raise TypeError(f"length must be an integer or None, found {length!r}")
    if tokens is not None and tokens < 1:
        raise ValueError(f"length must be 1 or more, found {tokens}")
    inner = unwrapped(module)
    _check_no_layers(module)
    if (entered := root_entered(inner)) is not None:  # it stays the outermost
        vars(inner)["forward"].undo()
    found = vars(inner).get("forward")
    if isinstance(found, Override) and isinstance(found.around, Tiled):
        found.undo()
    if tokens is not None:
        Override(inner, "forward", Tiled(tokens))
    if entered is not None:
        enter_root(inner, *entered)
    return module


def _check_no_layers(module: nn.Module) -> None:
    """Raises ValueError if there are layers inside, or experts: each tile would exchange."""
    if any(layer is not module for layer in layers_of(module)):
        raise ValueError(
            f"there are layers inside of this {type(unwrapped(module)).__name__}, which each tile "
            "would gather again: tile the modules in them"
        )


Compute = Callable[[Tensor], Tensor]


def joined(whole: Tensor, length: int, compute: Compute) -> Tensor:
    """What `compute` makes of each tile."""
    return torch.cat([compute(each) for each in torch.split(whole, length, -2)], -2)


class Tiled:
    """What a tiled module's forward runs. `join`: see `joined`; a plan does it in another way."""

    def __init__(
        self, length: int, join: Callable[[Tensor, int, Compute], Tensor] = joined
    ) -> None:
        self._length, self._join = length, join

    def __call__(
        self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Tensor:
        name = None if args else next(iter(inspect.signature(forward).parameters), None)
        whole = kwargs.pop(name) if name in kwargs else args[0]
        if not isinstance(whole, Tensor) or whole.dim() < 2:
            raise ValueError(
                f"tile: {type(module).__name__} was called with a "
                f"{type(whole).__name__} as its first argument, expected a tensor [..., S, H]"
            )
        _check_no_layers(module)
        one = partial(self._one, module, forward, args[1:], kwargs)
        if not torch.is_grad_enabled():
            return self._join(whole, self._length, one)
        _add_up_widely(module)
        return self._join(whole, self._length, partial(checkpoint, one, use_reentrant=False))

    @staticmethod
    def _one(
        module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, tile: Tensor
    ) -> Tensor:
        # one whose batch has several rows comes back from `offload_activations` in order, where a
        # linear map takes another way than forward did
        made = forward(tile.contiguous(), *args, **kwargs)
        if not isinstance(made, Tensor) or made.shape[:-1] != tile.shape[:-1]:
            found = list(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"tile: {type(module).__name__} is not token-wise: of {list(tile.shape)} it made "
                f"{found}, expected a tensor {[*tile.shape[:-1], '*']}"
            )
        return made


def _add_up_widely(module: nn.Module) -> None:
    """Autograd adds up the gradients of all tiles in the dtype of a parameter's gradient."""
    for inner in module.modules():
        for _, parameter in parameters_of(inner):
            state = state_of(parameter)
            if parameter is not None and parameter.requires_grad and state is not None:
                dtype = gradient_dtype(state.policy, parameter.dtype)
                if parameter.grad_dtype not in (None, dtype):
                    parameter.grad_dtype = dtype
