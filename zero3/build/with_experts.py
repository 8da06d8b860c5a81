"""Experts that stay with the ranks that own them are layers of their own, inside of others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from ..comm.communicator import is_first
from ..comm.factory import Dealer, communicator_for, is_dealt
from ..core.layer_state import LayerState
from ..experts.finding import check_adapters, count_of, is_experts, no_experts, tied
from ..modules import own_modules
from ..policy import ShardingPolicy
from .construction import Request, all_but, device_of

__all__: list[str] = []

_log = logging.getLogger("zero3")


def with_experts(
    requests: Sequence[Request], is_layer: Callable[[nn.Module], bool]
) -> list[Request]:
    """The requests, and one more for each module of experts in them that stays at home, as the
    policy of the layer around it says. None, if one rank owns all experts.

    Args:
        requests: Of all layers to be. The first one's module holds the modules of all others.
        is_layer: Also True for modules that these requests make layers.

    Raises:
        ValueError: A policy, or the mesh, is for experts, and there are none; or the mesh is, and
            no policy; or an adapter changes the parameters of experts.
    """
    first = requests[0]
    asked = [each for each in requests if _wants(each.policy)]
    around = any(
        isinstance(state := vars(module).get("_state"), LayerState) and _wants(state.policy)
        for module in first.module.modules()
    )
    shared = tied(first.module) if asked else set()
    found = [
        (each, name, module)
        for each in asked
        for name, module in own_modules(each.module, all_but(each, is_layer))
        if is_experts(module) and shared.isdisjoint(map(id, module.parameters(recurse=False)))
    ]
    if asked and not found and not around:
        raise no_experts(f"this {type(first.module).__name__}")
    if is_dealt(first.process_group) and not found and not around:
        raise ValueError(
            'process_group is a mesh with the dimension "ep", over which experts are dealt, and no '
            "layer has a policy with expert_parallel=True and experts: give it, or a mesh "
            '("dp_replicate", "dp_shard")'
        )
    check_adapters(first.module, {id(module) for _, _, module in found})
    dealer, device = Dealer(first.process_group), device_of(first, is_layer)
    if not found or (blocks := dealer.blocks(device)) == 1:
        return [*requests]
    few = [each.prefix + name for each, name, experts in found if count_of(experts) < blocks]
    if few and is_first(communicator_for(first.process_group, device)):
        _log.warning(
            "expert_parallel=True: %s (and %d more) has fewer experts than the %d ranks over which "
            "they are dealt, and some ranks own none. A mesh (\"dp_shard\", \"ep\") deals them "
            "over fewer ranks, and cuts each rank's experts over the others.",
            few[0], len(few) - 1, blocks,
        )  # fmt: skip
    own = {id(module) for each, _, module in found if module in each.modules}
    return [
        *(replace(e, dealer=dealer) if id(e.module) in own else e for e in requests),
        *(
            replace(
                each,
                module=module,
                device=device_of(each, is_layer) if each.device is None else each.device,
                policy=replace(each.policy, output_dtype=None),
                label=f"{each.prefix + name!r} ({type(module).__name__})",
                prefix=f"{each.prefix}{name}.",
                borrowed=(),
                model=each.model or first.module,
                together=(),
                dealer=dealer,
            )
            for each, name, module in found
            if id(module) not in own
        ),
    ]


def _wants(policy: object) -> bool:
    return isinstance(policy, ShardingPolicy) and policy.expert_parallel
