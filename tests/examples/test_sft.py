"""The recipe for chats: run as a user runs it, on two processes and on one, with what users bring."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.programs import ROOT, printed_by, printed_by_two

trl = pytest.importorskip("trl", reason="the example's packages are not installed: pip install 'zero3[trl,examples]'")
datasets = pytest.importorskip("datasets")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from zero3.integrations.transformers import Zero3Trainer  # noqa: E402

EXAMPLE = ROOT / "examples" / "sft.py"
FEW = ["--device", "cpu", "--steps", 4, "--every", 2, "--samples", 1, "--batch-size", 2, "--patience", 3]
CHAT = [{"role": "user", "content": "What is 2 and 2?"}, {"role": "assistant", "content": "It is 4."}]


def held_out(printed: str) -> tuple[float, float]:
    before, after = re.findall(r"held-out loss: ([\d.]+) before, ([\d.]+) after 4 steps", printed)[0]
    return float(before), float(after)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The small model, after four steps of two processes; and what they printed. An earlier run was killed in its first save."""
    directory = tmp_path_factory.mktemp("sft") / "small"
    killed = directory / "checkpoints" / "checkpoint-2"
    killed.mkdir(parents=True)
    (killed / "model.safetensors").write_bytes(bytes(100))
    return directory, printed_by_two(EXAMPLE, *FEW, "--output", directory, "--resume")


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
def test_sft_by_muon_and_adamw(tmp_path: Path) -> None:
    before, after = held_out(printed_by_two(EXAMPLE, *FEW, "--optimizer", "muon", "--output", tmp_path))
    assert after < before - 0.1


@pytest.mark.slow
def test_sft_goes_on_with_another_number_of_processes(small: tuple[Path, str]) -> None:
    """And to a later end, with its state in files."""
    directory, _ = small
    longer = ["--device", "cpu", "--steps", 6, "--every", 2, "--samples", 1, "--batch-size", 4, "--patience", 3, "--offload", directory]
    printed = printed_by(sys.executable, EXAMPLE, *longer, "--output", directory, "--resume")
    assert re.search(r"held-out loss: [\d.]+ after 6 steps", printed), printed


def test_methods_that_a_trainer_of_an_example_replaces_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nobody calls them."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = importlib.import_module("finetuning.fast")
    own = {name for name, value in vars(module.GoesOn).items() if callable(value)} - {"train_from"}
    assert len(own) > 3
    assert [name for name in own if not hasattr(Zero3Trainer, name)] == []


