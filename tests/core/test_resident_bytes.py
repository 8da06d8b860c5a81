"""ShardingPolicy(resident_bytes=N): frozen full buffers stay from step to step. No bit of a result changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.adapters import WIDE, adapted, same_bits, took, values_of
from tests.support.inside import held_bytes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence, process_group
from tests.support.stacks import WIDTH, WORDS, Stack, loss_of, train
from tests.support.uneven import Plan, assert_same, joined_threads, plain, tell_sharded
from zero3 import ShardingPolicy

NUMEL = 8  # bytes of an element
EMBED, NORM, HEAD = WORDS * WIDTH + 1, 2 * WIDTH, WORDS * WIDTH + 1  # full buffers on two ranks, in elements
BLOCKS = [numel + numel % 2 for numel in (2 * WIDTH * (WIDE + i) + WIDE + i + WIDTH for i in range(3))]
ALL = NUMEL * (EMBED + NORM + HEAD + sum(BLOCKS))


def sharded(group: ThreadCommunicator, **policy: Any) -> Stack:
    return zero3.shard(adapted(), policy=ShardingPolicy(**policy), process_group=process_group(group))


def lives(group: ThreadCommunicator, **policy: Any) -> list[Tensor]:
    """Steps, evaluations, a load and a change by hand: what they bring, to the bit."""
    model = sharded(group, **policy)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    found = []
    for step in range(6):
        found.append(train(model, Turn(group.rank, step, 2)).detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(loss_of(model, Turn(group.rank, 50 + step, 2)))
        if step == 1:
            state = zero3.full_state_dict(model)
            zero3.load_full_state_dict(model, {name: value * 1.01 for name, value in state.items()})
        if step == 2:
            with zero3.full_params(model, writeback=True):
                model.blocks[1].up.weight.data.mul_(1.1)
        if step == 3:
            for chunk in model.parameters():
                chunk.data.mul_(0.9)
        if step == 4:
            with zero3.resident(model), torch.no_grad():
                found.append(loss_of(model, Turn(group.rank, 0, 2)))
    return [*found, *values_of(model, group)]


@pytest.mark.parametrize(
    "policy",
    [
        {}, {"prefetch_depth": 0}, {"dynamic": True}, {"transactional": True}, {"reshard_after_forward": False}, {"stage": 2},
        {"group_adapters": False}, {"param_dtype": torch.float32},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("world_size", [1, 2])
def test_resident_bytes_changes_no_bit(world_size: int, policy: dict[str, Any]) -> None:
    expected = run_ranks(world_size, lambda group: lives(group, **policy))
    for nbytes in (NUMEL * (NORM + EMBED + BLOCKS[0]), 10**6):
        found = run_ranks(world_size, lambda group, nbytes=nbytes: lives(group, resident_bytes=nbytes, **policy))
        assert all(same_bits(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("nbytes", "gathered"),
    [
        (0, [NORM, EMBED, *BLOCKS, HEAD]),
        (ALL, []),
        (ALL - 1, [HEAD]),
        (NUMEL * (NORM + EMBED), [*BLOCKS, HEAD]),
        (NUMEL * (NORM + EMBED + BLOCKS[0]) - 1, [*BLOCKS]),  # the first block does not fit, and the head does
        (NUMEL * NORM - 1, [NORM, EMBED, *BLOCKS, HEAD]),
    ],
)
def test_resident_bytes_hold_the_first_that_fit_and_gather_them_once(nbytes: int, gathered: list[int]) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, resident_bytes=nbytes)
        adapters = sum(chunk.numel() for chunk in zero3.get_trainable_chunk(model)) * 2
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        train(model, Turn(group.rank, 0, 2))
        for step in range(2):
            group.log.clear()
            loss = loss_of(model, Turn(group.rank, step, 2))
            assert [numel for numel in took(group, "all_gather") if numel != adapters] == gathered
            loss.backward()
            assert set(took(group, "all_gather")) <= set(gathered)
            optimizer.step()
            optimizer.zero_grad()
        assert sum(held_bytes(model).values()) == ALL - NUMEL * sum(gathered) <= nbytes, "and nothing else stays"

    run_ranks(2, body)


@pytest.mark.parametrize("group_adapters", [True, False])
def test_what_trains_takes_none_of_resident_bytes(group_adapters: bool) -> None:
    """Wherever it stands among what is frozen: bytes for exactly that hold all of it."""

    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, resident_bytes=ALL, group_adapters=group_adapters)
        train(model, Turn(group.rank, 0, 2))
        assert sum(held_bytes(model).values()) == ALL

    run_ranks(2, body)


@pytest.mark.parametrize("change", ["load", "checkpoint", "writeback", "by hand", "one rank alone"])
def test_resident_bytes_follow_a_load_a_writeback_or_a_changed_chunk(change: str, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, resident_bytes=ALL)
        chunk = dict(model.blocks[1].named_parameters())["frozen_chunk"]
        with torch.no_grad():
            before = loss_of(model, Turn(0, 0, 1))
            if change == "load":
                state = zero3.full_state_dict(model)
                zero3.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
            elif change == "checkpoint":
                chunk.data.mul_(2)
                zero3.save_checkpoint(tmp_path / "saved", model)
                chunk.data.div_(2)
                loss_of(model, Turn(0, 0, 1))
                zero3.load_checkpoint(tmp_path / "saved", model)
            elif change == "writeback":
                with zero3.full_params(model.blocks[1], writeback=True):
                    model.blocks[1].up.weight.data.mul_(2)
            elif change == "by hand" or group.rank == 1:
                chunk.data.mul_(2)
            group.log.clear()
            after = loss_of(model, Turn(0, 0, 1))
            with zero3.full_params(model):
                full = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        again = adapted()
        again.load_state_dict(full)
        assert not torch.equal(before, after)
        torch.testing.assert_close(after, loss_of(again, Turn(0, 0, 1)).detach(), rtol=1e-12, atol=0)
        if change in ("by hand", "one rank alone"):
            assert BLOCKS[1] in took(group, "all_gather")

    run_ranks(2, body)


def test_resident_bytes_after_an_exception_gather_nothing_again() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, resident_bytes=ALL)
        train(model, Turn(group.rank, 0, 2))
        for _ in range(2):
            group.log.clear()
            broken = model.blocks[1].up.register_forward_hook(_raise)
            with pytest.raises(RuntimeError, match="on purpose"):
                train(model, Turn(group.rank, 0, 2))
            broken.remove()
            train(model, Turn(group.rank, 0, 2))
            assert not {NORM, EMBED, *BLOCKS} & set(took(group, "all_gather"))

    run_ranks(2, body)


def _raise(*_: object) -> None:
    raise RuntimeError("on purpose")


def test_what_is_written_into_a_resident_buffer_is_refused_and_gathered_again() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, resident_bytes=ALL)
        expected = train(model, Turn(group.rank, 0, 2)).detach()
        model.zero_grad()

        def write(module: nn.Module, inputs: object) -> None:
            with torch.no_grad():
                module.weight.mul_(2)  # type: ignore[operator]

        written = model.blocks[1].up.register_forward_pre_hook(write)
        with pytest.raises(RuntimeError, match=r"up\.weight' was changed in place"):
            train(model, Turn(group.rank, 0, 2))
        written.remove()
        assert torch.equal(train(model, Turn(group.rank, 0, 2)), expected)

    run_ranks(2, body)


def test_resident_bytes_of_a_sequential_are_for_all_its_layers() -> None:
    def build() -> nn.Sequential:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).double()
        for linear in model[:2]:
            linear.requires_grad_(False)
        return model

    models = [build() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = in_sequence(models[group.rank], group, ShardingPolicy(resident_bytes=NUMEL * 20 + 1))
        for _ in range(3):
            group.log.clear()
            model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        assert took(group, "all_gather") == [20, 20], "the second and the last one; backward gathers no frozen layer"

    run_ranks(2, body)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_frozen_chunk_is_gathered_once_at_stages_1_and_2(stage: Any) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, stage=stage, group_adapters=False)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        for step in range(3):
            group.log.clear()
            train(model, Turn(group.rank, step, 2))
            optimizer.step()
            optimizer.zero_grad()
            frozen = [numel for numel in took(group, "all_gather") if numel != 2 * WIDTH]  # which adapters have, and the norm
            assert frozen == ([EMBED, *BLOCKS, HEAD] if not step else [])

    run_ranks(2, body)


def test_ranks_without_data_keep_resident_buffers_too() -> None:
    plan = Plan(((1, 1), (1, 1, 1), ()), frozen=True, policy=ShardingPolicy(resident_bytes=10**6))
    models = [plain(plan) for _ in plan.batches]

    def body(group: ThreadCommunicator) -> Any:
        def joined(*args: Any, **kwargs: Any) -> Any:
            return joined_threads(group, *args, by_all=plan.by_all, **kwargs)

        return tell_sharded(plan, models[group.rank], group.rank, joined, group)

    assert_same(run_ranks(len(plan.batches), body), plan, 1e-9)


def test_resident_bytes_must_be_a_number_of_bytes() -> None:
    with pytest.raises(ValueError, match="resident_bytes must be 0 or more, found -1"):
        ShardingPolicy(resident_bytes=-1)
    with pytest.raises(TypeError, match=r"resident_bytes must be an integer, found 1000000000\.0"):
        ShardingPolicy(resident_bytes=1e9)  # type: ignore[arg-type]
