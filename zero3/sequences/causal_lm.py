"""causal_lm_loss(): the loss of a causal language model, without its logits."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..auto_wrap import embeddings_of
from ..guards.module_overrides import Override
from ..modules import unwrapped
from .attention import text_config
from .chunks import Classes, mean_of
from .head import check_head, sum_of_losses
from .parts import check_labels, check_reduction

__all__: list[str] = []

IGNORED = -100
# in a configuration: what changes logits after the head
_CHANGE = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "logits_soft_cap",
)
# what a forward may be asked for, and why the loss is then not this one
_ASKED = MappingProxyType(
    {
        "output_router_logits": "the model adds a router's auxiliary loss to it",
        "logits_to_keep": "logits are left out of it",
        "num_logits_to_keep": "logits are left out of it",
    }
)


def causal_lm_loss(
    model: nn.Module,
    /,
    *,
    reduction: str = "mean",
    num_items_in_batch: int | Tensor | None = None,
    **batch: Any,
) -> Tensor:
    """`model(**batch).loss` of a causal language model, without its logits: see
    `linear_cross_entropy`.

    It enters through the model's own forward, so hooks, checkpointing and autocast hold. The loss
    is made in float32, as transformers' own.

    Args:
        model: A model with `get_output_embeddings()`, whose forward returns what its head does as
            `logits`, sharded or not.
        reduction: "mean" over the tokens that count, or "sum".
        num_items_in_batch: Divides the sum, in place of the number of tokens here. Not with
            `reduction="sum"`.
        batch: What `model(...)` takes. `labels` `[B, S]` are shifted here, `shift_labels` are
            shifted already; targets of -100 do not count.

    Returns:
        The loss, 0-dim.

    Raises:
        ValueError: There are no labels; `num_items_in_batch` is given with `reduction="sum"`; the
            model's logits are not what its head returns, or its loss has more terms: the error says
            which. Or `reduction` is "mean", or `labels` are given, in a model whose ranks hold
            parts of sequences.
        TypeError: The head is none that `linear_cross_entropy` takes.

    Example::

        loss = zero3.causal_lm_loss(model, **batch)
        loss.backward()

    Source: Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, 2024, which fuses
    the head with the loss.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", found {reduction!r}')
    if reduction == "sum" and num_items_in_batch is not None:
        raise ValueError(
            'num_items_in_batch divides the sum, and reduction="sum" divides by nothing: leave one '
            "of them out"
        )
    check_reduction(model, reduction)
    labels, target = batch.pop("labels", None), batch.pop("shift_labels", None)
    if labels is None and target is None:
        raise ValueError("causal_lm_loss needs labels, or shift_labels: the batch has neither")
    if target is None:
        check_labels(model)
        target = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    if (reason := other_loss(model, batch)) is not None:
        raise ValueError(f"{type(unwrapped(model)).__name__}: {reason}. Take model(**batch).loss")
    classes = Classes(target.reshape(-1), None, IGNORED, "sum")
    total = _through(model, classes, batch)
    if reduction == "sum":
        return total
    tokens = (target != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    if isinstance(tokens, Tensor):
        return mean_of(total, tokens.to(total.device))
    return mean_of(total, torch.tensor(tokens))


class OtherLogitsError(ValueError):
    """A model's logits are not what its head returns."""


def is_by_chunks(model: nn.Module, batch: Any) -> bool:
    """Whether `causal_lm_loss` takes the model, as far as can be known before its forward."""
    if "labels" not in batch and "shift_labels" not in batch:
        return False
    if getattr(model, "loss_type", None) is None or other_loss(model, batch) is not None:
        return False
    if any(map(_is_of_users, type(_base_of(model)).__mro__)):
        return False
    try:
        check_head(embeddings_of(model, "output"))
    except TypeError:
        return False
    return True


def other_loss(model: nn.Module, batch: Any) -> str | None:
    """Why the loss of a model is not the cross entropy of what its head returns. None: it is."""
    if embeddings_of(model, "output") is None:
        return "it has no output embeddings (get_output_embeddings)"
    text = text_config(model) or getattr(model, "config", None)
    for name in _CHANGE:
        if getattr(text, name, None) not in (None, 1, 1.0, False):
            return f"it changes its logits after its head ({name} of its configuration)"
    if "_loss_function" in vars(_base_of(model)):
        return "its loss_function was set"
    if getattr(text, "z_loss_coefficient", None):
        return "it adds a term to its loss (z_loss_coefficient of its configuration)"
    for each in (getattr(model, "peft_config", None) or {}).values():
        if each.is_prompt_learning and "PREFIX" not in str(each.peft_type):
            return "its adapter puts tokens before those of the batch"
    for name, reason in _ASKED.items():
        given = batch.get(name)
        if given is None and name == "output_router_logits":
            given = getattr(text, name, None)
        if isinstance(given, Tensor) or given:
            return f"with {name} its loss is another: {reason}"
    if getattr(text, "is_encoder_decoder", False):
        return "an encoder-decoder does not shift its labels"
    kind = getattr(model, "loss_type", None)
    if kind not in (None, "ForCausalLM", "ForConditionalGeneration"):
        return f"its loss is of the kind {kind}"
    return None


def _base_of(model: nn.Module) -> nn.Module:
    """Without peft's model around it."""
    asked = getattr(model, "get_base_model", None)
    return unwrapped(asked() if callable(asked) else model)


def _is_of_users(kind: type) -> bool:
    """Whether a class has a forward, or a loss, that is neither transformers' nor torch's."""
    own = vars(kind).keys() & {"forward", "loss_function"}
    return bool(own) and kind.__module__.partition(".")[0] not in ("transformers", "torch")


def _through(model: nn.Module, classes: Classes, batch: dict[str, Any]) -> Tensor:
    """The model's forward, whose head returns the sum of the losses in place of logits."""
    head: Any = embeddings_of(model, "output")
    inner, made = check_head(head), list[Tensor]()

    def compute(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) != len(classes.target):
            raise ValueError(
                f"{len(rows)} tokens came to the head, and there are {len(classes.target)} labels"
            )
        made.append(sum_of_losses(rows, inner, classes))
        return made[-1]

    # a layer is fetched around the call, as ever; the root's own is fetched already
    instead = Override(unwrapped(head), "forward", lambda module, forward, x: compute(x))
    try:
        found = model(**batch)
    finally:
        instead.undo()
    logits = found["logits"] if isinstance(found, dict) else getattr(found, "logits", None)
    if len(made) != 1 or not isinstance(logits, Tensor) or not _is_same(logits, made[0]):
        raise OtherLogitsError(
            f"{type(unwrapped(model)).__name__} returns other logits than its head makes: it "
            f"changes them, or has called its head {len(made)} times. Take model(**batch).loss"
        )
    return logits


def _is_same(logits: Tensor, made: Tensor) -> bool:
    """Whether `logits` are `made`, but for casts."""
    if logits is made:
        return True
    if logits.shape != made.shape:
        return False
    if (node := logits.grad_fn) is None or made.grad_fn is None:
        return bool(torch.equal(logits, made.to(logits.dtype)))
    while node is not None and node is not made.grad_fn and node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    return node is made.grad_fn
