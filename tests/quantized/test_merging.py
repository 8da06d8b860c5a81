"""save_merged: adapters merged by peft into copies, layer by layer, and written as Hugging Face files."""

from __future__ import annotations

import warnings
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.support.adapters import same_bits
from tests.support.architectures import ARCHITECTURES
from tests.support.models import WORLDS
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, process_group
from zero3.core.layer_chunks import LayerChunks

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

KINDS = {
    "plain": {"target_modules": ["q_proj", "down_proj"]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "norms too": {"target_modules": ["v_proj"], "modules_to_save": ["norm"]},
}


def base_model(name: str = "Llama", dtype: torch.dtype = torch.bfloat16) -> Any:
    return ARCHITECTURES[name]._replace(dtype=dtype).build()


def lora(name: str = "Llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = peft.get_peft_model(base_model(name, dtype), peft.LoraConfig(r=2, init_lora_weights=False, **options))
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key:
                parameter.data.normal_()
    return model


def merged(model: Any, quantize: Any = None) -> dict[str, Tensor]:
    """What peft makes of the model whose weights went through the format, as transformers writes it."""
    for key, parameter in model.named_parameters():
        name = key.removeprefix("base_model.model.").replace(".base_layer", "")
        if quantize is not None and name.endswith("_proj.weight") and "lora_" not in name:
            parameter.data = quantize.dequantize(quantize.quantize(parameter.data), parameter.dtype)
    return dict(model.merge_and_unload().state_dict())


def shard(model: Any, group: ThreadCommunicator, quantize: Any, **policy: Any) -> Any:
    chosen = zero3.ShardingPolicy(quantize=quantize, **policy)
    return zero3.shard(model, policy=chosen, process_group=process_group(group))


def files_in(directory: Path) -> dict[str, Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in safetensors.load_file(file).items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    wrong = {name: (found[name].float() - value.float()).abs().max().item() for name, value in expected.items()}
    assert not {name: error for name, error in wrong.items() if error != 0}


@WORLDS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quantize", [zero3.NF4(), None], ids=["nf4", "none"])
def test_save_merged_writes_what_peft_merges_into_the_dequantised_base(quantize: Any, kind: str, world_size: int, tmp_path: Path) -> None:
    expected = merged(lora(**KINDS[kind]), quantize)
    models = [lora(**KINDS[kind]) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model = shard(models[group.rank], group, quantize, group_adapters=world_size != 3)
        before = [chunk.detach().clone() for chunk in model.parameters()]
        zero3.save_merged(model, tmp_path / "out", max_shard_size=4000)
        assert same_bits([chunk.detach() for chunk in model.parameters()], before), "the model stays as it is"
        ARCHITECTURES["Llama"].loss(model, Turn(0, 0, 1))

    run_ranks(world_size, body)
    found = files_in(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert_same(found, expected)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


@pytest.mark.parametrize("part", ["base_model", "base_model.model", "base_model.model.model.layers"])
def test_save_merged_of_a_part_with_adapters_is_refused(part: str, tmp_path: Path) -> None:
    """It wrote the base's weights beside those of the adapters, under peft's names. A part without adapters has nothing to merge."""

    def body(group: ThreadCommunicator) -> None:
        model = shard(deepcopy(adapted), group, None)
        for use in (
            lambda given: zero3.save_merged(given, tmp_path / "out"),
            lambda given: zero3.stream_weights(given, merge_adapters=True),
            lambda given: zero3.stream_weights(given, adapters_only=True),
            lambda given: zero3.stream_weights(given),
        ):
            with pytest.raises(ValueError, match=r"holds adapters, and is not the model of peft's.*as peft\.get_peft_model returned it"):
                use(model.get_submodule(part))
        zero3.save_merged(model.base_model.model.lm_head, tmp_path / "head")
        zero3.save_merged(model, tmp_path / "whole")

    adapted = lora(target_modules=["q_proj"])
    run_ranks(2, body)
    assert not (tmp_path / "out").exists()
    assert_same(files_in(tmp_path / "whole"), expected := merged(adapted))
    assert_same(files_in(tmp_path / "head"), {"weight": expected["lm_head.weight"]})


def test_save_merged_into_the_original_weights(tmp_path: Path) -> None:
    adapted = lora(target_modules=["q_proj", "down_proj"])
    deepcopy(adapted).unload().save_pretrained(tmp_path / "base")
    models = [deepcopy(adapted) for _ in range(2)]
    expected = merged(adapted)

    def body(group: ThreadCommunicator) -> None:
        model = shard(models[group.rank], group, zero3.NF4())
        zero3.save_merged(model, tmp_path / "out", base=tmp_path / "base")

    run_ranks(2, body)
    found = files_in(tmp_path / "out")
    assert_same(found, expected)


def test_save_merged_of_a_quantised_model_without_adapters_and_its_config(tmp_path: Path) -> None:
    kind = zero3.NF4()
    plain = base_model("Mixtral").requires_grad_(False)
    plain.config = deepcopy(plain.config)
    plain.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    plain.config.quantization_config["bnb_4bit_use_double_quant"] = True
    model = zero3.shard(plain)
    zero3.save_merged(model, tmp_path / "out", dtype=torch.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, value in base_model("Mixtral").state_dict().items():
        quantised = "_proj" in name
        expected = kind.dequantize(kind.quantize(value), value.dtype) if quantised else value
        assert torch.equal(again.state_dict()[name], expected.float()), name


def test_save_merged_holds_one_layer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all adapters, which the root's own layer has."""
    whole: list[int] = []
    model = zero3.shard(lora(target_modules=["q_proj", "down_proj"]), policy=zero3.ShardingPolicy(quantize=zero3.NF4()))
    root: Any = vars(model)["_zero3_root"]
    read, alive = LayerChunks.read, list[tuple[LayerChunks, weakref.ref[Tensor]]]()

    def watched(chunks: LayerChunks, chunk: Any, full: Tensor) -> Any:
        ticket = read(chunks, chunk, full)
        alive.append((chunks, weakref.ref(full)))
        whole.append(len({id(layer) for layer, found in alive if found() is not None and layer is not root.chunks}))
        return ticket

    monkeypatch.setattr(LayerChunks, "read", watched)
    zero3.save_merged(model, tmp_path / "out")
    assert len(whole) >= 5
    assert max(whole) == 1
    assert not any(found() is not None for _, found in alive)


def test_what_can_not_be_merged_is_a_valueerror_on_all_ranks_and_nothing_is_written(tmp_path: Path) -> None:
    base_model("GPT-2").save_pretrained(tmp_path / "other")
    models = [lora(target_modules=["q_proj"]) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = shard(models[group.rank], group, zero3.NF4())
        with pytest.raises(ValueError, match="does not fit this LlamaForCausalLM"):
            zero3.save_merged(model, tmp_path / "out", base=tmp_path / "other")
        with pytest.raises(TypeError, match="dtype must be a torch"):
            zero3.save_merged(model, tmp_path / "out", dtype="bfloat16")  # type: ignore[arg-type]
        assert not (tmp_path / "out").exists()

    run_ranks(2, body)


@pytest.mark.parametrize("how", ["merge_adapter", "merge_and_unload"])
def test_peft_itself_merging_into_a_quantised_base_is_refused_and_names_save_merged(how: str) -> None:
    model = zero3.shard(lora(target_modules=["q_proj"]), policy=zero3.ShardingPolicy(quantize=zero3.NF4()))
    with zero3.full_params(model), pytest.raises(RuntimeError, match=r"zero3\.save_merged\(model, directory\)"):
        getattr(model, how)()
    with pytest.raises(RuntimeError, match=r"zero3\.save_merged\(model, directory\)"):
        getattr(model, how)()


def in_processes(rank: Rank, directory: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    model = zero3.shard(lora(target_modules=["q_proj", "down_proj"]), policy=zero3.ShardingPolicy(quantize=zero3.NF4()))
    zero3.save_merged(model, directory)


def test_save_merged_in_processes(tmp_path: Path) -> None:
    on_ranks(2, in_processes, tmp_path / "out")
    expected = merged(lora(target_modules=["q_proj", "down_proj"]), zero3.NF4())
    found = files_in(tmp_path / "out")
    assert_same(found, expected)
