"""Parameters that the policy leaves alone. They are in no chunk, but what is done to gradients is
done to theirs too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__: list[str] = []


class IgnoredGradient:
    """The gradient of a parameter that is left alone. It is one rank's own, and its mean over ranks
    is the model's gradient.

    While it is staged, new gradients are kept apart from those of earlier backwards, until `commit`
    or `roll_back`.
    """

    def __init__(
        self, parameter: nn.Parameter, ranks: int, *, transactional: bool, mean: bool
    ) -> None:
        self.parameter = parameter
        self._transactional, self.mean = transactional, mean
        self._ranks = self._averaged_over = ranks
        self._held = False  # whether a `step_guard` is open, which ends what is staged
        self._staged = False
        self._earlier: Tensor | None = None  # the gradient of earlier backwards, while it is staged
        self._new: Tensor | None = None  # that of backwards since
        self._factor: Tensor | None = None  # the argument of `scale`, applied at the commit

    def follow(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """`new` has taken the place of `old`, which had no values yet."""
        if self.parameter is old:
            self.parameter = new

    def stage(self) -> None:
        if not self._staged:
            self._staged, self._earlier, self.parameter.grad = True, self.parameter.grad, None

    def average_over(self, ranks: int) -> None:
        """The mean is taken over so many ranks: the others have no data left."""
        self._averaged_over = ranks

    def guard(self, *, on: bool) -> None:
        """A `step_guard` begins, or is over."""
        self._held = on
        if on:
            self.stage()

    def begin_backward(self) -> None:
        if self._transactional or self._averaged_over != self._ranks:
            self.stage()

    @torch.no_grad()
    def end_backward(self) -> None:
        """Weighs the gradient of a staged backward, so that the mean over ranks is right, and
        commits it unless a `step_guard` is open.
        """
        weight = self._ranks / self._averaged_over if self.mean else 1
        came = self.parameter.grad if self._staged else None
        if came is not None:
            came = came if weight == 1 else came.mul_(weight)
            self._new = came if self._new is None else self._new.add_(came)
            self.parameter.grad = None
        if not self._held:
            self.commit()

    @torch.no_grad()
    def commit(self) -> None:
        if not self._staged:
            return
        earlier, new, factor = self._earlier, self._new, self._factor
        self.roll_back()
        if earlier is None:
            self.parameter.grad = new
            return
        if factor is not None:
            self._scale(factor)
        if new is not None:
            earlier.add_(new)

    def roll_back(self) -> None:
        """Restores the gradient of earlier backwards."""
        if self._staged:
            self.parameter.grad = self._earlier
            self._staged, self._earlier, self._new, self._factor = False, None, None, None

    def give_up(self) -> None:
        """Drops the gradient of a backward that raised, and what it was added to, unless that is
        kept apart. It may be called twice.
        """
        self.roll_back()
        if not (self._held or self._transactional):
            self.parameter.grad = None
        if self._held:
            self.stage()

    def scale(self, factor: Tensor) -> None:
        """Multiplies the gradient of earlier backwards by the 0-dim `factor`."""
        if self._transactional:
            self.stage()
        if not self._staged:
            self._scale(factor)
        else:
            self._factor = factor if self._factor is None else self._factor * factor

    def _scale(self, factor: Tensor) -> None:
        if self.parameter.grad is not None:
            self.parameter.grad.mul_(factor.to(self.parameter.grad.device))
