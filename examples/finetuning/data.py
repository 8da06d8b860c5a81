"""Text, tokens and batches. Every rank reads the same text, draws the same batches, and takes its own rows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

__all__ = [
    "byte_tokenizer",
    "held_out_batches",
    "load_text",
    "load_tokenizer",
    "make_tokenizer",
    "split_tokens",
    "train_bpe",
    "training_batch",
]

END_OF_TEXT = "<|endoftext|>"


def load_text(path: Path | None) -> str:
    """The text of a file, or the English that every Python carries with it: the help pages of the language."""
    if path is not None:
        return read_text(path)
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def read_text(path: Path) -> str:
    """The file's text; ends the program, saying what is expected, if it holds something else."""
    expected = "Expected is plain text in UTF-8, as the model shall learn to write it"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SystemExit(f"--text {path}: {error.strerror}. {expected}") from None
    except UnicodeDecodeError as error:
        raise SystemExit(f"--text {path}: it is not UTF-8 ({error.reason}, byte {error.start}). {expected}") from None
    if "\0" in text or not text.strip():
        raise SystemExit(f"--text {path}: the file {'holds zero bytes' if text.strip() else 'is empty'}. {expected}")
    if is_json(text):
        raise SystemExit(
            f"--text {path}: these are JSON records, of which the model would learn braces, names and quotation marks. {expected}: "
            "write chats out first, with the tokenizer's apply_chat_template(..., tokenize=False), and other records as sentences"
        )
    return text


def is_json(text: str) -> bool:
    """Whether all of it, or its first line, is a JSON object or list."""
    first = text.lstrip("\ufeff \t\r\n")[:1]
    return first in ("{", "[") and any(_parses(each) for each in (text.lstrip("\ufeff").strip().partition("\n")[0], text.lstrip("\ufeff")))


def _parses(text: str) -> bool:
    try:
        return isinstance(json.loads(text), (dict, list))
    except ValueError:
        return False


def train_bpe(text: str, vocabulary: int) -> str:
    """A byte-level BPE tokenizer learnt from `text`, of the kind that GPT-NeoX models have, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # every byte has a token, so that no text is unknown
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer.to_str()


def make_tokenizer(json: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json), eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, and its number is the token's. The end of a text is the byte 0, which no text has."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters: the other bytes take those from 256 on
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=chr(256), bos_token=chr(256))


def load_tokenizer(directory: Path, kind: Any = AutoTokenizer) -> Any:
    """That of a model's directory, or its processor (`AutoProcessor`); ends the program if it has none."""
    what = "tokenizer" if kind is AutoTokenizer else "processor"
    try:
        return kind.from_pretrained(directory)
    except (OSError, ValueError) as error:
        expected = f"expected is a {what} beside the model, as {kind.__name__}'s save_pretrained leaves it"
        raise SystemExit(f"--model {directory}: its {what} can't be loaded ({expected}): {error}") from None


def split_tokens(tokenizer: PreTrainedTokenizerBase, text: str, held_out: float = 0.1) -> tuple[Tensor, Tensor]:
    """Tokens to train on, and the last tenth of the text, which training never sees. Both 1-D."""
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    boundary = int(len(tokens) * (1 - held_out))
    return tokens[:boundary], tokens[boundary:]


def training_batch(tokens: Tensor, batch_size: int, length: int, generator: torch.Generator) -> Tensor:
    """`batch_size` windows at random places, `[batch_size, length + 1]`: inputs, and one more to predict."""
    starts = torch.randint(len(tokens) - length, (batch_size, 1), generator=generator)
    return tokens[starts + torch.arange(length + 1)]


def held_out_batches(tokens: Tensor, batch_size: int, length: int, limit: int) -> list[Tensor]:
    """At most `limit` windows one after another, in whole batches `[batch_size, length + 1]`: equal work for every rank."""
    windows = tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)[:limit]
    if len(windows) < batch_size:
        raise SystemExit(
            f"{len(windows)} held-out sequences are less than one batch of {batch_size}: take a longer text, a larger --held-out, "
            "or a smaller --sequence-length or --batch-size"
        )
    return list(windows[: len(windows) // batch_size * batch_size].split(batch_size))
