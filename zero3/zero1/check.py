"""Tries whether an optimizer is right if every rank has only a part of the parameters, before any state is made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim.probe import Build, CannotProbe, builder, probe_flat, probe_whole
from .local_step import EvaluatesAgain, step_locally, takes_keywords

__all__: list[str] = []

_RANKS = 2  # also if there is only one rank: a script that runs on one rank should run on several


def check_divisible(
    optimizer_class: Callable[..., Any],
    defaults: dict[str, Any],
    options: dict[str, Any],
    parameters: Sequence[Tensor],
    *,
    whole: bool,
    one_by_one: bool,
    keywords: Mapping[str, Any] | None,
) -> bool:
    """Checks that ranks which each update a part of the parameters get the result of one optimizer over all parameters.

    Args:
        optimizer_class: Makes the optimizer.
        defaults: The options for `optimizer_class`.
        options: The group's options.
        parameters: The group's parameters.
        whole: The parts are whole parameters. Otherwise they are flat runs of elements.
        one_by_one: `step()` is called for a few parameters at a time.
        keywords: The keywords of `step()`; the trial uses copies. None: they are not known yet.

    Returns:
        Whether the check is complete. If not, `step()` takes keywords, and the check has to be repeated when they are known.

    Raises:
        ValueError: The results differ, the optimizer evaluates a closure several times, or `optimizer_class` makes no optimizer.
            Errors of `optimizer_class` pass through.
    """
    name, device = getattr(optimizer_class, "__name__", str(optimizer_class)), parameters[0].device
    ndims = sorted({parameter.ndim for parameter in parameters})
    small = [torch.zeros((1,) * parameter.ndim, dtype=parameter.dtype, device=device) for parameter in parameters[:1]]
    made = optimizer_class([{**options, "params": small}], **defaults)
    if not isinstance(made, Optimizer):
        raise ValueError(f"optimizer_class must make a torch.optim.Optimizer, found a {type(made).__name__}")
    plain = builder(made, made.param_groups[0])
    again = keywords is None and takes_keywords(made) and not one_by_one  # steps inside a backward get no keywords

    def build(parameters: list[nn.Parameter]) -> Any:
        return _AsStepped(plain(parameters), parameters, keywords or {}, one_by_one=False)

    try:
        reason = probe_whole(build, device, _RANKS, ndims) if whole else probe_flat(build, device, _RANKS)
        alone = probe_whole(_one_by_one_at_the_second_time(plain), device, 1, ndims if whole else [1, 2]) if one_by_one else None
    except CannotProbe as cause:
        if again and not isinstance(cause.__cause__, EvaluatesAgain):
            return False
        raise _unproven(name, cause, whole) from cause
    if reason:
        raise ValueError(f"{name} can't be spread over ranks, which each know a part of the parameters: {reason}. {_remedy(whole)}")
    if alone:
        raise ValueError(f"{name} can't run during backward, for some parameters by themselves: {alone}. Use overlap_with_ddp=False")
    return not again


def _unproven(name: str, cause: CannotProbe, whole: bool) -> ValueError:
    if isinstance(cause.__cause__, EvaluatesAgain):
        return ValueError(f"{name} can't be spread over ranks: its step() evaluates the closure several times, to look at all parameters")
    return ValueError(f"{name} can't be spread over ranks: it can't be tried out on small tensors ({cause}). {_remedy(whole)}")


def _remedy(whole: bool) -> str:
    return (
        "Its update of one parameter depends on others"
        if whole
        else "If it looks at one parameter at a time, give whole=True to its groups"
    )


class _AsStepped:
    """An optimizer whose steps are made as `ZeroRedundancyOptimizer` makes them. `one_by_one`: for one parameter at a time."""

    def __init__(self, optimizer: Optimizer, parameters: list[nn.Parameter], keywords: Mapping[str, Any], *, one_by_one: bool) -> None:
        self._optimizer, self._parameters, self._one_by_one = optimizer, parameters, one_by_one
        self._keywords = copy.deepcopy(dict(keywords))

    def step(self, closure: Callable[[], Any]) -> None:
        loss = closure()
        gradients = [parameter.grad for parameter in self._parameters]
        for turn in range(len(gradients)) if self._one_by_one else [None]:
            for number, parameter in enumerate(self._parameters):
                parameter.grad = gradients[number] if turn in (None, number) else None
            step_locally(self._optimizer, loss, self._keywords)


def _one_by_one_at_the_second_time(build: Build) -> Build:
    """Returns a function that makes the optimizer first as it is, for comparison, and then one that steps one by one."""
    made: list[object] = []

    def alternating(parameters: list[nn.Parameter]) -> Any:
        made.append(_AsStepped(build(parameters), parameters, {}, one_by_one=bool(made)))
        return made[-1]

    return alternating
