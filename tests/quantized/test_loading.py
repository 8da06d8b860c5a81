"""load_pretrained quantises as it reads, as the policy or a configuration asks; and checkpoints of such models."""

from __future__ import annotations

import threading
from collections import Counter
from copy import deepcopy
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support import disk
from tests.support.adapters import same_bits
from tests.support.architectures import ARCHITECTURES
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group

safetensors = pytest.importorskip("safetensors.torch")

FORMATS = {
    "nf4": zero3.NF4(), "nf4 single": zero3.NF4(double_quant=False, block_size=128), "int8": zero3.Int8(block_size=100),
    "mxfp4": zero3.MXFP4(), "float8": zero3.Float8(block=(8, 16)),
}  # fmt: skip


def built(name: str = "Llama", device: str = "cpu", **config: Any) -> Any:
    with torch.device(device):
        model = ARCHITECTURES[name]._replace(dtype=torch.bfloat16).build()
    model.config = deepcopy(model.config)  # which all models of the class share here
    for key, value in config.items():
        setattr(model.config, key, value)
    return model.requires_grad_(False)


def chunks_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def shard(model: nn.Module, group: ThreadCommunicator, quantize: Any = None) -> Any:
    policy = zero3.ShardingPolicy(quantize=quantize)
    return zero3.shard(model, device="cpu", policy=policy, process_group=process_group(group))


