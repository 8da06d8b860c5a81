"""Cross entropy of a linear layer's outputs, by chunks of rows: the whole logits are never there.

torch does the same since 2.13 (`torch.nn.functional.linear_cross_entropy`). This one is for older
versions, for weights of four and eight bits, and for a loss in float32 of bfloat16 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__: list[str] = []

# rows of a chunk, even if its logits are then larger than the inputs: a product with few rows is
# as slow as one with many
_FEWEST = 256


@dataclass(frozen=True, slots=True)
class Classes:
    """What the rows are compared with, and how they count."""

    target: Tensor  # [N]
    weight: Tensor | None  # [V], of classes
    ignored: int
    reduction: str  # mean, sum or none

    def counts(self, scores: torch.dtype) -> Tensor:
        """How much each row counts, `[N]`."""
        kept = self.target != self.ignored
        if self.weight is None:
            return kept.to(scores)
        return self.weight.to(scores)[self.target.where(kept, 0)] * kept


def chunked_cross_entropy(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, classes: Classes
) -> Tensor:
    """`inputs` `[N, H]`, `weight` `[V, H]`, `bias` `[V]`. Returns the loss in float32, or wider if
    the inputs are: `[N]` if nothing is reduced, otherwise 0-dim.
    """
    trains = torch.is_grad_enabled()
    found: Tensor = _Chunked.apply(inputs, weight, bias, classes, trains)  # type: ignore[no-untyped-call]
    return found


def mean_of(total: Tensor, tokens: Tensor, *, divided: bool = False) -> Tensor:
    """`total / tokens`, 0-dim. Without tokens it is nan, as torch's; its gradients are zeros.
    `divided`: it has been divided already.
    """
    mean = total if divided else total / torch.where(tokens == 0, 1, tokens)
    return mean + torch.where(tokens == 0, float("nan"), 0.0)


class _Chunked(torch.autograd.Function):
    """Gradients of a loss that is reduced are made in its forward, where a chunk's logits are.
    Otherwise backward makes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        classes: Classes,
        trains: bool,
    ) -> Tensor:
        counts = classes.counts(torch.promote_types(torch.float32, inputs.dtype))
        total = counts.sum()
        if classes.reduction == "mean":
            counts = counts / torch.where(total == 0, 1, total)
        reduced = classes.reduction != "none"
        gradients = None
        if trains and reduced:
            gradients = _Gradients(ctx.needs_input_grad, inputs, weight, counts.dtype)
        ctx.rest = classes, reduced, inputs.dtype, bias
        ctx.made = None if gradients is None else gradients.made
        if not reduced:
            ctx.save_for_backward(inputs, weight)
        losses = [
            _losses(logits, target) * count
            if gradients is None
            else gradients.add(rows, logits, target, count)
            for rows, logits, target, count in _by_chunks(inputs, weight, bias, classes, counts)
        ]
        if not reduced:
            return torch.cat(losses)
        found = torch.stack([each.sum() for each in losses]).sum()
        return mean_of(found, total, divided=True) if classes.reduction == "mean" else found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        """Raises RuntimeError if it is the second one of a loss that is reduced."""
        classes, reduced, dtype, bias = ctx.rest
        if reduced:
            made, ctx.made = ctx.made, None
            if made is None:
                raise RuntimeError(
                    "a second backward through linear_cross_entropy, which computes by chunks: "
                    "its gradients were made in forward, and are used up. Pass options=None for a "
                    "graph that is kept (retain_graph=True)"
                )
            found = [each if each is None else each.mul_(upstream) for each in made]
        else:
            inputs, weight = ctx.saved_tensors
            counts = classes.counts(torch.promote_types(torch.float32, dtype)) * upstream
            gradients = _Gradients(ctx.needs_input_grad, inputs, weight, counts.dtype)
            for chunk in _by_chunks(inputs, weight, bias, classes, counts):
                gradients.add(*chunk)
            found = gradients.made
        return *(each if each is None else each.to(dtype) for each in found), None, None


def _by_chunks(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, classes: Classes, counts: Tensor
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """For each chunk: rows, logits in the dtype of `counts`, targets, and how much they count."""
    (n, width), scores = inputs.shape, weight.shape[0]
    step = max(1, min(n, max(_FEWEST, n * width // (2 * scores))))
    for start in range(0, max(n, 1), step):
        rows = slice(start, min(n, start + step))
        logits = functional.linear(inputs[rows], weight, bias).to(counts.dtype)
        target = classes.target[rows]
        yield rows, logits, target.where(target != classes.ignored, 0), counts[rows]


def _losses(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits, target, reduction="none")


class _Gradients:
    """Of inputs, weight and bias, as far as needed. Those of several chunks add up in float32."""

    def __init__(
        self, needed: tuple[bool, ...], inputs: Tensor, weight: Tensor, wide: torch.dtype
    ) -> None:
        self._inputs, self._weight = inputs, weight
        self.made = [
            inputs.new_empty(inputs.shape) if needed[0] else None,
            inputs.new_zeros(weight.shape, dtype=wide) if needed[1] else None,
            inputs.new_zeros(weight.shape[0], dtype=wide) if needed[2] else None,
        ]

    def add(self, rows: slice, logits: Tensor, target: Tensor, count: Tensor) -> Tensor:
        """Adds those of a chunk's losses, which it returns. It writes over the logits."""
        of_inputs, of_weight, of_bias = self.made
        losses = _losses(logits, target) * count
        made = torch.softmax(logits, 1, out=logits)
        made.scatter_add_(1, target.unsqueeze(1), made.new_full((len(target), 1), -1.0))
        narrow = made.mul_(count.unsqueeze(1)).to(self._inputs.dtype)
        if of_inputs is not None:
            of_inputs[rows] = torch.matmul(narrow, self._weight)
        if of_weight is not None:
            of_weight.add_(narrow.t() @ self._inputs[rows])
        if of_bias is not None:
            of_bias.add_(made.sum(0))
        return losses
