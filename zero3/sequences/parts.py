"""Parts of sequences over the ranks of a group (Ulysses)."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..core.parameters import unwrapped

__all__: list[str] = []

_PARTS = "_zero3_parts"  # in the `__dict__` of a model's modules


def parts_of(module: nn.Module) -> Any:
    return vars(unwrapped(module)).get(_PARTS)


def check_reduction(module: nn.Module, reduction: str) -> None:
    """
    Raises:
        ValueError: The mean is asked for, and ranks hold parts of sequences.
    """
    if reduction == "mean" and parts_of(module) is not None:
        raise ValueError(
            'reduction="mean" in a model whose ranks hold parts of sequences (sp): the mean over a '
            'part is not that over the whole. Pass reduction="sum", and give the sum and the '
            "number of tokens to zero3.backward(loss_sum, num_tokens, model)"
        )


def check_labels(model: nn.Module) -> None:
    """
    Raises:
        ValueError: Ranks hold parts of sequences, so labels can't be shifted on a rank.
    """
    if parts_of(model) is not None:
        raise ValueError(
            "labels= in a model whose ranks hold parts of sequences (sp): they would be shifted "
            "across the cut between ranks. Pass the whole batch through zero3.split_sequence, "
            "which makes shift_labels"
        )
