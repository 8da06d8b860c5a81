"""Parameters that the policy leaves alone: they are in no chunk."""

from __future__ import annotations

from collections.abc import Sequence

from ..policy import ShardingPolicy, chosen, info_of
from .parameters import ParameterSites

__all__: list[str] = []


def without_ignored(parameters: Sequence[ParameterSites], policy: ShardingPolicy, prefix: str = "") -> list[ParameterSites]:
    """The parameters that are sharded. `prefix`: what stands before their names in the model.

    Raises:
        ValueError, TypeError: `ignored` has raised, or returned something else than True or False.
    """
    return [sites for sites in parameters if not _is_ignored(sites, policy, prefix + sites.name)]


def _is_ignored(sites: ParameterSites, policy: ShardingPolicy, name: str) -> bool:
    if policy.ignored is None:
        return False
    return chosen("ignored", policy.ignored, name, info_of(name, sites.parameter))
