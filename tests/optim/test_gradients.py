"""Gradients by name, in slices and whole, against those of the unsharded model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.optim.test_clip_grad_norm import WAYS, plain_with_gradients, with_gradients
from tests.support import processes
from tests.support.models import WORLDS
from tests.support.param_groups import build
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_close, process_group
from tests.support.stacks import Stack, loss_of, stack, train
from zero3 import ShardingPolicy

BY_WAY = pytest.mark.parametrize("way", WAYS)
TOLERANCE = 1e-12


def expected_of(plain: nn.Module) -> dict[str, Tensor]:
    """Not of what nothing uses, empty or not."""
    return {name: p.grad for name, p in plain.named_parameters() if p.requires_grad and p.grad is not None}


def whole(model: nn.Module) -> dict[str, Tensor]:
    with zero3.full_gradients(model) as gradients:
        return dict(gradients)


@WORLDS
@BY_WAY
def test_named_gradients_join_to_the_whole(world_size: int, way: str) -> None:
    models = [build(rank) for rank in range(world_size)]

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = with_gradients(group, models[group.rank], WAYS[way])
        before = len(group.log)
        found = zero3.named_gradients(model)
        assert len(group.log) == before, "no communication"
        return found, whole(model)

    results = run_ranks(world_size, body)
    expected = expected_of(plain_with_gradients(torch.float64, WAYS[way]))
    for slices, gathered in results:
        assert list(slices) == list(gathered) == list(expected)
        assert_close(gathered, expected, TOLERANCE, "full_gradients")
    joined = {name: torch.cat([slices[name] for slices, _ in results]) for name in expected}
    assert_close(joined, {name: value.flatten() for name, value in expected.items()}, TOLERANCE, "named_gradients")


def test_full_gradients_of_other_layers_on_another_rank_are_an_error_on_all() -> None:
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        train(model, Turn(0, 0, 1))
        with pytest.raises(ValueError, match="ranks differ in full_gradients"):
            whole(model.blocks[group.rank])

    run_ranks(2, body)


def scaled(gradients: dict[str, Tensor]) -> None:
    """Another factor for each parameter, from what only the whole one tells."""
    for gradient in gradients.values():
        gradient.div_(1 + gradient.norm())


@WORLDS
@BY_WAY
def test_full_gradients_writeback_takes_rank_0s(world_size: int, way: str) -> None:
    models = [build(rank) for rank in range(world_size)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = with_gradients(group, models[group.rank], WAYS[way])
        with zero3.full_gradients(model) as gradients:
            for gradient in gradients.values():
                gradient.fill_(7)  # lost
        with zero3.full_gradients(model, writeback=True) as gradients:
            for gradient in gradients.values() if group.rank else ():
                gradient.fill_(7)  # lost too
            if not group.rank:
                scaled(gradients)
        zero3.clip_grad_norm_(model, float("inf"))  # padding is still zero, or its norm would show it
        return whole(model)

    expected = expected_of(plain_with_gradients(torch.float64, WAYS[way]))
    scaled({name: gradient for name, gradient in expected.items() if gradient.numel()})
    for found in run_ranks(world_size, body):
        assert_close(found, expected, TOLERANCE, "after writeback")


def surgery(gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        gradient.mul_(0.5 if name.endswith("bias") else -2.0)


@WORLDS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_named_gradients_are_views_that_later_micro_batches_add_to(world_size: int, dtype: torch.dtype) -> None:
    """In bf16 chunks have a wider sum beside them, which must not bring back what was changed."""
    models = [stack().to(dtype) for _ in range(world_size)]
    plain = stack().to(dtype)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=process_group(group), policy=ShardingPolicy(reduce_dtype=torch.float64))
        train(model, Turn(0, 0, 1))
        surgery(zero3.named_gradients(model))
        train(model, Turn(0, 1, 1))
        return whole(model)

    train(plain, Turn(0, 0, 1))
    surgery({name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None})
    train(plain, Turn(0, 1, 1))
    for found in run_ranks(world_size, body):
        assert_close(found, expected_of(plain), TOLERANCE if dtype == torch.float64 else 0.02, "after surgery")


@WORLDS
@pytest.mark.parametrize("inside", ["blocks.1", "blocks.1.up", "norm"])
def test_full_gradients_of_a_module_alone_have_its_names(world_size: int, inside: str) -> None:
    models = [stack(tied=True) for _ in range(world_size)]
    plain = stack(tied=True)
    train(plain, Turn(0, 0, 1))

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], list[str]]:
        model: Stack = zero3.shard(models[group.rank], process_group=process_group(group))
        assert not zero3.named_gradients(model) and not whole(model), "no backward yet"
        train(model, Turn(0, 0, 1))
        assert list(zero3.named_gradients(model)) == [name for name, _ in plain.named_parameters()]
        part = model.get_submodule(inside)
        return whole(part), list(zero3.named_gradients(part))

    for found, names in run_ranks(world_size, body):
        expected = expected_of(plain.get_submodule(inside))
        assert_close(found, expected, TOLERANCE, inside)
        assert names == list(expected)


@pytest.mark.parametrize("read", [zero3.named_gradients, whole], ids=["named_gradients", "full_gradients"])
def test_gradients_that_are_not_reduced_raise_under_no_sync_and_are_reduced_at_stage_1(read: object) -> None:
    models = {stage: [stack() for _ in range(2)] for stage in (1, 3)}
    plain = stack()
    for rank in range(2):
        (loss_of(plain, Turn(rank, 0, 2)) / 2).backward()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[3][group.rank], process_group=group)
        with zero3.no_sync(model):
            train(model, Turn(group.rank, 0, 2))
        with pytest.raises(RuntimeError, match="not known yet"):
            read(model)  # type: ignore[operator]
        lazy = zero3.shard(models[1][group.rank], process_group=group, policy=ShardingPolicy(stage=1))
        train(lazy, Turn(group.rank, 0, 2))
        read(lazy)  # type: ignore[operator]
        return whole(lazy)

    for found in run_ranks(2, body):
        assert_close(found, expected_of(plain), TOLERANCE, "stage 1")


def fails_on_rank_0(model: nn.Module, rank: int) -> None:
    with zero3.full_gradients(model, writeback=True) as gradients:
        scaled(gradients)
        if rank == 0:
            raise RuntimeError("mine")


def test_full_gradients_writeback_writes_nothing_if_a_rank_raises() -> None:
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        train(model, Turn(0, 0, 1))
        before = whole(model)
        with pytest.raises(RuntimeError, match=r"rank 0: full_gradients.* RuntimeError: mine|^mine"):
            fails_on_rank_0(model, group.rank)
        assert_close(whole(model), before, 0, "nothing was written")

    run_ranks(2, body)


def on_a_process(rank: processes.Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = zero3.shard(stack())
    (loss_of(model, Turn(rank.number, 0, rank.world_size))).backward()
    surgery(zero3.named_gradients(model))
    with zero3.full_gradients(model, writeback=True) as gradients:
        scaled(gradients)
    frozen = zero3.Zero3Layer(torch.nn.Linear(2, 2).requires_grad_(False))
    assert not zero3.named_gradients(frozen) and not whole(frozen)
    return {name: slices.clone() for name, slices in zero3.named_gradients(model).items()}, whole(model)


def test_gradients_by_name_on_processes() -> None:
    plain = stack()
    for rank in range(2):
        (loss_of(plain, Turn(rank, 0, 2)) / 2).backward()
    expected = expected_of(plain)
    surgery(expected)
    scaled(expected)
    results = processes.on_ranks(2, on_a_process)
    for _, found in results:
        assert_close(found, expected, TOLERANCE, "full_gradients")
    for name, gradient in expected.items():
        assert_close([torch.cat([slices[name] for slices, _ in results])], [gradient.flatten()], TOLERANCE, name)


def through_a_file(gradient: Tensor) -> Tensor:
    torch.save([gradient], file := io.BytesIO())
    file.seek(0)
    return torch.load(file)[0]


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "deepcopy": copy.deepcopy,
    "deepcopy in a list": lambda gradient: copy.deepcopy([gradient])[0],
    "pickle": lambda gradient: pickle.loads(pickle.dumps(gradient)),
    "torch.save": through_a_file,
}


@pytest.mark.parametrize(("stage", "kind"), [(3, "slice"), (1, "slice"), (3, "piece"), (3, "whole")])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_chunks_gradient_is_a_plain_tensor(stage: int, way: str, kind: str) -> None:
    """At stage 1 it asks for the values."""
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group, policy=ShardingPolicy(stage=stage))
        if kind != "slice":
            zero3.param_groups(model, lambda name, info: {"whole": kind == "whole"})
        chunks = zero3.get_trainable_chunk(model)
        with zero3.no_sync(model):
            train(model, Turn(group.rank, 0, 2))
            with pytest.raises(RuntimeError, match="this gradient is not known yet"):
                COPIES[way](chunks[0].grad)
        zero3.reduce_gradients(model)
        train(model, Turn(group.rank, 1, 2))
        copies = [COPIES[way](chunk.grad) for chunk in chunks]
        for chunk, found in zip(chunks, copies, strict=True):
            assert type(found) is Tensor and found.data_ptr() != chunk.grad.data_ptr()
            chunk.grad.copy_(found + 0)
        assert_close(whole(model), expected, TOLERANCE, "gradients of copies")

    plain = stack()
    for rank in range(2):
        for step in range(2):
            (loss_of(plain, Turn(rank, step, 2)) / 2).backward()
    expected = expected_of(plain)
    run_ranks(2, body)
