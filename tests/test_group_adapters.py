"""ShardingPolicy(group_adapters=True): few parameters that train are one chunk of the root's. Numbers stay those of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.adapters import WIDE, adapted, adapter_numel, took
from tests.support.models import WORLDS
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_at_rest, assert_close, by_shard, check_parity, full_parameters, process_group
from tests.support.stacks import WIDTH, Stack, loss_of, train, train_and_look
from zero3 import ShardingPolicy

EVEN = adapter_numel() + adapter_numel() % 2  # the full buffer of all adapters on two ranks
TRAILERS = 2 * 2 * 3  # on each of them: whether a gradient has reached each of two adapters in each of three blocks


def sharded(group: ThreadCommunicator, model: Stack | None = None, **policy: Any) -> Stack:
    return zero3.shard(adapted() if model is None else model, policy=ShardingPolicy(**policy), process_group=process_group(group))


@WORLDS
@pytest.mark.parametrize(
    "policy",
    [
        {}, {"group_adapters": False}, {"stage": 1}, {"stage": 2}, {"dynamic": True}, {"transactional": True}, {"prefetch_depth": 0},
        {"prefetch_depth": 3}, {"reshard_after_forward": False}, {"gradient_reduction": "sum"}, {"resident_bytes": 10**6},
        {"resident_bytes": 2000}, {"separate_backup_group": True}, {"compare_every": 1}, {"grad_dtype": torch.float64},
    ],
    ids=str,
)  # fmt: skip
def test_group_adapters_trains_as_plain_torch(world_size: int, policy: dict[str, Any]) -> None:
    for tied in (False, True):
        build = lambda tied=tied: adapted(tied=tied)  # noqa: E731
        check_parity(build, train_and_look, world_size=world_size, steps=3, shard=by_shard, policy=ShardingPolicy(**policy))


@pytest.mark.parametrize("reentrant", [False, True])
def test_group_adapters_under_checkpointing_and_over_micro_batches(reentrant: bool) -> None:
    def recomputed(model: Any, turn: Turn) -> Tensor:
        through = model.through_blocks

        def through_checkpoints(x: Tensor) -> Tensor:
            x = x.requires_grad_() if x.is_leaf else x
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

        model.through_blocks = through_checkpoints
        losses = []
        for part in range(2):
            with zero3.no_sync(model) if zero3.is_sharded(model) and not part else torch.enable_grad():
                losses.append(train(model, turn._replace(step=10 * turn.step + part)))
        model.through_blocks = through
        return torch.stack(losses)

    check_parity(adapted, recomputed, steps=3, shard=by_shard)


def test_group_adapters_gathers_them_once_and_reduces_them_once_a_step() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        for step in range(3):
            group.log.clear()
            train(model, Turn(group.rank, step, 2))
            assert took(group, "reduce_scatter") == [EVEN + TRAILERS]
            assert took(group, "all_gather").count(EVEN) == 1
        assert [parameter.numel() * 2 for parameter in zero3.get_trainable_chunk(model)] == [EVEN]

    run_ranks(2, body)


def test_group_adapters_under_no_sync_reduces_once_for_all_micro_batches() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        group.log.clear()
        with zero3.no_sync(model):
            train(model, Turn(group.rank, 0, 2))
            train(model, Turn(group.rank, 1, 2))
        assert took(group, "reduce_scatter") == []
        train(model, Turn(group.rank, 2, 2))
        assert took(group, "reduce_scatter") == [EVEN + TRAILERS]

    run_ranks(2, body)


@pytest.mark.parametrize("grouped", [True, False])
def test_layers_below_the_first_adapter_are_not_gathered_in_backward(grouped: bool) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, adapted(first=2), group_adapters=grouped)
        train(model, Turn(group.rank, 0, 2))
        loss = loss_of(model, Turn(group.rank, 1, 2))
        group.log.clear()
        loss.backward()
        frozen = 2 * WIDTH * (WIDE + 2) + WIDE + 2 + WIDTH  # the elements of the last block's base
        assert took(group, "all_gather") == ([frozen + frozen % 2] if grouped else [frozen + frozen % 2, 2 * WIDTH])

    run_ranks(2, body)


def test_group_adapters_is_for_few_elements_alone() -> None:
    """Just a sixteenth of the elements is not less than a sixteenth."""

    def numbers(frozen: int) -> list[int]:
        class Part(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base, self.tip = nn.Parameter(torch.ones(frozen), requires_grad=False), nn.Parameter(torch.ones(1))

            def forward(self, x: Tensor) -> Tensor:
                return x * self.base.sum() * self.tip

        model = zero3.shard(nn.Sequential(Part(), Part()), layers=Part)
        owned = [sum(chunk.requires_grad for chunk in part.parameters()) for part in (*model, model)]
        return [*owned[:2], owned[2] - sum(owned[:2])]

    assert numbers(15) == [1, 1, 0]
    assert numbers(16) == [0, 0, 1]


def test_group_adapters_leaves_layers_with_another_policy_their_own() -> None:
    def policy(name: str, module: nn.Module) -> ShardingPolicy:
        return ShardingPolicy(stage=2) if name == "blocks.1" else ShardingPolicy()

    check_parity(adapted, train, steps=3, shard=lambda model, group, _: zero3.shard(model, policy=policy, process_group=group))
    model = zero3.shard(adapted(), policy=policy)
    root: Any = vars(model)["_zero3_root"]
    assert [len(layer._state.chunks.trainable()) for layer in model.blocks] == [0, 1, 0]
    assert root.chunks.trainable()[0].numel() == adapter_numel(2)


def test_group_adapters_under_param_dtype_computes_as_without() -> None:
    """The same casts and sums in the same order: bit for bit."""

    def run(group: ThreadCommunicator, grouped: bool) -> list[Tensor]:
        model = sharded(group, adapted().float(), group_adapters=grouped, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.5)
        losses = []
        for step in range(3):
            losses.append(train(model, Turn(group.rank, step, 2)).detach())
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *full_parameters(model).values()]

    for found, expected in zip(run_ranks(2, lambda group: run(group, True)), run_ranks(2, lambda group: run(group, False)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("saved_grouped", [True, False])
def test_a_checkpoint_loads_with_group_adapters_on_or_off(tmp_path: Path, saved_grouped: bool) -> None:
    def run(group: ThreadCommunicator) -> None:
        models = [sharded(group, group_adapters=grouped) for grouped in (saved_grouped, not saved_grouped)]
        optimizers = [torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1) for model in models]
        for step in range(2):
            train(models[0], Turn(group.rank, step, 2))
            optimizers[0].step()
            optimizers[0].zero_grad()
        zero3.save_checkpoint(tmp_path / "saved", models[0], optimizers[0])
        zero3.load_checkpoint(tmp_path / "saved", models[1], optimizers[1])
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            losses.append(train(model, Turn(group.rank, 7, 2)))
            norm = zero3.clip_grad_norm_(model, 0.01)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(norm)
        assert_close([losses[0], losses[1]], [losses[2], losses[3]], TOLERANCE, "the next loss and norm")
        assert_close(full_parameters(models[0]), full_parameters(models[1]), TOLERANCE, "parameters after the next step")

    run_ranks(2, run)


def test_group_adapters_with_param_groups_and_whole_parameters() -> None:
    def groups(model: nn.Module, turn: Any = None) -> list[dict[str, Any]]:
        if zero3.is_sharded(model):
            return zero3.param_groups(model, lambda name, info: {"lr": 0.3 if ".a." in name else 0.1, "whole": ".b." in name})
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        return [{"params": [p for n, p in named if (".a." in n) == is_a], "lr": 0.3 if is_a else 0.1} for is_a in (True, False)]

    def run(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = sharded(group)
        return steps(model, torch.optim.SGD(groups(model)), [group.rank])

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, ranks: list[int]) -> dict[str, Tensor]:
        for step in range(3):
            for rank in ranks:
                (loss_of(model, Turn(rank, step, 2)) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return full_parameters(model) if zero3.is_sharded(model) else dict(model.named_parameters())

    plain = adapted()
    expected = {name: p.detach() for name, p in steps(plain, torch.optim.SGD(groups(plain)), [0, 1]).items()}
    for found in run_ranks(2, run):
        assert_close(found, expected, TOLERANCE, "parameters")


def test_set_trainable_on_grouped_adapters_thaws_and_freezes_as_on_others() -> None:
    def run(group: ThreadCommunicator, grouped: bool) -> list[Tensor]:
        model = sharded(group, group_adapters=grouped)
        found = []
        for chosen in ("blocks", "blocks.1.a", "head"):
            zero3.set_trainable(model, lambda name, info, chosen=chosen: name.startswith(chosen))
            optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
            found.append(train(model, Turn(group.rank, 0, 2)).detach())
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *full_parameters(model).values()]

    for found, expected in zip(run_ranks(2, lambda group: run(group, True)), run_ranks(2, lambda group: run(group, False)), strict=True):
        assert_close(found, expected, TOLERANCE, "losses and parameters")


def train_in_processes(rank: Rank) -> None:
    plain = adapted()
    model = zero3.shard(adapted())
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    for step in range(3):
        for number in range(rank.world_size):
            (loss_of(plain, Turn(number, step, rank.world_size)) / rank.world_size).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        train(model, Turn(rank.number, step, rank.world_size))
        optimizer.step()
        optimizer.zero_grad()
    assert_close(full_parameters(model), {name: p.detach() for name, p in plain.named_parameters()}, TOLERANCE, "parameters")
    assert_at_rest(model)


def test_group_adapters_in_processes() -> None:
    on_ranks(2, train_in_processes)
