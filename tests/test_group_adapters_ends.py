"""Grouped adapters when something ends early: an exception, a guarded micro-batch, a block called alone, a deleted model."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

import zero3
from tests.support.adapters import adapted
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_at_rest, assert_close, full_parameters
from tests.support.stacks import WIDTH, loss_of, train
from tests.test_group_adapters import sharded


def test_an_exception_in_forward_or_backward_leaves_grouped_adapters_ready_for_the_next_step() -> None:
    wanted = adapted()
    for rank in range(2):
        (loss_of(wanted, Turn(rank, 1, 2)) / 2).backward()
    expected = {name: parameter.grad for name, parameter in wanted.named_parameters() if parameter.grad is not None}

    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        for where in ("forward", "backward"):
            handle = model.blocks[1].up.register_forward_hook(_raise if where == "forward" else _raise_in_backward)
            with pytest.raises(RuntimeError, match="on purpose"):
                train(model, Turn(group.rank, 0, 2))
            handle.remove()
            train(model, Turn(group.rank, 1, 2))
            with zero3.full_gradients(model) as found:
                assert_close({name: gradient.clone() for name, gradient in found.items()}, expected, TOLERANCE, "gradients")
            model.zero_grad()
        assert_at_rest(model)

    run_ranks(2, body)


def _raise(*_: object) -> None:
    raise RuntimeError("on purpose")


def _raise_in_backward(module: object, inputs: object, output: Tensor) -> None:
    output.register_hook(_raise)  # type: ignore[no-untyped-call]


def test_step_guard_drops_a_micro_batch_with_grouped_adapters() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, resident_bytes=10**6)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        plain = adapted()
        for step in range(5):
            for rank in range(2) if step != 3 else ():
                (loss_of(plain, Turn(rank, step, 2)) / 2).backward()
            with torch.no_grad():
                for parameter in plain.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
            handle = model.blocks[1].up.register_forward_hook(_raise) if step == 3 and group.rank == 1 else None
            with zero3.step_guard(model) as guard:
                train(model, Turn(group.rank, step, 2))
            if handle is not None:
                handle.remove()
            assert guard.failed == (step == 3)
            optimizer.step()
            optimizer.zero_grad()
        assert_close(full_parameters(model), {name: p.detach() for name, p in plain.named_parameters()}, TOLERANCE, "parameters")

    run_ranks(2, body)


def test_a_block_called_alone_names_the_adapter_that_the_root_has() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        with pytest.raises(RuntimeError, match=r"blocks\.1\.a\.weight' of layer the root .*released"):
            model.blocks[1](torch.ones(1, WIDTH, dtype=torch.float64))
        train(model, Turn(group.rank, 0, 2))

    run_ranks(2, body)


def test_a_deleted_model_with_grouped_adapters_is_gone_at_once() -> None:
    model = zero3.shard(adapted())
    train(model, Turn(0, 0, 1))
    gone = weakref.ref(model), *(weakref.ref(chunk) for chunk in model.parameters())
    gc.disable()
    try:
        del model
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()
