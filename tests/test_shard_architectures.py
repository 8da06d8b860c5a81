"""shard() on models of transformers as they are: losses, gradients and parameters are those of the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.fsdp2 import whole
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_close, by_shard, check_parity, spoil

architectures = pytest.mark.parametrize("name", ARCHITECTURES)
CHECKPOINTING = {"": None, "checkpointed": {"use_reentrant": False}, "checkpointed, reentrant": {"use_reentrant": True}}
CHECKPOINTED = [(kind, size) for kind in CHECKPOINTING for size in (1, 2, 3) if "reentrant" not in kind or size == 2]


@pytest.mark.slow
@architectures
@pytest.mark.parametrize(("checkpointing", "world_size"), CHECKPOINTED)
def test_training_equals_the_unsharded_model(name: str, world_size: int, checkpointing: str) -> None:
    architecture = ARCHITECTURES[name]

    def build() -> nn.Module:
        model = architecture.build().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[checkpointing])
        return model

    tolerance = architecture.tolerance if world_size > 1 else 0.0  # one rank: the same bits
    check_parity(build, architecture.loss, world_size=world_size, shard=by_shard, tolerance=tolerance)


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_gradient_checkpointing_after_shard_reaches_the_blocks(name: str) -> None:
    """transformers sets it at each module of the model. Blocks compute twice then, and once again after it was disabled."""
    counts, computed = list[list[str]](), list[str]()
    for shards in (False, True):
        model: Any = ARCHITECTURES[name].build().train()
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                first = next(inner for inner in module.modules() if isinstance(inner, nn.Linear))
                first.register_forward_hook(lambda module, *_: computed.append(type(module).__name__))
        if shards:
            zero3.shard(model)
        for how in ("enable", "disable"):
            getattr(model, f"gradient_checkpointing_{how}")()
            ARCHITECTURES[name].loss(model, Turn(0, 0, 1))
            counts.append(sorted(computed))
            computed.clear()
    assert counts[:2] == counts[2:] and len(counts[0]) > len(counts[1]) > 0


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_hidden_states_and_attentions_after_shard_are_counted_once(name: str) -> None:
    """transformers hooks each module of the class of its blocks, and tells by it what they have put out."""
    models: list[Any] = [ARCHITECTURES[name].build() for _ in range(3)]
    kept: list[list[Tensor]] = []
    for model in models:
        model.set_attn_implementation("eager")
    recorded(models[2])  # hooks from before
    for model in (models[0], zero3.shard(models[1]), zero3.shard(models[2])):
        kept.append(recorded(model))
    for found in kept[1:]:
        assert len(found) == len(kept[0]) > 4 and all(torch.equal(one, other) for one, other in zip(found, kept[0], strict=True))


def recorded(model: Any) -> list[Tensor]:
    ids = Turn(0, 0, 1).integers(20, 2, 5)
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        output = model.eval()(input_ids=ids, output_hidden_states=True, output_attentions=True, **more)
    return [tensor for key, found in output.items() if isinstance(found, tuple) and "past" not in key for tensor in found]


@architectures
def test_full_state_dict_is_that_of_the_unsharded_model(name: str) -> None:
    """Names, order, ties, buffers, values; saved by one model and loaded by another, whose own values are gone."""
    build = ARCHITECTURES[name].build
    plain = build()
    expected = plain.state_dict()
    models = [build() for _ in range(2)]
    others = [build() for _ in range(2)]
    for other in others:
        spoil(other)

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model, other = (zero3.shard(pair[group.rank], process_group=group) for pair in (models, others))
        saved = zero3.full_state_dict(model)
        zero3.load_full_state_dict(other, saved)
        with zero3.full_params(model):
            inside = {key: value.clone() for key, value in model.state_dict().items()}
            assert [key for key, _ in model.named_parameters()] == [key for key, _ in plain.named_parameters()]
        return saved, zero3.full_state_dict(other), inside

    for rank, (saved, loaded, inside) in enumerate(run_ranks(2, body)):
        assert list(saved) == list(loaded) == ([] if rank else list(expected))
        assert list(inside) == list(expected)
        for found in [inside] if rank else [saved, loaded, inside]:
            assert_close(found, expected, 0.0, "state dict")
    build().load_state_dict(expected)


@architectures
def test_blocks_become_layers_and_the_rest_is_small(name: str) -> None:
    model = ARCHITECTURES[name].build()
    blocks = [module for child in model.modules() if isinstance(child, nn.ModuleList) for module in child if hasattr(module, "forward")]
    total = sum(parameter.numel() for parameter in model.parameters())
    outer = {id(block) for block in blocks} - {id(inner) for block in blocks for inner in list(block.modules())[1:]}
    zero3.shard(model)
    wrapped = {id(layer.module) for layer in model.modules() if isinstance(layer, zero3.Zero3Layer)}
    assert outer <= wrapped, "every block is a layer"
    tied = name in ("Gemma", "GPT-2", "T5", "BERT", "Whisper")
    rest = sum(parameter.numel() for parameter in model._parameters.values() if parameter is not None)
    assert rest < total * (0.5 if tied else 0.05)


# -- a second judge


def fsdp2(model: nn.Module, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size,))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_beside_fsdp2(rank: Rank, name: str) -> None:
    architecture = ARCHITECTURES[name]
    models = [zero3.shard(architecture.build().train()), fsdp2(architecture.build().train(), rank.world_size)]
    parameters = [zero3.get_trainable_chunk(models[0]), list(models[1].parameters())]
    optimizers = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in parameters]
    for step in range(3):
        turn = Turn(rank.number, step, rank.world_size)
        ours, theirs = (architecture.loss(model, turn) for model in models)
        assert_close([ours], [theirs], architecture.tolerance, f"loss of step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: whole(parameter) for name, parameter in models[1].named_parameters()}
    with zero3.full_params(models[0]):
        assert_close({name: p.detach().clone() for name, p in models[0].named_parameters()}, expected, architecture.tolerance, "parameters")


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_processes_train_as_fsdp2_does(name: str) -> None:
    on_ranks(2, train_beside_fsdp2, name)
