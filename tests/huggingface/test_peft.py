"""peft's LoRA models, sharded: a frozen bf16 base under fp32 adapters, of which the adapters alone are trained and reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_at_rest, assert_close, by_shard, check_parity

peft = pytest.importorskip("peft")

TARGETS = {"Llama": ["q_proj", "v_proj", "down_proj"], "GPT-NeoX": ["query_key_value", "dense_4h_to_h"]}
names = pytest.mark.parametrize("name", TARGETS)


def lora(name: str, base: torch.dtype, **options: Any) -> Any:
    """A LoRA model whose adapters do something from the start (peft begins with zeros)."""
    model = ARCHITECTURES[name]._replace(dtype=base).build()
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS[name], task_type="CAUSAL_LM", **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                nn.init.normal_(parameter, std=0.1)
    return model


def train(name: str) -> Any:
    return lambda model, turn: ARCHITECTURES[name].loss(model, turn)


def fit(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for parameter in parameters if parameter.requires_grad], lr=0.1)


@WORLDS
@names
@pytest.mark.parametrize(("base", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_lora_trains_as_unsharded(name: str, base: torch.dtype, tolerance: float, world_size: int) -> None:
    """One rank gives the same bits; several differ in the order of sums, which bf16 makes much of after a step."""
    tolerance = tolerance if world_size > 1 else 0.0
    check_parity(lambda: lora(name, base), train(name), world_size=world_size, shard=by_shard, optimizer=fit, tolerance=tolerance)


@names
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_lora_with_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    def build() -> nn.Module:
        model = lora(name, torch.float32).train()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    check_parity(build, train(name), shard=by_shard, optimizer=fit, tolerance=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft, about saved modules
@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"bias": "lora_only"}], ids=str)
def test_other_kinds_of_adapters(options: dict[str, Any]) -> None:
    check_parity(lambda: lora("Llama", torch.float32, **options), train("Llama"), shard=by_shard, optimizer=fit, tolerance=1e-6)


@names
def test_only_adapters_are_trained_reduced_and_changed(name: str) -> None:
    build = lambda: lora(name, torch.bfloat16)  # noqa: E731
    plain, models = build(), [build() for _ in range(2)]
    adapters = {key: p for key, p in plain.named_parameters() if p.requires_grad}
    assert adapters and all(p.dtype is torch.float32 and "lora" in key for key, p in adapters.items())

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=group)
        chunks = zero3.get_trainable_chunk(model)
        assert all(chunk.dtype is torch.float32 for chunk in chunks)
        assert len(chunks) == 2, "one a block"
        assert sum(chunk.numel() for chunk in chunks) <= sum(p.numel() for p in adapters.values()) // 2 + len(chunks)
        optimizer = torch.optim.AdamW(chunks, lr=0.1)
        for step in range(2):
            before = len(group.log)
            ARCHITECTURES[name].loss(model, Turn(group.rank, step, 2))
            log = group.log[before:]
            reduced = [line for line in log if line.kind == "reduce_scatter"]
            trailers = len(reduced) * 2 * len(adapters) // len(chunks)  # an element for each adapter behind each slice
            assert sum(line.numel for line in reduced) == sum(c.numel() * 2 for c in chunks) + trailers
            assert all(line.dtype is torch.float32 for line in reduced)
            assert all(p.grad is None for p in model.parameters() if p.dtype is torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()
            assert_at_rest(model)
        return zero3.full_state_dict(model)

    saved = run_ranks(2, body)[0]
    before = plain.state_dict()
    assert list(saved) == list(before)
    for key, value in saved.items():
        assert value.dtype == before[key].dtype, key
        assert torch.equal(value, before[key]) == (key not in adapters), key


@names
def test_a_frozen_layer_is_gathered_again_only_where_a_gradient_flows_through_it(name: str) -> None:
    models = [lora(name, torch.float32) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        for step in range(2):
            before = len(group.log)
            ARCHITECTURES[name].loss(model, Turn(group.rank, step, 2))
            gathers = [line for line in group.log[before:] if line.kind == "all_gather"]
        layers = [module for module in model.modules() if isinstance(module, zero3.Zero3Layer)]
        blocks = [layer for layer in layers if layer.get_trainable_chunk()]
        assert len(blocks) == 2 and len(layers) == 4
        # embedding and root once, blocks' two chunks in forward and backward, the head (last, so kept) once
        assert len(gathers) == 1 + 1 + 2 * 2 * len(blocks) + 1

    run_ranks(2, body)


@names
def test_adapters_are_saved_and_loaded_by_peft_with_writeback(name: str, tmp_path: Any) -> None:
    """What full_state_dict gives fits peft's own saving; and adapters can be set inside full_params."""
    models = [lora(name, torch.float32) for _ in range(2)]
    others = [lora(name, torch.float32) for _ in range(2)]
    plain = lora(name, torch.float32)

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = zero3.shard(models[group.rank], process_group=group)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.5)
        ARCHITECTURES[name].loss(model, Turn(group.rank, 0, 2))
        optimizer.step()
        whole = zero3.full_state_dict(model)
        adapters = peft.get_peft_model_state_dict(model, state_dict=whole) if group.rank == 0 else {}
        other = zero3.shard(others[group.rank], process_group=group)
        with zero3.full_params(other, writeback=True):
            if group.rank == 0:
                peft.set_peft_model_state_dict(other, adapters)
        return adapters, zero3.full_state_dict(other), whole

    adapters, loaded, whole = run_ranks(2, body)[0]
    assert adapters and all("lora" in key for key in adapters)
    assert_close(loaded, whole, 0.0, "what another model loaded")
    peft.set_peft_model_state_dict(plain, adapters)
    assert_close(plain.state_dict(), whole, 0.0, "what an unsharded model loaded")
