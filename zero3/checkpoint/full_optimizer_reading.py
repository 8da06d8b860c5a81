"""Checks an optimizer's full state dict that a caller passes, on rank 0, before anything is sent or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..comm.plain_values import encode_scalar, name_of, unreadable
from ..core.parameters import own_name
from .contents import Contents
from .optimizer_contents import NamedState, OptimizerContents, options_of

__all__: list[str] = []


def read_full(state_dict: Any, contents: Contents) -> tuple[OptimizerContents, dict[str, Mapping[str, Any]]]:
    """Returns a description of the dict without tensors' values, and the dict's state; both by the parameters' first names.

    Raises:
        ValueError: Names or groups are missing or repeated, or tensors can't be read.
        TypeError: The structure is wrong, or a value could only be pickled.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"expected a dict with 'state' and 'param_groups' on rank 0, found a {type(state_dict).__name__}")
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(f"expected a dict with 'state' and 'param_groups', found the keys {list(state_dict)}")
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list | tuple) or not all(isinstance(group, Mapping) for group in groups):
        raise TypeError(f"param_groups must be a list of dicts, found {_shown(groups)}")
    if not isinstance(state, Mapping) or not all(isinstance(values, Mapping) for values in state.values()):
        raise TypeError(f"state must be a dict with a dict for each parameter's name, found {_shown(state)}")
    _check_names(state, "state")
    given = _by_first_name(state, contents)
    read = [_read_group(number, group, contents) for number, group in enumerate(groups)]
    counts = Counter(name for _, names in read for name in names)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"param_groups name these parameters twice: {', '.join(twice)}")
    return OptimizerContents(read, _read_state(given, contents)), given


def _read_group(number: int, group: Mapping[str, Any], contents: Contents) -> tuple[dict[str, Any], list[str]]:
    what = f"param_groups[{number}]"
    if "params" not in group:
        raise ValueError(f"{what} has no 'params', which must list the names of its parameters; it has {list(group)}")
    if not isinstance(group["params"], list | tuple):
        raise TypeError(f"the 'params' of {what} must be a list of parameters' names, found {_shown(group['params'])}")
    _check_names(group["params"], what)
    return options_of(dict(group), what), list(_by_first_name(dict.fromkeys(group["params"]), contents))


def _check_names(names: Any, what: str) -> None:
    if strangers := [name for name in names if not isinstance(name, str)]:
        raise ValueError(
            f"{what} has {strangers[:3]} as params; expected parameters' names, as "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict writes them (optimizer.state_dict() has numbers)"
        )


def _by_first_name(found: Mapping[Any, Any], contents: Contents) -> dict[Any, Any]:
    """Changes keys to first names. A tied parameter may have any of its names, and names may have prefixes of torch's wrappers."""
    first = {name: names[0] for names in contents.names.values() for name in names}
    return {first.get(own_name(name), own_name(name)): value for name, value in found.items()}


def _read_state(given: Mapping[str, Mapping[str, Any]], contents: Contents) -> dict[str, NamedState]:
    shapes = {name: contents.shape(name) for name in given if contents.knows(name)}
    tensors = [(name, key, value) for name, values in given.items() for key, value in values.items() if isinstance(value, Tensor)]
    if unread := [f"{key} of {name} {problem}" for name, key, value in tensors if (problem := unreadable(value)) is not None]:
        raise ValueError(f"can't be read: {'; '.join(unread)}")
    return sorted_out(given, shapes, Tensor)


def sorted_out(given: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]], tensors: Any) -> dict[str, NamedState]:
    """Divides each name's state into numbers, tensors of the name's shape, and other tensors. `tensors`: the classes of tensors in it."""
    each = [(name, key, value) for name, values in given.items() for key, value in values.items()]
    numbers = {key for name, key, value in each if isinstance(value, tensors) and shapes.get(name) and not len(value.shape)}
    state = {name: NamedState() for name in given}
    for name, key, value in each:
        if not isinstance(key, str) or ":" in key:
            raise TypeError(f"{key!r} of {name}: a key must be a string without a colon")
        named, is_number = state[name], not isinstance(value, tensors)
        if is_number or (not len(value.shape) and (shapes.get(name) or key in numbers or key == "step")):
            named.scalars[key] = encode_scalar(value, f"{key!r} of {name}")
        elif tuple(value.shape) == shapes.get(name):
            named.elements[key] = name_of(value.dtype)
        else:
            named.whole[key] = name_of(value.dtype), list(value.shape)
    return state


def _shown(value: Any) -> str:
    return f"a {type(value).__name__} ({value!r:.80})"
