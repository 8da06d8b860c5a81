"""gpt-oss's MXFP4 is stored as it lies, transposed to transformers' parameters, and trains as what transformers makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.adapters import same_bits
from tests.support.models import WORLDS
from tests.support.quantised_bases import Kind
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_at_rest, process_group

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")

NAME = "model.layers.0.mlp.experts.down_proj"
HIDDEN, WIDTH, EXPERTS, WORDS = 64, 96, 3, 40
ASKED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}


def config(**options: Any) -> Any:
    return transformers.GptOssConfig(
        vocab_size=WORDS, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_local_experts=EXPERTS, num_experts_per_tok=2, dtype=torch.float32, pad_token_id=0, eos_token_id=1, **options,
    )  # fmt: skip


def built(device: str = "cpu", seed: int = 0, experts: str = "eager", **options: Any) -> Any:
    """The base alone, frozen."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model = transformers.GptOssForCausalLM._from_config(config(**options), experts_implementation=experts)
    return model.requires_grad_(False)


def adapted(base: Any) -> Any:
    """Adapters have values, also on a base that has none."""
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            *path, last = name.split(".")
            values = torch.randn(parameter.shape, generator=generator) * 0.1
            setattr(model.get_submodule(".".join(path)), last, nn.Parameter(values))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as OpenAI's: experts as blocks and scales, everything else as it is."""
    directory = tmp_path_factory.mktemp("gpt-oss")
    write(directory, seed=0)
    return directory


