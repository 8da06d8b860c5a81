"""What docs/operations.md and the launch files tell whoever is on call is true: commands and options exist, screens and errors come so."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.docs.test_faq import PATTERNS
from tests.docs.test_pages import blocks_of
from tests.support.programs import ROOT
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from zero3.__main__ import main
from zero3.comm.ring import BACKWARD, Ring

PAGE = (ROOT / "docs/operations.md").read_text()
LAUNCH = sorted((ROOT / "examples/launch").iterdir())
COMMAND = re.compile(r"python -m zero3 (\w+)((?: -{2}[\w-]+)*)")


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def help_of(*command: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("file", [ROOT / "docs/operations.md", *LAUNCH], ids=lambda file: file.name)
def test_commands_for_operations_are_there_with_their_options(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = COMMAND.findall(file.read_text())
    assert found or file.suffix == ".yaml"
    for command, options in found:
        assert set(options.split()) <= set(re.findall(r"--[\w-]+", help_of(command, capsys=capsys)))


def test_options_that_the_page_of_operations_gives_to_hang_and_to_examples_exist(capsys: pytest.CaptureFixture[str]) -> None:
    of_hang = set(re.findall(r"`(--\w+)(?: FILE)?`", section("A run hangs")))
    assert of_hang == {"--json", "--picture"} <= set(re.findall(r"--[\w-]+", help_of("hang", capsys=capsys)))
    of_examples = set(re.findall(r"`(--[\w-]+) [A-Z]+`", section("Two tiers of checkpoints")))
    assert of_examples
    for script in ("finetune", "sft"):
        sources = [ROOT / f"examples/{script}.py", *(ROOT / "examples/finetuning").glob("*.py")]
        assert of_examples <= set(re.findall(r'"(--[\w-]+)"', "".join(each.read_text() for each in sources))), script


def test_the_screen_of_a_hang_is_the_one_that_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 ranks on eight hosts. Rank 40 computes in a layer that the others have left."""
    made = []
    for rank in range(64):
        monkeypatch.setattr(socket, "gethostname", lambda rank=rank: f"gpu-{rank // 8}")
        made.append(ring := Ring(tmp_path, 0x3FA9C1, rank, 64))
        ring.direction, ring.transfers = BACKWARD, 154020
        inner, outer = (f"'model.layers.{number}' (LlamaDecoderLayer)" for number in (16, 17))
        ring.put(ring.code("gathering", inner, 16), 1203)
        ring.put(ring.code("computing", outer, 17), 1203, 0)
        if rank != 40:
            ring.put(ring.code("reducing", outer, 17), 1203)
            ring.put(ring.code("waiting", inner, 16), 1203, 0)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert main(["hang", str(tmp_path)]) == 0
    shown = next(each for each in re.findall(r"^```\n(.*?)^```$", section("A run hangs"), re.M | re.S) if "64 ranks" in each)
    assert capsys.readouterr().out == shown


def test_errors_that_the_page_of_operations_quotes_are_the_packages() -> None:
    """`No space left on device` is the system's."""
    quoted = re.findall(r"^\| `([^`]+)` \|", section("A checkpoint is broken"), re.M)
    assert len(quoted) == 3
    for text in quoted:
        words = text.removesuffix(" ...")
        assert words == "No space left on device" or any(
            words in re.sub(r"\\s\*|\\", " ", each.pattern).replace("  ", " ") for each, _ in PATTERNS
        )


def test_python_of_the_page_of_operations_runs(tmp_path: Path) -> None:
    """Both blocks, in two steps of two ranks: the newest checkpoint is first the slow tier's, then the fast one's."""

    def body(group: ThreadCommunicator) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        zero3.shard(model, layers=nn.Linear, process_group=process_group(group))
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
        names: dict[str, Any] = {
            "zero3": zero3, "model": model, "optimizer": optimizer, "extra": None,
            "batch": torch.ones(3, 4, dtype=torch.float64), "loss_of": lambda model, x: model(x).square().mean(),
        }  # fmt: skip
        tiers, batches = (
            block.replace("/shared", f"{tmp_path}/shared").replace("/local", f"{tmp_path}/local") for block in blocks_of(PAGE, "python")
        )
        latest = []
        for step in (1000, 1020):
            exec(batches, names)
            optimizer.zero_grad()
            found: dict[str, Any] = {}
            exec(tiers, names | {"step": step}, found)
            latest.append(found["latest"].relative_to(tmp_path).as_posix())
        assert names["micro"].rows == 3 and not names["micro"].failed
        return latest

    assert run_ranks(2, body) == [["shared/run/step-1000", "local/run/step-1020"]] * 2


def test_no_signal_has_a_handler_of_ours() -> None:
    code = "import signal; before = [signal.getsignal(n) for n in signal.valid_signals()]; import zero3, zero3.integrations; "
    code += "assert before == [signal.getsignal(n) for n in signal.valid_signals()]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_variables_of_the_environment_that_operations_name_are_read() -> None:
    text = "".join(path.read_text() for path in (ROOT / "zero3").rglob("*.py"))
    for name in set(re.findall(r"\b(?:ZERO3|TORCH)_\w+", PAGE)):
        assert f'"{name}"' in text, name
