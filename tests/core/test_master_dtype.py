"""`ShardingPolicy(master_dtype=)`: a bf16 model trains as its fp32 copy does under `param_dtype=torch.bfloat16`, to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from zero3 import ShardingPolicy

BF16, FP32 = torch.bfloat16, torch.float32
WIDTH = 6


class Net(nn.Module):
    """The first block is frozen, and the norms of the last one are in fp32 if they are to be."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(3))
        self.to(BF16)
        self.blocks[0].requires_grad_(False)
        self.last = nn.LayerNorm(WIDTH, dtype=FP32 if mixed else BF16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x.to(self.last.weight.dtype))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(BF16)


def train(model: nn.Module, rank: int, steps: int = 4, first: int = 0) -> tuple[list[Tensor], Any]:
    """Two micro-batches a step, clipped."""
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=1e-2)
    losses = []
    for step in range(first, first + steps):
        for micro in range(2):
            loss = model(batch(2 * step + micro, rank)).float().pow(2).mean()
            loss.backward()
            losses.append(loss.detach())
        zero3.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, optimizer


def led(model: nn.Module, world: tuple[int, int], policy: ShardingPolicy) -> list[Any]:
    replicas, shards = world
    models = [copy.deepcopy(model) for _ in range(max(1, replicas) * shards)]

    def body(group: Any) -> Any:
        sharded = zero3.shard(models[group.rank], process_group=group, policy=policy)
        losses, _ = train(sharded, group.rank)
        return losses, zero3.full_state_dict(sharded, rank0_only=False)

    return run_mesh(replicas, shards, body) if replicas else run_ranks(shards, body)


def masters_of(model: nn.Module) -> nn.Module:
    """What trains is in fp32."""
    found = copy.deepcopy(model)
    for parameter in found.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(FP32)
    return found


@pytest.mark.parametrize("world", [(0, 1), (0, 2), (0, 3), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "fields",
    [{}, {"reduce_dtype": FP32}, {"stage": 2}, {"stage": 1}, {"offload": "cpu"}, {"transactional": True}, {"gather_format": zero3.Int8()}],
    ids=str,
)
def test_a_model_in_bf16_trains_as_its_copy_in_fp32(fields: dict[str, Any], world: tuple[int, int]) -> None:
    model = Net()
    found = led(model, world, ShardingPolicy(master_dtype=FP32, **fields))
    expected = led(masters_of(model), world, ShardingPolicy(param_dtype=BF16, **fields))
    for (losses, state), (others, masters) in zip(found, expected, strict=True):
        assert losses == others
        for name, value in masters.items():
            assert state[name].dtype == (BF16 if name.startswith("blocks.0") else FP32)
            assert torch.equal(state[name], value), name
    bare = led(model, world, ShardingPolicy(**fields))
    assert bare[0][0] != found[0][0], "bf16 masters train otherwise"


@pytest.mark.parametrize("offload", [None, "cpu", "files"])
def test_chunks_of_other_own_dtypes_stay_apart_and_are_written_as_they_were(offload: str | None, tmp_path: Path) -> None:
    policy = ShardingPolicy(master_dtype=FP32, offload=str(tmp_path) if offload == "files" else offload)
    models = [Net(mixed=True) for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model = zero3.shard(models[group.rank], process_group=group, policy=policy)
        assert {chunk.dtype for chunk in zero3.get_trainable_chunk(model)} == {FP32}
        train(model, group.rank, 1)
        zero3.save_checkpoint(tmp_path / "checkpoint", model)
        return [name for name, _ in model.named_parameters()], zero3.full_state_dict(model, rank0_only=False)

    (names, state), _ = run_ranks(2, body)
    assert len(names) == len(set(names))
    again = [Net(mixed=True) for _ in range(3)]

    def load(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(again[group.rank], process_group=group, policy=policy)
        zero3.load_checkpoint(tmp_path / "checkpoint", model)
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(3, load):
        assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in state.items())


def test_parameters_of_one_layer_in_two_dtypes_have_two_chunks() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=BF16), nn.LayerNorm(WIDTH, dtype=FP32))

    def body(group: ThreadCommunicator) -> Any:
        model = zero3.Zero3Layer(copy.deepcopy(layer), process_group=group, policy=ShardingPolicy(master_dtype=FP32, param_dtype=BF16))
        model(batch(0, group.rank)).sum().backward()
        return {name: (p.dtype, p.grad is not None) for name, p in model.named_parameters()}

    for found in run_ranks(2, body):
        assert found == {"trainable_chunk_bfloat16": (FP32, True), "trainable_chunk_float32": (FP32, True)}


