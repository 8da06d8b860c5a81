"""Experts at home in a model that also has a tower, which some ranks call and others do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.experts import Block, H, made, tokens
from tests.support.ranks import run_mesh, run_ranks

CALLS = [(False, False, True, False), (True, False, False, True), (False,) * 4, (False, True, True, True), (True, False, False, False)]


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.language = nn.Linear(H, H).double(), made()

    def forward(self, x: Tensor, sees: bool) -> Tensor:
        return self.language(x * self.vision(x.detach()[:1]).sum() if sees else x)


def seeing(trains: str, checkpoints: str) -> Seeing:
    torch.manual_seed(0)
    model = Seeing()
    model.language.checkpoints = checkpoints
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trains))
    return model


@pytest.mark.parametrize("checkpoints", ["", "not reentrant"])
@pytest.mark.parametrize("trains", ["vision", ("vision", "language.blocks.1", "language.last"), ("vision", "language")], ids=str)
@pytest.mark.parametrize("replicas", [0, 2, 4])
def test_a_tower_trains_under_frozen_experts_though_some_replicas_see_nothing(replicas: int, trains: Any, checkpoints: str) -> None:
    plain = seeing(trains, checkpoints)
    copies = [copy.deepcopy(plain) for _ in range(4)]
    data = [[tokens(rank, 4 * step + 4) for rank in range(4)] for step in range(len(CALLS))]

    def body(group: Any) -> dict[str, Tensor]:
        policy = zero3.ShardingPolicy(expert_parallel=True)
        model = zero3.shard(copies[group.rank], [Block], optional="vision", policy=policy, process_group=group)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), 0.02, weight_decay=0.1)
        for step, sees in enumerate(CALLS):
            loss = model(data[step][group.rank], sees[group.rank]).square().sum()
            assert loss.requires_grad == (any(sees) or trains != "vision"), "on all ranks, if on one"
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    found = run_mesh(replicas, 4 // replicas, body, 20) if replicas else run_ranks(4, body, 20)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], 0.02, weight_decay=0.1)
    for step, sees in enumerate(CALLS):
        for rank in range(4):
            loss = plain(data[step][rank], sees[rank]).square().sum() / 4
            if loss.requires_grad:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in found:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("checkpoints", ["", "not reentrant"])
def test_a_backward_comes_after_the_forward_of_another_batch(checkpoints: str, order: list[int]) -> None:
    """One replica recomputes a batch without an image, since the other has seen one. In the batch after it nobody has."""
    calls = [(True, False, False, False), (False,) * 4]
    plain = seeing("vision", checkpoints)
    copies = [copy.deepcopy(plain) for _ in range(4)]

    def differentiate(model: nn.Module, rank: int) -> None:
        losses = [model(tokens(rank, 4 * step + 4), calls[step][rank]).square().sum() for step in (0, 1)]
        for loss in (losses[step] for step in order):
            if loss.requires_grad:
                loss.backward()

    def body(group: Any) -> dict[str, Tensor]:
        policy = zero3.ShardingPolicy(expert_parallel=True)
        model = zero3.shard(copies[group.rank], [Block], optional="vision", policy=policy, process_group=group)
        for _ in range(2):  # in the second step ranks compare the transfers of the first
            model.zero_grad()
            differentiate(model, group.rank)
        with zero3.full_gradients(model) as gradients:
            return {name: gradient.clone() for name, gradient in gradients.items()}

    found = run_mesh(2, 2, body, 20)
    for rank in range(4):
        differentiate(plain, rank)
    expected = {name: parameter.grad / 4 for name, parameter in plain.named_parameters() if parameter.grad is not None}
    for gradients in found:
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_that_some_ranks_recompute_is_an_error_on_all_at_once() -> None:
    plain = seeing("vision", "reentrant")
    copies = [copy.deepcopy(plain) for _ in range(3)]

    def body(group: Any) -> dict[str, Tensor]:
        policy = zero3.ShardingPolicy(expert_parallel=True)
        model = zero3.shard(copies[group.rank], [Block], optional="vision", policy=policy, process_group=group)
        x = tokens(group.rank, 4)
        with pytest.raises(ValueError, match=r"reentrant checkpoint.*use_reentrant=False"):
            model(x, group.rank == 1)
        model(x.requires_grad_(), group.rank == 1).square().sum().backward()
        return dict(zero3.named_gradients(model))

    gradients = run_ranks(3, body, 20)
    (plain(tokens(1, 4).requires_grad_(), True).square().sum() / 3).backward()
    for name in ("vision.weight", "vision.bias"):
        joined = torch.cat([each[name] for each in gradients])
        torch.testing.assert_close(joined, plain.get_parameter(name).grad.flatten(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("weights", [True, False])
def test_inputs_of_frozen_experts_may_need_gradients_on_some_ranks_alone(weights: bool) -> None:
    """Hidden states, and weights or not."""
    plain = made().requires_grad_(False)
    for block in plain.blocks if not weights else ():
        block.router.register_forward_hook(lambda router, args, scores: scores.detach())
    copies = [copy.deepcopy(plain) for _ in range(3)]

    def body(group: Any) -> Tensor | None:
        model = zero3.shard(copies[group.rank], [Block], policy=zero3.ShardingPolicy(expert_parallel=True), process_group=group)
        x = tokens(group.rank, 4).requires_grad_(group.rank == 1)
        model(x).square().sum().backward()
        return x.grad

    found = run_ranks(3, body, 20)
    plain(x := tokens(1, 4).requires_grad_()).square().sum().backward()
    assert found[0] is found[2] is None
    torch.testing.assert_close(found[1], x.grad, rtol=1e-9, atol=1e-9)
