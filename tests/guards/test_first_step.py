"""What the first step of an optimizer tells, once, and on rank 0: groups that got nothing, and masters in 16 bits."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy

Groups = Callable[[nn.Module], list[Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def by_ndim(model: nn.Module) -> list[Any]:
    """The usual recipe for no weight decay."""
    named = list(model.named_parameters())
    matrices, others = [p for _, p in named if p.dim() >= 2], [p for _, p in named if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]


def by_names(model: nn.Module) -> list[Any]:
    named = list(model.named_parameters())
    own = [p for name, p in named if not name.endswith("bias")]
    return [{"params": own}, {"params": [p for name, p in named if name.endswith("bias")], "lr": 0.5}]


def of_ours(model: nn.Module) -> list[Any]:
    return zero3.param_groups(model, lambda name, info: {"weight_decay": 0.5 if info.ndim > 1 else 0.0})


def told(model: nn.Module, groups: Groups, caplog: pytest.LogCaptureFixture, kind: Any = torch.optim.AdamW, **policy: Any) -> list[str]:
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        sharded = zero3.shard(copies[group.rank], process_group=group, policy=ShardingPolicy(**policy))
        optimizer = kind(groups(sharded), lr=0.1)
        for _ in range(3):
            sharded(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with caplog.at_level(logging.WARNING, "zero3"):
        run_ranks(2, body)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("groups", "number", "option"), [(by_ndim, 0, "weight_decay=0.5"), (by_names, 1, "lr=0.5")])
def test_a_group_that_got_nothing_is_named(groups: Groups, number: int, option: str, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = told(Net(), groups, caplog)
    for words in (f"group {number} of the AdamW ({option}) has no parameters", "0.weight", "zero3.param_groups(model"):
        assert words in text


def test_groups_of_ours_and_chunks_of_matrices_alone_are_right(caplog: pytest.LogCaptureFixture) -> None:
    assert not told(Net(), of_ours, caplog)
    adapters = Net()
    for name, parameter in adapters.named_parameters():
        parameter.requires_grad_(name.endswith("0.weight"))
    assert not told(adapters, by_ndim, caplog)
    assert not told(Net(), zero3.get_trainable_chunk, caplog)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_in_16_bits_are_named_with_both_remedies(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    (text,) = told(Net().to(dtype), zero3.get_trainable_chunk, caplog)
    for words in ("0.weight", f"in {dtype}", "ShardingPolicy(master_dtype=torch.float32)", "dtype=torch.float32"):
        assert words in text


def test_frozen_chunks_in_16_bits_that_an_optimizer_holds_are_no_masters(caplog: pytest.LogCaptureFixture) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = Net().to(torch.bfloat16).requires_grad_(False)
            self.adapter = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.adapter(self.base(x.to(torch.bfloat16)).float())

    copies = [Adapted() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(copies[group.rank], nn.Linear, process_group=group)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # frozen chunks too, as scripts do
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    with caplog.at_level(logging.WARNING, "zero3"):
        run_ranks(2, body)
    assert not caplog.records


def test_options_that_can_not_be_compared_break_no_step(caplog: pytest.LogCaptureFixture) -> None:
    def groups(model: nn.Module) -> list[Any]:
        chunks = zero3.get_trainable_chunk(model)
        return [{"params": chunks, "scales": torch.ones(3)}, {"params": [], "scales": torch.zeros(3)}]

    (text,) = told(Net(), groups, caplog, kind=torch.optim.SGD)
    assert "group 1 of the SGD (scales=" in text


def test_masters_in_float32_and_optimizers_of_others_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Own(torch.optim.SGD):
        """It may round as it likes."""

    low = Net().to(torch.bfloat16)
    assert not told(low, zero3.get_trainable_chunk, caplog, kind=Own)
    assert not told(low, zero3.get_trainable_chunk, caplog, master_dtype=torch.float32)
    assert not told(Net(), zero3.get_trainable_chunk, caplog)


def test_a_model_that_is_not_sharded_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    zero3.Zero3Layer(nn.Linear(2, 2))
    plain = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([{"params": plain.parameters()}, {"params": []}], lr=0.1)
    plain(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert not caplog.records
