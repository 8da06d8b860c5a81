"""What the example is given: texts that are none, and directories that hold something else. It ends with a sentence, not a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.examples.test_finetune import SIZES, example

__all__ = ["example"]  # the fixture

CHAT = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]}
EXPECTED = r"Expected is plain text in UTF-8"

TEXTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "chat.jsonl": (lambda p: p.write_text("\n".join([json.dumps(CHAT)] * 3)), rf"JSON records.*{EXPECTED}.*apply_chat_template"),
    "one.json": (lambda p: p.write_text(json.dumps([CHAT] * 2, indent=1)), rf"JSON records.*{EXPECTED}"),
    "rows.json": (lambda p: p.write_text("\ufeff\n" + json.dumps(["a", "b"])), rf"JSON records.*{EXPECTED}"),
    "records.txt": (lambda p: p.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b"})), rf"JSON records.*{EXPECTED}"),
    "missing.txt": (lambda p: None, rf"No such file or directory\. {EXPECTED}"),
    "a directory": (lambda p: p.mkdir(), rf"Is a directory\. {EXPECTED}"),
    "rows.parquet": (lambda p: p.write_bytes(b"PAR1\x15\x04\xff\xfe"), rf"not UTF-8 \(.*byte 6\)\. {EXPECTED}"),
    "zeros.bin": (lambda p: p.write_bytes(b"abc\0\0def"), rf"holds zero bytes\. {EXPECTED}"),
    "empty.txt": (lambda p: p.write_text(" \n"), rf"is empty\. {EXPECTED}"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_finetune_refuses_what_is_no_text(name: str, example: ModuleType, tmp_path: Path) -> None:
    write, said = TEXTS[name]
    write(tmp_path / name)
    options = [*SIZES, "--text", tmp_path / name, "--output", tmp_path / "output", "--device", "cpu"]
    with pytest.raises(SystemExit, match=rf"(?s)^--text {tmp_path / name}: .*{said}"):
        example.main([str(option) for option in options])
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("text", ["[1] A first note.\n[2] A second.", "{curly} text", 'Text with {"json": 1} in it.', "3\n4\n"])
def test_finetune_takes_text_that_only_looks_like_json(text: str, example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(text)
    assert example.data.load_text(tmp_path / "text") == text


LORA = ["--lora", "2", "--model", "nowhere"]
SHARDS = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
OUTPUTS: dict[str, tuple[list[str], list[str], str]] = {
    "adapters beside a model": (LORA, ["model.safetensors"], r"it holds a whole model .*model.safetensors\), and this run writes adapters"),
    "adapters beside a model in parts": (LORA, SHARDS, f"it holds a whole model .*{', '.join(SHARDS)}"),
    "a model beside adapters": ([], ["adapter_config.json"], "it holds adapters .*adapter_config.json.*writes a whole model"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_finetune_refuses_an_output_that_holds_the_other_kind(name: str, example: ModuleType, tmp_path: Path) -> None:
    options, files, said = OUTPUTS[name]
    for file in files:
        (tmp_path / file).write_text("old")
    with pytest.raises(SystemExit, match=rf"^--output {tmp_path}: {said}"):
        example.main([*map(str, SIZES), *options, "--output", str(tmp_path), "--device", "cpu"])
    assert all((tmp_path / file).read_text() == "old" for file in files), "nothing is removed"


def test_finetune_refuses_an_output_that_is_a_file(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "output").write_text("")
    with pytest.raises(SystemExit, match=r"^--output .*output: a file of this name is there"):
        example.main([*map(str, SIZES), "--output", str(tmp_path / "output"), "--device", "cpu"])
