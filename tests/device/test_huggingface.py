"""Hugging Face's models on the simulated device: in any order of streams, the numbers are those of the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

import zero3
from tests.device.huggingface import HUGGING_FACE, LLAMA, plain, sharded, words
from tests.device.test_order import run
from tests.device.test_parity import SETTINGS, Setting, assert_same, in_any_order, on_cpu
from tests.device.training import Me, built

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning:transformers")]  # of what older versions of it need


@pytest.mark.parametrize(("name", "setting"), [*zip(HUGGING_FACE, cycle(SETTINGS), strict=False)], ids=str)
def test_in_any_order_the_numbers_are_those_of_the_cpu(name: str, setting: Setting) -> None:
    tolerance = 1e-3 if "bf16" in name else 1e-6  # the CPU's attention is another kernel than the device's plain operators
    assert_same(in_any_order(HUGGING_FACE[name], setting), on_cpu(HUGGING_FACE[name]), tolerance)


def _host_waits_of_a_step(world_size: int, make: Callable[[Me], Any]) -> list[str]:
    """Of all ranks together, in a step after some others."""
    from tests.device import simulated

    def body(me: Me) -> list[str]:
        model = make(me)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        for step in range(4):
            tokens = words(me, step)
            mask = torch.ones_like(tokens)
            if together.wait() == 0:
                simulated.C.waits()  # those so far
            together.wait()
            model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()
            if zero3.is_sharded(model):
                zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            together.wait()
        return list(simulated.C.waits()) if me.rank == 0 else []

    together = threading.Barrier(world_size)
    simulated.schedule("random", 1)
    return list(run(world_size, body)[0])


def test_the_host_waits_in_a_step_only_where_transformers_does() -> None:
    alone = _host_waits_of_a_step(1, lambda me: built(lambda: plain(LLAMA)).to(me.device))
    assert alone == ["aten::_local_scalar_dense"]  # a look at the mask
    assert _host_waits_of_a_step(2, lambda me: sharded(me, built(lambda: plain(LLAMA)))) == 2 * alone
