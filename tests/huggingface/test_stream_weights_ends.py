"""stream_weights on ranks that stop early, that hold their iterators, or that ask at the wrong time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.support.models import Broken
from tests.support.processes import Rank, on_ranks, try_on_ranks
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import Turn, assert_at_rest, on_two
from tests.support.stacks import loss_of, stack

Names = list[str]


def all_of(model: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in zero3.stream_weights(model)}


def closes(model: Any) -> None:
    stream = zero3.stream_weights(model)
    next(stream)
    stream.close()
    assert next(stream, None) is None


def breaks(model: Any) -> None:
    for number, _ in enumerate(zero3.stream_weights(model, max_bytes=300)):
        if number == 1:
            break


def raises(model: Any) -> None:
    def consume() -> None:
        for _ in zero3.stream_weights(model):
            raise Broken("the engine is gone")

    with pytest.raises(Broken):
        consume()


def throws(model: Any) -> None:
    stream = zero3.stream_weights(model)
    next(stream)
    with pytest.raises(Broken):
        stream.throw(Broken("the engine is gone"))


def drops_before_the_first(model: Any) -> None:
    zero3.stream_weights(model)
    gc.collect()


STOPS = {each.__name__: each for each in (closes, breaks, raises, throws, drops_before_the_first)}


@pytest.mark.parametrize("how", STOPS)
@pytest.mark.parametrize("depth", [0, 1])
def test_a_rank_that_stops_stream_weights_early_takes_part_in_the_rest(how: str, depth: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        expected = zero3.full_state_dict(model, rank0_only=False)
        if group.rank == 1:
            STOPS[how](model)
        else:
            found = all_of(model) if how != "breaks" else {n: t.clone() for b in zero3.stream_weights(model, max_bytes=300) for n, t in b}
            assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert_at_rest(model)
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        found = all_of(model)
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    on_two(stack, body)


def steps(model: Any, scratch: Path) -> None:
    torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1).step()


USES: dict[str, tuple[str, Callable[[Any, Path], object]]] = {
    "forward": ("begins a forward", lambda model, scratch: loss_of(model, Turn(0, 0, 2))),
    "step": ("begins an optimizer's step", steps),
    "save_pretrained": ("begins save_pretrained", lambda model, scratch: zero3.save_pretrained(model, scratch / "saved")),
    "save_checkpoint": ("begins save_checkpoint", lambda model, scratch: zero3.save_checkpoint(scratch / "checkpoint", model)),
    "full_state_dict": ("begins full_state_dict", lambda model, scratch: zero3.full_state_dict(model)),
    "full_params": (r"begins full_params\(writeback=False\)", lambda model, scratch: zero3.full_params(model).__enter__()),
    "clip_grad_norm_": ("begins clip_grad_norm_", lambda model, scratch: zero3.clip_grad_norm_(model, 1.0)),
    "step_guard": ("begins step_guard", lambda model, scratch: zero3.step_guard(model).__enter__()),
    "stream_weights": ("begins stream_weights", lambda model, scratch: zero3.stream_weights(model)),
    "parked": ("begins parked", lambda model, scratch: zero3.parked(model).__enter__()),
    "reset": ("begins reset", lambda model, scratch: zero3.reset(model)),
}


@pytest.mark.parametrize("use", USES)
def test_a_rank_that_holds_stream_weights_finishes_it_at_its_next_use_of_the_model(use: str, tmp_path: Path) -> None:
    """Before a value changes. Then its iterator is over, and says so."""
    what, do = USES[use]

    def body(model: Any, group: ThreadCommunicator) -> None:
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        expected = zero3.full_state_dict(model, rank0_only=False)
        stream = zero3.stream_weights(model)
        if group.rank == 1:
            next(stream)
            do(model, tmp_path)
            with pytest.raises(RuntimeError, match=f"stream_weights: on this rank the model {what}, and that has ended this stream"):
                next(stream)
        else:
            found = {name: tensor.clone() for name, tensor in stream}
            assert all(torch.equal(found[name], value) for name, value in expected.items())
            do(model, tmp_path)

    on_two(stack, body)


def test_a_backward_finishes_stream_weights() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        loss = loss_of(model, Turn(group.rank, 0, 2))
        stream = zero3.stream_weights(model)
        next(stream)
        if group.rank == 0:
            list(stream)
        loss.backward()
        assert all(chunk.grad is not None for chunk in zero3.get_trainable_chunk(model))
        if group.rank:
            with pytest.raises(RuntimeError, match="stream_weights: on this rank the model begins a backward, and that"):
                next(stream)

    on_two(stack, body)


def test_stream_weights_at_the_wrong_time_is_an_error_that_names_it() -> None:
    """Inside of a forward, a backward, full_params and resident; and of what belongs to others nothing is lost."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        tried: Names = []

        def attempt(*_: object) -> None:
            with pytest.raises(RuntimeError, match="stream_weights"):
                zero3.stream_weights(model)
            tried.append("once")

        handle = model.blocks[1].register_forward_hook(attempt)
        loss = loss_of(model, Turn(group.rank, 0, 2))
        handle.remove()
        loss.register_hook(attempt)
        loss.backward()
        with zero3.full_params(model):
            attempt()
        with zero3.resident(model):
            attempt()
        assert len(tried) == 4
        assert len(all_of(model)) == len(zero3.full_state_dict(model, rank0_only=False))

    on_two(stack, body)


def test_a_model_with_a_stream_that_is_held_is_freed() -> None:
    import weakref

    model = zero3.shard(stack())
    stream = zero3.stream_weights(model)
    next(stream)
    gone = weakref.ref(model)
    del model, stream
    gc.collect()
    assert gone() is None


def stream_on(rank: Rank, tmp: str) -> list[float]:
    """Real processes: one stops, one holds; then all train and stream again."""
    torch.manual_seed(0)
    model = zero3.shard(stack(4))
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
    kept: list[Any] = []
    for step in range(3):
        for number, (_, tensor) in enumerate(stream := zero3.stream_weights(model, dtype=torch.float32)):
            tensor.zero_()
            if rank.number and number == step:
                kept.append(stream if rank.number == 2 else None)
                break
        del stream
        loss_of(model, Turn(rank.number, step, rank.world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tensor.double().sum().item() for tensor in all_of(model).values()]


@pytest.mark.slow
def test_stream_weights_on_processes_that_stop_and_hold(tmp_path: Path) -> None:
    found = on_ranks(3, stream_on, str(tmp_path))
    assert found[0] == found[1] == found[2]


def hold(rank: Rank) -> None:
    model = zero3.shard(stack(2))
    stream = zero3.stream_weights(model)
    next(stream)
    if rank.number == 0:
        list(stream)
    else:
        with suppress(RuntimeError):
            time.sleep(8)


@pytest.mark.slow
def test_a_rank_that_holds_stream_weights_and_does_nothing_more_is_named_at_the_timeout() -> None:
    outcome, _ = try_on_ranks(2, hold, fresh=True, group_timeout=3.0)
    assert outcome.error == "RuntimeError", outcome
    assert "rank 0 of 2: gathering layer" in outcome.text
