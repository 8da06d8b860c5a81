"""QLoRA by peft: it sees plain linear layers and plain experts, and trains as on the dequantised base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.huggingface.test_peft_adapters import lora, loss, without_warnings
from tests.support.architectures import ARCHITECTURES
from tests.support.models import WORLDS
from tests.support.processes import Rank, on_ranks
from tests.support.quantised_bases import Kind, quantised_names
from tests.support.reference import Turn, assert_at_rest
from zero3 import NF4, ShardingPolicy

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


def dequantized(model: nn.Module, names: list[str], kind: Kind) -> nn.Module:
    with torch.no_grad():
        for name in names:
            parameter = model.get_parameter(name)
            parameter.copy_(kind.dequantize(kind.quantize(parameter), parameter.dtype))
    return model


def steps(model: Any, name: str, parameters: list[nn.Parameter], ranks: range, world_size: int) -> list[list[float]]:
    """Two steps on the mean loss of `ranks`. One process stands for all of them, or each for itself."""
    optimizer, losses = torch.optim.SGD(parameters, lr=0.5), []
    for step in range(3):
        found = [loss(model, Turn(rank, step, world_size), name) for rank in ranks]
        (sum(found, torch.zeros(())) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([each.item() for each in found])
    return losses


def trained(rank: Rank, name: str, targets: Any) -> None:
    kind = NF4()
    model: Any = zero3.shard(lora(name, targets), policy=ShardingPolicy(quantize=kind))
    names = quantised_names(model)
    assert names
    assert not [each for each in names if "lora_" in each or "lm_head" in each or "embed" in each or "norm" in each]
    if name != "Mixtral":
        linear = [module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear)]
        assert linear
        assert all(type(module.get_base_layer()) is nn.Linear for module in linear), "peft sees plain linear layers"
    plain = dequantized(lora(name, targets), names, kind)
    size = rank.world_size
    expected = steps(plain, name, [p for p in plain.parameters() if p.requires_grad], range(size), size)
    found = steps(model, name, zero3.get_trainable_chunk(model), range(rank.number, rank.number + 1), size)
    assert expected[0] != expected[-1]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[0] == pytest.approx(theirs[rank.number], rel=1e-6)
        assert size > 1 or mine == theirs
    values = zero3.full_state_dict(model, rank0_only=False)
    for key, value in plain.state_dict().items():
        # after three steps of AdamW in float32, in which kernels of processors differ
        torch.testing.assert_close(values[key], value, rtol=1e-5, atol=5e-6)
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        assert loss(model, Turn(0, 0, 1), name).item() == loss(plain, Turn(0, 0, 1), name).item()
    with pytest.raises(RuntimeError, match="Quantised parameters are read-only"), zero3.full_params(model, writeback=True):
        model.merge_adapter()
    assert_at_rest(model)


@WORLDS
@pytest.mark.parametrize(("name", "targets"), [("Llama", "all-linear"), ("Mixtral", "all-linear")])
def test_lora_on_a_quantized_base(world_size: int, name: str, targets: Any) -> None:
    """Mixtral's experts are one 3-D parameter each, which peft targets itself and folds its factors into."""
    on_ranks(world_size, without_warnings, trained, name, targets)


def merging(rank: Rank) -> None:
    model: Any = zero3.shard(lora(), policy=ShardingPolicy(quantize=NF4()))
    with pytest.raises(RuntimeError, match=r"the base of this Linear is quantised.*zero3\.save_merged"), zero3.resident(model):
        model.merge_adapter()


def test_merging_into_a_quantized_base_is_refused() -> None:
    on_ranks(1, without_warnings, merging)


@pytest.mark.parametrize("name", ["GPT-NeoX", "Qwen", "Gemma", "GPT-2", "T5", "BERT", "ViT", "Whisper", "Mixtral"])
def test_quantized_base_of_many_architectures(name: str) -> None:
    """Forward and backward to an adapter at its inputs, on one rank: the bits of the dequantised base."""
    kind, architecture = NF4(), ARCHITECTURES[name]

    def build() -> Any:
        model = architecture.build().requires_grad_(False)
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(("norm" in key.lower() and parameter.ndim == 1) or key.endswith("bias"))
        return model

    if name == "GPT-2":  # Conv1D is no linear layer: it has to be named
        kind = NF4(select=lambda key, info: key.endswith(("c_attn.weight", "c_fc.weight")))
    model = zero3.Zero3Layer(build(), policy=ShardingPolicy(quantize=kind))
    names = quantised_names(model)
    assert names
    plain = dequantized(build(), names, kind)
    turn = Turn(0, 0, 1)
    for each in (model, plain):
        each.train()
    found, expected = architecture.loss(model, turn), architecture.loss(plain, turn)
    assert found.item() == expected.item()
    gradients: dict[str, Tensor] = {}
    with zero3.full_gradients(model) as full:
        gradients = {key: value.clone() for key, value in full.items()}
    for key, parameter in plain.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            assert gradients[key].equal(parameter.grad), key
