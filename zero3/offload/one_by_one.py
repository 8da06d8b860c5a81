"""An optimizer's step, made for a few of its parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..optim.probe import Build, builder, trying

__all__: list[str] = []

Step = Callable[[torch.optim.Optimizer], object]
# groups of the optimizer, with those of their parameters whose turn it is
Turn = Sequence[tuple[dict[str, Any], list[nn.Parameter]]]

_STEPS = 3
_SHAPE = (6, 5, 4, 3, 2, 2)  # of what is tried: as many of them as a parameter has dimensions


def step_of(kind: type[torch.optim.Optimizer]) -> Step:
    """The class's own step, without the hooks that torch puts around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", None) else step  # type: ignore[no-any-return]


@contextmanager
def narrowed(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[Turn], None]]:
    """Yields a function that leaves the optimizer a turn's parameters alone. At the end it has all
    of them again.
    """
    groups = list(optimizer.param_groups)
    held = [group["params"] for group in groups]

    def narrow(turn: Turn) -> None:
        for group, parameters in turn:
            group["params"] = parameters
        optimizer.param_groups[:] = [group for group, _ in turn]

    try:
        yield narrow
    finally:
        optimizer.param_groups[:] = groups
        for group, parameters in zip(groups, held, strict=True):
            group["params"] = parameters


def try_out(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> list[torch.dtype]:
    """Makes some steps on two small parameters like `parameter`: of both together, and of one after
    the other.

    Returns:
        The dtype of each tensor that the optimizer keeps for a parameter, with as many elements.

    Raises:
        ValueError: The results differ, or the optimizer can't make steps on small tensors.
    """
    build, step = builder(optimizer, group), step_of(type(optimizer))
    name = type(optimizer).__name__
    try:
        together, kept = _trained(build, lambda twin: twin.step(), parameter)
        alone, _ = _trained(build, lambda twin: each_alone(twin, step), parameter)
    except Exception as error:  # of any kind, since the optimizer may be of any library
        raise ValueError(
            f"{name} can't be tried out on small tensors ({type(error).__name__}: {error}), so "
            "whether it may step one chunk after another is unknown. Use it without "
            "zero3.offload_optimizer; then its state stays in memory"
        ) from error
    if together != alone:
        raise ValueError(
            f"{name} computes something from all parameters at once, and so it can't step one "
            "chunk after another. Use it without zero3.offload_optimizer; then its state stays "
            "in memory"
        )
    return kept


def each_alone(optimizer: torch.optim.Optimizer, step: Step) -> None:
    """Steps one parameter after another."""
    with narrowed(optimizer) as narrow:
        for group in list(optimizer.param_groups):
            for parameter in list(group["params"]):
                narrow([(group, [parameter])])
                step(optimizer)


def _trained(build: Build, make_step: Step, like: nn.Parameter) -> tuple[str, list[torch.dtype]]:
    """Returns a text of all numbers that steps have led to, and the dtypes of state."""
    shape = _SHAPE[: like.ndim]
    with trying(like.device):
        numel = torch.Size(shape).numel()
        values = [
            torch.linspace(-1, 1, numel, dtype=torch.float64),
            torch.linspace(3, -2, numel, dtype=torch.float64),
        ]
        parameters = [nn.Parameter(value.to(like.dtype).view(shape)) for value in values]
        twin = build(parameters)
        for number in range(_STEPS):
            for parameter in parameters:
                parameter.grad_dtype = like.grad_dtype
                parameter.grad = (parameter.detach() * (number + 1) - 0.3).to(like.grad_dtype)
            make_step(twin)
    kept = [value for value in twin.state[parameters[0]].values() if isinstance(value, Tensor)]
    options = [
        {key: value for key, value in group.items() if key != "params"}
        for group in twin.param_groups
    ]
    numbers = [parameter.tolist() for parameter in parameters]
    return str([numbers, options]), [value.dtype for value in kept if value.numel() == numel > 1]
