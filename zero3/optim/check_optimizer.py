"""check_optimizer(): raises if an optimizer would not train the sharded model as it trains the
unsharded one.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..access import sharded_in, tell_of_outsiders, used_together
from ..comm.agreement import agreeing
from ..comm.plain_values import encode_scalar
from ..core.chunk import Chunk, Part
from ..core.layer_state import LayerState
from ..core.layout import Piece
from ..core.released import ReleasedParameter
from ..guards.optimizer_steps import empty_groups, label_of
from ..modules import named
from .cuts import are_blocks
from .param_groups import named_parameters
from .pieces import Superseded
from .probe import CannotProbe, Trial, builder, fitting, longest
from .several import Optimizers, held_by, members_of

__all__: list[str] = []

_REPLICATED = frozenset(
    {
        ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
        ("torch.distributed.optim.post_localSGD_optimizer", "PostLocalSGDOptimizer"),
        ("zero3.zero1.optimizer", "ZeroRedundancyOptimizer"),
    }
)


class Owned(NamedTuple):
    """A parameter that this rank's optimizer may hold. `part.parameter` is elements `part.start` to
    `part.stop` of `chunk`.
    """

    state: LayerState
    chunk: Chunk
    part: Part

    def pieces(self) -> Iterator[tuple[Piece, slice]]:
        """Yields the pieces of slots that the parameter covers, each with its place in the
        flattened parameter. Padding has no piece.
        """
        for piece in self.chunk.pieces:
            if self.part.start <= piece.offset < self.part.stop:
                start = piece.offset - self.part.start
                yield piece, slice(start, start + piece.stop - piece.start)


def owned_by(states: Iterable[LayerState]) -> dict[int, Owned]:
    """Returns all parameters that this rank's optimizers may hold, trainable and frozen, by id."""
    return {
        id(part.parameter): Owned(state, chunk, part)
        for state in states
        for chunk in state.chunks
        for part in chunk.parts
    }


def check_optimizer(model: nn.Module, *optimizers: Optimizers, strict: bool = True) -> None:
    """Raises if an optimizer would not train the sharded model as it trains the unsharded one.
    Every rank calls it.

    It makes a few steps on small tensors with each optimizer's class, with the options of each
    group, and with what else the optimizer was made with: once on whole tensors, and once on slices
    as ranks hold them. So it can judge any optimizer of any library. Ranks also compare their
    options. (A schedule that follows a rank's own loss would give each rank another learning rate.)
    `save_checkpoint` and `full_optimizer_state_dict` warn of the same mistakes; this finds them
    before the first step.

    Args:
        model: Any model that contains zero3 layers.
        optimizers: All optimizers that train it, one by one or in a list or a dict. One of them
            must hold each trainable parameter.
        strict: An optimizer that can't make steps on small tensors is an error; otherwise it is
            accepted.

    Raises:
        ValueError: The optimizer needs shapes, norms or other parameters, which a flat slice does
            not have (use `whole=True` in `param_groups`); no optimizer or several hold a parameter;
            one holds parameters from before sharding, or from before the last `param_groups`; a
            chunk also holds parameters outside of `model`; a group is empty (a filter by names
            over `named_parameters()` sees only chunks); an optimizer expects equal parameters on
            all ranks; options differ between ranks; or an optimizer can't make steps on small
            tensors. Every rank raises it.
        TypeError: An argument is no optimizer. Every rank raises it.

    Example::

        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=3e-4)
        zero3.check_optimizer(model, optimizer)
    """
    states = used_together(model, "check_optimizer", whole=True)
    tell_of_outsiders(model, states)
    first = states[0]
    with agreeing(first, "check_optimizer") as lines:
        members = [member for given in optimizers for member in members_of(given)]
        lines += [line for member in members for line in _options_of(member)]
        for optimizer in members:
            _check_groups(model, states, optimizer)
        _check_held(states, members)
        for optimizer in members:
            _check_maths(states, optimizer, strict)


