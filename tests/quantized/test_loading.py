"""load_pretrained quantises as it reads, and takes what is quantised already as it lies."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.adapters import same_bits
from tests.support.architectures import ARCHITECTURES
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from zero3.checkpoint.safetensors_files import SafetensorsFiles
from zero3.huggingface import load_pretrained as loading

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
def test_each_rank_reads_the_elements_that_it_keeps_and_no_others(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that its edges cut as well: ranks share what they need to know of each other's parts."""
    opened: list[SafetensorsFiles] = []

    class Counted(SafetensorsFiles):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            opened.append(self)

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
    monkeypatch.setattr(loading, "SafetensorsFiles", Counted)
    run_ranks(2, lambda group: zero3.load_pretrained(shard(models[group.rank], group, kind), tmp_path))
    stored = sum(tensor.nbytes for tensor in plain.state_dict().values())
    read = [files.bytes_read for files in opened]
    assert sum(read) == stored
    scales = stored // 2 * 0.15  # in a slot they stand behind the codes, so the last rank has fewer codes
    assert max(read) <= stored / 2 + scales


def test_a_read_that_fails_on_one_rank_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built().save_pretrained(tmp_path)
    models = [built(device="meta") for _ in range(2)]
    plain = SafetensorsFiles.read

    def read(files: Any, stored: Any, start: int, target: Tensor) -> None:
        if files.fails and "up_proj" in stored.name:
            raise OSError("the disk is gone")
        plain(files, stored, start, target)

    monkeypatch.setattr(SafetensorsFiles, "read", read)
    monkeypatch.setattr(SafetensorsFiles, "fails", False, raising=False)

    def body(group: ThreadCommunicator) -> str:
        model = shard(models[group.rank], group, zero3.NF4())

        class Failing(SafetensorsFiles):
            fails = group.rank == 1

        with pytest.raises(RuntimeError, match="the disk is gone") as caught, closing(Failing(tmp_path)) as files:
            loading._load(model, loading.states_of(model), files, loading.fit(model, files.tensors, True))
        with pytest.raises(RuntimeError, match="has no values yet"):
            model(torch.ones(1, 3, dtype=torch.long))
        zero3.load_pretrained(model, tmp_path)
        return str(caught.value)

    assert len(set(run_ranks(2, body))) == 1


# -- quantised already


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
