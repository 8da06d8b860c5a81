"""load_pretrained of a part of a model, of tied parameters under any name, and of names with a prefix more or less."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import Tensor, nn

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.pretrained import TURN, assert_same_bits, loaded, on_meta, rewritten, saved
from tests.support.ranks import ThreadCommunicator, run_ranks


@pytest.mark.parametrize("direction", ["base into full", "full into base"])
def test_the_base_models_prefix_may_lack_or_be_one_too_many(direction: str, tmp_path: Path) -> None:
    full = saved("GPT-2", tmp_path / "full")  # tied: nothing lacks that the base model does not hold
    full.transformer.save_pretrained(tmp_path / "base")
    source, target = (tmp_path / "base", full) if direction == "base into full" else (tmp_path / "full", full.transformer)
    for state in loaded(target, source, 2):
        assert_same_bits(state, target.state_dict())


@pytest.mark.parametrize("names", [["lm_head.weight"], ["transformer.wte.weight"], ["lm_head.weight", "transformer.wte.weight"]])
def test_a_tied_parameter_under_any_of_its_names(names: list[str], tmp_path: Path) -> None:
    expected = saved("GPT-2", tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        value = tensors.pop("transformer.wte.weight")
        tensors.update({name: value.clone() for name in names})

    rewritten(tmp_path, rename)
    for state in loaded(expected, tmp_path, 2):
        assert_same_bits(state, expected.state_dict())


def test_tied_across_layers(tmp_path: Path) -> None:
    """The embedding and the head are layers of their own; what they share on meta is one parameter of the root."""
    expected = saved("GPT-2", tmp_path)
    models = [on_meta(expected) for _ in range(2)]
    inputs = ARCHITECTURES["GPT-2"].inputs(TURN)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        own = zero3.shard(models[group.rank], (nn.Embedding, nn.Linear, type(expected.transformer.h[0])), process_group=group)
        zero3.load_pretrained(own, tmp_path)
        own(**inputs).loss.backward()
        return zero3.full_state_dict(own, rank0_only=False)

    for state in run_ranks(2, body):
        assert_same_bits(state, expected.state_dict())


def test_a_part_of_a_model(tmp_path: Path) -> None:
    """Only what is in the module is filled; the rest still waits."""
    expected = saved("Llama", tmp_path / "full")
    expected.model.save_pretrained(tmp_path / "base")
    models = [on_meta(expected) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        own = zero3.shard(models[group.rank], process_group=group)
        zero3.load_pretrained(own.model, tmp_path / "base")
        assert_same_bits(zero3.full_state_dict(own.model, rank0_only=False), expected.model.state_dict())
        with pytest.raises(RuntimeError, match=r"layer 'lm_head' \(Linear\) has no values yet for: parameter weight"):
            own(**ARCHITECTURES["Llama"].inputs(TURN))

    run_ranks(2, body)


def test_every_rank_may_have_its_own_copy(tmp_path: Path) -> None:
    expected = saved("Llama", tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    models = [on_meta(expected) for _ in range(2)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        own = zero3.shard(models[group.rank], process_group=group)
        zero3.load_pretrained(own, tmp_path / str(group.rank))
        return zero3.full_state_dict(own, rank0_only=False)

    for state in run_ranks(2, body):
        assert_same_bits(state, expected.state_dict())
