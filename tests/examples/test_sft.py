"""The recipe for chats: run as a user runs it, on two processes and on one, with what users bring."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.examples.test_finetune import ROOT, launch_two

trl = pytest.importorskip("trl", reason="the example's packages are not installed: pip install 'zero3[trl,examples]'")
datasets = pytest.importorskip("datasets")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

EXAMPLE = ROOT / "examples" / "sft.py"
FEW = ["--device", "cpu", "--steps", 4, "--every", 2, "--samples", 1, "--batch-size", 2, "--patience", 3]
CHAT = [{"role": "user", "content": "What is 2 and 2?"}, {"role": "assistant", "content": "It is 4."}]


def held_out(printed: str) -> tuple[float, float]:
    before, after = re.findall(r"held-out loss: ([\d.]+) before, ([\d.]+) after 4 steps", printed)[0]
    return float(before), float(after)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The small model, after four steps of two processes; and what they printed."""
    directory = tmp_path_factory.mktemp("sft") / "small"
    return directory, launch_two(EXAMPLE, *FEW, "--output", directory)


@pytest.mark.slow
def test_sft_of_the_small_model_gets_better_and_leaves_a_model(small: tuple[Path, str]) -> None:
    directory, printed = small
    before, after = held_out(printed)
    assert after < before - 0.1
    assert printed.count("->") >= 3, "samples at each evaluation"
    assert (directory / "loss.png").stat().st_size > 5000
    assert {path.name for path in (directory / "checkpoints").iterdir()} >= {"checkpoint-4"}
    AutoModelForCausalLM.from_pretrained(directory)
    assert "Answer: " in AutoTokenizer.from_pretrained(directory).apply_chat_template(CHAT, tokenize=False)


@pytest.mark.slow
def test_sft_goes_on_with_another_number_of_processes(small: tuple[Path, str]) -> None:
    """And to a later end."""
    directory, _ = small
    longer = ["--device", "cpu", "--steps", 6, "--every", 2, "--samples", 1, "--batch-size", 4, "--patience", 3]
    command = [sys.executable, EXAMPLE, *longer, "--output", directory, "--resume"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [str(part) for part in command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"held-out loss: [\d.]+ after 6 steps", run.stdout), run.stdout


@pytest.mark.slow
def test_sft_trains_adapters_of_a_model_on_chats_of_ones_own(small: tuple[Path, str], tmp_path: Path) -> None:
    base, _ = small
    chats = [
        {"messages": [{"role": "user", "content": f"What is {n} and 1?"}, {"role": "assistant", "content": f"It is {n + 1}."}]}
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    lora = ["--model", base, "--data", tmp_path / "chats.jsonl", "--lora", 4, "--lora-dropout", 0.1, "--lr", 1e-2, "--merge"]
    packed = ["--packing", "--max-length", 64, "--checkpointing", "--quantize", "nf4"]
    printed = launch_two(EXAMPLE, *FEW, *lora, *packed, "--output", tmp_path / "tuned")
    before, after = held_out(printed)
    assert after < before
    assert (tmp_path / "tuned" / "adapter_model.safetensors").is_file() and not (tmp_path / "tuned" / "model.safetensors").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned" / "merged")
    plain = AutoModelForCausalLM.from_pretrained(base)
    changed = {name for (name, a), b in zip(merged.named_parameters(), plain.parameters(), strict=True) if not a.equal(b)}
    assert changed and all("proj" in name for name in changed)


# -- what it is given


@pytest.fixture(scope="module")
def chats() -> Iterator[ModuleType]:
    import importlib

    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield importlib.import_module("finetuning.chats")
    finally:
        sys.path.remove(str(ROOT / "examples"))


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def many(path: Path) -> Path:
    path.mkdir()
    for number in range(2):
        jsonl(path / f"{number}.jsonl", [{"messages": CHAT}])
    return path


def saved(path: Path) -> Path:
    datasets.Dataset.from_list([{"messages": CHAT, "source": "here"}] * 2).save_to_disk(str(path))
    return path


def parquet(path: Path) -> Path:
    datasets.Dataset.from_list([{"conversations": CHAT}] * 2).to_parquet(path)
    return path


SOURCES: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": lambda path: jsonl(path, [{"messages": CHAT}] * 2),
    "pairs.jsonl": lambda path: jsonl(path, [{"prompt": "What is 2 and 2?", "completion": "It is 4."}] * 2),
    "rows.parquet": parquet,
    "a directory of files": many,
    "a directory of datasets": saved,
}


@pytest.mark.parametrize("name", SOURCES)
def test_chats_are_read_from(name: str, chats: ModuleType, tmp_path: Path) -> None:
    found = chats.load_chats(SOURCES[name](tmp_path / name))
    assert len(found) == 2 and set(found.column_names) in ({"messages"}, {"prompt", "completion"})
    assert chats.prompts_of(found, 1) == [CHAT[:1]]


STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "text.jsonl": (lambda path: jsonl(path, [{"text": "a"}]), r"the columns \['text'\]\. Expected is messages or prompt and completion"),
    "half.jsonl": (lambda path: path.write_text('{"messages": ['), r"Expected are jsonl or parquet files with chats"),
    "missing.jsonl": (lambda path: None, r"Expected are jsonl"),
    "empty": (lambda path: path.mkdir(), r"no jsonl, json or parquet file"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_sft_refuses_what_holds_no_chats(name: str, chats: ModuleType, tmp_path: Path) -> None:
    write, said = STRANGE[name]
    write(tmp_path / name)
    with pytest.raises(SystemExit, match=rf"(?s)^--data {re.escape(str(tmp_path / name))}: .*{said}"):
        chats.load_chats(tmp_path / name)


def test_chats_that_are_made_have_questions_and_answers(chats: ModuleType) -> None:
    made = chats.made_chats()
    assert len(made) > 150
    assert all([each["role"] for each in row["messages"]] == ["user", "assistant"] and row["messages"][1]["content"] for row in made)
