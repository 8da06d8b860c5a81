"""peft's `merge_adapter` on a sharded model: where it stays, where it is undone, and where that is told of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.huggingface.test_peft_adapters import lora, loss
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import Turn, assert_close, on_two

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_adapter_that_is_left_inside_resident_is_told_of(dtype: torch.dtype) -> None:
    """However small: it is undone, and peft would leave the adapters out from then on."""

    def build() -> Any:
        model = lora().to(dtype)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.data *= 1e-3
        return model

    def body(model: Any, group: ThreadCommunicator) -> None:
        text = rf"rank {group.rank}: inside resident, (adapters were merged into|the values of) .*q_proj.*undone.*writeback=True"
        with pytest.raises(RuntimeError, match=text), zero3.resident(model):
            model.merge_adapter()

    on_two(build, body)


def test_merge_adapter_on_one_rank_stays() -> None:
    model = zero3.shard(lora())
    with torch.no_grad():
        expected = loss(model, Turn(0, 0, 1))
        with zero3.resident(model):
            model.merge_adapter()
        assert torch.allclose(loss(model, Turn(0, 0, 1)), expected, rtol=1e-5)


def test_merge_adapter_stays_where_it_is_written_back() -> None:
    """Inside `resident` it would be undone, and peft would go on counting it as merged."""
    plain = lora().eval()
    plain.merge_adapter()
    merged = {key: value.clone() for key, value in plain.state_dict().items()}
    with torch.no_grad():
        expected = loss(plain, Turn(0, 0, 1))

    def body(model: Any, group: ThreadCommunicator) -> dict[str, Tensor]:
        def evaluate() -> None:
            with zero3.resident(model.eval()), torch.no_grad():
                model.merge_adapter()
                assert torch.equal(loss(model, Turn(0, 0, 1)), expected)

        with pytest.raises(RuntimeError, match=rf"rank {group.rank}: inside resident, the values of '.*base_layer.weight'.*writeback=True"):
            evaluate()
        for module in model.modules():  # its own notes of what was undone
            if hasattr(module, "merged_adapters"):
                module.merged_adapters.clear()
        with zero3.full_params(model, writeback=True):
            model.merge_adapter()
        with torch.no_grad():
            assert torch.equal(loss(model, Turn(0, 0, 1)), expected)
        return zero3.full_state_dict(model, rank0_only=False)

    for found in on_two(lora, body):
        assert_close(found, merged, 0.0, "the state")


def test_merging_and_unmerging_inside_resident_is_no_change() -> None:
    """As trainers do it to hand the merged weights on. What comes back differs in its last bits, and that is undone as well."""
    plain = lora()
    expected = loss(plain, Turn(0, 0, 1))

    def body(model: Any, group: ThreadCommunicator) -> None:
        with zero3.resident(model), torch.no_grad():
            model.merge_adapter()
            model.unmerge_adapter()
        assert torch.equal(loss(model, Turn(0, 0, 1)), expected)

    on_two(lora, body)
