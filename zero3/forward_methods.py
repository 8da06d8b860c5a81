"""register_forward_method(): methods other than `forward` by which a sharded module may be
called.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from .access import states_of
from .guards.module_overrides import Override
from .layer import Zero3Layer, enter_root, layers_of, root_entered, run_in
from .modules import unwrapped
from .sequences.dividing import enter_forward, read_own
from .sequences.parts import parts_of
from .towers.entering import follow

__all__: list[str] = []


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """From now on a call of this method fetches parameters before it and releases them after it, as
    a call of `forward` does.

    A method that only calls submodules needs no registration: these are fetched when they are
    called. It is needed for methods that read parameters themselves, and for methods of a single
    layer. A backward through the results works as after `forward`. In a model with towers
    (`optional=`) the method has gates, as `forward` has; on a mesh with `sp` it takes this rank's
    parts of sequences.

    Every rank calls it, and every rank then calls the same methods in the same order.

    Args:
        module: A `Zero3Layer`, or a model that `shard` has sharded, or a module outside the layers
            of one.
        method_name: The name of the method, as `"encode"`.

    Raises:
        ValueError: Nothing in `module` is sharded, it has no such method, or it lies inside a
            layer: register the layer's method.

    Example::

        zero3.register_forward_method(model, "encode")
        found = model.encode(batch)
        found.mean().backward()
    """
    states_of(module)  # raises if nothing is sharded
    owner = unwrapped(module)
    if not callable(getattr(owner, method_name, None)):
        raise ValueError(
            f"{type(owner).__name__} has no method {method_name!r}: register_forward_method takes "
            "the name of one"
        )
    if parts_of(module) is not None:
        Override(owner, method_name, partial(enter_forward, read_own))
    if isinstance(module, Zero3Layer):
        Override(
            module,
            method_name,
            partial(_call_layer, method_name),
            default=getattr(type(owner), method_name, None),
        )
    elif (entered := root_entered(module)) is not None:
        follow(module, entered[1], method_name)
        enter_root(module, *entered, method_name)
    elif not layers_of(module):
        raise ValueError(
            f"this {type(module).__name__} lies inside a layer, which is fetched as a whole: "
            "register a method of the layer that calls it"
        )


def _call_layer(
    method_name: str, layer: Zero3Layer, _: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    return run_in(layer, getattr(layer.module, method_name), *args, **kwargs)
