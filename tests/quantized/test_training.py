"""Training on a quantised base: the numbers of one process whose weights are what the format makes of them, and a graph without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import WORLDS
from tests.support.quantised_bases import (
    WIDTH,
    Adapted,
    Kind,
    blocks,
    by_shard,
    formats,
    is_base,
    plain_losses,
    program,
    quantizing,
    seeded,
    sharded_losses,
)
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, as_one_layer, check_parity, in_sequence, nested, process_group
from zero3 import NF4, ShardingPolicy

pytestmark = pytest.mark.slow


@WORLDS
@formats
@pytest.mark.parametrize("shard", [in_sequence, as_one_layer, nested, by_shard], ids=lambda shard: shard.__name__)
def test_quantized_base_trains_as_its_dequantized_values_do(world_size: int, kind: Kind, shard: Any) -> None:
    """One rank to the bit, several to the order of sums."""
    build = seeded(blocks, kind, is_base)
    check_parity(build, program, world_size=world_size, shard=quantizing(shard), policy=ShardingPolicy(quantize=kind))


@pytest.mark.parametrize("shard", [in_sequence, by_shard], ids=lambda shard: shard.__name__)
def test_quantized_base_on_a_mesh(shard: Any) -> None:
    check_parity(
        seeded(blocks, NF4(), is_base), program, world_size=4, replicas=2, shard=quantizing(shard), policy=ShardingPolicy(quantize=NF4())
    )


@WORLDS
def test_quantized_base_with_offload_activations(world_size: int, tmp_path: Path) -> None:
    def offloading(model: nn.Module, turn: Turn) -> Tensor:
        x = turn.tensor(2, 5, WIDTH, requires_grad=True)
        with zero3.offload_activations(tmp_path, min_bytes=1):
            loss = model(x).square().mean()
        loss.backward()
        return torch.cat([loss.view(1), x.grad.flatten()])  # type: ignore[union-attr]

    build = seeded(blocks, NF4(), is_base)
    check_parity(build, offloading, world_size=world_size, shard=quantizing(by_shard), policy=ShardingPolicy(quantize=NF4()))


@WORLDS
@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, {"stage": 2}, {"reshard_after_forward": False}, {"prefetch_depth": 0}, {"transactional": True}, {"dynamic": True}],
    ids=str,
)
def test_quantized_base_under_policies(world_size: int, options: dict[str, Any]) -> None:
    kind = NF4()

    def shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        return quantizing(in_sequence)(model, group, policy)

    build = seeded(blocks, kind, is_base)
    expected = plain_losses(build)

    def body(group: ThreadCommunicator) -> list[float]:
        model = shard(models[group.rank], process_group(group), ShardingPolicy(quantize=kind, **options))
        return sharded_losses(model)

    models = [build() for _ in range(world_size)]
    for found in run_ranks(world_size, body):
        assert found == pytest.approx(expected, rel=1e-12)
        assert world_size > 1 or found == expected


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Adapted(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@WORLDS
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [True, False])
def test_quantized_base_with_checkpoint(world_size: int, reentrant: bool, around: bool) -> None:
    """Inside layers, and around them."""
    kind = NF4()

    def make() -> nn.Module:
        return nn.Sequential(*[Checkpointed(reentrant) for _ in range(3)])

    def shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        return zero3.shard(model, Adapted if around else Checkpointed, policy=policy, process_group=group)

    check_parity(seeded(make, kind, is_base), program, world_size=world_size, shard=quantizing(shard), policy=ShardingPolicy(quantize=kind))


@WORLDS
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["param_dtype", "autocast"])
def test_quantized_base_in_bf16(world_size: int, stored: torch.dtype, how: str) -> None:
    """It computes with the values in the dtype of compute, which are rounded once."""
    kind = NF4()
    original = seeded(lambda: nn.Sequential(Adapted(stored), Adapted(stored)), kind, lambda *_: False)
    plain = original().bfloat16() if how == "param_dtype" else original()
    for name, p in original().named_parameters():
        if is_base(name, p):
            values = kind.dequantize(kind.quantize(p), stored).to(plain.get_parameter(name).dtype)
            plain.get_parameter(name).data.copy_(values)
    x = Turn(0, 0, 1).tensor(2, 5, WIDTH).to(torch.bfloat16 if how == "param_dtype" else stored)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        expected = plain(x)
    expected.float().square().mean().backward()
    gradients = [p.grad.float().flatten() for p in plain.parameters() if p.requires_grad]
    policy = ShardingPolicy(quantize=kind, param_dtype=torch.bfloat16 if how == "param_dtype" else None)

    def body(group: ThreadCommunicator) -> tuple[Tensor, dict[str, Tensor]]:
        model = zero3.shard(models[group.rank], Adapted, policy=policy, process_group=process_group(group))
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            output = model(x)
        output.float().square().mean().backward()
        with zero3.full_gradients(model) as full:
            return output, {name: value.clone() for name, value in full.items()}

    models = [original() for _ in range(world_size)]
    for output, full in run_ranks(world_size, body):
        assert output.equal(expected)
        for found, mine in zip(full.values(), gradients, strict=True):
            torch.testing.assert_close(found.float().flatten(), mine, rtol=2e-2, atol=1e-3)


@WORLDS
def test_full_params_show_quantized_values(world_size: int) -> None:
    kind = NF4()
    expected = seeded(blocks, kind, is_base)().state_dict()

    def body(group: ThreadCommunicator) -> None:
        model = by_shard(models[group.rank], process_group(group), ShardingPolicy(quantize=kind))
        for _ in range(2):
            with zero3.full_params(model):
                for name, values in expected.items():
                    found = dict(model.named_parameters())[name]
                    assert type(found) is nn.Parameter
                    assert found.equal(values)
        sharded_losses(model)
        values = zero3.full_state_dict(model, rank0_only=False)
        assert all(values[name].equal(expected[name]) for name, p in blocks().named_parameters() if is_base(name, p))
        read_only = r"'up.weight' of layer '0' \(Adapted\) \(nf4\(64, double\)\).*read-only"
        with pytest.raises(RuntimeError, match=read_only), zero3.full_params(model, writeback=True):
            pass

    models = [seeded(blocks, kind, lambda *_: False)() for _ in range(world_size)]
    run_ranks(world_size, body)


@WORLDS
def test_load_full_state_dict_quantizes_what_has_changed(world_size: int) -> None:
    """What a dict leaves out keeps its bytes: quantising dequantised values again would change them."""
    kind = NF4()
    given = {name: torch.randn_like(values) for name, values in blocks().state_dict().items() if name.startswith(("0.", "1.down"))}
    expected = seeded(blocks, kind, is_base)().state_dict()
    for name, values in given.items():
        expected[name] = kind.dequantize(kind.quantize(values), values.dtype) if "up.w" in name or "down.w" in name else values

    def body(group: ThreadCommunicator) -> None:
        model = in_sequence(models[group.rank], process_group(group), ShardingPolicy(quantize=kind))
        loss = model(torch.randn(2, 5, WIDTH, dtype=torch.float64)).sum()
        zero3.load_full_state_dict(model, given if group.rank == 0 else None, strict=False)
        found = zero3.full_state_dict(model, rank0_only=False)
        assert all(found[name].equal(values) for name, values in expected.items())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        sharded_losses(model)

    models = [seeded(blocks, kind, lambda *_: False)() for _ in range(world_size)]
    run_ranks(world_size, body)
