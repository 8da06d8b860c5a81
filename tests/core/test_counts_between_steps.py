"""The exact collectives of what runs between steps: micro-batches, evaluation, clipping, state dicts, construction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.test_counts import STEP
from tests.support.ranks import Collective
from tests.support.stories import Block, Container, Teller, told
from zero3 import ShardingPolicy, clip_grad_norm_, full_params, full_state_dict, load_full_state_dict


def test_micro_batches_repeat_the_step_and_the_optimizer_is_alone_with_its_chunks() -> None:
    def body(teller: Teller) -> list[str]:
        model = teller.sequential(teller.blocks())
        optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
        teller.step(model)
        found = []
        for _ in range(2):
            found += [teller.step(model), teller.step(model)]
            optimizer.step()
            optimizer.zero_grad()
            found.append(teller.story())
        return found

    assert told(body) == [STEP, STEP, ""] * 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode_gather_once_and_training_goes_on_without_a_word(context: Callable[[], Any]) -> None:
    def body(teller: Teller) -> list[str]:
        model = teller.sequential(teller.blocks())
        teller.step(model)
        found = []
        for _ in range(2):
            with context():
                model(torch.randn(2, 4))
            found += [teller.story(), teller.step(model)]
        return found

    assert told(body) == ["g0 g1 f0 g2 f1 g3 f2 f3", STEP] * 2


def test_a_forward_without_backward_leaves_nothing_to_the_next() -> None:
    def body(teller: Teller) -> list[str]:
        model = teller.sequential(teller.blocks())
        teller.step(model)
        model(torch.randn(2, 4))
        return [teller.story(), teller.step(model)]

    assert told(body) == ["g0 g1 f0 g2 f1 g3 f2 f3", STEP]


def test_two_forwards_before_a_backward_are_walked_from_the_last() -> None:
    def body(teller: Teller) -> str:
        model = teller.sequential(teller.blocks())
        for _ in range(2):
            teller.story()
            first, second = model(torch.randn(2, 4)), model(torch.randn(2, 4))
            (first.sum() + second.sum()).backward()
        return teller.story()

    assert told(body).split("f3")[2] == " g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 g3 g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0"


def test_a_turn_to_another_known_path_costs_one_word() -> None:
    """Each layer of a new path is compared; later only where a pass turns from the path that was expected."""

    def body(teller: Teller) -> list[int]:
        torch.manual_seed(0)
        blocks = [Block(0, teller.communicator.log) for _ in range(3)]
        for number, block in enumerate(blocks):
            block.number, block.linear = number, nn.Linear(4, 4)
        model = Container([teller.wrap(block, "", ShardingPolicy()) for block in blocks])
        found = []
        for calls in ((0, 1, 2), (0, 2, 1), (0, 1, 2), (0, 2, 1), (0, 2, 1)):
            model.calls = calls
            found.append(teller.step(model).split().count("x"))
        return found

    first, second, *again = told(body)
    assert first > 1 and second > 1
    assert again == [2, 2, 0], "forward and backward"


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_is_one_scalar(norm_type: float) -> None:
    def body(teller: Teller) -> list[Collective]:
        model = teller.sequential(teller.blocks())
        teller.step(model)
        clip_grad_norm_(model, 1.0, norm_type)
        return list(teller.communicator.log)

    (only,) = told(body)
    assert (only.kind, only.numel) == ("all_reduce", 1)


def test_full_state_dict_and_load_full_state_dict_move_each_chunk_once() -> None:
    def body(teller: Teller) -> list[str]:
        model = teller.sequential(teller.blocks())
        teller.story()
        state = full_state_dict(model)
        found = [teller.story()]
        load_full_state_dict(model, state)
        found.append(teller.story())
        with full_params(model):
            pass
        return [*found, teller.story()]

    saved, loaded, shown = told(body)
    assert saved == shown == "x g0 g1 g2 g3"
    assert loaded == "x g0 s0 g1 s1 g2 s2 g3 s3"


def test_construction_compares_and_scatters_each_chunk_once() -> None:
    def body(teller: Teller) -> str:
        torch.manual_seed(0)
        block = teller.blocks()[0]
        block.register_buffer("running", torch.zeros(3))
        teller.wrap(block, "0", ShardingPolicy())
        return teller.story()

    assert told(body) == "x s0 b"


def test_one_rank_moves_nothing() -> None:
    def body(teller: Teller) -> list[Any]:
        model = teller.sequential(teller.blocks())
        teller.step(model)
        model(torch.randn(2, 4)).sum().backward()
        return [entry for entry in teller.communicator.log if isinstance(entry, Collective) and entry.kind != "exchange"]

    assert told(body, world_size=1) == []
