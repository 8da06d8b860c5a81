"""`ShardingPolicy(offload=)`: the bits of training without, under every policy and with every capability."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import chunks_of
from tests.support.models import WIDTH, WORLDS, seeded
from tests.support.offloaded import in_files
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.reference import Turn, process_group
from zero3 import ShardingPolicy


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(3))
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


Body = Callable[[nn.Module, ThreadCommunicator], list[Tensor]]


def train(model: nn.Module, group: ThreadCommunicator, optimizer: torch.optim.Optimizer | None = None, steps: int = 3) -> list[Tensor]:
    optimizer = optimizer or torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    seen = []
    for step in range(steps):
        for micro in range(2):
            loss = model(Turn(group.rank, 10 * step + micro, group.world_size).tensor(5, WIDTH)).pow(2).mean()
            loss.backward()
            seen.append(loss.detach())
        seen.append(zero3.clip_grad_norm_(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *values(model)]


def values(model: nn.Module) -> list[Tensor]:
    return list(zero3.full_state_dict(model, rank0_only=False).values())


def on_ranks(world_size: int, body: Body, offload: Any, *, replicas: int = 1, **policy: Any) -> list[list[Tensor]]:
    copies = [seeded(Model)[0] for _ in range(world_size)]

    def run(group: ThreadCommunicator) -> list[Tensor]:
        model = zero3.shard(copies[group.rank], policy=ShardingPolicy(offload=offload, **policy), process_group=process_group(group))
        return body(model, group)

    return run_mesh(replicas, world_size // replicas, run) if replicas > 1 else run_ranks(world_size, run)


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), f"value {number} of rank {rank}"


POLICIES: list[dict[str, Any]] = [
    {}, {"stage": 2}, {"stage": 1}, {"param_dtype": torch.float32}, {"prefetch_depth": 0}, {"transactional": True}, {"dynamic": True},
    {"prefetch_depth": 2, "reshard_after_forward": False}, {"resident_bytes": 10**6}, {"reduce_format": zero3.Int8(block_size=4)},
    {"gradient_reduction": "sum", "compare_every": 1},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("where", ["cpu", "files"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@WORLDS
def test_training_has_the_same_bits(world_size: int, policy: dict[str, Any], where: str, tmp_path: Path) -> None:
    offload = "cpu" if where == "cpu" else tmp_path
    assert_same(on_ranks(world_size, train, offload, **policy), on_ranks(world_size, train, None, **policy))


def test_the_sum_that_a_gradient_is_rounded_from_stays_beside_it(tmp_path: Path) -> None:
    """Chunks in fp32, sums in fp64: micro-batches are added up in fp64."""

    def run(offload: Any) -> list[list[Tensor]]:
        copies = [seeded(Model)[0].float() for _ in range(2)]
        policy = ShardingPolicy(offload=offload, reduce_dtype=torch.float64)

        def body(group: ThreadCommunicator) -> list[Tensor]:
            model = zero3.shard(copies[group.rank], policy=policy, process_group=group)
            optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
            for step in range(3):
                for micro in range(3):
                    model(Turn(group.rank, 10 * step + micro, 2).tensor(5, WIDTH).float()).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return values(model)

        return run_ranks(2, body)

    assert_same(run(tmp_path), run(None))


def test_on_a_mesh(tmp_path: Path) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        seen = train(model, group)
        with zero3.no_sync(model, replicas_only=True):
            model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
        return [*seen, *train(model, group)]

    assert_same(on_ranks(4, body, tmp_path, replicas=2), on_ranks(4, body, None, replicas=2))


def whole_and_groups(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    groups = zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 2, "weight_decay": 0.1 * (info.ndim == 2)})
    seen = train(model, group, torch.optim.AdamW(groups, lr=0.1))
    if chunks_of(model)[0].store.rests:
        assert all(in_files([chunk.shard]) for chunk in chunks_of(model) if chunk.shard.numel())
    return seen


def accumulating(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9)
    for step in range(3):
        for micro in range(3):
            with zero3.no_sync(model) if micro != 1 else nullcontext():
                model(Turn(group.rank, 10 * step + micro, 2).tensor(5, WIDTH)).pow(2).mean().backward()
        model(Turn(group.rank, 10 * step + 5, 2).tensor(5, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return values(model)


def guarded(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    for step in range(4):
        for micro in range(2):
            with zero3.step_guard(model):
                loss = model(Turn(group.rank, 10 * step + micro, 2).tensor(5, WIDTH)).pow(2).mean()
                loss.backward()
                if (group.rank, step) == (1, 2):
                    raise ArithmeticError("as told")
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def scaled(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1, fused=True)
    scaler = zero3.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        loss = model(Turn(group.rank, step, 2).tensor(5, WIDTH)).pow(2).mean()
        scaler.scale(loss * (float("inf") if (group.rank, step) == (0, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values(model)


def over_tokens(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    for step in range(4):
        count = 3 + 2 * group.rank + step
        loss = model(Turn(group.rank, step, 2).tensor(count, WIDTH)).pow(2).sum()
        zero3.backward(loss, torch.tensor(count), model)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def changing_what_trains(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    seen = train(model, group, steps=1)
    zero3.set_trainable(model, lambda name, info: "weight" in name)
    seen += train(model, group, steps=1)
    zero3.set_trainable(model, lambda name, info: True)
    return [*seen, *train(model, group, steps=1)]


def shown_and_written(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    train(model, group, steps=1)
    with zero3.full_params(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    seen = train(model, group, steps=1)
    state = zero3.full_state_dict(model)
    zero3.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
    with zero3.resident(model), torch.no_grad():
        seen.append(model(torch.ones(2, WIDTH, dtype=torch.float64)))
    return [*seen, *train(model, group, steps=1)]


def broken(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    def fails(*_: Any) -> None:
        raise ArithmeticError("as told")

    seen = train(model, group, steps=1)
    loss = model(torch.ones(2, WIDTH, dtype=torch.float64).requires_grad_()).sum()
    handle = model.blocks[1].register_forward_hook(lambda module, inputs, output: output.register_hook(fails) and None)  # type: ignore[operator,union-attr]
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
    handle.remove()
    del loss
    return [*seen, *train(model, group, steps=2)]


BODIES = [whole_and_groups, accumulating, guarded, scaled, over_tokens, changing_what_trains, shown_and_written, broken]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_capabilities_have_the_same_bits(body: Body, tmp_path: Path) -> None:
    assert_same(on_ranks(2, body, tmp_path), on_ranks(2, body, None))


def test_checkpoints_with_and_without_offload_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()

    def body(path: Path) -> Body:
        def saves(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
            optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
            train(model, group, optimizer, 1)
            zero3.save_checkpoint(path, model, optimizer)
            return train(model, group, optimizer, 1)

        return saves

    def loads(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        zero3.load_checkpoint(tmp_path / "with", model, optimizer)
        return train(model, group, optimizer, 1)

    found = on_ranks(2, body(tmp_path / "with"), tmp_path / "files")
    expected = on_ranks(2, body(tmp_path / "without"), None)
    assert_same(found, expected)
    for world_size, offload in ((2, tmp_path / "files"), (2, None)):
        assert_same(on_ranks(world_size, loads, offload), expected)


def test_materialize_and_load(tmp_path: Path) -> None:
    def run(offload: Any) -> list[list[Tensor]]:
        def body(group: ThreadCommunicator) -> list[Tensor]:
            with torch.device("meta"):
                model: nn.Module = Model().double()
            zero3.shard(model, policy=ShardingPolicy(offload=offload), process_group=group, device="cpu")
            zero3.materialize(model, init=lambda module: [nn.init.constant_(p, 0.1) for p in module.parameters(recurse=False)] and None)
            return [*values(model), *train(model, group, steps=1)]

        return run_ranks(2, body)

    assert_same(run(tmp_path), run(None))
