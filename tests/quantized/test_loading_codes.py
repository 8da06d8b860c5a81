"""load_pretrained takes what is quantised already as it lies, or says on all ranks what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.quantized.test_loading import assert_same, built, chunks_of, expected, loaded, shard
from tests.support.adapters import same_bits
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks

safetensors = pytest.importorskip("safetensors.torch")


def as_bitsandbytes(state: Mapping[str, Tensor], names: list[str], kind: zero3.NF4) -> dict[str, Tensor]:
    """A state dict as transformers saves it of a model that bitsandbytes has quantised."""
    found = dict(state)
    for name in names:
        quantized = kind.quantize(state[name])
        found[name] = quantized.codes.view(-1, 1)
        said = {"quant_type": "nf4", "blocksize": kind.block_size, "dtype": "bfloat16", "shape": list(state[name].shape)}
        found[f"{name}.absmax"], found[f"{name}.quant_map"] = quantized.scales, torch.zeros(16)
        if quantized.scale_scales is not None and quantized.offset is not None:
            found[f"{name}.nested_absmax"], found[f"{name}.nested_quant_map"] = quantized.scale_scales, torch.zeros(256)
            said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": quantized.offset.item()}
        found[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return found


def linear_names(model: nn.Module) -> list[str]:
    return [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear) and "lm_head" not in name]


def save(state: Mapping[str, Tensor], directory: Path) -> None:
    safetensors.save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")


@WORLDS
@pytest.mark.parametrize("double", [True, False])
def test_bitsandbytes_checkpoints_are_stored_as_they_lie(double: bool, world_size: int, tmp_path: Path) -> None:
    kind, model = zero3.NF4(double_quant=double), built()
    save(as_bitsandbytes(model.state_dict(), linear_names(model), kind), tmp_path)
    assert_same(loaded(tmp_path, kind, world_size), expected(kind, world_size))


def test_a_checkpoint_that_bitsandbytes_itself_has_quantised(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model, kind = built(), zero3.NF4()
    state = dict(model.state_dict())
    for name in linear_names(model):
        codes, how = bitsandbytes.functional.quantize_4bit(state[name], blocksize=64, compress_statistics=True, quant_type="nf4")
        packed = {f"{name}.{key}": value for key, value in how.as_dict(packed=True).items()}
        state |= {name: codes, **packed}
    save(state, tmp_path)
    assert_same(loaded(tmp_path, kind, 2), expected(kind, 2))


def in_tiles(state: Mapping[str, Tensor], names: list[str], kind: zero3.Float8) -> dict[str, Tensor]:
    found = dict(state)
    for name in names:
        rows, columns = (-(-size // tile) for size, tile in zip(state[name].shape, kind.block, strict=True))
        quantized = kind.quantize(state[name])
        found[name], found[f"{name}_scale_inv"] = quantized.codes.view(state[name].shape), quantized.scales.view(rows, columns)
    return found


class Matrices(nn.Module):
    """Wide enough for tiles of 128."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(300, 200), (128, 256), (100, 130)]
        self.blocks = nn.ModuleList(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for rows, columns in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return x


@WORLDS
def test_float8_in_tiles_is_stored_as_it_lies(world_size: int, tmp_path: Path) -> None:
    def matrices(device: str = "cpu") -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            return Matrices().requires_grad_(False)

    kind, plain = zero3.Float8(), matrices()
    save(in_tiles(plain.state_dict(), list(plain.state_dict()), kind), tmp_path)
    models, others = [matrices("meta") for _ in range(world_size)], [matrices() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> tuple[list[Tensor], list[Tensor]]:
        model = shard(models[group.rank], group, kind)
        zero3.load_pretrained(model, tmp_path)
        return chunks_of(model), chunks_of(shard(others[group.rank], group, kind))

    for found, wanted in run_ranks(world_size, body):
        assert same_bits(found, wanted)


def test_float8_experts_that_files_hold_one_by_one_are_stored_as_they_lie(tmp_path: Path) -> None:
    def wide(device: str) -> Any:
        transformers = pytest.importorskip("transformers")
        config = transformers.MixtralConfig(
            vocab_size=32, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
            num_local_experts=3, dtype=torch.bfloat16,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            return transformers.MixtralForCausalLM(config).to(torch.bfloat16).requires_grad_(False)

    kind = zero3.Float8()
    wide("cpu").save_pretrained(tmp_path)
    state = safetensors.load_file(tmp_path / "model.safetensors")
    weights = [name for name, value in state.items() if value.dim() == 2 and ("experts" in name or "_proj" in name)]
    assert len(weights) == 3 * 3 + 4
    save(in_tiles(state, weights, kind), tmp_path)
    models, others = [wide("meta") for _ in range(2)], [wide("cpu") for _ in range(2)]

    def select(name: str, info: zero3.ParamInfo) -> bool:
        return "_proj" in name

    def body(group: ThreadCommunicator) -> tuple[list[Tensor], list[Tensor]]:
        chosen = zero3.Float8(select=select)
        model = shard(models[group.rank], group, chosen)
        zero3.load_pretrained(model, tmp_path)
        return chunks_of(model), chunks_of(shard(others[group.rank], group, chosen))

    for found, wanted in run_ranks(2, body):
        assert same_bits(found, wanted)


def broken(how: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(state: dict[str, Tensor]) -> dict[str, Tensor]:
        name = next(name for name in state if name.endswith(".absmax")).removesuffix(".absmax")
        if how == "missing":
            del state[f"{name}.nested_absmax"]
        elif how == "short":
            state[f"{name}.absmax"] = state[f"{name}.absmax"][:-1]
        elif how == "fp4":
            state[f"{name}.quant_state.bitsandbytes__fp4"] = state.pop(f"{name}.quant_state.bitsandbytes__nf4")
        elif how == "state":
            state[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(b'{"shape": 3}'), dtype=torch.uint8)
        return state

    return change


@pytest.mark.parametrize(
    ("how", "quantize", "text"),
    [
        ("", zero3.Int8(), r"q_proj\.weight is stored as nf4\(64, double\), and here it is int8\(256\)"),
        ("", zero3.NF4(double_quant=False), r"is stored as nf4\(64, double\), and here it is nf4\(64\)"),
        ("", None, r"is stored as nf4\(64, double\), and here it is not quantised.*ShardingPolicy\(quantize=\.\.\.\)"),
        ("missing", zero3.NF4(), "its scale_scales are missing"),
        ("short", zero3.NF4(), r"absmax has \d+ of torch\.uint8, nf4\(64, double\) has \d+ of torch\.uint8 there"),
        ("fp4", zero3.NF4(), "quantised by bitsandbytes as fp4, which zero3 does not read"),
        ("state", zero3.NF4(), "is not what bitsandbytes writes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_valueerror_on_all_ranks_before_anything_changes(how: str, quantize: Any, text: str, tmp_path: Path) -> None:
    model = built()
    save(broken(how)(as_bitsandbytes(model.state_dict(), linear_names(model), zero3.NF4())), tmp_path)
    models = [built() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        sharded = shard(models[group.rank], group, quantize)
        before = chunks_of(sharded)
        with pytest.raises(ValueError, match=text):
            zero3.load_pretrained(sharded, tmp_path)
        assert same_bits(chunks_of(sharded), before)

    run_ranks(2, body)
