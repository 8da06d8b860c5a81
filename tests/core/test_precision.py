"""Mixed precision: gathered and computed in one dtype, reduced in another, stored and updated in a third.

The reference is a plain module whose parameters are cast by hand, once a forward, and whose gradients are added up over
ranks by hand, in the dtype that the policy names. On two ranks the bits must be the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

WIDTH = 6
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def blocks(dtype: torch.dtype = FP32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(3))).to(dtype)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def summed_by_hand(
    model: nn.Module, step: int, world_size: int, compute: torch.dtype, reduce: torch.dtype, scale: Callable[[Tensor], Tensor] = torch.clone
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of all ranks, and their gradients' sums in `reduce`."""
    losses, sums = [], dict[str, Tensor]()
    for rank in range(world_size):
        cast = {name: p.detach().to(compute).requires_grad_() for name, p in model.named_parameters()}
        loss = loss_of(functional_call(model, cast, batch(step, rank).to(compute)))
        losses.append(loss.item())
        for name, gradient in zip(cast, torch.autograd.grad(scale(loss), list(cast.values())), strict=True):
            sums[name] = sums[name] + gradient.to(reduce) if name in sums else gradient.to(reduce)
    return losses, sums


def trained_by_hand(policy: ShardingPolicy, world_size: int, steps: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    model = blocks(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    compute, reduce = policy.param_dtype or dtype, policy.reduce_dtype or policy.param_dtype or dtype
    losses = []
    for step in range(steps):
        found, sums = summed_by_hand(model, step, world_size, compute, reduce)
        losses += found
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].to(dtype) / world_size
        optimizer.step()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def in_layers(model: nn.Module, group: ThreadCommunicator | None, policy: ShardingPolicy) -> Zero3Sequential:
    return Zero3Sequential([Zero3Layer(child, policy=policy, process_group=group) for child in model.children()])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (FP32, ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32)),
        (FP32, ShardingPolicy(param_dtype=BF16)),
        (FP32, ShardingPolicy(param_dtype=FP16, reduce_dtype=FP32)),
        (FP32, ShardingPolicy(param_dtype=BF16, reduce_dtype=BF16, reshard_after_forward=False, prefetch_depth=0)),
        (FP32, ShardingPolicy(reduce_dtype=BF16)),
        (FP64, ShardingPolicy(param_dtype=FP32, reduce_dtype=FP64)),
    ],
    ids=str,
)
def test_param_dtype_and_reduce_dtype_train_as_a_plain_module_with_the_same_casts(
    dtype: torch.dtype, policy: ShardingPolicy, world_size: int
) -> None:
    losses, parameters = trained_by_hand(policy, world_size, 4, dtype)

    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor], list[Any]]:
        model = in_layers(fresh[group.rank], group if world_size > 1 else None, policy)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=0.05)
        seen = []
        for step in range(4):
            loss = loss_of(model(batch(step, group.rank)))
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen, zero3.full_state_dict(model, rank0_only=False), group.log

    fresh = [blocks(dtype) for _ in range(world_size)]
    results = run_ranks(world_size, body)
    for rank, (seen, found, _) in enumerate(results):
        assert seen == losses[rank::world_size]
        for name, value in parameters.items():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], value), name


