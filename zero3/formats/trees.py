"""A run as one dict, `{"model": ..., "optimizer": ..., ...}`: how torch's files and
torch.distributed.checkpoint hold it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..checkpoint.lazy import Lazy
from ..modules import own_name
from .run import Run, kind_of
from .values import mapped, small

__all__: list[str] = []

_MODEL = ("model", "model_state_dict", "state_dict", "module")
_OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
_EXTRA = "extra"
_NAMED = (
    "save torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer, "
    "options=StateDictOptions(full_state_dict=True, cpu_offload=True)), or make the optimizer "
    "from model.named_parameters()"
)


def tree_of(run: Run) -> dict[str, Any]:
    """`extra` stands beside the model if it is a dict with names of its own, and under "extra"
    otherwise.
    """
    model: dict[str, Any] = {}
    for name, lazy in run.tensors.items():
        model |= dict.fromkeys([name, *run.also.get(name, ())], lazy)
    tree: dict[str, Any] = {"model": model | run.extra_states}
    if run.groups is not None:
        tree["optimizer"] = {"state": run.state, "param_groups": run.groups}
    if run.extra is None:
        return tree
    names = [*run.extra] if isinstance(run.extra, dict) else []
    taken = {*_MODEL, *_OPTIMIZER, _EXTRA}
    if names and all(isinstance(name, str) and name not in taken for name in names):
        return {**tree, **run.extra}
    return tree | {_EXTRA: run.extra}


def run_of(tree: Any, kind: str, what: str) -> Run:
    """What `tree_of` made, and the ways in which people save: a bare state dict, one more dict
    around, flat optimizer state. Raises ValueError if there is no model in it, or an optimizer by
    numbers.
    """
    level = tree
    while isinstance(level, dict) and len(level) == 1 and not {*level} & {*_MODEL}:
        (inner,) = level.values()
        if not isinstance(inner, dict):
            break
        level = inner
    if not isinstance(level, dict):
        raise ValueError(
            f"{what} holds a {kind_of(level)}, expected a dict with a state dict in 'model'"
        )
    key = _first(_MODEL, level)
    bare = key is None and any(isinstance(value, Lazy) for value in level.values())
    if key is None and not bare:
        raise ValueError(
            f"{what} holds no model: expected one of {', '.join(_MODEL)}, or a state dict, found "
            f"{list(level)[:8]}"
        )
    run = _model(level if key is None else level[key], kind, what)
    rest = {} if bare else {other: value for other, value in level.items() if other != key}
    if (key := _first(_OPTIMIZER, rest)) is not None:
        run = _with_optimizer(run, rest.pop(key), what)
    return replace(run, extra=None if not rest else rest[_EXTRA] if {*rest} == {_EXTRA} else rest)


def _first(names: Sequence[str], found: Mapping[Any, Any]) -> str | None:
    return next((name for name in names if isinstance(found.get(name), dict)), None)


def _model(found: Mapping[Any, Any], kind: str, what: str) -> Run:
    run = Run(kind, {})
    first: dict[int, str] = {}
    for key, value in found.items():
        name = own_name(key) if isinstance(key, str) else key
        if isinstance(name, str) and name.rpartition(".")[2] == "_extra_state":
            run.extra_states[name] = value
        elif not isinstance(name, str) or not isinstance(value, Lazy):
            shown = getattr(value, "name", type(value).__name__)
            raise ValueError(
                f"{what}: {key!r} of the model is a {shown}, expected a plain tensor under a "
                "parameter's name"
            )
        elif name in run.tensors:
            raise ValueError(f"{what} has {name!r} twice, with and without the prefix of a wrapper")
        elif value.numel and id(value) in first:
            run.also.setdefault(first[id(value)], []).append(name)
        else:
            first[id(value)] = name
            run.tensors[name] = value
    return run


def _with_optimizer(run: Run, found: Mapping[str, Any], what: str) -> Run:
    if not {"state", "param_groups"} <= {*found}:
        found = _unflattened(run, found, what)
    state, groups = found["state"], found["param_groups"]
    if (
        not isinstance(state, dict)
        or not isinstance(groups, list)
        or not all(isinstance(group, dict) for group in groups)
    ):
        raise ValueError(
            f"{what}: an optimizer's 'state' must be a dict, and its 'param_groups' a list of dicts"
        )
    names: dict[str, str] = {}
    named: list[dict[str, Any]] = []
    for group in groups:
        options = dict(group)
        listed, known = list(options.pop("params", ())), options.pop("param_names", ())
        if not all(isinstance(name, str) for name in listed):
            if len(known) != len(listed):
                raise ValueError(
                    f"{what}: the optimizer's state is by numbers, and nothing says which "
                    f"parameter is which: {_NAMED}"
                )
            names |= {str(number): own_name(known[at]) for at, number in enumerate(listed)}
            listed = known
        named.append(mapped(options, small) | {"params": [own_name(name) for name in listed]})
    by_name = {
        names.get(str(number), own_name(str(number))): {key: small(v) for key, v in values.items()}
        for number, values in state.items()
    }
    left = [key for key in found if key not in ("state", "param_groups")]
    left_out = [f"{key!r} of the optimizer (neither state nor groups)" for key in left]
    return replace(run, groups=named, state=by_name, left_out=left_out)


def _unflattened(run: Run, found: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Of `flatten_optimizer_state_dict=True`: keys such as `state.layers.0.weight.exp_avg` and
    `param_groups.layers.0.weight.lr`.
    """
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        kind, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        if kind not in ("state", "param_groups") or not name:
            raise ValueError(
                f"{what}: {key!r} of the optimizer is neither state nor an option of a parameter"
            )
        (state if kind == "state" else options).setdefault(name, {})[last] = small(value)
    alike: dict[str, dict[str, Any]] = {}
    for name in (name for name in run.tensors | options if name in options):  # the model's order
        text = json.dumps(options[name], sort_keys=True, default=repr)
        alike.setdefault(text, {**options[name], "params": []})["params"].append(name)
    return {"state": state, "param_groups": list(alike.values())}
