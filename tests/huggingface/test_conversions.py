"""load_pretrained and save_pretrained of models whose files transformers rearranges: the same bits, and the same files, as its own."""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from packaging.version import Version
from torch import Tensor, nn
from transformers import conversion_mapping
from transformers import core_model_loading as loading

import zero3
from tests.huggingface.test_save_pretrained import contents
from tests.support import disk
from tests.support.pretrained import assert_same_bits, on_meta
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from tests.versions import HUGGING_FACE
from zero3.huggingface.conversions import Conversions

_TEXT = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
_PICTURE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
_EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
_QWEN_VL = {
    "text_config": {**_TEXT, **_EXPERTS, "num_experts": 3, "head_dim": 8},
    "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "patch_size": 4, "out_hidden_size": 16,
                      "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}  # fmt: skip
_ERNIE = {
    "text_config": {**_TEXT, "moe_intermediate_size": [12, 8], "moe_num_experts": 3, "moe_k": 2, "moe_num_shared_experts": 1,
                    "mlp_layer_types": ["dense", "sparse"],
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
    "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "intermediate_size": 24},
}  # fmt: skip
_PHONON = {
    **_TEXT, "audio_prompt_dim": 8, "num_hidden_layers": 1,
    "flow_head_config": {"condition_dim": 16, "hidden_size": 16, "num_hidden_layers": 1, "frequency_embedding_size": 8},
}  # fmt: skip

MODELS: dict[str, Callable[[], nn.Module]] = {
    "NomicBert: Chunk": lambda: t.NomicBertForMaskedLM(t.NomicBertConfig(**_TEXT)),
    "Dinov2: Chunk of biases": lambda: t.Dinov2Model(t.Dinov2Config(**_PICTURE, use_swiglu_ffn=True)),
    "Qwen3-VL-MoE: Transpose": lambda: t.Qwen3VLMoeForConditionalGeneration(t.Qwen3VLMoeConfig(**_QWEN_VL)),
    "Ernie-4.5-VL: many to many": lambda: t.Ernie4_5_VLMoeForConditionalGeneration(t.Ernie4_5_VLMoeConfig(**_ERNIE)),
    "Phonon: Chunk and PermuteForRope": lambda: t.GradiumPhononTTSForConditionalGeneration(t.GradiumPhononTTSConfig(**_PHONON)),
    "Qwen3-MoE: MergeModulelist": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**_TEXT, **_EXPERTS, num_experts=3, head_dim=8)),
}
models = pytest.mark.parametrize("name", MODELS)


def not_yet(reason: str) -> None:
    """An older transformers need not have what we follow; the newest must."""
    if Version(t.__version__) >= Version(HUGGING_FACE[-1][0]):
        pytest.fail(f"transformers {t.__version__} {reason}")
    pytest.skip(f"transformers {t.__version__} {reason}")


