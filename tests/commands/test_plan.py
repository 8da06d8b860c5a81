"""`python -m zero3 plan`: what it prints and draws, and the codes that it ends with."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

import zero3
from tests.support.planned import CAUSES, FAMILIES, PLANS
from zero3.__main__ import main

pytestmark = PLANS

ARGUMENTS = ["--ranks", "2", "--device", "cpu", "--sequence", "48", "--batch", "3", "--optimizer", "SGD"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with nothing but config.json."""
    path = tmp_path_factory.mktemp("model")
    FAMILIES["Llama"]().save_pretrained(path)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return str(path)


@pytest.mark.slow
def test_plan_as_json_is_the_plan(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", directory, *ARGUMENTS, "--memory", "8MB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    plan = zero3.plan(directory, ranks=2, device="cpu", sequence=48, batch=3, optimizer=torch.optim.SGD, memory="8MB")
    assert told == json.loads(json.dumps(plan.as_dict()))
    assert set(told["by_cause"]) == set(CAUSES) and sum(told["by_cause"].values()) == told["peak_bytes"]
    assert told["fits"] is True and told["unknown"] == [0, 0] and told["memory"] == 8_000_000
    assert {"largest_batch", "seconds", "advice", "policy"} <= set(told)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--prefetch-depth", "0"]], ids=str)
def test_plan_that_does_not_fit_ends_with_1_and_the_command_that_does(
    directory: str, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["plan", directory, *ARGUMENTS, *options, "--memory", "1.7MB"]) == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed and "it fits with" in printed
    command = shlex.split(printed.splitlines()[-1])
    assert command[:4] == ["python", "-m", "zero3", "plan"] and "--checkpointing" in command and {*options} <= {*command}
    assert main(command[3:]) == 0
    assert "fits, and leaves" in capsys.readouterr().out


def test_plan_that_cannot_tell_ends_with_2(directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", directory, *ARGUMENTS]) == 2, "no memory is given"
    told = capsys.readouterr()
    assert "peak" in told.out and "largest batch" not in told.out and not told.err
    assert main(["plan", str(tmp_path), "--ranks", "2"]) == 2
    assert "has no config.json" in capsys.readouterr().err
    for option, says in (
        (["--mesh", "2"], "such as 2x4"),
        (["--mesh", "2x4"], "as many"),
        (["--memory", ""], "memory must be bytes such as 24GiB, 80GB or 25769803776, found ''"),
        (["--resident", "-1"], "--resident must be bytes"),
        (["--gpu", "h100", "--link", "0bit"], "--link must be a rate such as 400Gbit"),
        (["--quantize", "nf4"], "add --lora RANK"),
        (["--batch", "9" * 20], "batch must be 65536 or less"),
    ):
        assert main(["plan", directory, "--ranks", "2", *option]) == 2
        assert says in capsys.readouterr().err


def test_plan_of_a_model_that_raises_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 would say that it does not fit."""
    config = FAMILIES["T5"]()
    config.pad_token_id = None  # then the decoder's inputs can't be made from labels
    config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), *ARGUMENTS, "--memory", "1GiB"]) == 2
    told = capsys.readouterr()
    assert "pad_token_id" in told.err and not told.out


@pytest.mark.parametrize(("device", "where"), [("cpu", "/no/such/directory"), ("cuda", "cpu")])
def test_plan_of_offload(directory: str, capsys: pytest.CaptureFixture[str], device: str, where: str) -> None:
    arguments = ["plan", directory, "--ranks", "4", "--sequence", "32", "--device", device, "--json"]
    found = []
    for options in ([], ["--offload", where]):
        assert main([*arguments, *options]) == 2
        found.append(json.loads(capsys.readouterr().out))
    plain, away = found
    assert plain["offloaded_bytes"] == 0 < away["offloaded_bytes"] and away["peak_bytes"] < plain["peak_bytes"]
    assert sum(away["by_cause"].values()) == away["peak_bytes"] and away["by_cause"].keys() == plain["by_cause"].keys()


def test_plan_of_a_mesh(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", directory, "--ranks", "4", "--mesh", "2x2", "--sequence", "32", "--rank", "3", "--device", "cpu"]) == 2
    assert "rank 3 of 4 (2 replicas of 2 shards) on cpu" in capsys.readouterr().out


def test_plan_follows_its_options(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "bf16", "--reduce-dtype", "fp32", "--stage", "2", "--prefetch-depth", "0", "--keep", "--accumulation", "2"]
    assert main(["plan", directory, "--ranks", "4", "--sequence", "32", *options, "--checkpointing", "--lora", "4", "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "stage": 2, "reshard_after_forward": False}
    assert told["policy"] == repr(zero3.ShardingPolicy(**policy, prefetch_depth=0))
    assert told["trainable"] < told["parameters"] / 16 and told["attention"] == {"flash": 8}  # twice: in backward again
    assert told["unknown"][1] > told["unknown"][0] > 0


def test_plan_draws_a_step(directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plan", directory, *ARGUMENTS, "--picture", str(tmp_path / "step.svg")]) == 2
    drawn = (tmp_path / "step.svg").read_text()
    assert "backward of model.layers.3" in drawn and "activations" in drawn


def test_a_picture_that_can_not_be_drawn_is_told_before_anything_is_computed(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("zero3.commands.plan._plan", lambda options: pytest.fail("computed"))
    (tmp_path / "file").touch()
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.chdir(tmp_path)  # a name without a suffix got one, and so it stood elsewhere
    for target, says in (
        ("nowhere/step.svg", "'nowhere/step.svg' can't be written: No such file or directory"),
        ("file/step.svg", "Not a directory"),
        ("folder.svg", "Is a directory"),
        ("step", "must end in one of .eps"),
        (".", "must end in one of"),
        ("step.docx", "found 'step.docx'"),
    ):
        assert main(["plan", directory, *ARGUMENTS, "--json", "--picture", target]) == 2
        told = capsys.readouterr()
        assert says in told.err and told.err.count("\n") == 1 and not told.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.svg"]


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--json"]], ids=["table", "json"])
def test_a_picture_that_fails_after_all_leaves_what_was_computed(
    directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    pytest.importorskip("matplotlib")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    arguments = ["plan", directory, *ARGUMENTS, "--memory", "8MB", *option]
    assert main([*arguments, "--picture", str(tmp_path / "step.png")]) == 2
    told = capsys.readouterr()
    assert "No space left on device" in told.err and not list(tmp_path.iterdir())
    assert main(arguments) == 0
    assert told.out == capsys.readouterr().out