def write(directory: Path, seed: int, change: Callable[[dict[str, Tensor]], object] = dict) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = dict(built(seed=seed).state_dict())
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(256, (experts, columns, rows // 32, 16), generator=generator, dtype=torch.uint8)
        state[f"{name}_scales"] = torch.randint(118, 124, (experts, columns, rows // 32), generator=generator, dtype=torch.uint8)
    change(state)
    safetensors.save_file(state, directory / "model.safetensors")


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model whose experts transformers' own function has unpacked."""
    state, model = safetensors.load_file(directory / "model.safetensors"), built()
    for name in [name.removesuffix("_blocks") for name in state if name.endswith("_blocks")]:
        state[name] = mxfp4.convert_moe_packed_tensors(state.pop(f"{name}_blocks"), state.pop(f"{name}_scales"), dtype=dtype)
    model.load_state_dict(state)
    return model


def shard(model: nn.Module, group: ThreadCommunicator, kind: Kind | None = None) -> Any:
    """Without a format, the configuration's counts."""
    policy = zero3.ShardingPolicy(quantize=kind)
    return zero3.shard(model, device="cpu", policy=policy, process_group=process_group(group))


def sharded(group: ThreadCommunicator, directory: Path, model: Any) -> Any:
    model = shard(model, group)
    zero3.load_pretrained(model, directory)
    return model


# -- the bytes, and the values that they stand for


@WORLDS
def test_mxfp4_of_gpt_oss_is_stored_as_it_lies(world_size: int, checkpoint: Path) -> None:
    stored = safetensors.load_file(checkpoint / "model.safetensors")
    models = [built("meta", quantization_config=ASKED) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> tuple[list[Tensor], dict[str, Tensor]]:
        model = sharded(group, checkpoint, models[group.rank])
        assert "mxfp4(transposed)" in str(zero3.report(model))
        chunks = [chunk.detach() for chunk in model.parameters() if chunk.dtype == torch.uint8]
        return chunks, zero3.full_state_dict(model, rank0_only=False)

    found = run_ranks(world_size, body)
    for layer, chunks in enumerate(zip(*(chunks for chunks, _ in found), strict=True)):
        raw = torch.cat(chunks)
        expected = [stored[f"model.layers.{layer}.mlp.experts.{name}"] for name in ("gate_up_proj_blocks", "gate_up_proj_scales")]
        experts, columns, blocks, nbytes = expected[0].shape
        rows = zero3.MXFP4(transposed=True).rows((experts, blocks * 2 * nbytes, columns))
        each = rows.seen(raw[: experts * rows.nbytes].view(experts, rows.nbytes))  # expert by expert
        assert torch.cat([row.codes for row in each]).equal(expected[0].view(-1))
        assert torch.cat([row.scales for row in each]).equal(expected[1].view(-1))
        assert len(raw) < sum(value.numel() for name, value in stored.items() if f"layers.{layer}.mlp" in name and "s_" not in name) + 512
    plain = reference(checkpoint).state_dict()
    for _, values in found:
        assert values.keys() == plain.keys()
        assert all(values[name].equal(value) for name, value in plain.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_and_scale_is_the_number_that_transformers_makes_of_it(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).expand(20, 16, 1, 16).contiguous()
    scales = torch.arange(110, 130, dtype=torch.uint8).view(20, 1, 1).expand(20, 16, 1).contiguous()
    kind = zero3.MXFP4(transposed=True)
    quantized = kind.quantize(torch.zeros(20, 32, 16))
    quantized.codes.copy_(blocks.view(-1))
    quantized.scales.copy_(scales.view(-1))
    expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    found = kind.dequantize(quantized, dtype)
    assert found.equal(expected)
    assert found.is_contiguous()
    again = kind.quantize(expected)
    assert kind.dequantize(again, dtype).equal(expected)
    for number in (0, 7, 19):
        assert kind.codec(found.device).dequantize(quantized, dtype, number).equal(expected[number])


# -- quantised while it is read


@WORLDS
def test_transposed_blocks_of_values_that_are_read_or_given(world_size: int, tmp_path: Path) -> None:
    """Each rank reads what it keeps of the transposed; the bytes are those that construction makes of whole parameters."""
    built().save_pretrained(tmp_path)
    kind = zero3.MXFP4(transposed=True)
    empty, full = [built("meta") for _ in range(world_size)], [built() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model, other = shard(empty[group.rank], group, kind), shard(full[group.rank], group, kind)
        zero3.load_pretrained(model, tmp_path)
        assert same_bits([c.detach() for c in model.parameters()], [c.detach() for c in other.parameters()])
        zero3.load_full_state_dict(model, zero3.full_state_dict(other, rank0_only=False))
        assert same_bits([c.detach() for c in model.parameters()], [c.detach() for c in other.parameters()])

    run_ranks(world_size, body)
    plain = built().model.layers[0].mlp.experts.gate_up_proj
    assert kind.quantize(plain).codes.equal(zero3.MXFP4().quantize(plain.mT.contiguous()).codes)


# -- training


def steps(model: Any, parameters: list[nn.Parameter], turns: Callable[[int], list[Turn]]) -> list[list[float]]:
    optimizer, found = torch.optim.SGD(parameters, lr=0.5), []
    for step in range(3):
        losses = []
        for turn in (all_turns := turns(step)):
            words = turn.integers(WORDS - 2, 2, 8) + 2
            loss = model(input_ids=words, labels=words).loss
            (loss / len(all_turns)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        found.append(losses)
    return found


@WORLDS
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_adapters_train_as_on_the_base_that_transformers_unpacks(experts: str, world_size: int, checkpoint: Path) -> None:
    plain = reference(checkpoint)
    plain.set_experts_implementation(experts)
    plain = adapted(plain)
    trained = [p for p in plain.parameters() if p.requires_grad]
    expected = steps(plain, trained, lambda step: [Turn(rank, step, world_size) for rank in range(world_size)])
    models = [adapted(built("meta", experts=experts, quantization_config=ASKED)) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> tuple[list[list[float]], dict[str, Tensor]]:
        model = sharded(group, checkpoint, models[group.rank])
        found = steps(model, zero3.get_trainable_chunk(model), lambda step: [Turn(group.rank, step, world_size)])
        assert_at_rest(model)
        return found, zero3.full_state_dict(model, rank0_only=False)

    for rank, (losses, values) in enumerate(run_ranks(world_size, body)):
        assert [each for (each,) in losses] == pytest.approx([each[rank] for each in expected], rel=0 if world_size == 1 else 1e-6)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(values[name], value, rtol=0 if world_size == 1 else 1e-5, atol=0 if world_size == 1 else 1e-6)


# -- what is written


def test_save_merged_and_hashes_of_a_transposed_base(checkpoint: Path, tmp_path: Path) -> None:
    expected = dict(adapted(reference(checkpoint)).merge_and_unload().state_dict())
    write_other = tmp_path / "other"
    write_other.mkdir()
    write(write_other, seed=3)
    models = [[adapted(built("meta", quantization_config=ASKED)) for _ in range(2)] for _ in range(3)]

    def body(group: ThreadCommunicator) -> None:
        model, same, other = (
            sharded(group, directory, each[group.rank])
            for directory, each in zip((checkpoint, checkpoint, write_other), models, strict=True)
        )
        zero3.save_merged(model, tmp_path / "merged")
        zero3.save_checkpoint(tmp_path / "adapters", model, frozen=False)
        zero3.load_checkpoint(tmp_path / "adapters", same)
        with pytest.raises(ValueError, match="another base"):
            zero3.load_checkpoint(tmp_path / "adapters", other)

    run_ranks(2, body)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert all(again[name].equal(value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


# -- what does not fit


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (dict, zero3.MXFP4(), r"down_proj is stored as mxfp4\(transposed\), and here it is mxfp4\b"),
        (dict, zero3.NF4(), r"is stored as mxfp4\(transposed\), and here it is nf4"),
        (lambda state: state.pop("model.layers.0.mlp.experts.down_proj_scales"), None, "down_proj is quantised .* its scales are missing"),
        (
            lambda state: state.update({f"{NAME}_blocks": state[f"{NAME}_blocks"][..., :8].contiguous()}),
            None, "down_proj_blocks has blocks of 8 bytes, MXFP4 has 16",
        ),
        (
            lambda state: state.update({f"{NAME}_scales": state[f"{NAME}_scales"][:1].contiguous()}),
            None, r"down_proj_scales has \d+ of torch.uint8, mxfp4\(transposed\) has \d+",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_valueerror_before_anything_changes(change: Any, kind: Any, text: str, tmp_path: Path) -> None:
    write(tmp_path, 0, change)
    models = [built(quantization_config=ASKED) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = shard(models[group.rank], group, kind)
        before = [chunk.detach().clone() for chunk in model.parameters()]
        with pytest.raises(ValueError, match=text):
            zero3.load_pretrained(model, tmp_path)
        assert same_bits([chunk.detach() for chunk in model.parameters()], before)

    run_ranks(2, body)


def test_transposed_is_true_or_false() -> None:
    with pytest.raises(TypeError, match="transposed must be True or False, found 1"):
        zero3.MXFP4(transposed=1)  # type: ignore[arg-type]
