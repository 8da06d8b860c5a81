"""Finds changes of chunks and gradients between two rounds. A rank with data can make them, and
ranks without data can't see them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.chunk_gradient import DeferredGradient
from ..core.layer_state import LayerState, accounts_of, parts_of

__all__: list[str] = []


class StateChanges:
    """Compares tensors' versions and identities, never values. Other ranks can repeat only one kind
    of change: dropped gradients.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._states = states
        self._taken: list[tuple[int, Tensor | None, int]] = []
        self._holds = False  # whether this rank follows ranks that are in a `step_guard`

    def take(self, *, only_if: bool) -> None:
        """Notes the state after a round. It has to be the same before the next round, unless
        `only_if` is False.
        """
        self._taken = self._now() if only_if else []

    def forget(self) -> None:
        self._taken = []

    def changed(self) -> bool:
        """Whether anything has changed since `take`, other than that gradients were dropped."""
        for (version, gradient, its_version), (version_now, gradient_now, its_version_now) in zip(
            self._taken, self._now(), strict=False
        ):
            same = gradient_now is gradient and its_version_now == its_version
            if version_now != version or not (same or gradient_now is None):
                return True
        return False

    @property
    def divided(self) -> bool:
        return any(chunk.parts.divided for state in self._states for chunk in state.chunks)

    def gradients(self) -> list[int]:
        """The number of gradients, and the number of layers that keep sums for a later backward to
        reduce.
        """
        return [
            sum(_reduced(part) is not None for part in parts_of(self._states)),
            sum(state.gradients.owed() for state in self._states),
        ]

    def follow(self, gradients: int, owed: int) -> None:
        """Takes the numbers of `gradients` and `owed` on ranks with data. If one of them is 0, this
        rank drops its own too.
        """
        mine, kept = self.gradients()
        if kept and not owed:
            for account in accounts_of(self._states):
                account.drop()
        if mine and not gradients:
            for account in accounts_of(self._states):
                account.drop_all()

    def kept(self) -> str:
        """The places of the accounts that keep sums, each with the tokens of their mean, if these
        are known.
        """
        totals = {
            place: account.noted_tokens()
            for place, account in enumerate(accounts_of(self._states))
            if account.owed
        }
        return json.dumps({k: None if v is None else v.item() for k, v in totals.items()})

    def keep(self, told: Sequence[str]) -> None:
        """Keeps zeros where another rank keeps sums: so a step function finds the same on all
        ranks, whether it reduces them or looks at them too early. `told`: what `kept` is on each
        rank.
        """
        everyone = {int(k): total for text in told for k, total in json.loads(text).items()}
        places = [(state, a) for state in self._states for a in state.gradients.accounts.values()]
        for place, total in everyone.items():
            state, account = places[place]
            if account.owed:
                continue
            account.keep(state.gradients)
            if (backward := state.gradients.backward()) is not None:
                backward.owe()
            if total is not None:
                total = torch.tensor(total, dtype=torch.float64, device=state.device)
                account.note_tokens(total)
            state.gradients.end_backward()

    def hold(self) -> None:
        """Gradients are staged from now on, as on ranks that are in a `step_guard`."""
        for state in self._states if not self._holds else ():
            state.gradients.begin_guard()
        self._holds = True

    def let_go(self, *, keep: bool) -> None:
        for state in self._states if self._holds else ():
            state.gradients.end_guard(keep=keep)
        self._holds = False

    def _now(self) -> list[tuple[int, Tensor | None, int]]:
        gradients = [(part, _reduced(part)) for part in parts_of(self._states)]
        return [
            (part._version, found, 0 if found is None else found._version)
            for part, found in gradients
        ]


def _reduced(part: Tensor) -> Tensor | None:
    """The gradient of earlier backwards. A `step_guard`, and gradients that are kept, put another
    object into its place.
    """
    return part.grad.earlier if isinstance(part.grad, DeferredGradient) else part.grad
