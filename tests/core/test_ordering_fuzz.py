"""Models, policies and lives drawn at random on the fake device: no access to any buffer that its streams leave unordered.

The checker does not watch one timing: two accesses count as ordered only if events order them, so what passes here
passes under every delay of every stream. ZERO3_EXAMPLES=3000 draws more, and others every time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zero3
from tests.core.test_random_programs import WIDTH, Node, as_layers, build, in_place, models, with_shard
from tests.support.ordering import EchoCommunicator, FakeDevice, FakeEvent, FakeStream, faking, release_at_once
from zero3 import ShardingPolicy

EXAMPLES = int(os.environ.get("ZERO3_EXAMPLES", "8"))

policies = st.builds(
    ShardingPolicy,
    param_dtype=st.sampled_from([None, None, torch.bfloat16]),
    reduce_dtype=st.sampled_from([None, None, torch.float32]),
    gradient_reduction=st.sampled_from(["mean", "sum"]),
    reshard_after_forward=st.booleans(),
    prefetch_depth=st.integers(0, 3),
    separate_backup_group=st.booleans(),
    transactional=st.booleans(),
)
Action = Callable[[nn.Module, torch.optim.Optimizer], object]


def rows(model: nn.Module) -> Tensor:
    return torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True, device=next(model.parameters()).device)


def loss_of(model: nn.Module) -> Tensor:
    return model(rows(model)).double().pow(2).mean()


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()


def accumulate_locally(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with zero3.no_sync(model):
        loss_of(model).backward()


def two_forwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    (loss_of(model) + loss_of(model)).backward()


def token_mean(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    zero3.backward(loss_of(model), 3, model)
    zero3.backward(loss_of(model), 5, model)


def guarded(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with zero3.step_guard(model):
        loss_of(model).backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    zero3.clip_grad_norm_(model, 1.0)
    optimizer.step()


def zero_grad(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def evaluate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        loss_of(model)


def forward_only(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model)


def generate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with zero3.resident(model), torch.no_grad():
        loss_of(model)


def rewrite(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with zero3.full_params(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def break_off(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """An exception at the other end of the model, when all layers are on their way."""
    x = rows(model)
    x.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x * 2).double().pow(2).mean().backward()


ACTIONS: list[Action] = [
    accumulate, accumulate_locally, two_forwards, token_mean, guarded, step, step, zero_grad,
    evaluate, forward_only, generate, rewrite, break_off,
]  # fmt: skip


def lead(model: nn.Module, actions: Sequence[Action]) -> None:
    """A model's life. `step` first, which is what everything else comes after."""
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9)
    for action in (step, *actions, step):
        action(model, optimizer)


def live(nodes: tuple[Node, ...], policy: ShardingPolicy, shard: Any, actions: Sequence[Action]) -> FakeDevice:
    """A model's life on the fake device."""
    with faking() as fake:
        lead(shard(build(nodes), EchoCommunicator(), policy), actions)
        fake.notice_freed()
    return fake


lives: dict[str, st.SearchStrategy[Any]] = {
    "nodes": models,
    "policy": policies,
    "shard": st.sampled_from([in_place, as_layers, with_shard]),
    "actions": st.lists(st.sampled_from(ACTIONS), max_size=6),
}
drawn = settings(max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES == 8, suppress_health_check=list(HealthCheck))


@drawn
@given(**lives)
def test_no_life_has_a_race(nodes: tuple[Node, ...], policy: ShardingPolicy, shard: Any, actions: list[Action]) -> None:
    fake = live(nodes, policy, shard, actions)
    assert fake.races == []
    assert fake.allocations_on_lanes == []


class Shorter(nn.Module):
    """Leaves out its last layer, if it is told to: by then it is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, calls: int) -> Tensor:
        for layer in self.layers[:calls]:
            x = layer(x)
        return x


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_layer_that_was_foreseen_and_does_not_come_leaves_no_race(depth: int) -> None:
    with faking() as fake:
        model = zero3.shard(Shorter(), nn.Linear, policy=ShardingPolicy(prefetch_depth=depth), process_group=EchoCommunicator())
        for calls in (4, 4, 3, 4, 2, 4, 1):
            with torch.no_grad():
                model(torch.ones(2, WIDTH), calls)
        fake.notice_freed()
    assert fake.races == []


# -- each order that is taken out is found, in the very lives that have none missing


def _lanes_do_not_wait(name: str, patch: pytest.MonkeyPatch) -> None:
    real = FakeStream.wait_stream
    patch.setattr(FakeStream, "wait_stream", lambda self, other: None if self.name.startswith(name) else real(self, other))


def _compute_does_not_wait(name: str, patch: pytest.MonkeyPatch) -> None:
    real = FakeEvent.record
    patch.setattr(FakeEvent, "record", lambda self, stream: None if stream.name.startswith(name) else real(self, stream))


def _backups_hold_nothing(name: str, patch: pytest.MonkeyPatch) -> None:
    release_at_once(patch)


@pytest.mark.parametrize(
    ("take_out", "name"),
    [(_lanes_do_not_wait, "fetch"), (_lanes_do_not_wait, "backup"), (_compute_does_not_wait, "fetch"), (_compute_does_not_wait, "backup"),
     (_backups_hold_nothing, "")],
)  # fmt: skip
@pytest.mark.parametrize("policy", [ShardingPolicy(), ShardingPolicy(param_dtype=torch.bfloat16, transactional=True)])
def test_an_order_that_is_missing_is_found(take_out: Any, name: str, policy: ShardingPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    take_out(name, monkeypatch)
    assert live((Node(), Node(), Node()), policy, in_place, [accumulate]).races
