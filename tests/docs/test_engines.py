"""The adapter of docs/engines.md, on two ranks as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero3
from tests.docs.test_pages import blocks_of
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import on_two
from tests.support.stacks import stack

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()


class Engine:
    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.calls = 0

    def load(self, named: list[tuple[str, Tensor]]) -> None:
        assert all(tensor.is_shared() for _, tensor in named)
        self.weights |= {name: tensor.clone() for name, tensor in named}
        self.calls += 1


def test_the_adapter_of_the_engines_page_hands_over_all_weights_in_buckets() -> None:
    code = next(block for block in blocks_of(PAGE, "python") if "def synchronise" in block)
    assert len(code.strip().splitlines()) <= 15
    names: dict[str, Any] = {"torch": torch, "zero3": zero3}
    exec(compile(code, "docs/engines.md", "exec"), names)

    def body(model: Any, group: ThreadCommunicator) -> None:
        engine = Engine()
        names["synchronise"](model, engine, group.rank, nbytes=400)
        expected = zero3.full_state_dict(model, rank0_only=False, dtype=torch.bfloat16)
        if group.rank == 0:
            assert engine.calls > 2 and engine.weights.keys() == expected.keys()
            assert all(torch.equal(engine.weights[name], value) for name, value in expected.items())

    on_two(stack, body)
