"""Chats to learn from: files and directories of a user's, or questions and answers about Python that are made here."""

from __future__ import annotations

import builtins
import inspect
import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Image, List, load_from_disk
from tokenizers import Tokenizer
from transformers import LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from trl.data_utils import prepare_multimodal_messages

from .data import END_OF_TEXT, train_bpe

__all__ = ["TEMPLATE", "last_answer", "load_chats", "made_chats", "prompts_of", "small_config", "small_tokenizer"]

# What stands between `generation` and `endgeneration` is what is learned. A content is a text, or a list of texts and pictures.
TEMPLATE = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}{% if message['role'] == 'assistant' %}Answer: {% generation %}{{ said(message['content']) + eos_token }}"
    "{% endgeneration %}\n{% else %}{{ {'user': 'Question', 'system': 'Note'}.get(message['role'], message['role']) }}: "
    "{{ said(message['content']) }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"
)
_FORMS = ("messages", "prompt and completion")
_MESSAGES = "messages with a role and a content each, at least one of role assistant"
_ROLES = {"human": "user", "gpt": "assistant"}  # as chats of the column `conversations` often name them
_KINDS = (str, bytes, list, dict, set, frozenset, tuple, int, float, complex, range, slice, memoryview)
_ASKED = ("What does {} do?", "Explain {}.", "Tell me about {}, please.")


def load_chats(path: Path) -> Dataset:
    """Chats of a `.jsonl`, `.json` or `.parquet` file, a directory of such files, or one that `datasets` has saved.

    A row has `messages`, a list of `{"role", "content"}`; or `conversations`, the same, or a list of `{"from", "value"}`; or `prompt`
    and `completion`, texts or such lists; and with any of these, it may have `images`, a list of files beside the data. Ends the program,
    saying what is expected, if it has something else.
    """
    try:
        found = _read(path)
    except StopIteration:
        raise SystemExit(f"--data {path}: there are no rows in it") from None
    except Exception as error:  # of three libraries
        raise SystemExit(f"--data {path}: {type(error).__name__}: {error}. Expected are jsonl or parquet files with chats") from None
    columns = set(found.column_names)
    if "conversations" in columns and "messages" not in columns:
        found, columns = found.map(_renamed, remove_columns=["conversations"]), {"messages"} | columns & {"images"}
    if not (columns >= {"messages"} or columns >= {"prompt", "completion"}) or len(found) < 2:
        raise SystemExit(
            f"--data {path}: {len(found)} rows with the columns {sorted(columns)}. Expected is {' or '.join(_FORMS)} in each, and two rows "
            "at least: one is held out"
        )
    found = found.select_columns([*(["messages"] if "messages" in columns else ["prompt", "completion"]), *columns & {"images"}])
    if "images" in columns:
        place = path if path.is_dir() else path.parent
        found = found.map(lambda row: {"images": [str(place / each) if isinstance(each, str) else each for each in row["images"] or []]})
    for number, row in enumerate(found):
        if wrong := _wrong(row):
            raise SystemExit(f"--data {path}: row {number + 1} of {len(found)} has {wrong}")
    return found.cast_column("images", List(Image())) if "images" in columns else found


def _renamed(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "messages": [
            each if each.get("role") is not None else {"role": _ROLES.get(each.get("from"), each.get("from")), "content": each.get("value")}
            for each in row["conversations"] or []
        ]
    }


def _wrong(row: dict[str, Any]) -> str:
    """What is wrong with a row; "" if nothing is."""
    for each in row.get("images", ()):
        if isinstance(each, str) and not Path(each).is_file():
            return f"the image {each}, which is no file"
    if "messages" in row:
        found = row["messages"]
        wrong = not _are_messages(found) or last_answer(found) is None
        return f"the messages {str(found)[:200]}. Expected are {_MESSAGES}" if wrong else ""
    both = row["prompt"], row["completion"]
    if all(isinstance(each, str) for each in both) or all(_are_messages(each) for each in both):
        return ""
    return f"the prompt and completion {str(both)[:200]}. Expected are two texts, or two lists of messages"


def _are_messages(found: Any) -> bool:
    """A message that calls tools may be without content."""
    return (
        isinstance(found, list)
        and bool(found)
        and all(
            isinstance(each, dict)
            and isinstance(each.get("role"), str)
            and (each.get("content") is not None or bool(each.get("tool_calls")))
            for each in found
        )
    )


def last_answer(messages: list[dict[str, Any]]) -> int | None:
    """The place of the last answer in a chat."""
    return max((place for place, message in enumerate(messages) if message["role"] == "assistant"), default=None)


def _read(path: Path) -> Dataset:
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        saved = load_from_disk(str(path))
        return saved["train"] if isinstance(saved, DatasetDict) else saved
    files = sorted(each for each in path.rglob("*") if each.suffix in (".jsonl", ".json", ".parquet")) if path.is_dir() else [path]
    if not files:
        raise FileNotFoundError("there is no jsonl, json or parquet file in it")
    if files[0].suffix == ".parquet":
        return Dataset.from_parquet([str(each) for each in files])
    return Dataset.from_json([str(each) for each in files])


def made_chats() -> Dataset:
    """Questions about Python's own functions and methods, answered by the first sentence of their documentation."""
    things = {name: value for name, value in vars(builtins).items() if not name.startswith("_") and callable(value)}
    for kind in _KINDS:
        things |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}
    rows = []
    for number, (name, value) in enumerate(sorted(things.items())):
        lines = (inspect.getdoc(value) or "").split("\n\n")
        answer = " ".join(next((line for line in lines if line and "(" not in line.split(" ")[0]), "").split())
        if 8 < len(answer) < 160:
            asked = _ASKED[number % len(_ASKED)].format(name)
            rows.append({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]})
    return Dataset.from_list(rows)


def prompts_of(chats: Dataset, count: int) -> list[list[dict[str, Any]]]:
    """What was asked in the first `count` chats, each up to its last answer, with its pictures."""
    found = []
    for row in chats.select(range(min(count, len(chats)))):
        asked: Any = row["messages"][: last_answer(row["messages"])] if "messages" in row else row["prompt"]
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        found.append(prepare_multimodal_messages(asked, row["images"]) if "images" in row else asked)
    return found


def small_tokenizer(chats: Dataset, vocabulary: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE tokenizer learnt from the chats, with a chat template."""
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in chats)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(train_bpe(text, vocabulary)), eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def small_config(vocabulary: int) -> LlamaConfig:
    """Of a model that two CPU processes train in a minute."""
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaConfig(vocab_size=vocabulary, max_position_embeddings=512, tie_word_embeddings=False, **sizes)
