"""transformers' own mixtures, with experts at home: as plain models, from and to Hugging Face's files, with adapters of peft."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as t

import zero3
from tests.huggingface.test_load_pretrained import spy
from tests.support.ranks import run_ranks

_SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
CONFIGS = {
    "Qwen3Moe": t.Qwen3MoeConfig(
        **_SIZES, intermediate_size=24, moe_intermediate_size=12, num_experts=5, num_experts_per_tok=2, head_dim=8, decoder_sparse_step=1
    ),
    "Mixtral": t.MixtralConfig(**_SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2),
    "GptOss": t.GptOssConfig(**_SIZES, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2, head_dim=8),
}
HOME = zero3.ShardingPolicy(expert_parallel=True)


def made(name: str, implementation: str = "eager") -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = t.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name])).double()
    model.set_experts_implementation(implementation)
    return model


def batch(rank: int, step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (1, 5 + rank), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": ids, "labels": ids}


def train(group: Any, plain: Any, model: Any, steps: int = 2) -> None:
    mine = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    for step in range(steps):
        loss = model(**batch(group.rank, step)).loss
        loss.backward()
        for rank in range(group.world_size):
            other = plain(**batch(rank, step)).loss
            (other / group.world_size).backward()
            if rank == group.rank:
                torch.testing.assert_close(loss, other, rtol=1e-6, atol=1e-6)  # their norms are float32
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = zero3.full_state_dict(model, rank0_only=False)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "implementation"), [("Qwen3Moe", "eager"), ("Qwen3Moe", "batched_mm"), ("Mixtral", "eager"), ("GptOss", "eager")]
)
def test_models_train_as_plain(name: str, implementation: str) -> None:
    models = [[made(name, implementation) for _ in range(2)] for _ in range(2)]  # threads share one generator

    def body(group: Any) -> None:
        plain, model = models[group.rank]
        train(group, plain, zero3.shard(model, policy=HOME, process_group=group))
        assert zero3.report(model).experts[1] > 0

    run_ranks(2, body)


def test_ranks_generate_at_their_own_pace_inside_of_resident_and_in_step_outside() -> None:
    models = [[made("Qwen3Moe").eval() for _ in range(2)] for _ in range(2)]

    def body(group: Any) -> None:
        plain, model = models[group.rank]
        zero3.shard(model, policy=HOME, process_group=group)

        def same(prompt: int, more: int) -> None:
            ids, options = batch(prompt, 3)["input_ids"], {"max_new_tokens": more, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))

        same(group.rank, 3)
        with zero3.resident(model):
            for _ in range(1 + group.rank):
                same(group.rank, 2 + group.rank)

    run_ranks(2, body)


def test_files_are_read_and_written_expert_by_expert(tmp_path: Path) -> None:
    """No rank reads another's experts: all ranks together read each byte once."""
    made("Qwen3Moe").save_pretrained(tmp_path / "plain")
    plain = made("Qwen3Moe")
    with torch.device("meta"):
        bare = [t.AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["Qwen3Moe"])).double() for _ in range(2)]

    for each in bare:
        each.set_experts_implementation("eager")

    def body(group: Any) -> None:
        model = zero3.shard(bare[group.rank], policy=HOME, process_group=group, device="cpu")
        zero3.load_pretrained(model, tmp_path / "plain")
        with torch.no_grad():
            torch.testing.assert_close(model(**batch(0, 0)).loss, plain(**batch(0, 0)).loss)
        zero3.save_pretrained(model, tmp_path / "ours")

    with spy() as reads:
        run_ranks(2, body)
    stored = (tmp_path / "plain" / "model.safetensors").read_bytes()
    assert sum(count for *_, count in reads) == len(stored) - 8 - int.from_bytes(stored[:8], "little")
    again = t.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64)
    for name, value in plain.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def adapted(name: str = "Qwen3Moe", **config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(made(name), peft.LoraConfig(r=2, init_lora_weights=False, **config))


def test_adapters_on_other_modules_train_as_plain() -> None:
    models = [[adapted(target_modules=["q_proj", "v_proj"]) for _ in range(2)] for _ in range(2)]

    def body(group: Any) -> None:
        plain, model = models[group.rank]
        train(group, plain, zero3.shard(model, policy=HOME, process_group=group))

    run_ranks(2, body)


def test_adapters_on_experts_are_refused_by_name() -> None:
    models = [adapted(target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"]) for _ in range(2)]

    def body(group: Any) -> None:
        with pytest.raises(ValueError, match=r"expert_parallel.*down_proj"):
            zero3.shard(models[group.rank], policy=HOME, process_group=group)

    run_ranks(2, body)


@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_adapters_train_over_quantised_experts(name: str, tmp_path: Path) -> None:
    """The reference is plain peft, whose frozen linear layers and experts were quantised as a whole and decoded. Files are read in which
    experts lie one by one."""
    made(name).save_pretrained(tmp_path)
    models, kind = [], zero3.NF4(block_size=32) if name == "GptOss" else zero3.NF4()
    for _ in range(2):
        plain, model = (adapted(name, target_modules=["q_proj", "v_proj"]) for _ in range(2))
        for module in plain.modules():
            frozen = [p for p in module.parameters(recurse=False) if not p.requires_grad]
            linear = isinstance(module, torch.nn.Linear) and module is not plain.get_base_model().lm_head
            for values in (p.data for p in frozen if p.dim() == 3 or (linear and p.dim() == 2)):
                values.copy_(kind.dequantize(kind.quantize(values), values.dtype))
        models.append((plain, model))

    def body(group: Any) -> None:
        plain, model = models[group.rank]
        zero3.shard(model, policy=zero3.ShardingPolicy(expert_parallel=True, quantize=kind), process_group=group)
        zero3.load_pretrained(model, tmp_path)
        mine = zero3.full_state_dict(model, rank0_only=False)
        theirs = {key: value for key, value in plain.state_dict().items() if "lora" not in key}
        assert all(mine[key].equal(value) for key, value in theirs.items())
        train(group, plain, model)

    run_ranks(2, body)


def test_quantised_experts_with_guards_streams_and_merging(tmp_path: Path) -> None:
    """What other capabilities read of quantised experts are all of them, also after a micro-batch that failed on one rank."""
    kind, models = zero3.NF4(), [adapted(target_modules=["q_proj"]).float() for _ in range(2)]
    plain = copy.deepcopy(models[0])
    for name, parameter in plain.named_parameters():
        if ".experts." in name:
            parameter.data.copy_(kind.dequantize(kind.quantize(parameter.data), parameter.dtype))
    policy = zero3.ShardingPolicy(
        expert_parallel=True, quantize=zero3.NF4(select=lambda name, info: ".experts." in name), group_adapters=False
    )

    def body(group: Any) -> dict[str, torch.Tensor]:
        model = zero3.shard(models[group.rank], policy=policy, process_group=group)
        failing: list[int] = []

        def fail(*_: object) -> None:
            if group.rank in failing:
                raise ArithmeticError("a block")

        model.get_base_model().model.layers[1].mlp.register_forward_pre_hook(fail)
        for ranks in ([], [], [1], []):
            failing[:] = ranks
            with zero3.step_guard(model) as guarded:
                model(**batch(group.rank, 1)).loss.backward()
            assert sorted(guarded.errors) == ranks
        zero3.save_merged(model, tmp_path)
        return {name: value.clone() for name, value in zero3.stream_weights(model, merge_adapters=True)}

    streamed = run_ranks(2, body)
    merged = plain.merge_and_unload().state_dict()
    again = t.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    for name, value in merged.items():
        torch.testing.assert_close(again[name], value, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, streamed[1][name]) for name, value in streamed[0].items())