def loaded(directory: Path, quantize: Any, world_size: int, name: str = "Llama", **config: Any) -> list[list[Tensor]]:
    models = [built(name, "meta", **config) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> list[Tensor]:
        model = shard(models[group.rank], group, quantize)
        zero3.load_pretrained(model, directory)
        return chunks_of(model)

    return run_ranks(world_size, body)


def expected(quantize: Any, world_size: int, name: str = "Llama") -> list[list[Tensor]]:
    """What construction quantises, where rank 0 has whole parameters."""
    models = [built(name) for _ in range(world_size)]
    return run_ranks(world_size, lambda group: chunks_of(shard(models[group.rank], group, quantize)))


def assert_same(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
    assert all(same_bits(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


# -- quantised as it is read


@WORLDS
@pytest.mark.parametrize("format_name", FORMATS)
def test_load_pretrained_quantizes_as_construction_does(format_name: str, world_size: int, tmp_path: Path) -> None:
    built().save_pretrained(tmp_path)
    kind = FORMATS[format_name]
    assert_same(loaded(tmp_path, kind, world_size), expected(kind, world_size))


def test_load_pretrained_quantizes_experts_that_files_hold_one_by_one(tmp_path: Path) -> None:
    built("Mixtral").save_pretrained(tmp_path)
    assert_same(loaded(tmp_path, zero3.NF4(), 2, "Mixtral"), expected(zero3.NF4(), 2, "Mixtral"))


@pytest.mark.parametrize("kind", [*FORMATS.values(), zero3.Float8()], ids=lambda kind: kind.name)
def test_each_rank_reads_the_elements_that_it_keeps_and_no_others(kind: Any, tmp_path: Path) -> None:
    """Blocks that its edges cut as well: ranks share what they need to know of each other's parts."""
    by_rank: Counter[FileIO] = Counter()  # each rank opens the file

    def counted(file: FileIO, offset: int, into: memoryview) -> int:
        count = disk.read(file, offset, into)
        by_rank[file] += count
        return count

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(515, 300, bias=False, dtype=torch.bfloat16) for _ in range(3))

    def wide(device: str) -> Any:
        with torch.device(device):
            return Wide().requires_grad_(False)

    plain = wide("cpu")
    safetensors.save_file(plain.state_dict(), tmp_path / "model.safetensors")
    models = [wide("meta") for _ in range(2)]
    with disk.reading(counted):
        run_ranks(2, lambda group: zero3.load_pretrained(shard(models[group.rank], group, kind), tmp_path))
    stored = sum(tensor.nbytes for tensor in plain.state_dict().values())
    assert len(by_rank) == 2 and by_rank.total() == stored
    scales = stored // 2 * 0.15  # in a slot they stand behind the codes, so the last rank has fewer codes
    assert max(by_rank.values()) <= stored / 2 + scales


def test_a_read_that_fails_on_one_rank_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    built().save_pretrained(tmp_path)
    models = [built(device="meta") for _ in range(2)]
    local = threading.local()

    def read(file: FileIO, offset: int, into: memoryview) -> int:
        local.left -= 1
        if local.left == 0:
            raise OSError("the disk is gone")
        return disk.read(file, offset, into)

    def body(group: ThreadCommunicator) -> str:
        model = shard(models[group.rank], group, zero3.NF4())
        local.left = 8 if group.rank == 1 else -1  # until it fails
        with pytest.raises(RuntimeError, match="the disk is gone") as caught:
            zero3.load_pretrained(model, tmp_path)
        with pytest.raises(RuntimeError, match="has no values yet"):
            model(torch.ones(1, 3, dtype=torch.long))
        zero3.load_pretrained(model, tmp_path)
        return str(caught.value)

    with disk.reading(read):
        assert len(set(run_ranks(2, body))) == 1


# -- what a configuration asks for


@pytest.mark.parametrize("as_dict", [True, False])
def test_a_bitsandbytesconfig_in_the_models_config_is_understood(as_dict: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    asked = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["lm_head", "down_proj"]
    )
    config = asked.to_dict() if as_dict else asked
    built().save_pretrained(tmp_path)
    found = loaded(tmp_path, None, 2, quantization_config=config)
    kind = zero3.NF4(select=lambda name, info: name.endswith("_proj.weight") and "down_proj" not in name)
    assert_same(found, expected(kind, 2))


def test_a_configuration_for_float8_is_understood_and_a_policy_goes_before_it(tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [8, 16], "modules_to_not_convert": ["lm_head"]}
    built().save_pretrained(tmp_path)
    assert_same(loaded(tmp_path, None, 2, quantization_config=config), expected(zero3.Float8(block=(8, 16)), 2))
    assert_same(loaded(tmp_path, zero3.Int8(), 2, quantization_config=config), expected(zero3.Int8(), 2))


def test_a_configuration_that_no_frozen_weight_fits_changes_nothing() -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model = zero3.shard(built(quantization_config=config).requires_grad_(True))
    assert all(chunk.dtype == torch.bfloat16 for chunk in model.parameters())


# -- checkpoints


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2), (2, 1)])
def test_a_checkpoint_of_a_quantised_base_loads_at_any_number_of_ranks(frozen: bool, before: int, after: int, tmp_path: Path) -> None:
    def adapted(seed: int) -> Any:
        peft = pytest.importorskip("peft")
        torch.manual_seed(seed)
        return peft.get_peft_model(built(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))

    def save_it(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = shard(models[group.rank], group, zero3.NF4())
        zero3.save_checkpoint(tmp_path / "saved", model, frozen=frozen)
        return zero3.full_state_dict(model, rank0_only=False)

    def load_it(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = shard(others[group.rank], group, zero3.NF4())
        zero3.load_checkpoint(tmp_path / "saved", model)
        return zero3.full_state_dict(model, rank0_only=False)

    def load_into_another(group: ThreadCommunicator) -> None:
        model = shard(strangers[group.rank], group, zero3.Int8())
        text = r"other formats: .*q_proj\.base_layer\.weight has nf4\(64, double\) of .*, expected int8\(256\) of "
        with pytest.raises(ValueError, match=text):
            zero3.load_checkpoint(tmp_path / "saved", model)

    models, others, strangers = ([adapted(seed) for _ in range(3)] for seed in (1, 2, 3))
    saved = run_ranks(before, save_it)[0]
    for found in run_ranks(after, load_it):
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], value) for name, value in saved.items())
    run_ranks(after, load_into_another)


def test_save_pretrained_of_a_quantised_model_names_save_merged(tmp_path: Path) -> None:
    model = zero3.shard(built(), policy=zero3.ShardingPolicy(quantize=zero3.NF4()))
    with pytest.raises(ValueError, match=r"zero3\.save_merged"):
        zero3.save_pretrained(model, tmp_path / "out")
