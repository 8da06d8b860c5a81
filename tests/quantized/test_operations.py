"""What a model may do with a quantised weight: multiply in every way, take experts out of it, and look words up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zero3
from tests.support.models import WORLDS
from tests.support.quantised_bases import WIDTH, Kind, blocks, is_base, program, quantizing, seeded
from tests.support.reference import check_parity, in_sequence
from zero3 import NF4, Float8, Int8, ShardingPolicy

pytestmark = pytest.mark.slow


class Experts(nn.Module):
    """Weights of several experts in one parameter, used as libraries do: by index, as a batch, and in groups."""

    def __init__(self, how: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.how, self.num_experts = how, 3
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=dtype) / 5, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.reshape(-1, WIDTH) * self.scale)[:6]
        if self.how == "index":
            made = [rows[2 * i : 2 * i + 2] @ self.weight[torch.tensor(i) if i == 1 else i].t() for i in range(3)]
        elif self.how == "unbind":
            made = [functional.linear(rows[2 * i : 2 * i + 2], weight) for i, weight in enumerate(self.weight.unbind())]
        elif self.how == "iterate":
            made = [functional.linear(rows[2 * i : 2 * i + 2], weight) for i, weight in enumerate(self.weight)]
        elif self.how == "halves":
            made = [rows @ half.t() for half in self.weight[1].chunk(2)]
        elif self.how == "bmm":
            made = [torch.bmm(rows.view(3, 2, WIDTH), self.weight.transpose(1, 2))]
        elif self.how == "baddbmm":
            made = [torch.baddbmm(rows.view(3, 2, WIDTH), rows.view(3, 2, WIDTH), self.weight.mT)]
        elif self.how == "added":
            made = [torch.bmm(rows.view(3, 2, WIDTH), self.weight + self.scale)]
        elif self.how == "peft":  # as peft folds an adapter into experts
            made = [
                torch.bmm(rows.view(3, 2, WIDTH), torch.baddbmm(self.weight, self.scale.expand(3, 1, -1).mT, self.scale.expand(3, 1, -1)))
            ]
        else:
            ends = torch.tensor([2, 3, 6], dtype=torch.int32)
            products = functional.grouped_mm, getattr(torch, "_grouped_mm", functional.grouped_mm)  # what transformers calls
            made = [product(rows, self.weight.transpose(-2, -1), offs=ends) for product in products]
        return torch.cat([each.reshape(-1) for each in made])


class Ways(nn.Module):
    """Ways to multiply with a matrix, and an embedding."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 5, requires_grad=False)
        self.words = nn.Embedding(7, WIDTH, dtype=dtype).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x, w = x * self.scale, self.weight
        found = x @ w + functional.linear(x, w.T) + torch.matmul(x, w.transpose(0, 1)) + (w @ x.mT).mT
        flat = x.reshape(-1, WIDTH)
        found = found + (torch.mm(flat, w.permute(1, 0)) + torch.addmm(flat, flat, w[:, :]) + flat.mm(w.float().to(w.dtype))).view_as(x)
        return found + self.words(torch.arange(5, device=x.device) % 7).mean(0) * self.scale + torch.matmul(x, w.unsqueeze(0)[0].detach())


@WORLDS
@pytest.mark.parametrize("how", ["index", "unbind", "iterate", "halves", "bmm", "baddbmm", "added", "peft"])
@pytest.mark.parametrize("kind", [NF4(), Float8(block=(16, 8)), Int8(block_size=7)], ids=lambda kind: kind.name)
def test_quantized_experts(world_size: int, how: str, kind: Kind) -> None:
    check_parity(
        seeded(lambda: nn.Sequential(Experts(how)), kind, is_base), program, world_size=world_size, shard=quantizing(in_sequence),
        policy=ShardingPolicy(quantize=kind),
    )  # fmt: skip


@WORLDS
def test_quantized_experts_in_groups(world_size: int) -> None:
    build = seeded(lambda: nn.Sequential(Experts("groups", torch.bfloat16)), NF4(), is_base)
    check_parity(
        build, lambda model, turn: program(_in_bf16(model), turn), world_size=world_size, shard=quantizing(in_sequence),
        policy=ShardingPolicy(quantize=NF4(), reduce_dtype=torch.float32), tolerance=1e-2,
    )  # fmt: skip


def _in_bf16(model: nn.Module) -> Any:
    return lambda x: model(x.bfloat16()).double()


@WORLDS
def test_quantized_matrix_in_every_operation(world_size: int) -> None:
    kind = NF4(select=lambda name, info: info.ndim == 2)
    check_parity(
        seeded(lambda: nn.Sequential(Ways(), Ways()), kind, is_base), program, world_size=world_size, shard=quantizing(in_sequence),
        policy=ShardingPolicy(quantize=kind),
    )  # fmt: skip


def test_torch_func_in_resident_on_a_quantized_base() -> None:
    kind = NF4()
    plain = seeded(blocks, kind, is_base)()
    model = in_sequence(seeded(blocks, kind, lambda *_: False)(), None, ShardingPolicy(quantize=kind))
    x = torch.randn(WIDTH, dtype=torch.float64)
    with zero3.resident(model):
        found = torch.func.grad(lambda x: model(x).sum())(x)
        many = torch.func.vmap(model)(torch.stack([x, x]))
    assert found.equal(torch.func.grad(lambda x: plain(x).sum())(x))
    torch.testing.assert_close(many, torch.stack([plain(x)] * 2))
