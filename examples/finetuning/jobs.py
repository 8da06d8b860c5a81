"""What the short examples share: options, text in rows, the loop. Each example shows what its own job takes, and no more.

Without --model a small one is made, which reads bytes, and its text is the help pages that come with Python.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero3
from finetuning.options import HelpFormatter, positive
from finetuning.ranks import Ranks

__all__ = ["model_on_meta", "new_parser", "plain_loss", "rows", "save", "tokenizer_of", "train"]

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3, "vocab_size": 256}


def new_parser(description: str, *, output: str, lr: float) -> argparse.ArgumentParser:
    """`description`: what the example does, and after an empty line its commands."""
    summary, _, commands = description.partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=commands, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face directory of a causal model; without it a small one is made")
    add("--text", type=Path, metavar="FILE", help="what to train on; without it, the help pages that come with Python")
    add("--output", type=Path, metavar="DIR", default=Path(output), help="for the model, or the adapters")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    add("--steps", type=positive, metavar="N", default=60, help="optimizer steps")
    add("--batch-size", type=positive, metavar="N", default=8, help="sequences of a process and step")
    add("--length", type=positive, metavar="N", default=128, help="tokens of a sequence")
    add("--lr", type=float, metavar="X", default=lr, help="learning rate")
    add("--seed", type=int, metavar="N", default=0, help="of fresh weights and of batches")
    return parser


def policy_of(device: str, **choices: Any) -> zero3.ShardingPolicy:
    """On GPUs layers compute in bf16 over float32 masters."""
    mixed = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "master_dtype": torch.float32} if device == "cuda" else {}
    return zero3.ShardingPolicy(**mixed, **choices)


def model_on_meta(options: argparse.Namespace, kind: str = "llama", **small: Any) -> Any:
    """Without values, which takes no memory: of --model, or a small one of that kind."""
    from transformers import AutoConfig, AutoModelForCausalLM  # --help does without

    sizes = {**SIZES, "intermediate_size": 192, **small}
    config = AutoConfig.for_model(kind, **sizes) if options.model is None else AutoConfig.from_pretrained(options.model)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def fill(model: Any, options: argparse.Namespace) -> None:
    """Values, after sharding: read from --model, or drawn. Every rank holds its own slices alone."""
    if options.model is not None:
        zero3.load_pretrained(model, options.model)
    torch.manual_seed(options.seed)
    zero3.materialize(model)  # what no file has


def save(model: Any, directory: Path, options: argparse.Namespace, ranks: Ranks) -> None:
    """The model (or its adapters), and the tokenizer, for `from_pretrained`. All ranks call it."""
    if ranks.rank == 0:
        there = any(directory.glob("*.safetensors"))
        print("replacing what is in" if there else "writing", directory.resolve(), flush=True)
    zero3.save_pretrained(model, directory)
    if ranks.rank == 0:
        tokenizer_of(options).save_pretrained(directory)


def tokenizer_of(options: argparse.Namespace) -> Any:
    """That of --model; the small model reads bytes."""
    from finetuning.data import byte_tokenizer, load_tokenizer  # --help does without tokenizers

    return byte_tokenizer() if options.model is None else load_tokenizer(options.model)


def tokens_of(options: argparse.Namespace) -> Tensor:
    """Of the text, 1-D."""
    from finetuning.data import load_text

    return torch.tensor(tokenizer_of(options)(load_text(options.text), add_special_tokens=False, verbose=False).input_ids)


def rows(options: argparse.Namespace, device: torch.device, number: int) -> Iterator[dict[str, Tensor]]:
    """Batches of `--batch-size` sequences. `number`: whose; ranks with other numbers draw other sequences."""
    tokens, draws = tokens_of(options), torch.Generator().manual_seed(1000 * options.seed + number)
    if len(tokens) <= options.length:
        raise SystemExit(f"--text: {len(tokens)} tokens, expected more than --length {options.length}")
    while True:
        starts = torch.randint(len(tokens) - options.length, (options.batch_size, 1), generator=draws)
        ids = tokens[starts + torch.arange(options.length)].to(device)
        yield {"input_ids": ids, "labels": ids}


def plain_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Its backward, too."""
    loss: Tensor = model(**batch).loss
    loss.backward()
    return loss


def train(
    model: Any, batches: Iterator[dict[str, Tensor]], options: argparse.Namespace, ranks: Ranks, step: Callable[..., Tensor] = plain_loss
) -> Sequence[float]:
    """Takes `--steps` steps of AdamW, prints losses, and returns them. `step`: forward and backward of a batch, which gives its loss."""
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=options.lr)
    losses: list[float] = []
    for number in range(1, options.steps + 1):
        loss = step(model, next(batches))
        zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(ranks.mean(loss))
        if ranks.rank == 0 and (number % 10 == 0 or number in (1, options.steps)):
            print(f"step {number}: loss {losses[-1]:.4f}", flush=True)
    return losses
