"""The local optimizer, which has only this rank's shares: how it is made, tried out and stepped."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..optim.probe import Build, CannotProbe, Trial, builder

__all__: list[str] = []

Groups = list[dict[str, Any]]

_NOT_OPTIONS = ("params", "param_names")
_OF_SEVERAL = "Its update of one parameter depends on others"
_OF_ONE = "If it looks at one parameter at a time, give whole=True to its groups"
# are tried, also if there is only one: a script that runs on one rank should run on several
_RANKS = 2


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def copy_options(source: Iterable[dict[str, Any]], target: Iterable[dict[str, Any]]) -> None:
    """Copies the options of each group, which a schedule may have set, to another's groups."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(options_of(theirs))


class EvaluatesAgain(RuntimeError):
    """The optimizer asks for the gradients at another point."""


class LocalOptimizers:
    """Makes optimizers of one class, and tries first whether they may have shares."""

    def __init__(
        self, optimizer_class: Callable[..., Any], defaults: dict[str, Any], *, one_by_one: bool
    ) -> None:
        """`defaults`: for `optimizer_class`. `one_by_one`: each step is for a few parameters."""
        self.optimizer_class, self.defaults = optimizer_class, defaults
        self._one_by_one = one_by_one

    def make(self, groups: Groups) -> Any:
        return self.optimizer_class(groups, **self.defaults)

    def check(
        self, group: dict[str, Any], *, whole: bool, keywords: Mapping[str, Any] | None
    ) -> bool:
        """Checks that ranks which each update a share of the parameters get the result of one
        optimizer over all parameters.

        Args:
            group: The caller's group of parameters, which is not empty.
            whole: The shares are whole parameters. Otherwise they are flat runs of elements.
            keywords: The keywords of `step()`; the trial uses copies. None: they are not known yet.

        Returns:
            Whether the check is complete. If not, `step()` takes keywords, and the check has to be
            repeated when they are known.

        Raises:
            ValueError: The results differ, the optimizer evaluates a closure several times, or
                `optimizer_class` makes no optimizer. Errors of `optimizer_class` pass through.
        """
        name = getattr(self.optimizer_class, "__name__", str(self.optimizer_class))
        first = group["params"][0]
        ndims = sorted({parameter.ndim for parameter in group["params"]})
        small = torch.zeros((1,) * first.ndim, dtype=first.dtype, device=first.device)
        made = self.make([{**options_of(group), "params": [small]}])
        if not isinstance(made, Optimizer):
            raise ValueError(
                f"optimizer_class must make a torch.optim.Optimizer, found a {type(made).__name__}"
            )
        plain = builder(made, made.param_groups[0])
        # steps inside a backward get no keywords
        again = keywords is None and _takes_keywords(made) and not self._one_by_one
        as_stepped: Any = partial(_AsStepped, plain, keywords=keywords or {}, alone=False)

        def then_alone(parameters: list[nn.Parameter]) -> Any:
            """The first one, to which the others are compared, steps all parameters together."""
            return _AsStepped(plain, parameters, {}, alone=next(turns) > 0)

        turns, alone, trial = count(), None, Trial(as_stepped, first.device, _RANKS)
        remedy = _OF_SEVERAL if whole else _OF_ONE
        try:
            reason = trial.whole(ndims) if whole else trial.flat()
            if self._one_by_one:
                alone = Trial(then_alone, first.device, 1).whole(ndims if whole else [1, 2])
        except CannotProbe as cause:
            why = f"it can't be tried out on small tensors ({cause}). {remedy}"
            if isinstance(cause.__cause__, EvaluatesAgain):
                why = "its step() evaluates the closure several times, to look at all parameters"
            elif again:
                return False
            raise ValueError(f"{name} can't be spread over ranks: {why}") from cause
        if reason:
            raise ValueError(
                f"{name} can't be spread over ranks, which each know a part of the parameters: "
                f"{reason}. {remedy}"
            )
        if alone:
            raise ValueError(
                f"{name} can't run during backward, for some parameters by themselves: {alone}. "
                "Use overlap_with_ddp=False"
            )
        return not again


def step_locally(optimizer: Optimizer, loss: Any, keywords: Mapping[str, Any]) -> None:
    """Makes a step; gradients are set already. If `step()` requires a closure, it gets one that
    returns `loss`, once.

    Raises:
        EvaluatesAgain: The optimizer calls the closure a second time. Other errors of the optimizer
            pass through.
    """
    asked = False

    def tell() -> Any:
        nonlocal asked
        if asked:
            raise EvaluatesAgain(
                "the optimizer evaluates its closure several times in a step, and gradients are "
                "there for one"
            )
        asked = True
        return loss

    closure = inspect.signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    optimizer.step(*([tell] if required else []), **keywords)


def _takes_keywords(optimizer: Optimizer) -> bool:
    """Whether its `step()` has parameters besides a closure."""
    return bool(inspect.signature(optimizer.step).parameters.keys() - {"closure"})


class _AsStepped:
    """Steps as `ZeroRedundancyOptimizer` makes them. `alone`: for one parameter at a time."""

    def __init__(
        self,
        build: Build,
        parameters: list[nn.Parameter],
        keywords: Mapping[str, Any],
        *,
        alone: bool,
    ) -> None:
        self._optimizer, self._parameters, self._alone = build(parameters), parameters, alone
        self._keywords = copy.deepcopy(dict(keywords))

    def step(self, closure: Callable[[], Any]) -> None:
        loss = closure()
        gradients = [parameter.grad for parameter in self._parameters]
        for turn in range(len(gradients)) if self._alone else [None]:
            for number, parameter in enumerate(self._parameters):
                parameter.grad = gradients[number] if turn in (None, number) else None
            step_locally(self._optimizer, loss, self._keywords)
