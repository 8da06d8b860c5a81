"""The example, run as a user runs it: as two processes that a launcher starts, and compared with one."""

from __future__ import annotations

import importlib
import json
import math
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.programs import ROOT, printed_by_two

pytest.importorskip("transformers", reason="the example's packages are not installed: pip install 'zero3[examples]'")

EXAMPLE = ROOT / "examples" / "finetune.py"

STEPS, LENGTH, BATCH = 40, 64, 8
SIZES = ["--batch-size", BATCH, "--sequence-length", LENGTH, "--held-out", 2 * BATCH]
SMALL = ["--vocabulary", 512, "--width", 64, "--blocks", 2, "--heads", 2, "--lr", 1e-2]
PROMPT = "The assignment statement"


class Outcome:
    """What a run left behind."""

    def __init__(self, directory: Path, printed: str) -> None:
        self.directory = directory
        self.printed = printed
        self.summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.directory / "model.safetensors")


def run_two_processes(output: Path, *options: object) -> Outcome:
    return Outcome(output, printed_by_two(EXAMPLE, "--output", output, *SIZES, *options))


def run_all(rank: Rank, runs: list[list[str]]) -> None:
    warnings.simplefilter("default")
    sys.path.insert(0, str(EXAMPLE.parent))
    finetune: Any = importlib.import_module("finetune")
    ranks = finetune.Ranks(rank.number, rank.world_size, torch.device("cpu"))
    for arguments in runs:
        options = finetune.parse_options(arguments)
        summary = finetune.finetune(options, ranks)
        if rank.number == 0:
            finetune.present(summary, options.output)


def run_in_two_processes(output: Path, runs: dict[str, list[Any]]) -> dict[str, Outcome]:
    """Some runs in the same two processes, without the launcher, which takes longer to start than they take."""
    arguments = [[str(part) for part in [*SIZES, *given, "--output", output / name]] for name, given in runs.items()]
    on_ranks(2, run_all, arguments, fresh=True)
    return {name: Outcome(output / name, "") for name in runs}


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """The example as a module, for the parts that need no second process."""
    sys.path.insert(0, str(EXAMPLE.parent))
    yield importlib.import_module("finetune")
    sys.path.remove(str(EXAMPLE.parent))


