"""The model's own names, in and out, whatever torch has wrapped: apply_activation_checkpointing and torch.compile add prefixes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import zero3
from tests.huggingface.test_save_pretrained import contents
from tests.support.architectures import ARCHITECTURES
from tests.support.checkpoints import Block, assert_same, odd, on_ranks, train
from tests.support.pretrained import assert_same_bits, on_meta
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group


def checkpointed(model: nn.Module, kind: type[nn.Module] = Block) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, kind))
    return model


def compiled(model: Any) -> nn.Module:
    """Each block, as torch.compile wraps it; nothing is compiled before it is called."""
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="eager")
    return model


def both(model: Any) -> nn.Module:
    return compiled(checkpointed(model))


WRAPPERS: dict[str, Callable[[Any], Any]] = {"apply_activation_checkpointing": checkpointed, "torch.compile": compiled, "both": both}
wrappers = pytest.mark.parametrize("wrapper", WRAPPERS)
moments = pytest.mark.parametrize("moment", ["before shard", "after shard"])


def on_wrapped(world_size: int, wrapper: str, moment: str, body: Callable[[Any], Any]) -> list[Any]:
    """`body(model)` on every rank."""
    models = [odd() for _ in range(world_size)]  # here: threads share one random generator

    def rank(group: ThreadCommunicator) -> Any:
        model = WRAPPERS[wrapper](models[group.rank]) if moment == "before shard" else models[group.rank]
        model = zero3.shard(model, lambda name, module: isinstance(module, Block), process_group=process_group(group))
        return body(WRAPPERS[wrapper](model) if moment == "after shard" else model)

    return run_ranks(world_size, rank)


@wrappers
@moments
def test_full_state_dict_and_its_inverse(wrapper: str, moment: str) -> None:
    """Torch's own state dict of the wrapped model is taken too, prefixes and all."""
    expected = odd().state_dict()
    prefixed = WRAPPERS[wrapper](odd()).state_dict() if wrapper != "both" else {f"_orig_mod.{n}": v for n, v in expected.items()}
    assert wrapper == "apply_activation_checkpointing" or list(prefixed) != list(expected)

    def body(model: Any) -> None:
        assert_same(zero3.full_state_dict(model, rank0_only=False), dict(expected))
        for given in (expected, prefixed):
            for chunk in model.parameters():
                chunk.data.zero_()
            zero3.load_full_state_dict(model, given)
            assert_same(zero3.full_state_dict(model, rank0_only=False), dict(expected))

    on_wrapped(2, wrapper, moment, body)


@wrappers
@moments
def test_param_groups_and_parameter_norms(wrapper: str, moment: str) -> None:
    trained = [name for name, parameter in odd().named_parameters() if parameter.requires_grad]

    def body(model: Any) -> None:
        asked: list[str] = []
        assert list(zero3.parameter_norms(model)) == trained
        zero3.param_groups(model, lambda name, info: asked.append(name) or {})
        assert asked == trained

    on_wrapped(2, wrapper, moment, body)


@wrappers
@moments
def test_full_optimizer_state_dict_and_its_inverse(wrapper: str, moment: str) -> None:
    def plain(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> Any:
        train(model, optimizer, range(2))
        return zero3.full_optimizer_state_dict(model, optimizer)

    expected = on_ranks(2, plain)[0]
    prefixed = {
        "state": {f"_orig_mod.{name}": state for name, state in expected["state"].items()},
        "param_groups": [{**g, "params": [f"_orig_mod.{name}" for name in g["params"]]} for g in expected["param_groups"]],
    }

    def body(model: Any) -> None:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
        for given in (expected, prefixed):
            zero3.load_full_optimizer_state_dict(model, optimizer, given)
            assert_same(zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False), expected)

    on_wrapped(2, wrapper, moment, body)


