"""backward(): the mean over tokens, although ranks and micro-batches have different numbers of
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import nan
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..access import left_out, only_a_part, used_in_step
from ..comm.agreement import Members, agree_where_nan
from ..comm.errors import NamingFailures, Subject
from ..conductors.conducted import unconducted
from ..core.chunk_gradient import TOKENS, DeferredGradient, WrongCallError
from ..core.layer_state import LayerState, accounts_of, ignored_of

__all__: list[str] = []

_TOO_MANY = 2**53  # above it float64, in which tokens are counted, skips numbers


def backward(loss_sum: Tensor, num_tokens: int | Tensor, model: nn.Module) -> Tensor:
    """Runs the backward of a loss that is summed over tokens. The gradients are those of the mean
    over all tokens of all ranks.

    After each call the gradients are the mean over the tokens of all micro-batches since they were
    last zeroed. (In a mean of means, a token of a short micro-batch would count more.) Every rank
    calls it, also a rank whose batch has no tokens. It costs one all-reduce of four numbers and,
    from the second micro-batch on, one pass over the chunks' gradients. On a GPU the host does not
    wait, but for gradients that rest with it (`offload`). It may be used inside `no_sync`, and with
    a scaled loss. Gradients of parameters that the policy's `ignored` leaves alone are weighed
    alike: their mean over ranks (with `gradient_reduction="sum"` their sum) is the gradient. Zero
    them with the others.

    Args:
        loss_sum: 0-dim: this rank's loss, summed over its `num_tokens` tokens.
        num_tokens: The number of tokens in this rank's sum, 0 or more, as an integer or a 0-dim
            tensor.
        model: The sharded model that computed the loss. If the loss trains several, all of them, as
            an `nn.ModuleList`: earlier gradients of the others would keep their weight.

    Returns:
        The mean loss over this micro-batch's tokens of all ranks, 0-dim, detached, the same on all
        ranks. It is 0 if there are no tokens.

    Raises:
        ValueError: Nothing in `model` is sharded, the loss is not 0-dim or has no graph, the number
            of tokens is negative or not finite (a tensor on a GPU gives nan on all ranks), `model`
            is only a part of a model, its layers that train differ in `gradient_reduction`, a
            backward without a number of tokens has left gradients, or only parameters that
            `ignored` leaves alone train; or it is the second one inside one `step_guard`. Every
            rank raises it; on a GPU, where the host does not wait, only the rank with the mistake.
        TypeError: The loss is no tensor, or the number of tokens is no number. The same ranks raise
            it.

    Example::

        optimizer.zero_grad()
        for ids, labels in token_batches:
            logits = model(ids).flatten(0, 1)
            loss_sum = cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
            zero3.backward(loss_sum, (labels != -100).sum(), model)
        optimizer.step()
    """
    states = used_in_step(model, "backward")
    if any(account.undecided for account in accounts_of(states)):
        raise WrongCallError(
            "a second zero3.backward inside one zero3.step_guard: the number of tokens of the "
            "first one counts only when the guard ends. Give each micro-batch a guard of its own."
        )
    error = _mistake(loss_sum, num_tokens, states)
    mine = (num_tokens, loss_sum.detach()) if error is None else (0, 0)
    count = CountTokens(states[0], (states, *mine, error))
    weights: Weights = states[0].conductor.conduct(count)
    try:
        _without_ranks(loss_sum, weights.share, states).backward()  # type: ignore[no-untyped-call]
    except BaseException:
        # earlier gradients are scaled for a sum that is incomplete now
        for account in accounts_of(states):
            account.give_up()
        for ignored in ignored_of(states):
            ignored.give_up()
        raise
    note(states, weights.total)
    return torch.where(weights.tokens == 0, 0, weights.loss / weights.tokens).to(loss_sum.dtype)


def _mistake(loss_sum: Any, num_tokens: Any, states: list[LayerState]) -> Exception | None:
    """Returns the mistake that this rank finds in its own arguments, if any."""
    if not isinstance(loss_sum, Tensor):
        return TypeError(
            f"loss_sum is a {type(loss_sum).__name__}, expected a 0-dim tensor with a graph"
        )
    if loss_sum.ndim or not loss_sum.requires_grad:
        return ValueError(
            f"loss_sum has shape {tuple(loss_sum.shape)} and "
            f"requires_grad={loss_sum.requires_grad}, expected a 0-dim tensor with a graph: a "
            "rank without tokens runs the model too, and sums over nothing (reduction='sum')"
        )
    if any(each.parameter.requires_grad for each in ignored_of(states)) and not any(
        state.chunks.trainable() for state in states
    ):
        return ValueError(
            "nothing trains but parameters that the policy's `ignored` leaves alone: no chunk's "
            "gradient counts their tokens"
        )
    if (wrong := _not_a_count(num_tokens) or _unlike(states)) is not None:
        return wrong
    others = left_out(states)
    return ValueError(only_a_part("zero3.backward", others[0])) if others else None


def _not_a_count(tokens: Any) -> Exception | None:
    """On an accelerator the host does not wait: there `weigh` makes nan of a wrong one."""
    if isinstance(tokens, Tensor):
        if tokens.numel() != 1:
            return ValueError(
                f"num_tokens has shape {tuple(tokens.shape)}, expected an integer or a 0-dim tensor"
            )
        if tokens.is_complex() or tokens.dtype == torch.bool:
            return TypeError(
                f"num_tokens is {tokens.dtype}, expected an integer or a real 0-dim tensor"
            )
        if tokens.device.type != "cpu":
            return None
        tokens = tokens.item()
    if type(tokens) is bool or not isinstance(tokens, Real):
        return TypeError(
            f"num_tokens is a {type(tokens).__name__}, expected an integer or a 0-dim tensor"
        )
    number: Any = tokens
    if 0 <= number < _TOO_MANY:
        return None
    return ValueError(f"num_tokens must be 0 or more, and finite, found {number}")


def _trains(state: LayerState) -> bool:
    return bool(state.chunks.trainable()) or any(
        each.parameter.requires_grad for each in state.gradients.ignored
    )


def _unlike(states: list[LayerState]) -> Exception | None:
    """All layers share the one loss that is scaled."""
    if len({state.policy.gradient_reduction for state in states}) == 1:
        return None
    by = {state.policy.gradient_reduction: state for state in states if _trains(state)}
    if len(by) < 2:
        return None
    found = " and ".join(f"{reduction!r} in layer {by[reduction].label}" for reduction in by)
    return ValueError(
        f"zero3.backward found policy.gradient_reduction={found}, expected one for all layers that "
        "train: give all models of one loss the same"
    )


@dataclass(frozen=True)
class CountTokens:
    """Ranks add up the tokens of a micro-batch: see `weigh`. `mine`: its arguments."""

    layer: LayerState  # the model's first
    mine: Any = field(default=None, compare=False)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "counts tokens"

    def perform(self) -> Weights:
        return weigh(*self.mine)

    def take_part(self) -> None:
        none = torch.zeros(4, dtype=torch.float64, device=self.layer.device)
        unconducted(self.layer.communicator).all_reduce(none)


class Weights(NamedTuple):
    """The numbers of one micro-batch on all ranks, 0-dim."""

    tokens: Tensor
    loss: Tensor  # summed over these tokens
    total: Tensor  # the tokens since gradients were zeroed
    share: Tensor  # the weight of one token: 1 / total


def weigh(
    states: list[LayerState],
    tokens: int | Tensor,
    loss: float | Tensor,
    error: Exception | None = None,
) -> Weights:
    """Adds up the tokens of all ranks, and scales earlier gradients to their part of the new mean.

    `error`: a mistake that this rank has found. Every rank raises it, and nothing has changed.
    """
    # the tokens, their loss, the tokens of earlier micro-batches, and the number of ranks that know
    # the latter
    counts = torch.zeros(4, dtype=torch.float64, device=states[0].device)
    if isinstance(tokens, Tensor):
        tokens = torch.where((tokens >= 0) & tokens.isfinite(), tokens.double(), nan)
    counts[0], counts[1] = tokens, loss
    known = _so_far(states, counts.new_zeros(2))
    if isinstance(known, Tensor):
        counts[2:] = known
    else:
        error = error or known
    if error is not None:
        counts.fill_(nan)
    communicator = unconducted(states[0].communicator)
    with NamingFailures(
        communicator, "counting", Subject("the tokens of the micro-batch"), "zero3.backward"
    ):
        communicator.all_reduce(counts)
    agree_where_nan(Members(communicator, states[0].device), "zero3.backward", counts[3:], error)
    so_far = counts[2] / counts[3].clamp(min=1)
    total = counts[0] + so_far
    share = torch.where(total == 0, 0, 1 / total)
    for account in accounts_of(states):
        account.scale(so_far * share)
    for ignored in ignored_of(states):
        ignored.scale(so_far * share)
    return Weights(counts[0], counts[1], total, share)


def note(states: list[LayerState], total: Tensor) -> None:
    """Notes after the backward that gradients are the mean over `total` tokens."""
    for account in accounts_of(states):
        account.note_tokens(total)


def _without_ranks(loss_sum: Tensor, share: Tensor, states: list[LayerState]) -> Tensor:
    """The loss, scaled such that the reduction gives the sum over ranks, times `share`."""
    first = next(filter(_trains, states), states[0])
    mean = first.policy.gradient_reduction == "mean"
    return loss_sum * (share * (first.gradients.among.averaged_over if mean else 1)).to(
        loss_sum.dtype
    )


def _so_far(states: list[LayerState], nothing: Tensor) -> Tensor | ValueError:
    """The tokens that gradients are the mean of, and 1; or `nothing`, if they were zeroed since."""
    gradients = [gradient for account in accounts_of(states) for gradient in account.earlier]
    known = [
        (gradient, *noted)
        for gradient in gradients
        if (noted := getattr(gradient, TOKENS, None)) is not None
    ]
    if len(known) < len(gradients):
        return ValueError(
            "there are gradients that loss.backward() has left, and their weight among tokens is "
            "unknown. Use zero3.backward for every backward of a step, and begin it with "
            "optimizer.zero_grad()."
        )
    if not known:
        return nothing
    tokens = known[0][1]
    found = torch.stack([tokens, torch.ones_like(tokens)])
    if any(isinstance(gradient, DeferredGradient) and gradient.zeroed for gradient, _, _ in known):
        return nothing
    here = [(g, version) for g, _, version in known if not isinstance(g, DeferredGradient)]
    if all(gradient._version == version for gradient, version in here):
        return found
    return found * torch.stack([gradient.as_subclass(Tensor).any() for gradient, _ in here]).any()
