"""Mixed precision on real processes, beside FSDP2 with the same policy; and the bytes that the kernel saw."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

import zero3
from tests.support.processes import Rank, on_ranks
from zero3 import ShardingPolicy

transformers = pytest.importorskip("transformers")

BF16, FP32 = torch.bfloat16, torch.float32


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def trained(model: nn.Module, parameters: object, rank: Rank) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)  # type: ignore[arg-type]
    losses = []
    for step in range(4):
        words = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank.number))
        scores = model(words[:, :-1]).logits
        assert scores.dtype == FP32
        loss = cross_entropy(scores.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_zero3(rank: Rank, reduce_dtype: torch.dtype) -> list[float]:
    model = zero3.shard(llama(), policy=ShardingPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype, output_dtype=FP32))
    return trained(model, zero3.get_trainable_chunk(model), rank)


def by_fsdp2(rank: Rank, reduce_dtype: torch.dtype) -> list[float]:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    model = llama()
    inner = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    for block in model.model.layers:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype, output_dtype=FP32))
    return trained(model, model.parameters(), rank)


@pytest.mark.parametrize("reduce_dtype", [FP32, BF16])
def test_the_losses_of_fsdp2(reduce_dtype: torch.dtype) -> None:
    ours, theirs = (on_ranks(2, body, reduce_dtype) for body in (by_zero3, by_fsdp2))
    for rank in range(2):
        assert ours[rank][0] == theirs[rank][0], "the first forward: the same bits"
        assert ours[rank] == pytest.approx(theirs[rank], rel=2e-4)
