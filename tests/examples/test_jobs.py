"""The short examples, one for each job: run as their first lines say, in short; and the table of all examples."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest

from tests.support.processes import Rank, on_ranks
from tests.support.programs import ROOT

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="the example's packages are not installed: pip install 'zero3[examples]'")

from tests.support.trainers import launched  # noqa: E402

EXAMPLES = ROOT / "examples"
INDEX = (EXAMPLES / "README.md").read_text()
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
FEW = ["--device", "cpu", "--steps", 12, "--batch-size", 4, "--length", 64]


def run(rank: Rank, name: str, port: str, arguments: list[str]) -> str:
    """As torchrun runs it, in a process that has imported transformers already, which takes longer than an example in short."""
    with launched(rank), pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setenv("MASTER_PORT", port)
        patch.setattr(sys, "argv", [name, *arguments])
        patch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue()


def printed_by(ranks: int, name: str, *arguments: object) -> str:
    """By its first process."""
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    printed: str = on_ranks(ranks, run, f"{name}.py", port, [str(each) for each in arguments], process_group=False)[0]
    return printed


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", printed, re.M)]


@pytest.mark.parametrize("name", NAMES)
def test_an_examples_first_lines_have_its_command_and_the_table_has_its_row(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    first = "\n".join(text.splitlines()[:8])
    assert re.search(rf"^    (torchrun|python) .*examples/{name}", first, re.M)
    assert f"]({name})" in INDEX
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "examples").glob("*.py"))
    assert re.search(rf'"(examples/)?{name.removesuffix(".py")}(\.py)?"', tests), f"no test runs {name}"


def test_the_table_of_examples_names_files_and_options_that_exist() -> None:
    for name, options in re.findall(r"examples/(\w+\.py)([^`|\n]*)", INDEX):
        assert name in NAMES
        text = (EXAMPLES / name).read_text()
        others = [*(EXAMPLES / "finetuning").glob("*.py"), *([EXAMPLES / "sft.py"] if "\nimport sft\n" in text else [])]
        sources = text + "".join(path.read_text() for path in others)
        assert not [option for option in re.findall(r"--[\w-]+", options) if f'"{option}"' not in sources]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "moe", "long_context"])
def test_an_example_of_one_job_learns_and_leaves_a_model(name: str, tmp_path: Path) -> None:
    printed = printed_by(2, name, *FEW, "--output", tmp_path / "out")
    first, *_, last = losses(printed)
    assert last < first - 0.5
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", "qlora"])
def test_adapters_of_an_example_are_pefts(name: str, tmp_path: Path) -> None:
    printed = printed_by(2, name, *FEW, "--output", tmp_path / "out")
    first, *_, last = losses(printed)
    assert last < first and (("frozen nf4" in printed) is (name == "qlora"))
    assert peft.PeftConfig.from_pretrained(tmp_path / "out").r == 16
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_several_hosts_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    """Two hosts of one process, then one process alone."""
    given = ["--device", "cpu", "--batch-size", 4, "--length", 64, "--every", 4, "--output", tmp_path]
    printed = printed_by(2, "several_hosts", *given, "--steps", 8, "--hosts", 2)
    assert len(losses(printed)) == 2
    again = printed_by(1, "several_hosts", *given, "--steps", 12)
    assert re.findall(r"^step (\d+):", again, re.M) == ["12"] and losses(again)[0] < losses(printed)[0]
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
