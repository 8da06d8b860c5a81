"""What a policy's dtypes cast of inputs and outputs, wherever it lies, and what they leave as it is."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.test_precision import BF16, FP32, FP64, WIDTH, batch, blocks, in_layers, loss_of
from tests.support.ordering import EchoCommunicator, FakeDevice
from zero3 import ShardingPolicy, Zero3Layer
from zero3.casting import cast


@dataclass
class Given:
    x: Tensor
    mask: Tensor
    note: str = ""


class Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []

    def forward(self, given: Given, pair: tuple[Tensor, int], *, more: dict[str, Any]) -> OrderedDict[str, Any]:
        self.seen = [given.x.dtype, given.mask.dtype, pair[0].dtype, more["deep"][0].dtype, more["name"]]
        return OrderedDict(out=self.linear(given.x), mask=given.mask, given=given, n=pair[1])


def test_param_dtype_and_output_dtype_cast_floating_tensors_wherever_they_lie() -> None:
    layer = Zero3Layer(Edges(), policy=ShardingPolicy(param_dtype=BF16, output_dtype=FP64))
    x = torch.ones(2, WIDTH, requires_grad=True)
    given, mask = Given(x, torch.ones(2, dtype=torch.bool), "n"), torch.ones(2, dtype=torch.bool)
    output = layer(given, (x, 3), more={"deep": [x], "name": "more"})
    assert layer.seen == [BF16, torch.bool, BF16, BF16, "more"]
    assert given.x is x
    assert type(output) is OrderedDict
    assert (output["out"].dtype, output["given"].x.dtype, output["mask"].dtype, output["n"]) == (FP64, FP64, torch.bool, 3)
    assert torch.equal(output["mask"], mask)
    output["out"].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == FP32


def test_param_dtype_leaves_containers_without_floats_what_they_are() -> None:
    """The caller may look for what the module has put into them."""
    plain: list[Any] = [{"a": torch.arange(3), "b": [1, "x"]}, [torch.ones(2, dtype=BF16)], (None, 2), Given(torch.arange(2), None)]
    for value in plain:
        assert cast(value, BF16) is value
    mixed = {"floats": torch.ones(2), "others": plain[0]}
    found = cast(mixed, BF16)
    assert found["floats"].dtype == BF16 and found["others"] is plain[0] and mixed["floats"].dtype == FP32


def test_cast_forward_inputs_false_leaves_inputs_alone() -> None:
    layer = Zero3Layer(Edges(), policy=ShardingPolicy(param_dtype=BF16, cast_forward_inputs=False))
    x = torch.ones(2, WIDTH)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(Given(x, x), (x, 3), more={"deep": [x], "name": ""})
    assert layer.seen[0] == FP32


# -- on a device


@pytest.mark.parametrize("reduce_dtype", [BF16, FP32, FP64])
def test_casts_have_no_race_and_allocate_on_the_compute_stream(fake_device: FakeDevice, reduce_dtype: torch.dtype) -> None:
    group = EchoCommunicator()
    policy = ShardingPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model = in_layers(blocks(), group, policy)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for _ in range(2):
            loss_of(model(batch(0, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    fake_device.notice_freed()
    assert fake_device.races == []
    assert fake_device.allocations_on_lanes == []
