"""What integrations choose for a model, on one rank."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import zero3
from zero3.integrations.handover import Handover
from zero3.integrations.preparing import Sharding, policy_and_masters


class Words(nn.Module):
    """With a head that is larger than any block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 500)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.head.weight.T  # read outside of the head's own forward


@pytest.mark.parametrize("layers", [None, (nn.Linear, nn.Embedding)], ids=["automatic", "by class"])
def test_the_head_stays_in_the_roots_own_layer_without_advice(layers: object, caplog: pytest.LogCaptureFixture) -> None:
    model = Words()
    expected = model(torch.arange(3))
    with caplog.at_level(logging.INFO, "zero3"):
        Sharding(None, layers, head_in_root=True).shard(model, torch.device("cpu"), "no")  # type: ignore[arg-type]
    assert not isinstance(model.head, zero3.Zero3Layer) and isinstance(model.blocks[0], zero3.Zero3Layer)
    assert torch.equal(model(torch.arange(3)), expected)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    with caplog.at_level(logging.INFO, "zero3"):
        zero3.shard(Words(), [nn.Embedding])
    assert caplog.records[-1].levelname == "WARNING", "others are told"


@pytest.mark.parametrize(("mixed_precision", "low"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_low_precision_has_a_policy_and_fp32_masters(mixed_precision: str, low: torch.dtype) -> None:
    policy = policy_and_masters(Words(), None, mixed_precision)
    assert isinstance(policy, zero3.ShardingPolicy)
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (low, torch.float32, torch.float32)
    model = Words().to(low)
    model.embedding.requires_grad_(False)
    Sharding().shard(model, torch.device("cpu"), mixed_precision)
    found = {parameter.requires_grad: parameter.dtype for parameter in model.parameters()}
    assert found == {True: torch.float32, False: low}, "what is frozen stays as it is stored"


def test_a_policy_of_ones_own_is_taken_and_layers_that_match_nothing_name_shard() -> None:
    model = Words()
    Sharding(zero3.ShardingPolicy(prefetch_depth=0)).shard(model, torch.device("cpu"), "bf16")
    assert next(model.parameters()).dtype is torch.float32 and "prefetch_depth=0" in zero3.report(model).policies[0]
    with pytest.raises(ValueError, match=r"matches no submodule.*zero3\.shard\(model"):
        Sharding(None, nn.LSTM).shard(Words(), torch.device("cpu"), "no")


def test_a_handover_keeps_groups_optimizers_and_what_is_in_none() -> None:
    models = [Words(), Words()]
    biases = [p for model in models for name, p in model.named_parameters() if "bias" in name]
    rest = [p for name, p in models[0].named_parameters() if "bias" not in name]
    one = torch.optim.SGD([{"params": biases, "lr": 1.0}, {"params": [models[1].embedding.weight]}], lr=0.1)
    other = torch.optim.AdamW(rest, lr=0.01)
    handover = Handover(models, [one, other])
    for model in models:
        zero3.shard(model, lambda name, module: "blocks." in name)
    handover.finish()
    counts = [sum(p.numel() for p in group["params"]) for optimizer in (one, other) for group in optimizer.param_groups]
    assert counts == [sum(p.numel() for p in biases), 4000, sum(p.numel() for p in rest)]
    assert [group["lr"] for group in one.param_groups] == [1.0, 0.1]
    before = zero3.full_state_dict(models[1])
    models[1](torch.arange(3)).sum().backward()
    one.step()
    after = zero3.full_state_dict(models[1])
    assert {name for name in after if not torch.equal(after[name], before[name])} == {"embedding.weight", "blocks.0.bias", "blocks.1.bias"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_handover_leaves_no_parameter_of_before_in_an_optimizer(device: str) -> None:
    """Not even an empty one, whose gradient a step would ask for all the same."""
    with torch.device(device):
        model = Words()
        model.nothing = nn.Parameter(torch.empty(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handover, before = Handover([model], [optimizer]), set(map(id, model.parameters()))
    zero3.shard(model, device="cpu")
    handover.finish()
    assert not before & {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    zero3.check_optimizer(model, optimizer)
