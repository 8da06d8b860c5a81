"""linear_cross_entropy() and causal_lm_loss(): the loss of a model's head, without its logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import has_torch_function

from ..layer import run_in
from ..modules import unwrapped
from .chunks import Classes, chunked_cross_entropy
from .parts import check_reduction

__all__: list[str] = []

_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    input: Tensor,  # noqa: A002 (torch's name)
    head: nn.Module,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    options: Any = "auto",
) -> Tensor:
    """The cross entropy of a head's logits. Only a chunk of their rows is in memory at a time.

    Logits `[N, V]` are often the largest tensor of a step, and backward holds them twice. Here the
    head is gathered once, whatever the chunks, and reduced once. The gradient of its weight is made
    in forward, and lives from there to backward; a second backward through it (`retain_graph=True`)
    needs `options=None`. In a model that nobody sharded it is a plain call.

    Args:
        input: What the head would be called with, `[..., H]`.
        head: The module, not its weight: an `nn.Linear`, or an `nn.Embedding` whose weight is
            `[V, H]`. It may be a layer of its own or not, tied or not, frozen or not; and be called
            in the model's forward or after it.
        target: Numbers of classes, `[...]`.
        weight: How much each class counts, `[V]`.
        reduction: "mean", "sum", or "none", which keeps the shape of `target`.
        ignore_index: The target of rows that do not count.
        label_smoothing: As in `torch.nn.functional.cross_entropy`. torch makes whole logits for it,
            with a warning.
        options: "auto": by chunks, as torch chooses them (since 2.13; before, as zero3 does). A
            `torch.nn.LinearCrossEntropyOptions`. None: whole logits.

    Returns:
        The loss, 0-dim, or `[...]` with `reduction="none"`.

    Raises:
        TypeError: `head` is no such module, an adapter of peft is around it, or `options` is of
            another type.
        ValueError: Shapes do not fit together; `reduction` is unknown; or it is "mean" in a model
            whose ranks hold parts of sequences, where it has to be the mean over all of them.

    Example::

        hidden = model.model(**batch).last_hidden_state
        loss = zero3.linear_cross_entropy(hidden, model.lm_head, targets)

    Source: Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2025.
    """
    inner = check_head(head)
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be one of {_REDUCTIONS}, found {reduction!r}")
    check_reduction(head, reduction)
    if target.shape != input.shape[:-1] or input.shape[-1] != inner.weight.shape[-1]:
        raise ValueError(
            f"input {list(input.shape)}, target {list(target.shape)} and a head of "
            f"{list(inner.weight.shape)} do not fit: expected [..., H], [...] and [V, H]"
        )
    whole = options if options is not None and options != "auto" else None
    if whole is not None and type(whole).__name__ != "LinearCrossEntropyOptions":
        raise TypeError(
            'options must be "auto", None or a torch.nn.LinearCrossEntropyOptions, found '
            f"{type(options).__name__}"
        )

    def compute(x: Tensor) -> Tensor:
        classes = Classes(target.reshape(-1), weight, ignore_index, reduction)
        rows = x.reshape(-1, x.shape[-1])
        loss = _computed(rows, inner, classes, label_smoothing, options)
        return loss.view_as(target) if reduction == "none" else loss

    return run_in(head, compute, input)  # type: ignore[no-any-return]


def check_head(head: Any) -> Any:
    """The `Linear` or the `Embedding` that a head is. Raises TypeError if it is neither."""
    inner = unwrapped(head) if isinstance(head, nn.Module) else head
    kind = type(inner)
    plain = isinstance(inner, nn.Linear) and kind.forward is nn.Linear.forward
    if plain or (isinstance(inner, nn.Embedding) and kind.forward is nn.Embedding.forward):
        return inner
    adapted = kind.__module__.partition(".")[0] == "peft"
    raise TypeError(
        f"head must be an nn.Linear or an nn.Embedding, found {kind.__name__}"
        + (", an adapter of peft, which computes beside the head: leave the head out of "
           "target_modules and modules_to_save" if adapted else "")
    )  # fmt: skip


def sum_of_losses(rows: Tensor, head: Any, classes: Classes) -> Tensor:
    """The sum over `rows` `[N, H]`, in float32 or wider. `head`: a Linear or an Embedding that
    shows its weight.
    """
    narrow = rows.dtype.itemsize < 4 or _autocast_dtype(rows) is not None
    if narrow or not _torch_chunks(head):
        return chunked_cross_entropy(*_as_autocast(rows, head), classes)
    return _computed(rows, head, classes, 0.0, "auto")


def _torch_chunks(head: Any) -> bool:
    return hasattr(functional, "linear_cross_entropy") and not has_torch_function((head.weight,))


def _computed(
    rows: Tensor, head: Any, classes: Classes, label_smoothing: float, options: Any
) -> Tensor:
    ours, wide = not _torch_chunks(head), _autocast_dtype(rows) is not None
    rows, weight, bias = _as_autocast(rows, head)
    named: dict[str, Any] = {
        "weight": classes.weight, "reduction": classes.reduction, "ignore_index": classes.ignored,
        "label_smoothing": label_smoothing,
    }  # fmt: skip
    if options is None or (label_smoothing and (ours or wide)):
        logits = functional.linear(rows, weight, bias)
        return functional.cross_entropy(logits, classes.target, **named)
    if ours or wide:
        loss = chunked_cross_entropy(rows, weight, bias, classes)
        return loss if wide else loss.to(rows.dtype)  # autocast makes losses in float32
    target, named["linear_bias"] = classes.target, bias
    named["options"] = nn.LinearCrossEntropyOptions() if options == "auto" else options
    if classes.reduction != "mean":
        return functional.linear_cross_entropy(rows, weight, target, **named)
    # Where no row counts, torch makes NaN of gradients. There it gets some that count, and no
    # gradient comes to them.
    nothing = classes.counts(torch.float32).sum() == 0
    if classes.weight is not None:
        named["weight"] = classes.weight.masked_fill(nothing, 1)
    target = target.masked_fill(nothing, int(classes.ignored == 0))
    loss = functional.linear_cross_entropy(rows, weight, target, **named)
    return loss.masked_fill(nothing, float("nan"))


def _autocast_dtype(rows: Tensor) -> torch.dtype | None:
    device = rows.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or rows.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def _as_autocast(rows: Tensor, head: Any) -> tuple[Tensor, Any, Any]:
    """In the dtype of autocast's linear layers: products by chunks ask for one dtype."""
    bias = getattr(head, "bias", None)
    if (dtype := _autocast_dtype(rows)) is None:
        return rows, head.weight, bias
    return rows.to(dtype), head.weight.to(dtype), None if bias is None else bias.to(dtype)