def build(name: str) -> Any:
    """Every number another one, and no part of a tensor like any other."""
    lacking = [each for each in MODELS[name].__code__.co_names if each[0].isupper() and not hasattr(t, each)]
    if lacking:
        not_yet(f"has no {lacking[0]}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter))
    return model


@models
@pytest.mark.parametrize("world_size", [1, 3])
def test_load_pretrained_and_save_pretrained_as_transformers(name: str, world_size: int, tmp_path: Path) -> None:
    """Also what is saved after loading: transformers goes by the names that it has found."""
    plain, *others = [build(name) for _ in range(1 + world_size)]
    plain.save_pretrained(tmp_path / "theirs")
    expected = type(plain).from_pretrained(tmp_path / "theirs")
    assert_same_bits(expected.state_dict(), plain.state_dict())
    if list(contents(tmp_path / "theirs")) == sorted(plain.state_dict()) and "Transpose" not in name:
        not_yet("stores it as it is")
    expected.save_pretrained(tmp_path / "theirs again")
    empty = [on_meta(plain) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        zero3.save_pretrained(sharded(others[group.rank], group), tmp_path / "ours")
        model = sharded(empty[group.rank], group)
        zero3.load_pretrained(model, tmp_path / "theirs")
        assert all(torch.equal(one, other) for one, other in zip(model.buffers(), expected.buffers(), strict=True))
        zero3.save_pretrained(model, tmp_path / "ours again")
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(world_size, body):
        assert_same_bits(found, expected.state_dict())
    assert_same_bits(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    assert_same_bits(contents(tmp_path / "ours again"), contents(tmp_path / "theirs again"))


def sharded(model: nn.Module, group: ThreadCommunicator) -> nn.Module:
    return zero3.shard(model, nn.Linear, process_group=process_group(group), device="cpu")


def test_load_pretrained_transposes_what_hub_files_have_transposed(tmp_path: Path) -> None:
    """Qwen3-VL-MoE's files hold experts either way; transformers looks at shapes."""
    from safetensors.torch import save_file

    plain = build("Qwen3-VL-MoE: Transpose")
    plain.save_pretrained(tmp_path)
    stored = contents(tmp_path)
    if any(value.dim() != 3 for name, value in stored.items() if ".experts." in name):
        not_yet("stores experts one by one")
    tensors = {name: value.transpose(1, 2).contiguous() if ".experts." in name else value for name, value in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_bits(type(plain).from_pretrained(tmp_path).state_dict(), plain.state_dict())
    empty = [on_meta(plain) for _ in range(2)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = sharded(empty[group.rank], group)
        zero3.load_pretrained(model, tmp_path)
        return zero3.full_state_dict(model)

    assert_same_bits(run_ranks(2, body)[0], plain.state_dict())


@pytest.mark.parametrize("name", ["Qwen3-VL-MoE: Transpose", "Phonon: Chunk and PermuteForRope"])
def test_load_pretrained_holds_one_stored_tensor_at_a_time(name: str, tmp_path: Path) -> None:
    """Where elements are to be looked up one by one too."""
    plain = build(name)
    plain.save_pretrained(tmp_path)
    largest = max(value.nbytes for value in contents(tmp_path).values())
    reads: list[int] = []

    def watched(file: FileIO, offset: int, into: memoryview) -> int:
        reads.append(len(into))
        return disk.read(file, offset, into)

    model = zero3.shard(on_meta(plain), nn.Linear, device="cpu")
    with disk.reading(watched):
        zero3.load_pretrained(model, tmp_path)
    assert 0 < max(reads) <= largest
    assert_same_bits(zero3.full_state_dict(model), plain.state_dict())


def test_load_pretrained_of_a_conversion_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named on all ranks before anything changes; transformers can still load it on rank 0."""

    class Doubled(loading.ConversionOps):
        def convert(self, input_dict: Any, **_: Any) -> Any:
            return {"gate_proj": next(iter(input_dict.values()))[0] * 2}

    def mapping(model: Any, *_: Any, **__: Any) -> list[Any]:
        return [loading.WeightConverter("gate_proj", "gate_proj", operations=[Doubled()])]

    plain = t.LlamaForCausalLM(t.LlamaConfig(**_TEXT))
    plain.save_pretrained(tmp_path)
    empty = [on_meta(plain) for _ in range(2)]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)

    def body(group: ThreadCommunicator) -> str:
        model = sharded(empty[group.rank], group)
        with pytest.raises(
            ValueError, match=r"not to be converted here: model\.layers\.0\.mlp\.gate_proj\.weight \(transformers makes it by D"
        ) as e:
            zero3.load_pretrained(model, tmp_path)
        return str(e.value)

    first, second = run_ranks(2, body)
    assert first == second and "missing" not in first and "use from_pretrained on rank 0" in first


def test_load_pretrained_beside_older_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which look at the class of the model that they are given, and don't tell which of their conversions they have used."""
    given: list[Any] = []

    def mapping(model: Any) -> list[Any]:
        given.append(model)
        return [object()]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)
    model = t.LlamaForCausalLM(t.LlamaConfig(**_TEXT))
    conversions = Conversions(model, model.state_dict())
    assert [each.__class__ for each in given] == [t.LlamaForCausalLM]
    assert len(conversions.used or []) == 1


def test_load_pretrained_of_experts_that_do_not_fit(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    plain = build("Qwen3-MoE: MergeModulelist")
    plain.save_pretrained(tmp_path)
    tensors = contents(tmp_path)
    del tensors["model.layers.0.mlp.experts.1.up_proj.weight"]
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"other shapes: (.|\n)*made from 3 of \(12, 16\), 2 of \(12, 16\)") as raised:
        zero3.load_pretrained(zero3.shard(on_meta(plain), nn.Linear, device="cpu"), tmp_path)
    assert "model.layers.1.mlp.experts.down_proj can't be made from 3 of (16, 12)" in str(raised.value)
    assert "missing" not in str(raised.value)


def test_save_pretrained_when_transformers_can_not_turn_names_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no way back")

    plain = build("NomicBert: Chunk")
    plain.save_pretrained(tmp_path / "theirs", save_original_format=False)
    monkeypatch.setattr(loading, "revert_weight_conversion", fails)
    zero3.save_pretrained(zero3.shard(build("NomicBert: Chunk"), nn.Linear, device="cpu"), tmp_path / "ours")
    assert_same_bits(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    assert any("names of files can't be had (no way back)" in record.getMessage() for record in caplog.records)
