"""Several optimizers that share a model, treated as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []

Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)


def members_of(given: object) -> list[Any]:
    """Returns the optimizers in `given`: one optimizer, a list or a dict.

    Raises:
        TypeError: `given` holds something other than optimizers.
    """
    members: list[Any] = (
        list(given.values())
        if isinstance(given, Mapping)
        else list(given)
        if isinstance(given, list | tuple)
        else [given]
    )
    for member in members or [given]:
        if not isinstance(getattr(member, "param_groups", None), list) or not hasattr(
            member, "state"
        ):
            raise TypeError(
                "expected a torch.optim.Optimizer, or several in a list or a dict, found "
                f"{type(member).__name__}"
            )
    return members


def held_by(*optimizers: Any) -> list[Tensor]:
    """Returns the parameters in all groups of the optimizers."""
    return [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


class Together:
    """The groups of all optimizers, one after another, and the state of all.

    One optimizer trains each parameter, and state is saved by parameters' names. So the name tells
    the optimizer, and neither the order of the optimizers nor a dict's keys matter.

    Raises:
        TypeError: `given` holds something other than optimizers.
        ValueError: Two optimizers hold the same parameter.
    """

    def __init__(self, given: object) -> None:
        self.members = members_of(given)
        self.param_groups: list[dict[str, Any]] = [
            group for member in self.members for group in member.param_groups
        ]
        self.state: dict[Tensor, dict[str, Any]] = {
            key: state for member in self.members for key, state in member.state.items()
        }
        self.kinds = [type(member).__name__ for member in self.members for _ in member.param_groups]
        # of each group
        self.owners = [member for member in self.members for _ in member.param_groups]
        self.labels = [
            f"group {n} of the {type(m).__name__}"
            for m in self.members
            for n in range(len(m.param_groups))
        ]
        self._owners: dict[Tensor, Any] = {}
        for member in self.members:
            for parameter in held_by(member):
                if (
                    self._owners.setdefault(parameter, member) is not member
                    or self.members.count(member) > 1
                ):
                    raise ValueError(
                        f"a {type(self._owners[parameter]).__name__} and a "
                        f"{type(member).__name__} hold the same parameter "
                        f"{tuple(parameter.shape)}: give each parameter to one of the optimizers"
                    )

    @property
    def name(self) -> str:
        return ", ".join(type(member).__name__ for member in self.members)

    def replace_state(self, state: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        for member in self.members:
            member.state.clear()
        for parameter, own in state:
            self._owners[parameter].state[parameter] = own
