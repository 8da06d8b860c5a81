"""The modules of a model with towers, at whose calls ranks come to gates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from ..auto_wrap import Candidate
from ..comm.communicator import Communicator
from ..comm.factory import in_memory
from ..core.layer_state import LayerState
from ..core.parameters import released_in
from ..core.runtime import Runtime, compare_call
from ..core.schedule import LearnedOrder
from ..guards.module_overrides import Override
from ..layer import Zero3Layer, is_layer, layers_of, run_sharded, runtimes_in, states_in
from ..modules import is_callable, own_module_name, own_modules, unwrapped
from .gates import Gate, Gates, ModuleInside, ModuleOutside

__all__: list[str] = []


def own_layers(
    towers: Mapping[str, nn.Module], layers: Iterable[tuple[Candidate, ...]]
) -> dict[str, nn.Module]:
    """The towers that hold parameters in none of the `layers`: each becomes a layer, too."""
    ids = {id(each.module) for part in layers for each in part}

    def will_be_layer(module: nn.Module) -> bool:
        return id(module) in ids

    return {
        name: tower
        for name, tower in towers.items()
        if not will_be_layer(tower)
        and any(
            parameter is not None
            for _, module in own_modules(tower, will_be_layer)
            for parameter in module._parameters.values()
        )
    }


def put_gates(
    model: nn.Module, towers: Mapping[str, nn.Module], root: LayerState, host: Communicator
) -> Gates:
    """Puts gates around the modules of a model, whose layers have their places already, and that
    has no root yet. `host`: a communicator for what ranks tell each other.
    """
    tower_of = {
        id(inner): number
        for number, tower in enumerate(towers.values())
        for inner in (tower, *map(unwrapped, tower.modules()))
    }
    called = list(_called(model, set(map(id, towers.values()))))
    rooms = [(name, module, own) for name, module, own in called if _in(tower_of, module)]
    depth = root.policy.prefetch_depth
    trunk = LearnedOrder[LayerState]((), depth, partial(compare_call, root.communicator))
    names = [name for name, _, _ in rooms]
    gates = Gates(list(towers), names, host, in_memory(host), trunk, depth)
    here = weakref.ref(gates)  # a runtime holds it; a module must hold nothing that holds it
    for number, (name, module, own) in enumerate(rooms, 1):
        room = ModuleInside(name, number, tower_of[id(unwrapped(module))], weakref.ref(module))
        Override(module, "forward", partial(_in_tower, here, room, own))
    everywhere, before = _places(model, tower_of, len(towers))
    outside = [(name, module) for name, module, _ in called if not _in(tower_of, module)]
    for _, module in outside:
        if found := before.get(id(unwrapped(module))):
            gates.before[states_in(module)[0]] = frozenset(found)
    for place, (name, module) in enumerate(outside):
        around = frozenset(
            number
            for number, tower in enumerate(towers.values())
            if any(unwrapped(inner) is tower for inner in module.modules())
        )
        gated = frozenset(everywhere | before.get(id(unwrapped(module)), set()))
        spot = partial(ModuleOutside, name or type(model).__name__, place, around, gated)
        if is_layer(module) and around:
            Override(unwrapped(module), "forward", partial(_outside, here, spot(True, True)))
        gates.outside[id(module)] = spot(not (is_layer(module) and around), False)
        Override(module, "forward", partial(_outside, here, gates.outside[id(module)]))
    return gates


def follow(module: nn.Module, runtime: Runtime, method_name: str) -> None:
    """From now on, gates are in another method of `module`, too, which is outside of layers."""
    gates = runtime.own_order
    if isinstance(gates, Gates) and (spot := gates.outside.get(id(module))) is not None:
        Override(module, method_name, partial(_outside, weakref.ref(gates), spot))


def towers_of(model: nn.Module) -> tuple[str, ...]:
    """The names of a sharded model's towers."""
    return next((gates.towers for gates in _gates_in(model)), ())


def gates_of(model: nn.Module) -> list[Gate]:
    """What ranks without data take part in."""
    return [gates.without_data for gates in _gates_in(model)]


def _gates_in(model: nn.Module) -> list[Gates]:
    orders = [runtime.own_order for runtime in runtimes_in(model)]
    return [order for order in orders if isinstance(order, Gates)]


def refuse_towers(model: nn.Module, caller: str, reason: str) -> None:
    """Raises ValueError on every rank if the model has towers."""
    if found := towers_of(model):
        raise ValueError(
            f"{caller}: this model has towers, which not every rank calls ({', '.join(found)}), "
            f"and {reason}. With zero3.shard(..., optional=()) it has none, and all ranks call the "
            "same layers"
        )


def _in(tower_of: Mapping[int, int], module: nn.Module) -> bool:
    return id(unwrapped(module)) in tower_of


def _called(
    model: nn.Module, towers: set[int]
) -> Iterator[tuple[str, nn.Module, weakref.ref[Zero3Layer] | None]]:
    """Names and modules that are called and hold layers, or what a tower's own layer has: and that
    one, if it is around the module.
    """
    outside = {id(module) for _, module in own_modules(model, is_layer)}
    own = {
        id(module): weakref.ref(layer)
        for layer in layers_of(model)
        if id(layer.module) in towers
        for _, module in own_modules(layer.module, is_layer)
        if any(released_in(inner) for _, inner in own_modules(module, is_layer))
    }
    for name, module in model.named_modules():
        holds = is_layer(module) or id(module) in own or bool(states_in(module))
        if holds and (
            is_layer(module) or (id(module) in outside | own.keys() and is_callable(module))
        ):
            yield own_module_name(name), module, own.get(id(module))


def _places(
    model: nn.Module, tower_of: Mapping[int, int], towers: int
) -> tuple[set[int], dict[int, set[int]]]:
    """The towers that may be called anywhere; and those in a list of blocks, whose place is before
    the next block that is none, by that block.
    """
    everywhere, before = set(range(towers)), dict[int, set[int]]()
    for blocks in model.modules():
        found = list(map(unwrapped, blocks)) if isinstance(blocks, nn.ModuleList) else []
        for at, block in enumerate(found):
            following = next((each for each in found[at:] if id(each) not in tower_of), None)
            if id(block) in tower_of and id(blocks) not in tower_of and following is not None:
                everywhere.discard(tower_of[id(block)])
                before.setdefault(id(following), set()).add(tower_of[id(block)])
    return everywhere, before


def _outside(
    gates: weakref.ref[Gates],
    spot: ModuleOutside,
    module: nn.Module,
    method: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    found = gates()
    if found is None:  # the sharded model is gone
        return method(*args, **kwargs)
    return found.run(spot, method, args, kwargs)


def _in_tower(
    gates: weakref.ref[Gates],
    room: ModuleInside,
    own: weakref.ref[Zero3Layer] | None,
    module: nn.Module,
    method: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`own`: the tower's own layer, if it has the module's parameters."""
    found, layer = gates(), None if own is None else own()
    runtime = None if layer is None else layer._runtime
    if layer is not None and runtime is not None and not runtime.stack.is_under_way(layer._state):
        method = partial(_enter, runtime, layer._state, module, method)
    return method(*args, **kwargs) if found is None else found.call(room, method, args, kwargs)


def _enter(
    runtime: Any, state: LayerState, module: nn.Module, method: Any, /, *args: Any, **kwargs: Any
) -> Any:
    return run_sharded(runtime, state, module, method, args, kwargs)
