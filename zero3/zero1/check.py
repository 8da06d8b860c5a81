"""Is an optimizer right when every rank knows only a part of the parameters? Tried out before any state is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim.probe import Build, CannotProbe, builder, probe_flat, probe_whole

__all__: list[str] = []

_RANKS = 2  # on one rank too, so that a script that runs on one runs on several


def check_divisible(
    optimizer_class: Callable[..., Any],
    defaults: dict[str, Any],
    options: dict[str, Any],
    parameters: Sequence[Tensor],
    *,
    whole: bool,
    one_by_one: bool,
) -> None:
    """Returns if ranks that each update a part of the parameters update them as one optimizer of all would.

    Args:
        defaults: for `optimizer_class`.
        options: of the group in question.
        parameters: of that group.
        whole: the parts are whole parameters, and not flat runs of their elements.
        one_by_one: `step()` is called for a few parameters at a time.

    Raises:
        ValueError: they do not, the optimizer needs a closure, or it is none. What `optimizer_class` raises itself.
    """
    name, device = getattr(optimizer_class, "__name__", str(optimizer_class)), parameters[0].device
    ndims = sorted({parameter.ndim for parameter in parameters})
    small = [torch.zeros((1,) * parameter.ndim, dtype=parameter.dtype, device=device) for parameter in parameters[:1]]
    made = optimizer_class([{**options, "params": small}], **defaults)
    if not isinstance(made, Optimizer):
        raise ValueError(f"optimizer_class must make a torch.optim.Optimizer, found a {type(made).__name__}")
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{name} can't be spread over ranks: its step() needs a closure, to look at all parameters several times")
    build = builder(made, made.param_groups[0])
    try:
        reason = probe_whole(build, device, _RANKS, ndims) if whole else probe_flat(build, device, _RANKS)
        alone = probe_whole(_one_by_one_at_the_second_time(build), device, 1, ndims if whole else [1, 2]) if one_by_one else None
    except CannotProbe as cause:
        raise ValueError(
            f"{name} can't be spread over ranks: it can't be tried out on small tensors ({cause}). {_remedy(whole)}"
        ) from cause
    if reason:
        raise ValueError(f"{name} can't be spread over ranks, which each know a part of the parameters: {reason}. {_remedy(whole)}")
    if alone:
        raise ValueError(
            f"{name} can't run during backward, a few parameters at a time, as it does for all at once: {alone}. Use overlap_with_ddp=False"
        )


def _remedy(whole: bool) -> str:
    return (
        "Its update of one parameter depends on others"
        if whole
        else "If it looks at one parameter at a time, give whole=True to its groups"
    )


class _OneByOne:
    def __init__(self, optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    def step(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        for turn in range(len(gradients)):
            for number, parameter in enumerate(self._parameters):
                parameter.grad = gradients[number] if number == turn else None
            self._optimizer.step()


def _one_by_one_at_the_second_time(build: Build) -> Build:
    """What is tried out is made first as it is, for comparison, and then as it would run."""
    made: list[object] = []

    def alternating(parameters: list[nn.Parameter]) -> Any:
        made.append(build(parameters) if not made else _OneByOne(build(parameters), parameters))
        return made[-1]

    return alternating
