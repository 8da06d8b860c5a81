"""Adapters from peft's own files, and adapters on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.huggingface.test_peft_adapters import lora, loss
from tests.support.architectures import ARCHITECTURES
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_close, on_two

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


@pytest.mark.parametrize("adapters", [("default",), ("default", "ref"), ("mine",)])
def test_load_pretrained_fills_adapters_from_peft_files(tmp_path: Path, adapters: tuple[str, ...]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        source = lora(adapters=adapters) if adapters != ("mine",) else named_mine(lora())
        for key, parameter in source.named_parameters():
            if "lora_" in key:
                parameter.data.normal_()
    source.save_pretrained(str(tmp_path / "saved"))
    expected = {key: value.clone() for key, value in source.state_dict().items()}

    def body(model: Any, group: ThreadCommunicator) -> dict[str, Tensor]:
        zero3.load_pretrained(model, tmp_path / "saved")
        zero3.save_pretrained(model, tmp_path / "again")
        return zero3.full_state_dict(model, rank0_only=False)

    for found in on_two(lambda: lora(adapters=adapters) if adapters != ("mine",) else named_mine(lora()), body):
        assert_close(found, expected, 0, "values")
    for file in (tmp_path / "saved").rglob("*.safetensors"):
        assert (tmp_path / "again" / file.relative_to(tmp_path / "saved")).read_bytes()[-64:] == file.read_bytes()[-64:]


def named_mine(model: Any) -> Any:
    """Its only adapter has another name than peft's own choice."""
    config = model.peft_config["default"]
    model.add_adapter("mine", config)
    model.set_adapter("mine")
    model.delete_adapter("default")
    return model


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"r": 3}, r"other shapes: .*lora_A\.weight has \(3, 16\), expected \(2, 16\)"),
        ({"lora_alpha": 3}, "other options: lora_alpha is 3, expected 8"),
        ({"target_modules": ["q_proj"]}, r"missing: .*v_proj\.lora_A\.weight"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, r"unknown: .*k_proj\.lora_A\.weight"),
    ],
    ids=str,
)
def test_load_pretrained_refuses_other_adapters_on_all_ranks_before_anything_changes(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], **change})
    peft.get_peft_model(ARCHITECTURES["Llama"]._replace(dtype=torch.float32).build(), config).save_pretrained(str(tmp_path))

    def body(model: Any, group: ThreadCommunicator) -> None:
        before = [chunk.detach().clone() for chunk in model.parameters()]
        with pytest.raises(ValueError, match=text):
            zero3.load_pretrained(model, tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    on_two(lora, body)


@pytest.mark.parametrize("quantize", [None, zero3.NF4()], ids=["plain", "nf4"])
def test_materialize_begins_adapters_on_meta_as_peft_does_over_a_base_that_was_read(tmp_path: Path, quantize: Any) -> None:
    base = ARCHITECTURES["Llama"]._replace(dtype=torch.float32).build()
    base.save_pretrained(tmp_path)

    def on_meta() -> Any:
        with torch.device("meta"):
            model = ARCHITECTURES["Llama"]._replace(dtype=torch.float32).build()
            return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        policy = zero3.ShardingPolicy(quantize=quantize)
        model = zero3.shard(models[group.rank], device="cpu", policy=policy, process_group=group)
        zero3.load_pretrained(model, tmp_path)
        with pytest.raises(RuntimeError, match=r"has no values yet for: .*lora_A.*zero3\.materialize"):
            loss(model, Turn(0, 0, 1))
        zero3.materialize(model)
        loss(model, Turn(group.rank, 0, 2)).backward()
        return zero3.full_state_dict(model, rank0_only=False)

    models = [on_meta() for _ in range(2)]
    for found in run_ranks(2, body):
        for name, value in found.items():
            if "lora_B" in name:
                assert not value.any()
            elif "lora_A" in name:
                assert 0 < value.abs().max() <= value.shape[1] ** -0.5, "uniform, as peft draws it"
            elif quantize is None:
                plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
                assert torch.equal(value, base.state_dict()[plain]), name


@pytest.mark.parametrize("saved", [["lm_head"], ["embed_tokens", "lm_head", "norm"]], ids=" ".join)
def test_load_pretrained_begins_modules_to_save_as_the_base_does(tmp_path: Path, saved: list[str]) -> None:
    """On the meta device, and over other values: peft, too, trains copies of a base that was read before."""
    llama = ARCHITECTURES["Llama"]._replace(dtype=torch.float32)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=saved)
    base = llama.build()
    base.save_pretrained(tmp_path)
    expected = peft.get_peft_model(base, config).state_dict()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], device="cpu", process_group=group)
        if not meta:
            for chunk in model.parameters():
                chunk.data.fill_(7.0)
        zero3.load_pretrained(model, tmp_path)
        zero3.materialize(model)
        return zero3.full_state_dict(model, rank0_only=False)

    for meta in (True, False):
        models = []
        for _ in range(2):
            with torch.device("meta" if meta else "cpu"):
                models.append(peft.get_peft_model(llama.build(), config))
        for found in run_ranks(2, body):
            kept = {name: value for name, value in found.items() if "lora_" not in name}
            assert any(".modules_to_save.default." in name for name in kept)
            assert_close(kept, {name: expected[name] for name in kept}, 0, "values")
