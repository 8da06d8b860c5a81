"""What bitsandbytes was told of single parameters. It knows them by their ids, or by their places
in groups, and the optimizer of a sharded model holds parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..access import states_of
from ..optim.check_optimizer import owned_by
from ..optim.param_groups import named_parameters

__all__: list[str] = []

Settings = dict[int, dict[str, Any]]  # by the id of a parameter of the unsharded model


def settings_of(optimizer: Any) -> Settings:
    """Returns what the optimizer's library was told, by `override_config` or by its own layers."""
    manager = getattr(optimizer, "mng", None)
    by_place = getattr(manager, "index2config", {})
    found = {
        id(parameter): by_place[number, place]
        for number, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if (number, place) in by_place
    } | dict(getattr(manager, "pid2config", {}))
    for module, name, config in getattr(manager, "module_weight_config_triple", ()):
        found[id(getattr(module, name))] = config
    return found


def forget_places(optimizer: Any) -> None:
    """Other parameters are in its groups' places now."""
    by_place = getattr(getattr(optimizer, "mng", None), "index2config", {})
    for place in [place for place in by_place if place[0] < len(optimizer.param_groups)]:
        del by_place[place]


def tell_parts(optimizer: Any, model: nn.Module, settings: Mapping[int, dict[str, Any]]) -> None:
    """Tells it the same of the parts that hold these parameters now."""
    states = states_of(model)
    slots = {
        (state, sharded.sites.name): settings[id(sharded.sites.parameter)]
        for _, state, sharded in named_parameters(model, states)
        if id(sharded.sites.parameter) in settings
    }
    for each in owned_by(states).values() if slots else ():
        part = each.part.parameter
        for config in (slots.get((each.state, piece.slot.name)) for piece, _ in each.pieces()):
            if config is not None:
                optimizer.mng.override_config(part, key_value_dict=dict(config))
                # another parameter may have its id later
                weakref.finalize(part, optimizer.mng.pid2config.pop, id(part), None)
