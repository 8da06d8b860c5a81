"""What a training loop does around a layer's calls, and what goes around in a larger graph: as with the unwrapped module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, WORLDS, calls, linear, mean_square, mlp, rows, seeded
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, as_one_layer, check_parity, in_sequence, nested, process_group, sgd

X = rows(3)


# -- around a step


@WORLDS
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("through", ["model", "optimizer"])
def test_zero_grad_with_set_to_none_and_without(world_size: int, set_to_none: bool, through: str) -> None:
    plain = mlp()
    optimizers: dict[Any, torch.optim.Optimizer] = {}

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        zeroed: Any = model if through == "model" else optimizer
        losses = []
        for _ in range(3):
            zeroed.zero_grad(set_to_none)
            losses.append(model(X).pow(2).mean())
            losses[-1].backward()
            optimizer.step()
        return losses

    expected = train(plain, sgd(plain.parameters()))

    def body(group: ThreadCommunicator) -> None:
        model = in_sequence(models[group.rank], process_group(group), zero3.ShardingPolicy())
        optimizers[group.rank] = sgd(zero3.get_trainable_chunk(model))
        found = train(model, optimizers[group.rank])
        assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-12)

    models = [mlp() for _ in range(world_size)]
    run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2, 9])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_policy_changes_when_not_what(world_size: int, reshard: bool, depth: int, reduction: Any) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        return [mean_square(model, turn), mean_square(model, turn)]

    policy = zero3.ShardingPolicy(reshard_after_forward=reshard, prefetch_depth=depth, gradient_reduction=reduction)
    for shard in (in_sequence, nested):
        check_parity(lambda: mlp(4), program, world_size=world_size, shard=shard, policy=policy)


@WORLDS
@pytest.mark.parametrize("around", ["forward", "forward and backward"])
@pytest.mark.parametrize("shard", [in_sequence, as_one_layer])
def test_autocast(world_size: int, around: str, shard: Any) -> None:
    def build() -> nn.Module:
        return seeded(*[calls(lambda m, x: m.a(x).tanh() + m.b(x))] * 3).float()

    def program(model: nn.Module, turn: Turn) -> Any:
        x = turn.tensor(3, WIDTH).float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x * 1).float().pow(2).mean()  # not a leaf: those are cast once, and rounded once
            if around == "forward and backward":
                loss.backward()
        if around == "forward":
            loss.backward()
        return loss, x.grad

    check_parity(build, program, world_size=world_size, shard=shard, tolerance=1e-6, steps=3)


@WORLDS
def test_autocast_around_several_steps(world_size: int) -> None:
    """One context for all of training: what autocast has cast must not outlive the weights. (In plain torch it would.)"""

    def build() -> nn.Module:
        return mlp().float()

    plain = build()
    optimizer = sgd(plain.parameters())
    expected = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = plain(X.float()).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())

    def body(group: ThreadCommunicator) -> None:
        model = in_sequence(models[group.rank], process_group(group), zero3.ShardingPolicy())
        optimizer = sgd(zero3.get_trainable_chunk(model))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for step in range(3):
                loss = model(X.float()).float().pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                assert torch.allclose(loss.detach(), expected[step], rtol=1e-6)

    models = [build() for _ in range(world_size)]
    run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode_before_training(world_size: int, mode: Callable[[], Any]) -> None:
    """Buffers made for the first forward serve training."""

    def program(model: nn.Module, turn: Turn) -> Any:
        model.eval()
        with mode():
            quiet = model(turn.tensor(2, WIDTH)).clone()
        model.train()
        return quiet, mean_square(model, turn)

    check_parity(mlp, program, world_size=world_size)


@WORLDS
def test_a_layer_that_computes_gradients_by_itself_under_no_grad(world_size: int) -> None:
    def with_gradients(module: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return module.a(x)

    def program(model: nn.Module, turn: Turn) -> Tensor:
        with torch.no_grad():
            output: Tensor = model(turn.tensor(2, WIDTH))
        loss = output.pow(2).mean()
        loss.backward()
        return loss

    check_parity(lambda: seeded(calls(with_gradients)), program, world_size=world_size)


@WORLDS
def test_a_model_in_a_larger_graph_with_autograd_grad_and_retain_graph(world_size: int) -> None:
    """A plain module before it and one after it train by themselves, on every rank the same."""
    before, after = seeded(linear)[0], seeded(linear, seed=1)[0]

    def program(model: nn.Module, turn: Turn) -> Any:
        x = turn.tensor(3, WIDTH)
        loss = after(model(before(x).tanh())).pow(2).mean()
        gradients = torch.autograd.grad(loss, [before.weight, after.weight], retain_graph=True)
        loss.backward()
        return loss, gradients

    check_parity(mlp, program, world_size=world_size)


class Game(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = mlp(2), mlp(2)


@WORLDS
def test_two_models_may_feed_each_other(world_size: int) -> None:
    """A generator and a critic: the critic's gradients from the generator's step are thrown away."""

    def shard(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
        model.maker, model.critic = in_sequence(model.maker, group, policy), in_sequence(model.critic, group, policy)
        return model

    def program(model: Any, turn: Turn) -> Any:
        x = turn.tensor(3, WIDTH)
        made = model.maker(x)
        judged = (model.critic(made.detach()) - model.critic(x)).pow(2).mean()
        judged.backward()
        kept = [None if p.grad is None else p.grad.clone() for p in model.critic.parameters()]
        fooled = model.critic(made).pow(2).mean()
        fooled.backward()
        for parameter, gradient in zip(model.critic.parameters(), kept, strict=True):
            parameter.grad = gradient
        return judged, fooled

    check_parity(lambda: seeded(Game)[0], program, world_size=world_size, shard=shard)


@WORLDS
def test_a_critic_may_judge_what_is_real_before_what_was_made(world_size: int) -> None:
    """Two layers, each a model of its own: the second has a forward under way when it finds the first in a graph."""

    def shard(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
        model.maker, model.critic = as_one_layer(model.maker, group, policy), as_one_layer(model.critic, group, policy)
        return model

    def program(model: Any, turn: Turn) -> Any:
        x = turn.tensor(3, WIDTH)
        made = model.maker(x)
        real = model.critic(x)
        loss = (model.critic(made) - real).pow(2).mean()
        loss.backward()
        return loss

    check_parity(lambda: seeded(Game)[0], program, world_size=world_size, shard=shard)