def check_exact(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """As `check_optimizer`, for optimizers that hold a part of what the model trains."""
    states = used_together(model, "check_optimizer")
    with agreeing(states[0], "check_optimizer"):
        for optimizer in optimizers:
            _check_maths(states, optimizer, strict=False)


def _options_of(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yields a line a group, the same on all ranks. What is no plain value is told by its type."""
    for number, group in enumerate(optimizer.param_groups):
        told = []
        texts = (key for key in group if isinstance(key, str))
        for key in sorted(key for key in texts if key not in ("params", "param_names")):
            try:
                told.append(f"{key}={json.dumps(encode_scalar(group[key], key))}")
            except TypeError:
                told.append(f"{key} is a {type(group[key]).__name__}")
        yield f"{type(optimizer).__name__}, group {number}: {', '.join(told)}"


def warn_if_inexact(states: list[LayerState], optimizer: torch.optim.Optimizer) -> None:
    """Warns at a save: the training so far is worth saving. It makes no collective."""
    for text in empty_groups(optimizer, states):
        warnings.warn(text, stacklevel=4)
    try:
        _check_maths(states, optimizer, strict=False)
    except ValueError as problem:
        warnings.warn(f"this run does not train as an unsharded one would: {problem}", stacklevel=4)


def _check_groups(
    model: nn.Module, states: list[LayerState], optimizer: torch.optim.Optimizer
) -> None:
    if any((kind.__module__, kind.__name__) in _REPLICATED for kind in type(optimizer).__mro__):
        raise ValueError(
            f"a {type(optimizer).__name__} takes the parameters of all ranks to be equal, and "
            "would give every rank the same, but chunks are each rank's own slice. Use the plain "
            "torch.optim optimizer: its state is as long as the chunks, so it is sharded already"
        )
    for number, group in enumerate(optimizer.param_groups):
        if not group["params"]:
            names = [name for name, _, _ in named_parameters(model, states)]
            chunks = [name for name, _ in model.named_parameters()]
            raise ValueError(
                f"{label_of(optimizer, number)} is empty. Was it made by a filter over "
                f"model.named_parameters()? These are {len(chunks)} flat chunks now "
                f"({named(chunks, 3)}): no name or shape of the "
                f"model's {len(names)} parameters ({named(names, 3)}) is found among them, and all "
                "parameters of a chunk would get the options of the group that holds it. "
                "zero3.param_groups(model, lambda name, info: {...}) makes groups by the "
                "parameters' own names and shapes"
            )


def _check_held(states: list[LayerState], optimizers: list[torch.optim.Optimizer]) -> None:
    found = owned_by(states)
    originals = {key: each.sites.name for key, each in sharded_in(states).items()}
    held = held_by(*optimizers)
    for parameter in held:
        if isinstance(parameter, Superseded):
            raise ValueError(
                f"the optimizer holds {parameter.zero3_name}, which zero3.param_groups has "
                "replaced since: make the optimizer from the groups that the last call returned"
            )
        if isinstance(parameter, ReleasedParameter) or id(parameter) in originals:
            name = originals.get(id(parameter), "of another sharded model")
            raise ValueError(
                f"the optimizer holds the parameter {name!r} of the unsharded model, which is "
                "trained in chunks: make it from zero3.get_trainable_chunk(model), or "
                "zero3.param_groups, after sharding"
            )
    counts = Counter(map(id, held))
    for each in found.values():
        parameter, count = each.part.parameter, counts[id(each.part.parameter)]
        if parameter.numel() and (count > 1 or (parameter.requires_grad and not count)):
            names = ", ".join(piece.slot.name for piece, _ in each.pieces()) or "padding"
            raise ValueError(
                f"{'no optimizer holds' if not count else 'optimizers hold more than once'} these "
                f"parameters of layer {each.state.label}, which this rank has a slice of: "
                f"{names}. Pass all optimizers that train the model; freeze parameters that "
                "should not train"
            )


def _check_maths(states: list[LayerState], optimizer: torch.optim.Optimizer, strict: bool) -> None:
    first, found = states[0], owned_by(states)
    ranks = min(2, first.communicator.shards)
    for group in optimizer.param_groups:
        align, least = group.get("align", 0), longest(optimizer, group)
        trial = Trial(builder(optimizer, group), first.device, ranks, least)
        owned = [found[id(p)] for p in group["params"] if id(p) in found and p.numel()]
        check_aligned(group, owned, type(optimizer).__name__)
        parts = [each.part for each in owned]
        ndims = sorted({part.parameter.ndim for part in parts if part.whole})
        try:
            if ndims and (reason := trial.whole(ndims)):
                raise ValueError(
                    f"{_named(optimizer, group)} takes something over several parameters at once, "
                    f"which lie on several ranks: {reason}"
                )
            # a rank's own experts, of all: `[E_r, ...]` of `[E, ...]`
            cut = sorted({e.part.parameter.ndim for e in owned if e.part.whole and e.chunk.in_part})
            if cut and (reason := trial.blocks(cut)):
                raise ValueError(
                    f"{_named(optimizer, group)} takes something over all experts of a parameter "
                    "at once, and each rank has its own (expert_parallel=True): "
                    f"{reason}. Take an optimizer that treats the first dimension as a batch, or "
                    "gather these experts"
                )
            if not all(part.whole for part in parts) and (
                reason := trial.aligned(align) if align else trial.flat()
            ):
                slices = f"slices cut at multiples of {align}" if align else "flat slices"
                raise ValueError(
                    f"{_named(optimizer, group)} does more than treat each element by itself, but "
                    f"has {slices} of parameters: {reason}"
                    f"{_remedy(fitting(optimizer, group, first.device) or {})}"
                )
        except CannotProbe as cause:
            if strict:
                raise ValueError(
                    f"{_named(optimizer, group)} can't be tried out on small tensors ({cause}), "
                    "so whether it may be spread over ranks is unknown. If it treats each "
                    "element by itself, pass strict=False"
                ) from cause


def _remedy(options: Mapping[str, Any]) -> str:
    """The line to write for an optimizer that is exact with these `options` of `param_groups`."""
    what = "aligned ones" if "align" in options else "whole ones"
    spelled = ", ".join(f'"{key}": {value}' for key, value in options.items())
    line = f". Give it {what}: zero3.param_groups(model, lambda name, info: {{{spelled}}})"
    return line if options else ""


def check_aligned(group: Mapping[str, Any], owned: Iterable[Owned], of: str) -> None:
    """Raises ValueError if the group says `align` of parts that are not cut so."""
    align = group.get("align", 0)
    for each in owned if align else ():
        pieces = [piece for piece, _ in each.pieces()]
        lengths = [piece.stop - piece.start for piece in pieces]
        if lengths != [each.part.parameter.numel()] or not all(
            are_blocks(piece.start, piece.stop, piece.slot.numel, align) for piece in pieces
        ):
            held = ", ".join(f"{piece.slot.name}[{piece.start}:{piece.stop}]" for piece in pieces)
            raise ValueError(
                f"a group of the {of} has align={align}, and one of its parameters is not cut so: "
                f"it holds {held or 'padding'} of layer {each.state.label}. Make the optimizer "
                "from the groups that zero3.param_groups returned last"
            )


def _named(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    told = (key for key in group if key in ("lr", "whole", "align", "foreach"))
    return f"{type(optimizer).__name__} ({', '.join(f'{key}={group[key]!r}' for key in told)})"
