"""Linear layers of torchao and bitsandbytes under `shard`: float8 training and quantisation-aware training go on as in one process,
and parameters that are no plain ones are refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make low-bit")
float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed: make low-bit")
from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: E402
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig  # noqa: E402

WIDTH, STEPS, RATE = 32, 4, 0.1


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(make(), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def in_float8(recipe: str | None) -> nn.Module:
    """Emulated: the CPU has no such products."""
    config = float8.Float8LinearConfig() if recipe is None else float8.Float8LinearConfig.from_recipe_name(recipe)
    return float8.convert_to_float8_training(Net(), config=replace(config, emulate=True))


def aware(activations: bool) -> nn.Module:
    """What trains is rounded to four bits in each forward, and so are activations to eight."""
    model = Net()
    weights = IntxFakeQuantizeConfig(torch.int4, group_size=WIDTH)
    inputs = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False) if activations else None
    quantize_(model, QATConfig(activation_config=inputs, weight_config=weights, step="prepare"))
    return model


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "float8": lambda: in_float8(None),
    "float8, a scale a row": lambda: in_float8("rowwise"),
    "float8, weights' gradients in high precision": lambda: in_float8("rowwise_with_gw_hp"),
    "quantisation-aware": lambda: aware(activations=False),
    "quantisation-aware, activations too": lambda: aware(activations=True),
}


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)).pow(2).mean()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", TRAINED)
def test_float8_and_aware_training_is_that_of_one_process(name: str, ranks: int) -> None:
    model = TRAINED[name]()
    copies = [copy.deepcopy(model) for _ in range(ranks)]  # made here: threads share the seed
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    assert nn.Linear not in kinds and kinds
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    for step in range(STEPS):
        for rank in range(ranks):
            (loss_of(model, rank, step) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        one = zero3.shard(copies[group.rank], process_group=group)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(one), RATE)
        for step in range(STEPS):
            loss_of(one, group.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(one)

    found = run_ranks(ranks, body)[0]
    assert found.keys() == model.state_dict().keys()
    for key, expected in model.named_parameters():
        assert not expected.equal(before[key])
        # a sum in another order may round to the next code of eight bits
        torch.testing.assert_close(found[key], expected.detach(), rtol=1e-3, atol=1e-4 if ranks > 1 else 0.0)


def of_float8_gathers() -> nn.Module:
    """FSDP2's own extension: a tensor subclass says what travels."""
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return float8.convert_to_float8_training(Net(), config=config)


def weights_in_eight_bits() -> nn.Module:
    model = Net()
    quantize_(model, Int8WeightOnlyConfig())
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "weights in eight bits": (weights_in_eight_bits, "Int8Tensor"),
    "Linear8bitLt": (lambda: Net(lambda: bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)), "Int8Params"),
    "Linear8bitLt that trains": (lambda: Net(lambda: bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH)), "Int8Params"),
    "Linear4bit": (lambda: Net(lambda: bitsandbytes.nn.Linear4bit(WIDTH, WIDTH)), "Params4bit"),
    "float8 gathers": (of_float8_gathers, "WeightWithDynamicFloat8CastTensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shard_refuses_parameters_of_bitsandbytes_and_torchao_by_name(name: str) -> None:
    make, kind = REFUSED[name]
    copies = [make() for _ in range(2)]

    def body(group: ThreadCommunicator) -> str:
        with pytest.raises(ValueError, match="expected a plain") as caught:
            zero3.shard(copies[group.rank], process_group=group)
        assert not zero3.is_sharded(copies[group.rank])
        return str(caught.value)

    for said in run_ranks(2, body):
        assert kind in said and "blocks.0.0.weight" in said and "quantize" in said and "gather_format" in said
