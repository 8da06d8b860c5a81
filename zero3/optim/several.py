"""Several optimizers that share a model, treated as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..guards.optimizer_steps import held_by as held_by
from .low_bit import blocks_of, tensors_of

__all__: list[str] = []

Optimizers = (
    torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer]
)


class _StateOfAll(MutableMapping[Tensor, Any]):
    """The state of all members of an `OptimizerList`, each parameter's in that of its member."""

    def __init__(self, members: Sequence[torch.optim.Optimizer]) -> None:
        self._members = members

    def _holding(self, parameter: Tensor) -> Any:
        holding = (member for member in self._members if id(parameter) in map(id, held_by(member)))
        if (member := next(holding, None)) is None:
            raise KeyError(parameter)
        return member.state

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._holding(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._holding(parameter)[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._holding(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in member.state for member in self._members)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for member in self._members for parameter in member.state)

    def __len__(self) -> int:
        return sum(len(member.state) for member in self._members)


class OptimizerList(torch.optim.Optimizer):
    """Several optimizers behind one: schedulers, loss scaling and checkpoints take it.

    `param_groups` are the members' own dicts, one member after another, and `state` is that of
    all. `step` and `zero_grad` are those of all. `state_dict` has the form of torch's, with the
    parameters of all members numbered in their order. `save_checkpoint`,
    `full_optimizer_state_dict`, `check_optimizer` and `offload_optimizer` treat it as its members,
    so that a checkpoint of members loads into their list, and the other way round.

    Args:
        members: The optimizers, at least one. The members of a list among them are its members.

    Attributes:
        members: The optimizers.

    Raises:
        TypeError: A member is no optimizer.
        ValueError: There is none, or two hold the same parameter.

    Example::

        groups = zero3.param_groups(
            model, lambda name, info: {"whole": True} if info.ndim == 2 else {}
        )
        matrices = [group for group in groups if group.get("whole")]
        others = [group for group in groups if not group.get("whole")]
        optimizer = zero3.OptimizerList(
            torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)
        )
    """

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        if not members:
            raise ValueError("zero3.OptimizerList needs one optimizer at least")
        if lists := [each for each in members if isinstance(each, Mapping | list | tuple)]:
            raise TypeError(
                "zero3.OptimizerList takes optimizers one by one, found a "
                f"{type(lists[0]).__name__}: write OptimizerList(*optimizers)"
            )
        self.members: list[torch.optim.Optimizer] = Together(members).members
        # without torch's constructor, which makes groups of its own
        self.__setstate__({"defaults": {}})

    def __getstate__(self) -> dict[str, Any]:
        return {"defaults": self.defaults, "members": self.members}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The members' groups, as they are now, one member after another."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        """The state of all members, by parameter. What is put into it goes to the member."""
        return _StateOfAll(self.members)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.members:
            member.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise ValueError(
            "add_param_group of a zero3.OptimizerList: which of its members is meant? Call that "
            "member's add_param_group"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned, into the members.

        Raises:
            ValueError: It has other numbers of groups, or of parameters in them.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != sizes:
            raise ValueError(
                f"the state dict has groups of {[len(group['params']) for group in groups]} "
                f"parameters, and the OptimizerList of {sizes}"
            )
        at = 0
        for member in self.members:
            own = groups[at : at + len(member.param_groups)]
            at += len(own)
            numbers = {number for group in own for number in group["params"]}
            state = {n: each for n, each in state_dict["state"].items() if n in numbers}
            member.load_state_dict({"state": state, "param_groups": own})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        return f"OptimizerList({', '.join(map(repr, self.members))})"


def members_of(given: object) -> list[Any]:
    """Returns the optimizers in `given`: one optimizer, an `OptimizerList`, a list or a dict.

    Raises:
        TypeError: `given` holds something other than optimizers.
    """
    several: Any = given.values() if isinstance(given, Mapping) else given
    found = list(several) if isinstance(given, Mapping | list | tuple) else [given]
    members: list[Any] = []
    for each in found:
        members += each.members if isinstance(each, OptimizerList) else [each]
    for member in members or [given]:
        if not isinstance(getattr(member, "param_groups", None), list) or not hasattr(
            member, "state"
        ):
            raise TypeError(
                "expected a torch.optim.Optimizer, or several in a list or a dict, found "
                f"{type(member).__name__}"
            )
    return members


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
        each = [(m, number) for m in self.members for number in range(len(m.param_groups))]
        # of each group
        self.owners = [member for member, _ in each]
        self.kinds = [type(member).__name__ for member in self.owners]
        self.labels = [f"group {number} of the {type(m).__name__}" for m, number in each]
        self._owners: dict[Tensor, Any] = {}
        self._blocks: dict[int, dict[str, int]] = {}
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

    def is_aligned(self, group: int) -> bool:
        """Whether a group's parameters are apart, so that state may be quantised in blocks."""
        return "align" in self.param_groups[group]

    def tensors(self, group: int, parameter: Tensor) -> dict[str, Any]:
        """The state of a parameter. That of an aligned one has plain tensors only."""
        state = self.state.get(parameter, {})
        return tensors_of(state, parameter.shape) if self.is_aligned(group) else state

    def blocks(self, group: int) -> dict[str, int]:
        """See `low_bit.blocks_of`. Without `align` there are none."""
        if group not in self._blocks:
            found = self.is_aligned(group)
            options = self.param_groups[group]
            self._blocks[group] = blocks_of(self.owners[group], options) if found else {}
        return self._blocks[group]

    def replace_state(self, state: Sequence[tuple[Tensor, dict[str, Any]]]) -> None:
        for member in self.members:
            member.state.clear()
        for parameter, own in state:
            self._owners[parameter].state[parameter] = own
