"""save_pretrained: sharded models as transformers and peft write them, and read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zero3
from tests.huggingface.test_peft import TARGETS, lora
from tests.support import disk
from tests.support.architectures import ARCHITECTURES
from tests.support.models import WORLDS
from tests.support.pretrained import assert_same_bits, on_meta
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, process_group

peft = pytest.importorskip("peft")

TURN = Turn(0, 0, 1)


def contents(directory: Path) -> dict[str, Tensor]:
    """Every tensor of every file, read by the format's own package."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return dict(sorted(found.items()))


def save(models: list[Any], directory: Path, **options: Any) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        zero3.save_pretrained(model, directory, **options)

    run_ranks(len(models), body)


@WORLDS
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_files_as_transformers_writes(name: str, world_size: int, tmp_path: Path) -> None:
    """Names, ties, experts, values; and what transformers and load_pretrained make of them."""
    plain, *models = [ARCHITECTURES[name].build().eval() for _ in range(world_size + 1)]
    plain.save_pretrained(tmp_path / "theirs")  # which notes the dtype in the config that they share
    save(models, tmp_path / "ours")
    assert_same_bits(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    for file in ("config.json", "generation_config.json"):
        if (tmp_path / "theirs" / file).exists():
            assert json.loads((tmp_path / "ours" / file).read_text()) == json.loads((tmp_path / "theirs" / file).read_text())
    found, inputs = type(plain).from_pretrained(tmp_path / "ours", dtype=plain.dtype).eval(), ARCHITECTURES[name].inputs(TURN)
    with torch.no_grad():
        assert torch.equal(found(**inputs).logits, plain(**inputs).logits)


@WORLDS
def test_masters_are_loaded_from_and_written_in_the_models_own_dtype(world_size: int, tmp_path: Path) -> None:
    plain = ARCHITECTURES["Llama"].build().to(torch.bfloat16).eval()
    plain.save_pretrained(tmp_path / "theirs")
    models = [on_meta(plain) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        policy = zero3.ShardingPolicy(master_dtype=torch.float32)
        model = zero3.shard(models[group.rank], process_group=process_group(group), policy=policy)
        zero3.load_pretrained(model, tmp_path / "theirs")
        assert {chunk.dtype for chunk in zero3.get_trainable_chunk(model)} == {torch.float32}
        zero3.save_pretrained(model, tmp_path / "ours")
        zero3.save_pretrained(model, tmp_path / "masters", dtype=torch.float32)

    run_ranks(world_size, body)
    theirs = contents(tmp_path / "theirs")
    assert_same_bits(contents(tmp_path / "ours"), theirs)
    assert_same_bits(contents(tmp_path / "masters"), {name: value.float() for name, value in theirs.items()})


@WORLDS
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Mixtral"])
def test_max_shard_size_gives_several_files_and_load_pretrained_reads_them(name: str, world_size: int, tmp_path: Path) -> None:
    build = ARCHITECTURES[name].build
    save([build() for _ in range(world_size)], tmp_path, max_shard_size="6KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert {path.name for path in files} == set(index["weight_map"].values()) and len(files) > 2
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in contents(tmp_path).values())
    for path in files:
        with safe_open(path, framework="pt") as file:
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
            assert sum(sizes) <= 6000 or len(sizes) == 1
            assert {key for key, value in index["weight_map"].items() if value == path.name} == set(file.keys())
    assert_same_bits(type(build()).from_pretrained(tmp_path, dtype=build().dtype).state_dict(), build().state_dict())

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        zero3.load_pretrained(model, tmp_path)
        return zero3.full_state_dict(model)

    models = [on_meta(build()) for _ in range(world_size)]
    assert_same_bits(run_ranks(world_size, body)[0], build().state_dict())


@WORLDS
@pytest.mark.parametrize("name", ["GPT-2", "Mixtral"])
def test_save_pretrained_and_load_pretrained_of_one_layer_around_a_whole_model(name: str, world_size: int, tmp_path: Path) -> None:
    """Its names, its config, and what transformers renames are the model's, not the wrapper's."""
    plain, *models = [ARCHITECTURES[name].build() for _ in range(world_size + 1)]
    plain.save_pretrained(tmp_path / "theirs")
    empty = [on_meta(plain) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        zero3.save_pretrained(zero3.Zero3Layer(models[group.rank], process_group=process_group(group)), tmp_path / "ours")
        layer = zero3.Zero3Layer(empty[group.rank], process_group=process_group(group), device="cpu")
        zero3.load_pretrained(layer, tmp_path / "theirs")
        return zero3.full_state_dict(layer)

    found = run_ranks(world_size, body)[0]
    assert_same_bits(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    assert (tmp_path / "ours" / "config.json").read_text() == (tmp_path / "theirs" / "config.json").read_text()
    assert_same_bits(found, plain.state_dict())


@WORLDS
def test_converted_on_the_way(world_size: int, tmp_path: Path) -> None:
    build = ARCHITECTURES["Llama"].build
    save([build() for _ in range(world_size)], tmp_path, dtype=torch.bfloat16)
    assert_same_bits(contents(tmp_path), {name: value.bfloat16() for name, value in sorted(build().state_dict().items())})
    assert type(build()).from_pretrained(tmp_path).dtype == torch.bfloat16


def test_an_earlier_save_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    build = ARCHITECTURES["Llama"].build
    save([build(), build()], tmp_path, max_shard_size="6KB")
    save([build(), build()], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "config.json", "generation_config.json", "model.safetensors"}


def test_tokenizer_and_generation_config_come_along(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    source = tmp_path / "source"
    model = ARCHITECTURES["Llama"].build()
    model.generation_config.max_length = 77
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    with torch.device("meta"):
        empty = [AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source)).double() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(empty[group.rank], process_group=group)
        with pytest.raises(RuntimeError, match=r"have no values yet"):
            zero3.save_pretrained(model, tmp_path / "ours")
        zero3.load_pretrained(model, source)
        zero3.save_pretrained(model, tmp_path / "ours")

    run_ranks(2, body)
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "ours" / "generation_config.json").read_text())["max_length"] == 77


def test_any_module(tmp_path: Path) -> None:
    """No config; odd shapes, an empty and a 0-dim parameter, buffers, a tie."""
    from tests.support.checkpoints import odd

    save([odd() for _ in range(3)], tmp_path, max_shard_size=200)
    expected = odd().state_dict()
    del expected["head.weight"]
    assert_same_bits(contents(tmp_path), dict(sorted(expected.items())))


@WORLDS
@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"bias": "lora_only"}], ids=["plain", "head", "dora", "bias"]
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, about saved modules
def test_adapters_as_peft_writes_them(options: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    plain = lora("Llama", torch.bfloat16, **options).eval()
    plain.save_pretrained(tmp_path / "theirs")
    models = [lora("Llama", torch.bfloat16, **options) for _ in range(world_size)]
    gathered: list[int] = []

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        before = len(group.log)
        zero3.save_pretrained(model, tmp_path / "ours")
        gathered.extend(line.numel for line in group.log[before:] if line.kind in ("all_gather", "broadcast"))

    run_ranks(world_size, body)
    assert not gathered
    assert_same_bits(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    ours, theirs = (json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs"))
    assert {key: sorted(v) if isinstance(v, list) else v for key, v in ours.items()} == {
        key: sorted(v) if isinstance(v, list) else v for key, v in theirs.items()
    }
    found = peft.PeftModel.from_pretrained(ARCHITECTURES["Llama"]._replace(dtype=torch.bfloat16).build(), tmp_path / "ours").eval()
    inputs = ARCHITECTURES["Llama"].inputs(TURN)
    with torch.no_grad():
        assert torch.equal(found(**inputs).logits, plain(**inputs).logits)


def test_two_adapters(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = lora("Llama", torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS["Llama"], init_lora_weights=False))
        return model

    build().save_pretrained(tmp_path / "theirs")
    save([build(), build()], tmp_path / "ours")
    for place in (".", "other"):
        assert_same_bits(contents(tmp_path / "ours" / place), contents(tmp_path / "theirs" / place))


def test_a_whole_model_over_adapters_and_adapters_over_a_whole_model_are_refused(tmp_path: Path) -> None:
    """transformers would put the old adapters on the new model, and load_pretrained would read the old model for the new adapters."""
    build, adapted = ARCHITECTURES["Llama"].build, lambda: lora("Llama", torch.float32)
    save([build(), build()], tmp_path / "model", max_shard_size="6KB")
    save([adapted(), adapted()], tmp_path / "adapters")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def body(group: ThreadCommunicator) -> None:
        model, adapters = zero3.shard(wholes[group.rank], process_group=group), zero3.shard(loras[group.rank], process_group=group)
        with pytest.raises(
            ValueError, match=r"^rank 0: .*holds adapters \(adapter_config.json, adapter_model.safetensors\), and .* a whole m"
        ):
            zero3.save_pretrained(model, tmp_path / "adapters")
        with pytest.raises(
            ValueError, match=r"^rank 0: .*holds a whole model \(model-00001-of.*\), and save_pretrained was to write adapters"
        ):
            zero3.save_pretrained(adapters, tmp_path / "model")
        zero3.save_pretrained(model, tmp_path / "other")

    wholes, loras = [build() for _ in range(2)], [adapted() for _ in range(2)]
    run_ranks(2, body)
    assert all(path.read_bytes() == text for path, text in before.items())
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file() and path not in before} == {"other"}


def test_adapters_may_stand_beside_the_model_that_they_belong_to(tmp_path: Path) -> None:
    save([ARCHITECTURES["Llama"].build() for _ in range(2)], tmp_path)
    models = [lora("Llama", torch.float32) for _ in range(2)]
    for model in models:
        model.peft_config["default"].base_model_name_or_path = str(tmp_path)
    save(models, tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists() and (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("size", ["5 GB?", "", "-1", 0, "0.1B"])
def test_max_shard_size_that_is_no_size(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes"):
        save([ARCHITECTURES["Llama"].build() for _ in range(2)], tmp_path, max_shard_size=size)


def test_dtype_that_is_no_dtype(tmp_path: Path) -> None:
    """Of one rank alone: the other would wait for it."""

    def body(group: ThreadCommunicator) -> None:
        model, wrong = zero3.shard(models[group.rank], process_group=group), "bfloat16" if group.rank == 1 else None
        with pytest.raises(TypeError, match=r"rank 1: dtype must be a torch.dtype or None, found 'bfloat16'"):
            zero3.save_pretrained(model, tmp_path / "new", dtype=wrong)
        with pytest.raises(TypeError, match=r"rank 1: dtype must be a torch.dtype or None, found 'bfloat16'"):
            zero3.full_state_dict(model, dtype=wrong)

    models = [ARCHITECTURES["Llama"].build() for _ in range(2)]
    run_ranks(2, body)
    assert not (tmp_path / "new").exists()


def test_an_error_of_one_rank_is_everybodys_and_leaves_nothing(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        with pytest.raises(OSError, match=r"rank 0: .*No space left on device"):
            zero3.save_pretrained(model, tmp_path)

    models = [ARCHITECTURES["Llama"].build() for _ in range(2)]
    with disk.replaced("write_at", disk.full):
        run_ranks(2, body)
    assert not list(tmp_path.iterdir())