def test_weights_and_gradients_may_travel_in_eight_bits(example: ModuleType) -> None:
    policy = example.parse_options(["--gather-format", "float8", "--reduce-format", "int8-stochastic", "--compute", "bf16"]).policy
    expected = {"gather_format": zero3.Float8(), "reduce_format": zero3.Int8(stochastic=True)}
    sums = torch.float32
    assert policy == zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=sums, output_dtype=sums, **expected)
    both = example.parse_options(["--gather-format", "int8", "--offload", "cpu"]).policy
    assert (both.gather_format, both.offload) == (zero3.Int8(), "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    output = tmp_path_factory.mktemp("two") / "model"
    return run_two_processes(output, *SMALL, "--steps", STEPS, "--generate", PROMPT, "--generate-tokens", 12)


def held_out_loss(example: ModuleType, model: torch.nn.Module, directory: Path) -> float:
    """The loss of a transformers model on the same held-out text, with nothing of ours but the cutting of the text."""
    from transformers import AutoTokenizer

    _, tokens = example.data.split_tokens(AutoTokenizer.from_pretrained(directory), example.data.load_text(None))
    windows = torch.cat(example.data.held_out_batches(tokens, BATCH, LENGTH, 2 * BATCH))
    with torch.no_grad():
        logits = model(input_ids=windows[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory)


def test_two_processes_learn(trained: Outcome) -> None:
    summary = trained.summary
    assert summary["world_size"] == 2
    assert len(summary["losses"]) == STEPS
    assert summary["held_out_loss_before"] == pytest.approx(math.log(512), abs=0.2)  # fresh weights know nothing
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"] - 1.5
    assert (trained.directory / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_each_rank_holds_half(trained: Outcome) -> None:
    alone, per_rank = trained.summary["memory_of_one_process"], trained.summary["memory_per_rank"]
    assert alone["optimizer"] == 2 * alone["parameters"] == 2 * alone["gradients"]
    assert len(per_rank) == 2
    for memory in per_rank:
        for kind in ("parameters", "gradients", "optimizer"):
            assert memory[kind] == pytest.approx(alone[kind] / 2, rel=0.02)


def test_saved_model_is_the_trained_one(example: ModuleType, trained: Outcome) -> None:
    from transformers import AutoTokenizer

    model, tokenizer = load(trained.directory), AutoTokenizer.from_pretrained(trained.directory)
    assert held_out_loss(example, model, trained.directory) == pytest.approx(trained.summary["held_out_loss_after"], rel=1e-5)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, min_new_tokens=12)
    assert tokenizer.decode(written[0]) == trained.summary["texts"]["after"]


@pytest.mark.slow
def test_report_says_what_happened(trained: Outcome) -> None:
    summary, printed = trained.summary, trained.printed
    for text in summary["texts"].values():
        assert text.startswith(PROMPT)
        assert text in printed
    assert summary["texts"]["before"] != summary["texts"]["after"]
    assert f"{summary['held_out_loss_before']:.4f} before, {summary['held_out_loss_after']:.4f} after" in printed
    assert "rank 1" in printed


@pytest.mark.slow
def test_one_process_gives_the_same_losses(
    example: ModuleType, trained: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same sequences, in one process and in two backward passes a step; and what it saves has its very logits."""
    models = []
    monkeypatch.setattr(example, "open_model", lambda *given, build=example.open_model: models.append(build(*given)) or models[0])
    options = [*SIZES, *SMALL, "--steps", STEPS, "--accumulate", 2, "--output", tmp_path, "--device", "cpu"]
    example.main([str(option) for option in options])
    alone = Outcome(tmp_path, capsys.readouterr().out).summary
    assert alone["world_size"] == 1
    assert alone["losses"] == pytest.approx(trained.summary["losses"], rel=1e-5)
    for moment in ("held_out_loss_before", "held_out_loss_after"):
        assert alone[moment] == pytest.approx(trained.summary[moment], rel=1e-5)
    memory, needed = alone["memory_per_rank"][0], alone["memory_of_one_process"]
    assert memory["parameters"] == needed["parameters"]
    assert memory["gradients"] == needed["gradients"]

    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(models[0].logits(tokens), load(tmp_path)(tokens).logits)


@pytest.fixture(scope="module")
def tuned(trained: Outcome, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Goes on from the saved model, so that a directory is read as well."""
    given = {choice: ["--model", trained.directory, "--train", choice, "--steps", 3, "--lr", 1e-2] for choice in ("biases", "last-1")}
    return run_in_two_processes(tmp_path_factory.mktemp("tuned"), given)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["biases", "last-1"])
def test_trains_only_what_is_chosen(trained: Outcome, tuned: dict[str, Outcome], choice: str) -> None:
    check_what_is_trained(trained, tuned[choice], choice)


def check_what_is_trained(trained: Outcome, tuned: Outcome, choice: str) -> None:
    assert tuned.summary["held_out_loss_before"] == pytest.approx(trained.summary["held_out_loss_after"], rel=1e-5)
    assert tuned.summary["losses"][-1] != tuned.summary["losses"][0]

    before, after = trained.weights, tuned.weights
    assert before.keys() == after.keys()
    chosen = {name for name in before if is_chosen(name, choice)}
    assert {name for name in before if not torch.equal(before[name], after[name])} == chosen

    alone = tuned.summary["memory_of_one_process"]
    assert alone["gradients"] == sum(before[name].nbytes for name in chosen)
    for memory in tuned.summary["memory_per_rank"]:
        assert memory["parameters"] == pytest.approx(alone["parameters"] / 2, rel=0.02)
        assert memory["gradients"] == pytest.approx(alone["gradients"] / 2, rel=0.02)


def is_chosen(name: str, choice: str) -> bool:
    return (
        name.endswith(".bias")
        if choice == "biases"
        else name.startswith(("gpt_neox.layers.1.", "gpt_neox.final_layer_norm.", "embed_out."))
    )


def test_help(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--model", "--text", "--train", "--accumulate", "--generate", "torchrun"):
        assert option in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "6", "--accumulate", "4"], "take a multiple of 4"),
        (["--sequence-length", "4096"], "the model has only 2048 positions"),
        (["--train", "last-9"], "the model has only 6 blocks"),
        (["--held-out", "3"], "3 held-out sequences are less than one batch of 8"),
        (["--model", "."], "there is no config.json in it"),
    ],
)
def test_mistakes_end_with_advice(example: ModuleType, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        example.main(options)


@pytest.mark.parametrize("option", [["--train", "some"], ["--steps", "0"], ["--steps", "few"]])
def test_options_are_checked(example: ModuleType, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.main(option)
    assert f"argument {option[0]}" in capsys.readouterr().err


def test_tied_embeddings_are_refused(example: ModuleType, tmp_path: Path) -> None:
    config = example.small_config(512, 64, 2, 2)
    config.tie_word_embeddings = True
    config.save_pretrained(tmp_path)
    example.data.make_tokenizer(example.data.train_bpe("a b c", 300)).save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=r"tie_word_embeddings is true.*--shard.*lm_head\.weight"):
        example.main(["--model", str(tmp_path)])


def test_missing_package_is_named(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "argv", ["finetune.py"])
    with pytest.raises(SystemExit, match=r"needs the package 'tqdm': pip install 'zero3\[examples\]'"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
