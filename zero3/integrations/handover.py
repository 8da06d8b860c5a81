"""Optimizers that were made over a model's own parameters are given its chunks, group by group."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..access import get_trainable_chunk, states_of
from ..core.layer_state import parts_of
from ..core.released import ReleasedParameter
from ..guards.marks import ignored_by, state_of
from ..optim.check_optimizer import check_exact, check_optimizer, owned_by
from ..optim.param_groups import named_parameters, param_groups
from ..optim.probe import fitting
from ..optim.several import held_by, members_of

__all__: list[str] = []

_Place = tuple[int, int]  # the number of an optimizer, and of its group
_TOGETHER = (
    "Pass the model and its optimizer to one call of prepare(); or shard the model first "
    "(zero3.shard), and make the optimizer from zero3.get_trainable_chunk(model) or "
    "zero3.param_groups"
)


class Handover:
    """Made before `models` are sharded, finished after it: remembers by name which group of which
    optimizer each parameter is in. A group gets flat chunks, aligned parts or whole parameters, the
    first on which its optimizer is exact.

    Raises:
        ValueError: An optimizer holds parameters that are neither of these models nor chunks, has
            made steps already, or can't be tried on small tensors.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._models = models
        self._optimizers = members_of(list(optimizers)) if optimizers else []
        places: dict[int, _Place] = {}
        known = {id(parameter) for model in models for parameter in model.parameters()}
        for number, optimizer in enumerate(self._optimizers):
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if id(parameter) in known:
                        places[id(parameter)] = number, index
            check_held(optimizer, known)
        self._settings = [_settings_of(optimizer) for optimizer in self._optimizers]
        used = set(places.values())
        self._cuts = {place: _cut(self._optimizers[place[0]], place[1]) for place in used}
        self._places = [
            {  # under all names, for a tied one may be asked for by any
                name: places.get(id(parameter))
                for name, parameter in model.named_parameters(remove_duplicate=False)
                if parameter.requires_grad
            }
            for model in models
        ]

    def finish(self) -> None:
        for number, optimizer in enumerate(self._optimizers):
            _forget_places(optimizer)
            for index, group in enumerate(optimizer.param_groups):
                group.update(self._cuts.get((number, index), {}))
                group["params"] = [
                    parameter
                    for parameter in group["params"]
                    if is_chunk(parameter) or ignored_by(parameter) is not None
                ]
                group.pop("param_names", None)  # of what it does not hold any more
        for model, places in zip(self._models, self._places, strict=True):
            for (number, index), parameters in self._divided(model, places):
                self._optimizers[number].param_groups[index]["params"] += parameters
            for optimizer, settings in zip(self._optimizers, self._settings, strict=True):
                tell_parts(optimizer, model, settings)

    def _divided(
        self, model: nn.Module, places: Mapping[str, _Place | None]
    ) -> Iterator[tuple[_Place, list[nn.Parameter]]]:
        """What each group of `places` gets: chunks, or parts as its optimizer needs them. What is
        in no group has gradients all the same, which count in norms.
        """
        found = set(places.values())
        cuts = {place: self._cuts[place] for place in found if place is not None}
        if len(cuts) == len(found) == 1 and not any(cuts.values()):
            yield from ((place, get_trainable_chunk(model)) for place in cuts)
        elif cuts:
            cut_as = {places[name]: cuts.get(place, {}) for name, place in places.items() if place}
            groups = param_groups(
                model, lambda name, info: {"place": places[name], **cut_as.get(places[name], {})}
            )
            for group in groups:
                if group["place"] is not None:
                    yield group["place"], group["params"]


def _cut(optimizer: torch.optim.Optimizer, index: int) -> dict[str, Any]:
    """How the parameters of a group are divided."""
    group = optimizer.param_groups[index]
    device = group["params"][0].device
    found = fitting(optimizer, group, torch.device("cpu") if device.type == "meta" else device)
    if found is None:
        raise ValueError(
            f"the {type(optimizer).__name__} can't be tried out on small tensors, so nobody knows "
            "what it needs of parameters. Shard the model first (zero3.shard), and make it from "
            "zero3.get_trainable_chunk(model) if it treats each element by itself, or else from "
            'zero3.param_groups(model, lambda name, info: {"whole": True})'
        )
    return found


def is_chunk(parameter: torch.Tensor) -> bool:
    """Whether it is a chunk of a sharded model, or a part of one: what an optimizer is to hold."""
    if (state := state_of(parameter)) is None or isinstance(parameter, ReleasedParameter):
        return False
    return not parameter.numel() or any(part is parameter for part in parts_of([state]))


def check_together(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """As `check_optimizer`, if all that the model trains is in these optimizers, or a filter has
    left a group of theirs empty. Otherwise they are checked for what they hold.

    Raises:
        ValueError: They would train it in another way than the unsharded model's.
    """
    chunks = {id(chunk) for chunk in get_trainable_chunk(model)}
    held = {id(optimizer): set(map(id, held_by(optimizer))) for optimizer in optimizers}
    empty = [o for o in optimizers if not all(group["params"] for group in o.param_groups)]
    its = [each for each in optimizers if each in empty or held[id(each)] & chunks]
    if empty or (chunks and chunks <= set().union(*held.values())):
        check_optimizer(model, *its, strict=False)
    else:
        check_exact(model, *its)


def check_held(optimizer: torch.optim.Optimizer, known: Container[int] = ()) -> None:
    """Raises a ValueError if the optimizer holds anything but chunks, and parameters with ids in
    `known` before its first step.
    """
    kind = type(optimizer).__name__
    for parameter in held_by(optimizer):
        frozen = ignored_by(parameter) is not None and not parameter.requires_grad
        if id(parameter) not in known and not frozen and not is_chunk(parameter):
            name = getattr(
                parameter, "zero3_name", f"a parameter of shape {tuple(parameter.shape)}"
            )
            raise ValueError(
                f"the {kind} holds {name}, which no sharded model trains: each rank would train "
                f"it alone, or nothing. {_TOGETHER}"
            )
        if id(parameter) in known and optimizer.state.get(parameter):
            raise ValueError(
                f"the {kind} has made steps already, and its state has the shapes of whole "
                "parameters. Prepare it before its first step"
            )


def _settings_of(optimizer: Any) -> dict[int, dict[str, Any]]:
    """What bitsandbytes was told of single parameters, by `override_config` or by its own layers:
    by the id of a parameter of the unsharded model. It knows them by their ids, or by their places
    in groups, and the optimizer of a sharded model holds parts.
    """
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


def _forget_places(optimizer: Any) -> None:
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
