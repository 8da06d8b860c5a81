"""The worked page of docs/design.md: a new wire is one file, goes with every store, and core does not learn its name."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.inside import chunks_of
from tests.support.models import mlp, rows
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from zero3 import ShardingPolicy
from zero3.build import axes
from zero3.core.chunk import Room, passing

PAGE = (Path(__file__).parents[2] / "docs/design.md").read_text()


def halved() -> Any:
    """The class as the page has it."""
    names: dict[str, Any] = {"torch": torch, "Room": Room, "passing": passing, "partial": partial}
    (code,) = re.findall(r"^```python\n(class Halved:\n.*?)```", PAGE, re.M | re.S)
    exec(code, names)
    return names["Halved"]


def trained(group: ThreadCommunicator, policy: ShardingPolicy, wires: list[Any]) -> list[torch.Tensor]:
    model = zero3.shard(mlp(), nn.Linear, policy=policy, process_group=process_group(group))
    wires += [chunk.wire for chunk in chunks_of(model)]
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    for _ in range(3):
        model(rows(3)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [chunk.detach().clone() for chunk in zero3.get_trainable_chunk(model)]


@pytest.mark.parametrize("offload", [None, "DIR"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_a_toy_wire_trains_to_the_same_bits(
    offload: str | None, param_dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halving and doubling are exact."""
    policy = ShardingPolicy(offload=tmp_path if offload else None, param_dtype=param_dtype)
    plain = run_ranks(2, lambda group: trained(group, policy, []))
    wires: list[Any] = []
    Halved = halved()  # noqa: N806
    monkeypatch.setattr(axes, "Plain", Halved)
    for expected, found in zip(plain, run_ranks(2, lambda group: trained(group, policy, wires)), strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
    assert wires and all(type(wire) is Halved for wire in wires)
