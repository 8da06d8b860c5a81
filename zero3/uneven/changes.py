"""What ranks that have data did to chunks and gradients between the rounds that they share with ranks that have none."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..core.gradient_types import DeferredGradient
from ..core.layer_state import LayerState, reducers_of

__all__: list[str] = []


class StateChanges:
    """Looks at versions and at what is there, never at values. Dropped gradients can be told to others, no other change can."""

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._states = states
        self._taken: list[tuple[int, Tensor | None, int]] = []

    def take(self, *, only_if: bool) -> None:
        """After a round: what is found then is how it has to be before the next; if not `only_if`, anything goes."""
        self._taken = self._now() if only_if else []

    def forget(self) -> None:
        self._taken = []

    def changed(self) -> bool:
        """Whether more was done since than to drop gradients."""
        for (version, gradient, its_version), (version_now, gradient_now, its_version_now) in zip(self._taken, self._now(), strict=False):
            same = gradient_now is gradient and its_version_now == its_version
            if version_now != version or not (same or gradient_now is None):
                return True
        return False

    @property
    def divided(self) -> bool:
        return any(chunk.divided for state in self._states for chunk in state.chunks)

    def gradients(self) -> list[int]:
        """How many there are, and how many layers keep sums for a later backward to reduce."""
        parts = [part.parameter.grad for state in self._states for chunk in state.chunks for part in chunk.parts]
        return [
            sum((gradient.earlier if isinstance(gradient, DeferredGradient) else gradient) is not None for gradient in parts),
            sum(state.gradients.owed() for state in self._states),
        ]

    def follow(self, gradients: int, owed: int) -> None:
        """Drops here what ranks that have so many have dropped."""
        mine, kept = self.gradients()
        if kept and not owed:
            for reducer in reducers_of(self._states):
                reducer.drop()
        if mine and not gradients:
            for reducer in reducers_of(self._states):
                reducer.drop_all()

    def _now(self) -> list[tuple[int, Tensor | None, int]]:
        parts = [part.parameter for state in self._states for chunk in state.chunks for part in chunk.parts]
        return [(p._version, p.grad, 0 if p.grad is None else p.grad._version) for p in parts]