def test_what_is_frozen_later_keeps_its_dtype() -> None:
    model = Net()

    def body(group: ThreadCommunicator) -> Any:
        sharded = zero3.shard(copy.deepcopy(model), process_group=group, policy=ShardingPolicy(master_dtype=FP32))
        zero3.set_trainable(sharded, lambda name, info: name.endswith("bias"))
        losses, _ = train(sharded, group.rank, 2)
        return losses, {name: value.dtype for name, value in zero3.full_state_dict(sharded, rank0_only=False).items()}

    for losses, dtypes in run_ranks(2, body):
        assert all(loss.isfinite() for loss in losses)
        assert all(dtype == (BF16 if name.startswith("blocks.0") else FP32) for name, dtype in dtypes.items())


def by_name(name: str, info: zero3.ParamInfo) -> bool:
    return name.startswith("blocks.0")


@pytest.mark.parametrize("frozen_first", [True, False])
def test_what_is_thawed_later_has_no_master_and_is_told_what_to_do(
    frozen_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the warning of masters in 16 bits, and in the error of a restart that shards with what trains now. Done as told, both are well."""

    def made(*, as_now: bool) -> Any:
        model = Net()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("blocks.0") if as_now else not (frozen_first and name.startswith("blocks.0")))
        sharded = zero3.shard(model, policy=ShardingPolicy(master_dtype=FP32))
        zero3.set_trainable(sharded, by_name)
        return sharded

    saved = made(as_now=False)
    _, optimizer = train(saved, 0, 1)
    warned = [text for text in caplog.messages if "smaller than half of the last bit" in text]
    assert len(warned) == frozen_first
    assert all("shard while they train, and freeze them afterwards by zero3.set_trainable" in text for text in warned)
    assert not any("ShardingPolicy(master_dtype" in text for text in warned)
    zero3.save_checkpoint(tmp_path, saved, optimizer)
    with pytest.raises(ValueError, match=r"other dtypes: .*\. A model's dtypes are decided .* change what trains by zero3\.set_trainable$"):
        zero3.load_checkpoint(tmp_path, made(as_now=True))
    again = made(as_now=False)
    zero3.load_checkpoint(tmp_path, again, torch.optim.AdamW(zero3.get_trainable_chunk(again)))
    expected = zero3.full_state_dict(saved)
    assert all(torch.equal(value, expected[name]) for name, value in zero3.full_state_dict(again).items())


def test_dtype_checks_what_the_optimizer_updates() -> None:
    policy = ShardingPolicy(master_dtype=FP32)
    zero3.Zero3Layer(nn.Linear(2, 2, dtype=BF16), dtype=FP32, policy=policy)
    with pytest.raises(ValueError, match=r"'weight' is torch.float32, expected dtype=torch.bfloat16"):
        zero3.Zero3Layer(nn.Linear(2, 2, dtype=BF16), dtype=BF16, policy=policy)
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype or None, found 'bfloat16'"):
        zero3.Zero3Layer(nn.Linear(2, 2), dtype="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.complex64])
def test_a_dtype_that_can_be_no_master_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="master_dtype must be a floating dtype"):
        ShardingPolicy(master_dtype=dtype)


def test_check_compares_with_the_masters() -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().pow(2).mean()

    report = zero3.check(Net(), batch(0, 0), loss=loss, policy=ShardingPolicy(master_dtype=FP32))
    assert not report.differences
