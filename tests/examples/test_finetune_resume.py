"""The example, killed and resumed: the losses are those of a run that nobody disturbed."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zero3
from tests.examples.test_finetune import EXAMPLE, SMALL, example
from tests.support.processes import Rank, on_ranks, try_on_ranks

pytest.importorskip("transformers", reason="the example's packages are not installed: pip install 'zero3[examples]'")

__all__ = ["example"]  # the fixture

STEPS, KILLED, EVERY = 10, 8, 3
SIZES = ["--batch-size", 4, "--sequence-length", 16, "--held-out", 4, *SMALL, "--steps", STEPS, "--device", "cpu"]
WAYS: dict[str, list[object]] = {"layers by hand": [], "shard": ["--shard"]}


def run(rank: Rank, runs: list[list[str]], kill: int | None) -> list[list[float]]:
    """The losses of each run; in the step `kill` rank 1 dies as by kill -9."""
    warnings.simplefilter("default")
    sys.path.insert(0, str(EXAMPLE.parent))
    finetune: Any = importlib.import_module("finetune")
    ranks = finetune.Ranks(rank.number, rank.world_size, torch.device("cpu"))
    clip, calls = zero3.clip_grad_norm_, 0

    def counting(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == kill and rank.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return clip(*given)

    zero3.clip_grad_norm_ = counting  # type: ignore[assignment]
    return [finetune.finetune(finetune.parse_options(arguments), ranks).losses for arguments in runs]


def arguments(output: Path, *options: object) -> list[str]:
    return [str(option) for option in [*SIZES, "--output", output, *options]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]], dict[str, list[float]]]:
    """Each way on two ranks: undisturbed, and killed in its eighth step and resumed. With the checkpoints as the kill left them."""
    directory = tmp_path_factory.mktemp("resumed")
    undisturbed = [arguments(directory / "whole" / way, *options) for way, options in WAYS.items()]
    expected = on_ranks(2, run, undisturbed, None, fresh=True)[0]
    checkpointing = {way: [*options, "--checkpoint-every", EVERY, "--resume"] for way, options in WAYS.items()}
    for way, options in checkpointing.items():
        first = arguments(directory / "cut" / way, *options)
        assert try_on_ranks(2, run, [first], KILLED, fresh=True)[1].error == "killed"
    shutil.copytree(directory / "cut", directory / "left")
    again = [arguments(directory / "cut" / way, *options) for way, options in checkpointing.items()]
    found = on_ranks(2, run, again, None, fresh=True)[0]
    return directory / "left", dict(zip(WAYS, expected, strict=True)), dict(zip(WAYS, found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_same_losses_after_kill_9(way: str, losses: tuple[Path, dict[str, list[float]], dict[str, list[float]]]) -> None:
    """Bit for bit, and from the newest checkpoint on."""
    left, expected, found = losses
    assert len(expected[way]) == STEPS
    assert sorted(path.name for path in (left / way / "checkpoints").iterdir()) == ["step-3", "step-6"]
    assert found[way] == expected[way]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_on_another_number_of_ranks(
    way: str, losses: tuple[Path, dict[str, list[float]], dict[str, list[float]]], example: ModuleType, tmp_path: Path
) -> None:
    left, expected, _ = losses
    shutil.copytree(left / way, tmp_path / "run")
    options = example.parse_options(arguments(tmp_path / "run", *WAYS[way], "--resume", "--accumulate", 2))
    with torch.random.fork_rng(devices=[]):
        found = example.finetune(options, example.Ranks(0, 1, torch.device("cpu"))).losses
    assert found[:6] == expected[way][:6]
    assert found == pytest.approx(expected[way], rel=1e-4)


@pytest.mark.slow
def test_the_same_losses_from_a_fast_directory(losses: tuple[Path, dict[str, list[float]], dict[str, list[float]]], tmp_path: Path) -> None:
    """Saved in each step to storage of the host's own, and in every third to what all hosts see."""
    fast = ["--fast-output", tmp_path / "fast", "--fast-every", 1]
    options = [*fast, "--checkpoint-every", EVERY, "--resume", "--run", "first"]
    given = [arguments(tmp_path / "run", *WAYS["shard"], *options)]
    assert try_on_ranks(2, run, given, KILLED, fresh=True)[1].error == "killed"
    assert sorted(path.name for path in (tmp_path / "fast").iterdir()) == ["first-step-5", f"first-step-{KILLED - 1}"]
    other = arguments(tmp_path / "other", *WAYS["shard"], *fast, "--run", "second", "--steps", KILLED - 1, "--lr", 1)
    on_ranks(2, run, [other], None, fresh=True)  # to the same disks
    assert on_ranks(2, run, given, None, fresh=True)[0][0] == losses[1]["shard"]
