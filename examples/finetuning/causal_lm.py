"""A causal language model of `transformers`, as training sees it, whichever way it is sharded; and what both ways need."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .report import Memory

__all__ = ["CausalLM", "check_output", "choose_trainable", "empty", "load_config", "new_model", "save_model"]


class CausalLM(Protocol):
    """What `neox.NeoX` and `any_model.AnyModel` are. Every rank calls every method."""

    sharded: nn.Module
    memory_of_one_process: Memory

    def logits(self, tokens: Tensor) -> Tensor:
        """From `[batch, length]` to `[batch, length, vocabulary]`."""

    def generate(self, tokens: Tensor, count: int, window: int) -> Tensor:
        """`tokens` `[1, length]`, and at most `count` more, each the likeliest; `window`: how many the model was trained to see."""

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Writes what was trained, in the format that `transformers` or `peft` reads."""


def load_config(directory: Path) -> PreTrainedConfig:
    if not (directory / "config.json").is_file():
        raise SystemExit(f"--model {directory}: there is no config.json in it")
    return AutoConfig.from_pretrained(directory)


def check_output(directory: Path, *, adapters: bool) -> None:
    """Ends the program if a model lies where adapters shall go, or adapters where a model shall: they would be loaded together, or one
    in place of the other."""
    if directory.exists() and not directory.is_dir():
        raise SystemExit(f"--output {directory}: a file of this name is there, expected a directory or nothing")
    patterns = ("model*.safetensors*", "pytorch_model*.bin*") if adapters else ("adapter_config.json", "adapter_model.*")
    found = sorted(path.name for pattern in patterns for path in directory.glob(pattern))
    if found:
        what, other = ("adapters", "a whole model") if adapters else ("a whole model", "adapters")
        raise SystemExit(
            f"--output {directory}: it holds {other} of an earlier run ({', '.join(found[:4])}), and this run writes {what}: who loads the "
            "directory would get the one or the other. Name another directory, or remove these files"
        )


def empty() -> torch.device:
    """A context in which a model needs no memory: its parameters have shapes, but no values."""
    return torch.device("meta")


def new_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """With fresh weights, or inside `empty()` with none."""
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except ValueError as error:
        raise SystemExit(f"{config.model_type!r} is not a causal language model that transformers knows: {error}") from None


def choose_trainable(model: PreTrainedModel, choice: str) -> None:
    """Freezes all but the choice: "all", "biases", or "last-N", the last N blocks and what follows them, as the readout does."""
    if choice == "all":
        trainable = list(model.parameters())
    elif choice == "biases":
        trainable = [parameter for name, parameter in model.named_parameters() if name.endswith(".bias")]
        if not trainable:
            raise SystemExit(f"--train biases: this {type(model).__name__} has no biases")
    else:
        trainable = last_parameters(model, int(choice.removeprefix("last-")))
    model.requires_grad_(False)
    for parameter in trainable:
        parameter.requires_grad_(True)


def last_parameters(model: PreTrainedModel, count: int) -> list[nn.Parameter]:
    """From the last `count` blocks on. A readout that is tied to the embedding counts as the embedding: it comes first."""
    length = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    blocks = next((module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == length), None)
    if blocks is None:
        raise SystemExit(f"--train last-{count}: there is no list of blocks in this {type(model).__name__}")
    if count > len(blocks):
        raise SystemExit(f"--train last-{count}: the model has only {len(blocks)} blocks")
    places = {parameter: place for place, parameter in enumerate(model.parameters())}
    starts = [min(places[parameter] for parameter in block.parameters()) for block in blocks]
    end = max(places[parameter] for parameter in blocks[-1].parameters()) + 1
    return list(places)[[*starts, end][len(blocks) - count] :]


def save_model(
    directory: Path, config: PreTrainedConfig, state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, source: Path | None
) -> None:
    """A directory that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` read.

    An empty model takes the tensors of `state`, without a copy, and writes itself: it knows what is tied, and under which
    names. How it generates is said in the directory `source` from which it came, if there is one.
    """
    with empty():
        model = new_model(config, config.dtype or torch.float32)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    if source is not None and (source / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
