"""The example with other models than its own: any architecture through `zero3.shard`, whole or with LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zero3
from tests.examples.test_finetune import LENGTH, PROMPT, SIZES, Outcome, example, held_out_loss, load, run_in_two_processes

peft = pytest.importorskip("peft", reason="the example's packages are not installed: pip install 'zero3[examples]'")

__all__ = ["example"]  # the fixture

pytestmark = pytest.mark.slow

FULL = ["--steps", 12, "--lr", 1e-2]
LORA = ["--steps", 6, "--lr", 3e-2, "--lora", 2]
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH)


@pytest.fixture(scope="module")
def directories(example: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small models of several architectures with random weights, each with a tokenizer for the example's text."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    tokenizer = example.data.make_tokenizer(example.data.train_bpe(example.data.load_text(None)[:100_000], 300))
    llama = LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    gpt2 = GPT2Config(vocab_size=300, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    found = {}
    for name, config in {"llama": llama, "gpt2": gpt2, "neox": example.small_config(300, 48, 2, 4)}.items():
        found[name] = tmp_path_factory.mktemp("models") / name
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
        tokenizer.save_pretrained(found[name])
    return found


def run_one_process(
    example: ModuleType, output: Path, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], Any, torch.Tensor]:
    """The summary, the trained model, still sharded, and its logits."""
    models = []
    monkeypatch.setattr(example, "open_model", lambda *given, build=example.open_model: models.append(build(*given)) or models[0])
    example.main([str(option) for option in [*SIZES, *options, "--output", output, "--device", "cpu"]])
    model = models[0]
    assert isinstance(model, example.AnyModel)
    model.sharded.eval()
    with torch.no_grad():
        return json.loads((output / "summary.json").read_text()), model.sharded, model.logits(TOKENS)


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def assert_same_run(one: dict[str, Any], two: dict[str, Any], rel: float) -> None:
    for number in ("losses", "held_out_loss_before", "held_out_loss_after"):
        assert one[number] == pytest.approx(two[number], rel=rel), number


@pytest.fixture(scope="module")
def two(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """What two processes made: a fine-tuned Llama, adapters for it, and for GPT-NeoX. One after another, to start them once."""
    output = tmp_path_factory.mktemp("two")
    options = {
        "full": ["--model", directories["llama"], *FULL, "--generate", PROMPT, "--generate-tokens", 12],
        "llama": ["--model", directories["llama"], *LORA],
        "neox": ["--model", directories["neox"], *LORA],
        "files": ["--model", directories["llama"], *FULL, "--offload", output],
    }
    return run_in_two_processes(output, options)


@pytest.mark.slow
def test_llama_learns_on_two_processes_and_is_saved(example: ModuleType, two: dict[str, Outcome]) -> None:
    from transformers import AutoTokenizer

    llama = two["full"]
    summary = llama.summary
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"] - 0.5
    for memory in summary["memory_per_rank"]:
        for kind in ("parameters", "gradients", "optimizer"):
            assert memory[kind] == pytest.approx(summary["memory_of_one_process"][kind] / 2, rel=0.02)
    model, tokenizer = load(llama.directory), AutoTokenizer.from_pretrained(llama.directory)
    assert held_out_loss(example, model, llama.directory) == pytest.approx(summary["held_out_loss_after"], rel=1e-5)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    assert tokenizer.decode(written[0]) == summary["texts"]["after"]


@pytest.mark.slow
def test_offload_to_files_gives_the_same_losses(two: dict[str, Outcome]) -> None:
    full, files = two["full"].summary, two["files"].summary
    for number in ("losses", "held_out_loss_before", "held_out_loss_after"):
        assert files[number] == full[number]


def test_llama_on_one_process(
    example: ModuleType, directories: dict[str, Path], two: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same losses as two, and the saved model has its very logits."""
    summary, _, logits = run_one_process(example, tmp_path, ["--model", directories["llama"], *FULL, "--accumulate", 2], monkeypatch)
    assert_same_run(summary, two["full"].summary, 1e-5)
    assert torch.equal(logits_of(load(tmp_path)), logits)


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_lora(
    example: ModuleType,
    directories: dict[str, Path],
    two: dict[str, Outcome],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On two processes as on one; peft puts the adapters on the untouched model, and has the same logits."""
    summary, sharded, logits = run_one_process(example, tmp_path, ["--model", directories[name], *LORA], monkeypatch)
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"] - 0.1
    assert_same_run(summary, two[name].summary, 1e-5)
    check_adapters(directories[name], tmp_path, sharded, logits, torch.float32)
    adapted = peft.PeftModel.from_pretrained(load(directories[name]), two[name].directory)
    loss = held_out_loss(example, adapted.eval(), two[name].directory)
    assert loss == pytest.approx(two[name].summary["held_out_loss_after"], rel=1e-5)


def test_lora_on_bf16(example: ModuleType, directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--model", directories["llama"], *LORA, "--dtype", "bf16"]
    summary, sharded, logits = run_one_process(example, tmp_path, options, monkeypatch)
    assert summary["losses"][-1] < summary["losses"][0]
    assert all(chunk.dtype == torch.float32 for chunk in zero3.get_trainable_chunk(sharded))
    check_adapters(directories["llama"], tmp_path, sharded, logits, torch.bfloat16)


def test_lora_on_a_quantised_model(
    example: ModuleType, directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", directories["llama"], *LORA, "--dtype", "bf16", "--quantize", "nf4"]
    summary, sharded, _ = run_one_process(example, tmp_path, options, monkeypatch)
    assert summary["losses"][-1] < summary["losses"][0]
    assert {chunk.dtype for chunk in sharded.parameters()} == {torch.float32, torch.bfloat16, torch.uint8}
    assert (tmp_path / "adapter_model.safetensors").is_file()
    zero3.save_merged(sharded, tmp_path / "merged")
    assert load(tmp_path / "merged").config.model_type == "llama"


def check_adapters(base: Path, directory: Path, sharded: torch.nn.Module, logits: torch.Tensor, dtype: torch.dtype) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    stored = load_file(directory / "adapter_model.safetensors")
    assert stored and all("lora_" in key and value.dtype == torch.float32 for key, value in stored.items())
    assert json.loads((directory / "adapter_config.json").read_text())["lora_alpha"] == 4
    assert not (directory / "model.safetensors").exists()
    untouched = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    before = {f"base_model.model.{name}": value.clone() for name, value in untouched.state_dict().items()}
    after = {name.replace(".base_layer.", "."): value for name, value in zero3.full_state_dict(sharded).items() if "lora_" not in name}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(logits_of(untouched), logits)
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(untouched, directory)), logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", ["--train", "biases"]),
        ("gpt2", ["--train", "last-1"]),
        ("llama", ["--train", "last-1"]),
        ("neox", ["--shard", "--train", "last-1"]),
        ("llama", ["--dtype", "bf16"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_trains_only_what_is_chosen(
    example: ModuleType, directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: list[str]
) -> None:
    """GPT-2's readout is its embedding, so it stays as it was; the tied matrix is saved once."""
    from transformers import AutoModelForCausalLM

    given = ["--model", directories[name], "--steps", 2, "--lr", 1e-2, *options]
    _, _, logits = run_one_process(example, tmp_path, given, monkeypatch)
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits_of(tuned), logits)
    assert tuned.dtype == (torch.bfloat16 if "bf16" in options else torch.float32)
    before, after = AutoModelForCausalLM.from_pretrained(directories[name], dtype=tuned.dtype).state_dict(), tuned.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    if "biases" in options:
        assert changed == {key for key in before if key.endswith(".bias")}
    elif "last-1" in options:
        last = ("transformer.h.1.", "transformer.ln_f.") if name == "gpt2" else ("model.layers.1.", "model.norm.", "lm_head.")
        last = ("gpt_neox.layers.1.", "gpt_neox.final_layer_norm.", "lm_head.", "embed_out.") if name == "neox" else last
        assert changed == {key for key in before if key.startswith(last)}
    else:
        assert changed


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "tolerance"), [([], 1e-6), (["--compute", "bf16"], 1e-2)], ids=["fp32", "bf16"])
def test_the_small_model_can_be_sharded_as_it_is(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: list[str], tolerance: float
) -> None:
    """Both ways of sharding are the same training; what is saved are the master copies."""
    small = ["--vocabulary", 300, "--width", 48, "--blocks", 2, "--heads", 4, "--steps", 3, *compute]
    by_hand = [*SIZES, *small, "--output", tmp_path / "by hand", "--device", "cpu"]
    example.main([str(option) for option in by_hand])
    summary, _, _ = run_one_process(example, tmp_path / "as it is", [*small, "--shard"], monkeypatch)
    assert_same_run(summary, json.loads((tmp_path / "by hand" / "summary.json").read_text()), tolerance)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "by hand" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.float32}


@pytest.mark.slow
def test_mistakes_end_with_advice(
    example: ModuleType, directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="this LlamaForCausalLM has no biases"):
        example.main(["--model", str(directories["llama"]), "--train", "biases"])
    with pytest.raises(SystemExit, match="the model has only 2 blocks"):
        example.main(["--model", str(directories["llama"]), "--train", "last-3"])
    with pytest.raises(SystemExit):
        example.main(["--model", str(directories["llama"]), "--quantize", "nf4"])
    assert "argument --quantize" in capsys.readouterr().err
    for mistake in (["--lora", "2"], ["--lora", "2", "--model", ".", "--train", "biases"]):
        with pytest.raises(SystemExit):
            example.main(mistake)
        assert "argument --lora" in capsys.readouterr().err
    for file in directories["llama"].iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(SystemExit, match=r"--model .*safetensors"):
        example.main(["--model", str(tmp_path)])