def test_param_dtype_halves_the_bytes_that_travel() -> None:
    def bytes_of(policy: ShardingPolicy) -> dict[str, int]:
        def body(group: ThreadCommunicator) -> list[Any]:
            model = in_layers(fresh[group.rank], group, policy)
            group.log.clear()
            loss_of(model(batch(0, group.rank))).backward()
            return list(group.log)

        fresh = [blocks(), blocks()]
        moved: dict[str, int] = {}
        for entry in run_ranks(2, body)[0]:
            if entry.kind in ("all_gather", "reduce_scatter"):
                moved[entry.kind] = moved.get(entry.kind, 0) + entry.numel * entry.dtype.itemsize
        return moved

    plain, both = bytes_of(ShardingPolicy()), bytes_of(ShardingPolicy(param_dtype=BF16))
    gathers = bytes_of(ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32))
    assert both == {kind: nbytes // 2 for kind, nbytes in plain.items()}
    assert gathers == {"all_gather": plain["all_gather"] // 2, "reduce_scatter": plain["reduce_scatter"]}


def test_a_shardingpolicy_of_its_own_keeps_norms_in_full_precision() -> None:
    """As FSDP2 has it: norms are layers of their own, which compute in fp32 and hand bf16 on."""
    seen: dict[str, tuple[torch.dtype, ...]] = {}

    def policy_of(name: str, module: nn.Module) -> ShardingPolicy:
        if isinstance(module, nn.LayerNorm):
            return ShardingPolicy(param_dtype=FP32, output_dtype=BF16)
        return ShardingPolicy(param_dtype=BF16, output_dtype=FP32 if name == "" else None)

    def body(group: ThreadCommunicator) -> tuple[Tensor, dict[str, Tensor]]:
        model = fresh[group.rank]
        zero3.shard(model, [nn.LayerNorm, *model.children()], policy=policy_of, process_group=group)
        for block in model.children():
            linear, norm = block.module[0], block.module[1].module
            linear.register_forward_hook(lambda m, a, out: seen.__setitem__("linear", (m.weight.dtype, a[0].dtype, out.dtype)))
            norm.register_forward_hook(lambda m, a, out: seen.__setitem__("norm", (m.weight.dtype, a[0].dtype, out.dtype)))
        output = model(batch(0, group.rank))
        loss_of(output).backward()
        return output.detach(), {}

    fresh = [blocks(), blocks()]
    outputs = [output for output, _ in run_ranks(2, body)]
    assert seen == {"linear": (BF16, BF16, BF16), "norm": (FP32, FP32, FP32)}
    x, plain = batch(0, 0).to(BF16), blocks()
    for block in plain:
        linear, norm, gelu = (part for part in block)  # type: ignore[attr-defined]
        x = nn.functional.linear(x, linear.weight.to(BF16), linear.bias.to(BF16))
        x = gelu(norm(x.float()).to(BF16))
    assert outputs[0].dtype == FP32
    assert torch.equal(outputs[0], x.float())


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.base = nn.Linear(WIDTH, WIDTH, dtype=BF16).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.Parameter(torch.tensor([7, 9]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x) * (self.steps[1] - self.steps[0])


def test_param_dtype_leaves_a_frozen_chunks_dtype_under_adapters() -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = Zero3Layer(fresh[group.rank], policy=ShardingPolicy(param_dtype=BF16), process_group=group)
        stored = {name: chunk.dtype for name, chunk in layer.named_parameters()}
        assert stored == {"frozen_chunk_bfloat16": BF16, "trainable_chunk": FP32, "frozen_chunk_int64": torch.int64}
        group.log.clear()
        layer(batch(0, group.rank)).float().sum().backward()
        assert {entry.dtype for entry in group.log if entry.kind == "all_gather"} == {BF16, torch.int64}
        (chunk,) = layer.get_trainable_chunk()
        assert chunk.grad is not None
        assert chunk.grad.dtype == FP32

    fresh = [Adapted(), Adapted()]
    run_ranks(2, body)


# -- sums


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_add_up_in_the_reduce_dtype(world_size: int) -> None:
    """bf16 chunks, fp32 sums: rounded once, although `chunk.grad` is bf16. Eight bits of mantissa would lose the small ones."""
    scales = [1.0, *[2.0**-10] * 64]

    def body(group: ThreadCommunicator) -> Tensor:
        policy = ShardingPolicy(reduce_dtype=FP32)
        layer = Zero3Layer(nn.Linear(1, 2, bias=False, dtype=BF16), policy=policy, process_group=group if world_size > 1 else None)
        (chunk,) = layer.get_trainable_chunk()
        for round_ in range(2):
            for scale in scales:
                layer(torch.full((1, 1), scale, dtype=BF16)).sum().backward()
            assert chunk.grad is not None
            assert chunk.grad.dtype == BF16
            assert chunk.grad.float().unique().item() == torch.tensor(sum(scales)).to(BF16).item(), round_
            if round_ == 0:
                chunk.grad.zero_()  # somebody's change counts: what the sum was rounded from is forgotten
        first = chunk.grad.clone()
        chunk.grad.mul_(2)
        layer(torch.full((1, 1), 1.0, dtype=BF16)).sum().backward()
        assert torch.equal(chunk.grad, 2 * first + 1)
        layer.zero_grad()
        assert chunk.grad is None
        return first

    assert sum(scales) == 1.0625
    run_ranks(world_size, body)


def test_fp16_sums_do_not_overflow_where_the_mean_does_not() -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = Zero3Layer(nn.Linear(1, 4, bias=False), policy=ShardingPolicy(param_dtype=FP16), process_group=group)
        layer(torch.full((1, 1), 20000.0)).sum().backward()  # four of them are too much
        (chunk,) = layer.get_trainable_chunk()
        assert chunk.grad is not None
        assert chunk.grad.tolist() == [20000.0]

    run_ranks(4, body)


def test_fp16_with_a_gradscaler_skips_and_steps_as_torchs_does() -> None:
    """A scale that overflows at first: the same steps are skipped, by all ranks, and the others have the same bits."""
    world_size, steps, policy = 2, 6, ShardingPolicy(param_dtype=FP16, reduce_dtype=FP32)
    scales: list[float] = []
    plain = blocks()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for step in range(steps):
        _, sums = summed_by_hand(plain, step, world_size, FP16, FP32, scaler.scale)
        for name, parameter in plain.named_parameters():
            parameter.grad = sums[name] / world_size
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())

    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]]:
        model = in_layers(fresh[group.rank], group, policy)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=0.05)
        scaler, found = zero3.GradScaler("cpu", init_scale=2.0**18), []
        for step in range(steps):
            scaler.scale(loss_of(model(batch(step, group.rank)))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(scaler.get_scale())
        return found, zero3.full_state_dict(model, rank0_only=False)

    fresh = [blocks() for _ in range(world_size)]
    assert scales[0] < 2.0**18, "nothing was skipped"
    assert scales[-1] == scales[-2], "nothing was stepped"
    for found, values in run_ranks(world_size, body):
        assert found == scales
        for name, parameter in plain.named_parameters():
            assert torch.equal(values[name], parameter), name
