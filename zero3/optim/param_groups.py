"""param_groups(): gives each parameter its own options, although optimizers see chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..access import used_together
from ..comm.agreement import agreeing
from ..comm.plain_values import integer
from ..core.layer_state import LayerState, Presence, chunks_of, parts_of
from ..core.parameters import ShardedParameter
from ..names import named_tensors
from ..policy import ParamInfo, info_of, shards_gradients
from .pieces import Choice, Choices, divide, placeholder
from .whole_parameters import Family, families, new_cuts, repartition

__all__: list[str] = []


Options = Callable[[str, ParamInfo], Mapping[str, Any] | None]


def param_groups(model: nn.Module, options: Options) -> list[dict[str, Any]]:
    """Makes optimizer parameter groups by the names and shapes of the model's own parameters.

    Chunks are divided into parts, which share the chunks' memory. The parts replace the chunks in
    these groups, in `model.parameters()` and in `get_trainable_chunk`. Neighbours with equal
    options are one part, and a chunk whose parameters all have equal options is not divided, but
    for the two options that follow.

    With `whole=True` among the options, exactly one rank has the parameter, in its own shape, for
    optimizers such as Muon, Shampoo, Adafactor and LAMB. Its gradient is complete there before
    `step()`, and every rank gets the result. That rank alone holds the parameter's optimizer state.
    The ranks hold about equal numbers of elements.

    With `align=n` among the options, each parameter is a part by itself, flattened. It is cut only
    where blocks of n elements end, into pieces of at least 16 n, and not at all if its length is no
    multiple of n. So an optimizer that quantises its state in blocks quantises each piece as it
    would quantise the parameter: `align=256` serves the 8-bit and 4-bit optimizers of bitsandbytes
    and torchao as they are made by default. `check_optimizer` tells which `align` one needs.

    Every rank calls it, with the same options. After a second call, make new optimizers: the
    parameters of the first call raise when they are used.

    Args:
        model: Any model that contains zero3 layers, between two steps: without gradients, and
            outside `full_params`.
        options: A function of the name and the `ParamInfo` of a trainable parameter. It returns the
            options of the parameter's group. A tied parameter appears once, under its first name.
            Unknown keys are kept. If it returns None, the parameter is in no group and keeps its
            value, and its gradient is dropped.

    Returns:
        One group for all parameters with equal options, in the order of each group's first
        parameter, the same on all ranks. A rank that has no part of a group has an empty parameter
        in its `params`. For two optimizers, divide the list.

    Raises:
        ValueError: Nothing in `model` is sharded, options differ between ranks or hold "params",
            `align` is no positive int or goes with `whole`, or the model has stage 1. All ranks
            raise the same error, and nothing has changed.
        TypeError: `options` is no function, or returns something other than a dict or None. Again
            all ranks raise it.
        RuntimeError: The model has gradients, computes, or is in `full_params`. Again all ranks
            raise it.

    Example::

        def options(name, info):
            return {"weight_decay": 0.1 if info.ndim > 1 else 0.0}

        groups = zero3.param_groups(model, options)
        optimizer = torch.optim.AdamW(groups, lr=3e-4)
    """
    states = used_together(model, "param_groups", whole=True)
    first = states[0]
    with agreeing(first, "param_groups") as lines:
        _check(states)
        if not callable(options):
            raise TypeError(
                "options must be a function (name, info) -> dict of options, or None, found a "
                f"{type(options).__name__}"
            )
        answers = _Answers(lines)
        answers.ask(model, states, options)
    found = families(states, answers.order)
    repartition(new_cuts(found, answers.choices))
    return _divided(states, found, answers)


def _divided(
    states: list[LayerState], found: list[Family], answers: _Answers
) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [{**options, "params": []} for options, _ in answers.groups]
    for family in found:
        state = family.state
        for chunk in family.chunks:
            for number, parameter in divide(state, chunk, answers.choices):
                groups[number]["params"].append(parameter)
    cut = [
        chunk.parts[0].parameter
        for family in found
        for chunk in family.chunks
        if chunk.parts[0].parameter is not chunk.shard
    ]
    for chunk in chunks_of(states):
        chunk.parts.count_as_divided(bool(cut))
    for made, (options, first) in zip(groups, answers.groups, strict=True):
        if not made["params"]:
            whole = options.get("whole", False)
            made["params"] = [placeholder(states[0], first, whole=whole, beside=cut[0])]
    return groups


def _check(states: list[LayerState]) -> None:
    for state in states:
        if not shards_gradients(state.policy) and state.communicator.world_size > 1:
            raise ValueError(
                "param_groups with stage=1, where gradients are reduced when an optimizer first "
                "looks at one: a rank may have nothing of a group to look at, and the others "
                "would wait for it. Use stage 2 or 3"
            )
        bring_to_rest(state, "param_groups")


def bring_to_rest(state: LayerState, caller: str) -> None:
    """For chunks that are to be cut anew: drops what is kept of gradients that were zeroed since,
    and refuses a layer that is fetched, or has gradients.
    """
    if state.pinned or state.presence in (Presence.FETCHED, Presence.FETCHING):
        raise RuntimeError(
            f"{caller} while layer {state.label} is fetched: call it outside of forward, backward "
            "and full_params; after an exception, call zero3.reset(model) first"
        )
    if (backward := state.gradients.backward()) is not None:
        backward.forget_zeroed()
    if state.gradients.owed() or any(part.grad is not None for part in parts_of([state])):
        raise RuntimeError(
            f"{caller} while layer {state.label} has gradients: step and "
            "zero_grad(set_to_none=True) first"
        )


@dataclass
class _Answers:
    """What the `options` function has answered. `lines`: as text, for the ranks to compare."""

    lines: list[str]
    # options, and the first parameter that has them
    groups: list[tuple[dict[str, Any], nn.Parameter]] = field(default_factory=list)
    choices: Choices = field(default_factory=dict)
    order: dict[tuple[LayerState, str], int] = field(default_factory=dict)

    def ask(self, model: nn.Module, states: list[LayerState], options: Options) -> None:
        numbers: dict[str, int] = {}
        # options that are neither numbers nor texts are compared by identity
        objects: list[Any] = []
        for name, state, sharded in named_parameters(model, states):
            parameter = sharded.sites.parameter
            self.order[state, sharded.sites.name] = len(self.order)
            if not sharded.chunk.shard.requires_grad:
                continue
            given = options(name, info_of(name, parameter))
            answer = None if given is None else _checked(name, given)
            spelled = "none" if answer is None else _spelled(answer, objects)
            self.lines.append(f"the options of {name}: {spelled}")
            if answer is None:
                self.choices[state, sharded.sites.name] = Choice(None)
                continue
            whole = answer.get("whole", False)
            if sharded.chunk.in_part:
                _check_experts(name, answer, shares=sharded.chunk.at.layout.world_size)
            if spelled not in numbers:
                numbers[spelled] = len(self.groups)
                self.groups.append((answer, parameter))
            choice = Choice(numbers[spelled], whole, answer.get("align", 0))
            self.choices[state, sharded.sites.name] = choice


def named_parameters(
    model: nn.Module, states: list[LayerState]
) -> list[tuple[str, LayerState, ShardedParameter]]:
    """Every sharded parameter in `model` once, under its first name, in the unwrapped model's
    order. A layer may have others, outside of the model.
    """
    owners = {
        id(each.sites.parameter): (state, each) for state in states for each in state.parameters
    }
    named = named_tensors(model)
    return [(name, *owners.pop(id(tensor))) for name, tensor in named if id(tensor) in owners]


def _checked(name: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, Mapping):
        raise TypeError(
            f"options({name!r}) returned {answer!r} of type {type(answer).__name__}, expected a "
            "dict of options, or None"
        )
    if "params" in answer:
        raise ValueError(
            f"options({name!r}) returned 'params', which param_groups fills in: return the other "
            "options only"
        )
    if not isinstance(answer.get("whole", False), bool):
        raise TypeError(
            f"options({name!r}) returned whole={answer['whole']!r}, expected True or False"
        )
    align = integer(answer.get("align", 1))
    if align is None or align < 1:
        raise ValueError(
            f"options({name!r}) returned align={answer['align']!r}, expected a positive int: "
            "the number of elements in a block of the optimizer's state"
        )
    if "align" in answer and answer.get("whole"):
        raise ValueError(
            f"options({name!r}) returned align={align} with whole=True: a whole parameter is not "
            "cut, so leave out align"
        )
    return {**answer, "align": align} if "align" in answer else dict(answer)


def _check_experts(name: str, answer: Mapping[str, Any], *, shares: int) -> None:
    if "align" in answer:
        raise ValueError(
            f"param_groups: options({name!r}) returned align={answer['align']}, but it belongs "
            "to experts that stay at home (expert_parallel=True), and those are cut between "
            "experts: leave out align for it"
        )
    if answer.get("whole") and shares > 1:
        raise ValueError(
            f"options({name!r}) returned whole=True, and {shares} ranks share each block of these "
            "experts (dp_shard of the mesh): no rank has whole ones. Leave it out for experts, or "
            "deal them among all ranks"
        )


def _spelled(value: Any, objects: list[Any]) -> str:
    """A text that is the same for equal values on all ranks. Objects are numbered by first use."""
    if isinstance(value, Mapping):
        items = (f"{key!r}: {_spelled(value[key], objects)}" for key in sorted(value, key=repr))
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(_spelled(item, objects) for item in value)})"
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()}, {value.dtype})"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    number = next((n for n, known in enumerate(objects) if known is value), len(objects))
    if number == len(objects):
        objects.append(value)
    return f"{type(value).__qualname__} #{number}"
