"""Small models of transformers', batches for groups of ranks, and what one plain process makes of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn
from torch.nn import functional

import zero3

WORDS = 61
_SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
KINDS = {
    "Llama": t.LlamaConfig,
    "Qwen2": t.Qwen2Config,
    "Qwen3": t.Qwen3Config,
    "Mistral": t.MistralConfig,
    "Gemma2": t.Gemma2Config,
}


def made(kind: str = "Llama", heads: int = 4, keys: int = 2, attention: str = "sdpa", **options: Any) -> Any:
    sizes = {**_SIZES, "num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 8}
    sizes |= {"hidden_size": 48} if 32 % heads else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = KINDS[kind](**{**sizes, **options})
        return t.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


def batch(group: int, tokens: int, padding: str = "", rows: int = 2, step: int = 0) -> dict[str, Tensor]:
    """`padding`: left, right, packed, or none."""
    ids = torch.randint(1, WORDS, (rows, tokens), generator=torch.Generator().manual_seed(97 * step + group))
    found = {"input_ids": ids, "labels": ids.clone()}
    if padding in ("left", "right"):
        mask = torch.ones_like(ids)
        for row in range(1, rows):
            mask[row, slice(0, 2) if padding == "left" else slice(-2, None)] = 0
        found |= {"attention_mask": mask, "labels": ids.where(mask > 0, -100)}
    if padding == "packed":
        first = tokens // 2
        found["position_ids"] = torch.cat([torch.arange(first), torch.arange(tokens - first)]).expand(rows, -1)
    return found


def plain_sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """transformers' own loss would be made in float32."""
    given = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**given, use_cache=False).logits[:, :-1].flatten(0, 1)
    target = batch["labels"][:, 1:].flatten()
    return functional.cross_entropy(logits, target, reduction="sum"), (target != -100).sum()


def plain_step(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """The gradients of the mean over the tokens of all batches. Returns that mean."""
    sums = [plain_sum(model, each) for each in batches]
    loss = torch.stack([loss for loss, _ in sums]).sum() / sum(int(count) for _, count in sums)
    loss.backward()
    return loss.detach()


def step(model: nn.Module, whole: dict[str, Tensor]) -> None:
    before = copy.deepcopy(whole)
    part = zero3.split_sequence(model, whole)
    assert all(torch.equal(before[key], whole[key]) for key in before) and before.keys() == whole.keys()
    loss = zero3.causal_lm_loss(model, reduction="sum", **part)
    zero3.backward(loss, (part["shift_labels"] != -100).sum(), model)


def assert_gradients(model: nn.Module, plain: nn.Module, tolerance: float = 1e-6) -> None:
    with zero3.full_gradients(model) as found:
        for name, p in plain.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(found[name], p.grad, rtol=tolerance, atol=tolerance * 1e-2, msg=lambda told, n=name: f"{n}: {told}")
