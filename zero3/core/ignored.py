"""Parameters that the policy leaves alone: they are in no chunk."""

from __future__ import annotations

from collections.abc import Sequence

from ..policy import ShardingPolicy, info_of
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
    try:
        answer = policy.ignored(name, info_of(name, sites.parameter))
    except Exception as error:  # whatever it raises: the other ranks have to hear of it
        raise ValueError(f"ignored({name!r}) of the policy has raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, bool):
        raise TypeError(f"ignored({name!r}) of the policy returned {answer!r}, expected True or False")
    return answer