@pytest.mark.slow
def test_sft_goes_on_from_a_fast_directory(tmp_path: Path) -> None:
    """It was killed in the save after its last step. What it has lost is that step alone."""
    given = [*FEW[:5], 4, *FEW[6:], "--output", tmp_path / "slow", "--fast-output", tmp_path / "fast", "--fast-every", 1]
    checkpoints = tmp_path / "slow" / "checkpoints"

    def losses() -> list[tuple[int, float]]:
        history = json.loads((checkpoints / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
        return [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]

    held_out(printed_by_two(EXAMPLE, *given))
    expected = losses()
    assert sorted(path.name for path in (tmp_path / "fast").iterdir()) == ["step-2", "step-3"]
    shutil.rmtree(checkpoints)
    printed = printed_by_two(EXAMPLE, *given, "--resume")
    assert "before" not in printed.rpartition("held-out loss")[2], "it has not begun anew"
    assert losses() == expected


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
    printed = printed_by_two(EXAMPLE, *FEW, *lora, *packed, "--output", tmp_path / "tuned")
    before, after = held_out(printed)
    assert after < before
    assert (tmp_path / "tuned" / "adapter_model.safetensors").is_file() and not (tmp_path / "tuned" / "model.safetensors").exists()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned" / "merged")
    plain = AutoModelForCausalLM.from_pretrained(base)
    changed = {name for (name, a), b in zip(merged.named_parameters(), plain.parameters(), strict=True) if not a.equal(b)}
    assert changed and all("proj" in name for name in changed)


@pytest.mark.slow
def test_sft_on_chats_with_images_of_ones_own(recipe: ModuleType, chats: ModuleType, tmp_path: Path) -> None:
    """Some rows have a picture, drawn here, and others none. A tiny model that sees trains all over."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    rows: list[dict[str, Any]] = [{"messages": CHAT}] * 12
    for number in range(36):
        color = ["red", "blue", "green"][number % 3]
        Image.new("RGB", (40 + number, 50), color).save(tmp_path / f"{number}.png")
        asked = [{"role": "user", "content": "Which color?"}, {"role": "assistant", "content": f"It is {color}."}]
        rows.insert(2 * number, {"messages": asked, "images": [f"{number}.png"]})
    read = chats.load_chats(jsonl(tmp_path / "chats.jsonl", rows))
    assert [len(row["images"]) for row in read] == [len(row.get("images", ())) for row in rows]
    processor = recipe.small_processor(read, 300)
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    plain = AutoModelForImageTextToText.from_config(recipe.small_vision_config(300, processor.image_token_id))
    for each in (plain, processor):
        each.save_pretrained(base)
    given = ["--model", base, "--data", tmp_path / "chats.jsonl", "--lr", 1e-2]
    before, after = held_out(printed_by_two(EXAMPLE, *FEW, *given, "--output", tuned))
    assert after < before - 0.1
    found = AutoModelForImageTextToText.from_pretrained(tuned)
    changed = {name for (name, a), b in zip(found.named_parameters(), plain.parameters(), strict=True) if not a.equal(b)}
    assert any("vision_tower" in name for name in changed) and any("language_model" in name for name in changed)


@pytest.mark.slow
def test_vision_chats_of_the_small_model_get_better(tmp_path: Path) -> None:
    printed = printed_by_two(ROOT / "examples" / "vision_chats.py", *FEW, "--output", tmp_path)
    before, after = held_out(printed)
    assert after < before - 0.1 and "<image> What is in the picture?" in printed


# -- what it is given


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    import importlib

    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield importlib.import_module("sft")
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def chats(recipe: ModuleType) -> ModuleType:
    return sys.modules["finetuning.chats"]


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


def shared(path: Path) -> Path:
    """As many chats are shared."""
    turns = [{"from": "human", "value": CHAT[0]["content"]}, {"from": "gpt", "value": CHAT[1]["content"]}]
    return jsonl(path, [{"conversations": turns, "id": 3}] * 2)


SOURCES: dict[str, Callable[[Path], Path]] = {
    "rows.jsonl": lambda path: jsonl(path, [{"messages": CHAT}] * 2),
    "pairs.jsonl": lambda path: jsonl(path, [{"prompt": "What is 2 and 2?", "completion": "It is 4."}] * 2),
    "rows.parquet": parquet,
    "shared.jsonl": shared,
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
    "nothing.jsonl": (lambda path: path.write_text(""), r"there are no rows in it"),
    "one.jsonl": (lambda path: jsonl(path, [{"messages": CHAT}]), r"1 rows .*two rows at least: one is held out"),
    "null.jsonl": (lambda path: jsonl(path, [{"messages": CHAT}, {"messages": None}]), r"row 2 of 2 has the messages None\. Expected"),
    "asked.jsonl": (lambda path: jsonl(path, [{"messages": CHAT[:1]}] * 2), r"row 1 of 2 .*at least one of role assistant"),
    "silent.jsonl": (lambda path: jsonl(path, [{"messages": [CHAT[0], {"role": "assistant", "content": None}]}] * 2), r"a content each"),
    "blind.jsonl": (
        lambda path: jsonl(path, [{"messages": CHAT, "images": ["a.png"]}] * 2),
        r"the image .*a.png, which is no file",
    ),
    "half-pairs.jsonl": (lambda path: jsonl(path, [{"prompt": "a", "completion": None}] * 2), r"\('a', None\)\. Expected are two texts"),
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


def test_the_last_answer_is_apart_from_what_comes_after_it(recipe: ModuleType, chats: ModuleType) -> None:
    """With a template that does not tell which tokens are an answer."""
    longer = datasets.Dataset.from_list([{"messages": [*CHAT, {"role": "user", "content": "Thanks."}]}] * 2)
    tokenizer = chats.small_tokenizer(chats.made_chats(), 300)
    tokenizer.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    apart, form = recipe.answers_apart(longer, tokenizer)
    assert form == "prompt" and apart[0] == {"prompt": CHAT[:1], "completion": CHAT[1:]}
    assert chats.prompts_of(longer, 1) == [CHAT[:1]]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--batch-size", "0"], "argument --batch-size: 0 is not a positive number"),
        (["--held-out", "1.5"], "argument --held-out: 1.5 is no share between 0 and 1"),
        (["--model", "nowhere"], "argument --model: nowhere is no directory"),
        (["--merge"], "argument --merge: it merges the adapters of --lora into --model"),
    ],
)
def test_options_that_can_not_be_are_refused(wrong: list[str], told: str, recipe: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        recipe.parse_options(wrong)
    assert told in capsys.readouterr().err


def test_a_model_without_a_tokenizer_and_targets_that_it_has_not(recipe: ModuleType, chats: ModuleType, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(chats.small_config(16))
    model.config.save_pretrained(tmp_path)
    options = recipe.parse_options(["--model", str(tmp_path), "--lora", "2", "--lora-targets", "up", "nowhere"])
    with pytest.raises(SystemExit, match=r"^--model .*: its tokenizer can't be loaded \(expected "):
        recipe.load_tokenizer(options, None)
    with pytest.raises(SystemExit, match=r"^--lora-targets .*'nowhere'"):
        recipe.add_adapters(model, options)
