"""A tokenizer of single letters with a chat template, and small chats for TRL's trainers."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = " abcdefghijklmnopqrstuvwxyz.,?!0123456789"
_SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
WORDS = len(_SPECIAL) + len(LETTERS)
_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant>{% generation %}{{ message.content }}<eos>"
    "{% endgeneration %}{% else %}<user>{{ message.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> Any:
    words = {word: number for number, word in enumerate([*_SPECIAL, *LETTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    found = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=_SPECIAL[2:])
    found.chat_template = _TEMPLATE
    return found


def said(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def sums(count: int, first: int = 0) -> list[tuple[str, str, str]]:
    """Questions, answers, and wrong answers, of uneven lengths."""
    numbers = [(first + 7 * n % 23, 5 * n % 11) for n in range(count)]
    return [(f"what is {a} and {b}?" + " please" * (a % 3), f"{a + b}.", f"it is {a * b + 1}!") for a, b in numbers]


def chats(count: int, first: int = 0) -> Dataset:
    """For supervised fine-tuning."""
    return Dataset.from_list([{"messages": said("user", q) + said("assistant", a)} for q, a, _ in sums(count, first)])


def preferences(count: int, first: int = 0) -> Dataset:
    rows = [(said("user", q), said("assistant", a), said("assistant", wrong)) for q, a, wrong in sums(count, first)]
    return Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])


def prompts(count: int) -> Dataset:
    return Dataset.from_list([{"prompt": said("user", q)} for q, _, _ in sums(count)])
