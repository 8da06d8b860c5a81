"""`python -m zero3`: what it prints, what it writes, and the codes that it ends with."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.huggingface.test_save_pretrained import contents
from tests.support import disk
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import odd, on_ranks, train
from tests.support.pretrained import assert_same_bits
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn
from zero3.__main__ import main


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of three ranks after two steps, and the whole state dict."""
    directory = tmp_path_factory.mktemp("llama")

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=group)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.5)
        for step in range(2):
            optimizer.zero_grad()
            ARCHITECTURES["Llama"].loss(model, Turn(group.rank, step, 3))
            optimizer.step()
        zero3.save_checkpoint(directory, model, optimizer, extra={"step": 17, "more": [1]})
        return zero3.full_state_dict(model)

    models = [ARCHITECTURES["Llama"].build() for _ in range(3)]
    return directory, run_ranks(3, body)[0]


def test_inspect(llama: tuple[Path, dict[str, Tensor]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(llama[0]), "--verify", "--json", "--parameters"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["world_size"], facts["files"], facts["verified"]) == (17, 3, 6, True)
    assert facts["dtypes"] == {"float64": facts["elements"]}
    assert facts["elements"] == sum(value.numel() for value in llama[1].values())
    assert facts["model_bytes"] == sum(value.nbytes for value in llama[1].values())
    assert facts["file_bytes"] == sum(path.stat().st_size for path in llama[0].rglob("*.safetensors"))
    assert facts["optimizer"] == "AdamW" and facts["groups"] == [{"parameters": len(llama[1]), "lr": 0.5}]
    assert {name: tuple(described["shape"]) for name, described in facts["tensors"].items()} == {
        name: tuple(value.shape) for name, value in llama[1].items()
    }
    assert main(["inspect", str(llama[0]), "--json"]) == 0
    short = json.loads(capsys.readouterr().out)
    assert short == {key: facts[key] for key in facts if key != "verified"} | {"tensors": len(llama[1])}
    assert main(["inspect", str(llama[0]), "--parameters"]) == 0
    printed = capsys.readouterr().out
    assert "step             17\n" in printed and "model.layers.0.self_attn.q_proj.weight" in printed


def test_export_is_read_by_transformers(llama: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["export", str(llama[0]), str(tmp_path / "out"), "--max-shard-size", "6KB"]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    assert_same_bits(found.state_dict(), llama[1])
    assert main(["export", str(llama[0]), str(tmp_path / "half"), "--dtype", "bfloat16", "--beside", str(tmp_path / "out")]) == 0
    assert_same_bits(contents(tmp_path / "half"), {name: value.bfloat16() for name, value in sorted(llama[1].items())})
    assert (tmp_path / "half" / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()


def test_inspect_shows_its_progress_at_a_terminal(
    llama: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tqdm")
    assert main(["inspect", str(llama[0]), "--verify"]) == 0
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["inspect", str(llama[0]), "--verify"]) == 0
    shown = capsys.readouterr().err
    assert "verifying:   0%" in shown and shown.endswith("\r"), "it leaves the line empty"
    monkeypatch.setitem(sys.modules, "tqdm", None)
    if importlib.util.find_spec("rich") is not None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        assert main(["inspect", str(llama[0]), "--verify"]) == 0
        assert "verifying" in capsys.readouterr().err, "rich's"
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["inspect", str(llama[0]), "--verify"]) == 0
    assert capsys.readouterr().err == "", "without tqdm and rich"


def test_export_of_odd_tensors(tmp_path: Path) -> None:
    """Empty, 0-dim, integers, buffers, a tie: what save_pretrained writes in a run."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        train(model, optimizer, range(2))
        zero3.save_checkpoint(tmp_path / "run", model, optimizer)
        zero3.save_pretrained(model, tmp_path / "theirs")

    on_ranks(3, body, build=odd)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert_same_bits(contents(tmp_path / "out"), contents(tmp_path / "theirs"))


def test_what_can_not_be_done_says_why_and_ends_with_1(
    llama: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 1
        return capsys.readouterr().err

    assert "is no checkpoint: there is no manifest.json in it (found nothing)" in fails("inspect", tmp_path)
    assert "(found no such directory)" in fails("inspect", tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "(found a file)" in fails("inspect", tmp_path / "file")
    assert f"{tmp_path} is not empty" in fails("export", llama[0], shutil.copytree(llama[0], tmp_path / "broken").parent)
    assert "there is no dtype 'fp32'" in fails("export", llama[0], tmp_path / "out", "--dtype", "fp32")
    assert "max_shard_size must be" in fails("export", llama[0], tmp_path / "out", "--max-shard-size", "big")
    file = next(tmp_path.rglob("optimizer-00001*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert main(["inspect", str(tmp_path / "broken")]) == 0
    assert "optimizer-00001-of-00003.safetensors is corrupt" in fails("inspect", tmp_path / "broken", "--verify")
    assert not (tmp_path / "out").exists()


WRONG = {
    "int8": (
        ["out", "--dtype", "int8"],
        "--dtype int8: floating tensors are converted to dtype, so it must be a floating dtype of 16 bits",
    ),
    "complex64": (["out", "--dtype", "complex64"], "found torch.complex64"),
    "8 bits": (["out", "--dtype", "float8_e4m3fn"], "found torch.float8_e4m3fn"),
    "no dtype": (["out", "--dtype", "load"], "there is no dtype 'load': torch's are such as float32"),
    "missing --beside": (["out", "--beside", "nowhere"], "--beside nowhere: there is no such directory"),
    "--beside a file": (["out", "--beside", "file"], "--beside file: there is no such directory"),
    "OUT a file": (["file"], "file is there already and no directory: OUT must be a directory that is not there yet, or is empty"),
    "OUT below a file": (["file/out"], "can't be made: "),
    "OUT a broken link": (["broken"], "broken is there already and no directory"),
    "a huge size": (["out", "--max-shard-size", "9" * 400], "max_shard_size must be a number of bytes"),
    "nothing to strip": (["out", "--strip", "module."], "--strip module.: no name begins with it; the first is 'weight'"),
    "a size": (["out", "--max-shard-size", "0"], "max_shard_size must be a number of bytes"),
    "names that become one": (["out", "--strip", "0."], "--strip 0. makes one name, 'weight', of 'weight' and '0.weight'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_export_finds_wrong_arguments_before_it_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and nothing left behind."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.weight = torch.nn.Parameter(torch.zeros(2))
    zero3.save_checkpoint(tmp_path / "step", zero3.shard(model, torch.nn.Linear))
    (tmp_path / "file").write_text("x")
    (tmp_path / "broken").symlink_to(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    arguments, message = WRONG[name]
    assert main(["export", "step", *arguments]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("zero3: ") and said.err.count("\n") == 1 and message in said.err
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "x"


def test_export_that_fails_leaves_nothing(
    llama: tuple[Path, dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk.replaced("sync", disk.full):
        assert main(["export", str(llama[0]), str(tmp_path / "out")]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_has_seen_enough_is_no_mistake(llama: tuple[Path, dict[str, Tensor]]) -> None:
    process = subprocess.Popen([sys.executable, "-m", "zero3", "inspect", str(llama[0])], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()  # as `head` does
    assert (process.stderr.read(), process.wait()) == (b"", 141)
    process.stderr.close()


class Keeping(torch.nn.Linear):
    def get_extra_state(self) -> int:
        return 3

    def set_extra_state(self, state: int) -> None:
        assert state == 3


def test_export_names_extra_state_that_files_of_tensors_can_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero3.save_checkpoint(tmp_path / "run", zero3.shard(torch.nn.Sequential(Keeping(2, 2)), Keeping))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == "zero3: safetensors files hold tensors only, so this was left out: 0._extra_state\n"
    assert list(contents(tmp_path / "out")) == ["0.bias", "0.weight"]


HELP = {
    "": "Sharded checkpoints, looked into, exported and converted; plans.",
    "plan": "config.json",
    "inspect": "a checkpoint",
    "export": "safetensors",
}


@pytest.mark.parametrize("command", HELP)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "python -m zero3" in shown and HELP[command] in " ".join(shown.split())


@pytest.mark.parametrize("arguments", [[], ["no-such"], ["inspect"], ["export", "a"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_as_a_program(llama: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "zero3", "inspect"]
    good = subprocess.run([*command, str(llama[0]), "--verify"], capture_output=True, text=True, timeout=280, check=False)
    assert (good.returncode, good.stderr) == (0, "") and "verified         yes" in good.stdout
    bad = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=280, check=False)
    assert (bad.returncode, bad.stdout) == (1, "") and bad.stderr.startswith("zero3: ")


def test_version_is_said_in_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out == f"zero3 {zero3.__version__}\n"
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert "version" not in pyproject["project"] and pyproject["project"]["dynamic"] == ["version"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "zero3.__version__"}


@pytest.mark.parametrize(
    ("extra", "told"), [({"step": 5, "a": 1}, ["a", "step"]), ({}, []), (None, None), ([1, 2], "list"), (7, "int"), ("text", "str")]
)
def test_inspect_tells_what_extra_is(extra: Any, told: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    zero3.save_checkpoint(tmp_path / "run", zero3.Zero3Layer(torch.nn.Linear(2, 2)), extra=extra, run="the name")
    assert main(["inspect", str(tmp_path / "run"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["extra"], facts["run"]) == (told, "the name")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    shown = [line.split(maxsplit=1)[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("extra ")]
    assert shown == ([] if told is None else [["; ".join(told)] * bool(told)] if isinstance(told, list) else [[told]])