@wrappers
def test_a_checkpoint_is_the_same_with_and_without_a_wrapper(wrapper: str, tmp_path: Path) -> None:
    def save(model: Any) -> Any:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
        for chunk in zero3.get_trainable_chunk(model):
            chunk.grad = torch.ones_like(chunk)
        optimizer.step()
        zero3.save_checkpoint(tmp_path, model, optimizer)
        return zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)

    expected = on_wrapped(3, wrapper, "before shard", save)[0]
    saved = json.loads((tmp_path / "manifest.json").read_text())["tensors"]
    assert list(saved) == [name for name in odd().state_dict() if name != "head.weight"]

    def load(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        for chunk in model.parameters():
            chunk.data.zero_()
        zero3.load_checkpoint(tmp_path, model, optimizer)
        found = zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)
        assert_same(found, expected if group.rank == 0 else ({}, {}))

    on_ranks(2, load)


def neox(group: ThreadCommunicator, models: list[Any], moment: str) -> Any:
    model = models[group.rank]
    kind = type(model.gpt_neox.layers[0])
    if moment == "before shard":
        checkpointed(model, kind)
    model = zero3.shard(model, process_group=process_group(group))
    return checkpointed(model, kind) if moment == "after shard" else model


@moments
def test_save_pretrained_and_load_pretrained(moment: str, tmp_path: Path) -> None:
    plain, *models = [ARCHITECTURES["GPT-NeoX"].build() for _ in range(3)]
    plain.save_pretrained(tmp_path / "theirs")
    run_ranks(2, lambda group: zero3.save_pretrained(neox(group, models, moment), tmp_path / "ours"))
    assert_same_bits(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    empty = [on_meta(plain) for _ in range(2)]

    def load(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = neox(group, empty, moment)
        zero3.load_pretrained(model, tmp_path / "theirs")
        return zero3.full_state_dict(model)

    assert_same_bits(run_ranks(2, load)[0], plain.state_dict())


def test_load_pretrained_of_a_compiled_models_state_dict(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    plain = ARCHITECTURES["Llama"].build()
    save_file({f"_orig_mod.{name}": value for name, value in plain.state_dict().items()}, tmp_path / "model.safetensors")
    empty = [on_meta(plain) for _ in range(2)]

    def load(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(empty[group.rank], process_group=process_group(group))
        zero3.load_pretrained(model, tmp_path)
        return zero3.full_state_dict(model)

    assert_same_bits(run_ranks(2, load)[0], plain.state_dict())


@moments
def test_errors_call_parameters_by_their_own_names(moment: str) -> None:
    def body(model: Any) -> None:
        with pytest.raises(RuntimeError, match=r"sum: 'linear\.weight' of layer 'blocks\.0' \(Block\)"):
            model.blocks[0].linear.weight.sum()
        given = odd().state_dict()
        del given["blocks.1.linear.weight"]
        with pytest.raises(ValueError, match=r"missing: blocks\.1\.linear\.weight$"):
            zero3.load_full_state_dict(model, given)

    on_wrapped(2, "apply_activation_checkpointing", moment, body)


@moments
def test_adapters_of_checkpointed_blocks(moment: str, tmp_path: Path) -> None:
    """As peft writes those of the model without wrappers, and load_pretrained of the base finds its names."""
    pytest.importorskip("peft")
    from tests.huggingface.test_peft import lora

    plain, *models = [lora("GPT-NeoX", torch.float32) for _ in range(3)]
    plain.save_pretrained(tmp_path / "theirs")
    base = ARCHITECTURES["GPT-NeoX"].build().float()
    base.save_pretrained(tmp_path / "base")

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = models[group.rank]
        kind = type(model.get_base_model().gpt_neox.layers[0])
        if moment == "before shard":
            checkpointed(model, kind)
        model = zero3.shard(model, [kind], process_group=process_group(group))
        if moment == "after shard":
            checkpointed(model, kind)
        zero3.save_pretrained(model, tmp_path / "ours")
        zero3.load_pretrained(model, tmp_path / "base")
        return zero3.full_state_dict(model)

    found = run_ranks(2, body)[0]
    assert_same_bits(contents(tmp_path / "ours"), contents(tmp_path / "theirs"))
    unwrapped = {name.removeprefix("base_model.model.").replace(".base_layer.", "."): v for name, v in found.items() if "lora" not in name}
    assert_same_bits(dict(sorted(unwrapped.items())), dict(sorted(base.state_dict().items())))
