"""Which modules are experts, and how they are cut: whole experts to each rank. Integers only."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise

from torch import nn

from ..core.layout import ChunkLayout, side_by_side
from ..core.sites import ParameterSites
from ..quantized.formats import Format

__all__: list[str] = []

Shape = tuple[int, ...]


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds experts that may stay on different ranks: it has an integer
    `num_experts`, which is the first dimension of all of its own parameters, one of these has three
    dimensions, and its forward takes (hidden_states, top_k_index, top_k_weights). Modules inside of
    it, such as a norm, hold no experts.
    """
    count = getattr(module, "num_experts", None)
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    inside = [each for child in module.children() for each in child.parameters()]
    return (
        type(count) is int
        and count > 0
        and any(parameter.dim() == 3 for parameter in own)
        and all(parameter.dim() and parameter.shape[0] == count for parameter in own)
        and not any(parameter.dim() > 1 and parameter.shape[0] == count for parameter in inside)
        and len(inputs_of(module)) == 3
    )


def count_of(experts: nn.Module) -> int:
    """How many there are."""
    return experts.num_experts  # type: ignore[return-value]


def tied(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules have."""
    owners = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    return {key for key, count in owners.items() if count > 1}


def check_adapters(model: nn.Module, experts: Container[int]) -> None:
    """Raises ValueError if an adapter of peft changes parameters of `experts`, ids of modules."""
    for name, module in model.named_modules():
        adapted = getattr(module, "parameter_name", None)
        if type(module).__name__ == "ParamWrapper" and any(
            id(inner) in experts for inner in module.modules()
        ):
            raise ValueError(
                f"expert_parallel=True, and an adapter of peft changes parameter {adapted!r} of "
                f"experts, {name!r} (target_parameters): its factors would have to be cut as the "
                "experts are. Train adapters on other modules (target_modules)"
            )


def no_experts(what: str) -> ValueError:
    """The error of a policy for experts, where there are none."""
    return ValueError(
        f"expert_parallel=True finds no experts in {what}: a module with an integer num_experts, "
        "all of whose own parameters have that as their first dimension, one of them three "
        "dimensions, and a forward (hidden_states, top_k_index, top_k_weights). Leave it out: "
        "experts of other kinds are gathered, as everything else"
    )


def check_experts(
    module: nn.Module,
    prefix: str,
    found: Sequence[ParameterSites],
    sharded: Sequence[ParameterSites],
    formats: Mapping[str, Format],
    blocks: int,
) -> None:
    """
    Raises:
        ValueError: A parameter of experts is to be left alone, or ranks would cut a block of it,
            if it is quantised; or the experts have a buffer with a row for each of them.
    """
    borders = [first for first in cuts(count_of(module), blocks) if first < count_of(module)]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.dim() and len(buffer) == count_of(module):
            raise ValueError(
                f"expert_parallel=True, and {prefix + name!r} is a buffer {list(buffer.shape)} of "
                f"{count_of(module)} experts: buffers are whole on every rank, which numbers its "
                "own experts from 0 while it computes, and would take others' rows. Make it a "
                "parameter that does not train, or gather these experts"
            )
    for sites in found:
        name = prefix + sites.name
        if "." not in sites.name and sites not in sharded:
            raise ValueError(
                f"ignored of the policy leaves {name!r} alone, a parameter of experts that stay at "
                "home (expert_parallel=True): each rank would compute with all of it, and number "
                "its own experts alone"
            )
        shape, kind = tuple(sites.parameter.shape), formats.get(sites.name)
        if "." in sites.name or kind is None:
            continue
        if len(shape) != 3 or any(first % kind.rows(shape).per for first in borders):
            raise ValueError(
                f"quantize of the policy selects {name!r} {list(shape)}, of experts that stay at "
                f"home (expert_parallel=True): a block of {kind.name} lies across the border of "
                f"experts of two ranks, which begin at {borders}. Take another block size, leave "
                "the parameter out (select= of the format), or gather experts"
            )


def inputs_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the first three arguments of a module's forward. None, if it needs more."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(module.forward).parameters.values()
    inputs = [each for each in found if each.kind in kinds]
    needed = [each for each in inputs if each.default is each.empty]
    return tuple(each.name for each in inputs[:3]) if len(needed) <= 3 else ()


def cuts(experts: int, blocks: int) -> tuple[int, ...]:
    """The first expert of each block, and the end of the last: so many each, and one more in the
    first blocks, if they can't have the same number.
    """
    each, more = divmod(experts, blocks)
    return tuple(block * each + min(block, more) for block in range(blocks + 1))


def layouts(
    name: str, shape: Shape, experts: int, blocks: int, shares: int
) -> tuple[ChunkLayout, ...]:
    """How a parameter `[E, ...]` of experts is cut: as a whole, block by block, each block into
    `shares` slices; and for each block as its ranks have it, `[E_r, ...]`. `shape`: as it is
    stored, which is in rows of bytes for one or a few experts, if it is quantised.
    """
    each, per = math.prod(shape[1:]), -(-experts // shape[0])
    parts, ends = [], [0]
    for first, end in pairwise(-(-expert // per) for expert in cuts(experts, blocks)):
        numel = (end - first) * each
        own = [numel * share // shares for share in range(shares + 1)]
        slots = side_by_side([(name, (end - first, *shape[1:]))])
        parts.append(ChunkLayout(slots, shares, None if shares == 1 else tuple(own)))
        ends += [first * each + bound for bound in own[1:]]
    whole = ChunkLayout(side_by_side([(name, shape)]), blocks * shares, tuple(ends))
    return (whole, *parts)
