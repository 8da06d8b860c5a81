"""set_trainable(): which parameters of a sharded model train, changed between two steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..access import used
from ..comm.agreement import agreeing
from ..core.chunk import Chunk
from ..core.layer_state import LayerState
from ..core.layout import ChunkLayout
from ..policy import ParamInfo, info_of
from .param_groups import bring_to_rest, named_parameters
from .pieces import renew, trains
from .whole_parameters import Family, repartition

__all__: list[str] = []

Trains = dict[tuple[LayerState, str], bool]  # by layer and slot


def set_trainable(model: nn.Module, select: Callable[[str, ParamInfo], bool]) -> None:
    """From now on exactly the selected parameters of a model train, and its others are frozen.

    Every rank calls it, with the same choice, between two steps. A chunk whose parameters all
    change alike keeps its place. One that is to be trained only in part is gathered once and
    divided into two.

    An optimizer that was made before goes on if parameters were frozen and no chunk was divided: it
    finds no gradients for frozen parameters. In all other cases its next step raises, because it
    would leave out what trains now. Make a new one then. To keep the old one's state, take
    `full_optimizer_state_dict` before, put the names that begin to train into its groups, and load
    it into the new one. Groups of `param_groups` are gone where an optimizer raises: call it again.

    Args:
        model: Any model that contains zero3 layers, or any module inside one, between two steps:
            without gradients, and outside `full_params`. Parameters outside of it stay as they are.
        select: Called with the name and the `ParamInfo` of each parameter; returns whether it
            trains. A tied parameter comes once, under its first name. Parameters that the policy
            ignores do not come.

    Raises:
        ValueError: Nothing in `model` is sharded, ranks choose differently, or an integer or a
            quantised parameter is selected. All ranks raise the same error, and nothing has
            changed.
        TypeError: `select` is no function, or has returned something else than True or False;
            likewise.
        RuntimeError: The model has gradients, computes, or is in `full_params`; likewise.

    Example::

        # first the head alone
        zero3.set_trainable(model, lambda name, info: name.startswith("head"))
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=3e-4)
        # then all of it
        zero3.set_trainable(model, lambda name, info: True)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=3e-5)
    """
    states = used(model, "set_trainable")
    first = states[0]
    places = [
        (state, chunk, slot.name)
        for state in states
        for chunk in state.chunks
        for slot in chunk.layout.slots
    ]
    with agreeing(first, "set_trainable") as lines:
        for state in states:
            bring_to_rest(state, "set_trainable")
        asked = _asked(model, states, select)
        # those outside of the model are not asked for
        wanted = {(state, name): chunk.shard.requires_grad for state, chunk, name in places} | asked
        lines += (f"{n} of layer {s.label} trains: {answer}" for (s, n), answer in wanted.items())
    before = {(state, name): trains(chunk, name) for state, chunk, name in places}
    thawed = any(answer and not before[place] for place, answer in asked.items())
    divided = [family for state in states for family in _families(state, wanted)]
    repartition([(family, _layouts(family)) for family in divided])
    # of all chunks, because ranks may hold parts of different ones
    renews = thawed or bool(divided)
    for state in states:
        for sharded in state.parameters:
            chosen = wanted[state, sharded.sites.name]
            if sharded.sites.parameter.requires_grad != chosen:
                sharded.sites.parameter.requires_grad_(chosen)
        for chunk in state.chunks:
            new = any(chunk in family.chunks for family in divided)
            _follow(state, chunk, wanted, renews=renews and not new)


def _asked(
    model: nn.Module, states: list[LayerState], select: Callable[[str, ParamInfo], bool]
) -> Trains:
    if not callable(select):
        raise TypeError(
            f"select must be a function (name, info) -> bool, found a {type(select).__name__}"
        )
    wanted = Trains()
    for name, state, sharded in named_parameters(model, states):
        answer = select(name, info_of(name, sharded.sites.parameter))
        if not isinstance(answer, bool):
            raise TypeError(f"select({name!r}) returned {answer!r}, expected True or False")
        dtype = sharded.sites.parameter.dtype
        if answer and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(
                f"select({name!r}) returned True, but the parameter is {dtype}: only floating and "
                "complex ones train"
            )
        if answer and sharded.chunk.read_only:
            raise ValueError(
                f"select({name!r}) returned True, but the parameter is quantised "
                f"({sharded.chunk.stored_as}): it can't train"
            )
        wanted[state, sharded.sites.name] = answer
    return wanted


def _families(state: LayerState, wanted: Trains) -> list[Family]:
    """The layer's chunks that have to be divided, with all of their dtype: there is one chunk that
    trains and one that does not. Experts at home have one for each parameter, which stays.
    """
    found = []
    shared = [chunk for chunk in state.chunks if not chunk.in_part]
    for dtypes in dict.fromkeys((chunk.shard.dtype, chunk.own_dtype) for chunk in shared):
        chunks = [c for c in shared if (c.shard.dtype, c.own_dtype) == dtypes]
        if any(
            len({wanted[state, slot.name] for slot in chunk.layout.slots}) > 1 for chunk in chunks
        ):
            slots = [slot for chunk in chunks for slot in chunk.layout.slots]
            frozen = frozenset(slot.name for slot in slots if not wanted[state, slot.name])
            found.append(Family(state, chunks, slots, frozen))
    return found


def _layouts(family: Family) -> list[ChunkLayout]:
    frozen = family.frozen or ()
    kinds = (
        [(slot.name, slot.shape) for slot in family.slots if (slot.name in frozen) == stays]
        for stays in (False, True)
    )
    return [ChunkLayout.build(kind, family.state.communicator.shards) for kind in kinds]


@torch.no_grad()
def _follow(state: LayerState, chunk: Chunk, wanted: Trains, *, renews: bool) -> None:
    chosen, trained = wanted[state, chunk.layout.slots[0].name], chunk.shard.requires_grad
    for parameter in (chunk.shard, *(part.parameter for part in chunk.parts)):
        parameter.requires_grad_(chosen)
    if renews and (chosen or trained):
        renew(state, chunk)
