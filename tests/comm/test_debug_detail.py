"""Everything on two real processes under TORCH_DISTRIBUTED_DEBUG=DETAIL, which compares torch's collectives between ranks.

What has no line here runs so elsewhere: `tests/support/processes.py` sets DETAIL unless a test says otherwise.
Only torch's DDP does not bear
it on gloo (it ends with SIGSEGV, with or without zero3), and with it `overlap_with_ddp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.training import SGD, loss_of, odd_model, sentences, train_plain
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

STEPS, LEFT_OUT = 4, 2
Parameters = dict[str, Tensor]


def modules(rank: Rank) -> list[nn.Module]:
    return odd_model(torch.float64, seed=rank.number)  # rank 0's values win


def sharded(rank: Rank, **policy: Any) -> Zero3Sequential:
    return Zero3Sequential([Zero3Layer(module, policy=ShardingPolicy(**policy)) for module in modules(rank)])


def mine(rank: Rank, step: int) -> Tensor:
    return sentences(step)[rank.number :: 2]


def train(rank: Rank, model: nn.Module, turn: Callable[[nn.Module, int], object], optimizer: Any = None) -> Parameters:
    optimizer = optimizer or SGD.build(zero3.get_trainable_chunk(model))
    for step in range(STEPS):
        turn(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return zero3.full_state_dict(model, rank0_only=False)


def stage(rank: Rank, number: int) -> Parameters:
    return train(rank, sharded(rank, stage=number), lambda model, step: loss_of(model, mine(rank, step)).backward())


def guarded(rank: Rank) -> Parameters:
    """In the third step rank 1 fails before its backward."""

    def micro_batch(model: nn.Module, step: int, fails: bool) -> bool:
        with zero3.step_guard(model) as guarded:
            loss = loss_of(model, mine(rank, step))
            if fails and rank.number == 1:
                raise ValueError("a bad micro-batch")
            loss.backward()
        return guarded.failed

    def turn(model: nn.Module, step: int) -> None:
        assert step != 2 or micro_batch(model, step, True)
        assert not micro_batch(model, step, False)

    return train(rank, sharded(rank, transactional=True, compare_every=1), turn)


def unequal_tokens(rank: Rank) -> Parameters:
    def turn(model: nn.Module, step: int) -> None:
        words = sentences(step)[:8] if rank.number == 0 else sentences(step)[8:]
        tokens = words[:, 1:].numel()
        zero3.backward(loss_of(model, words) * tokens, tokens, model)

    return train(rank, sharded(rank), turn)


def whole_and_scaled(rank: Rank) -> Parameters:
    """Two micro-batches a step, the first without communication; parameters in their own shapes; a scaled loss, a clipped gradient."""
    model, scaler = sharded(rank), zero3.GradScaler("cpu", 2.0**10)
    optimizer = SGD.build(zero3.param_groups(model, lambda name, info: {"whole": info.ndim > 1}))  # type: ignore[arg-type]
    for step in range(STEPS):
        first, second = mine(rank, step).chunk(2)
        with zero3.no_sync(model):
            scaler.scale(loss_of(model, first) / 2).backward()
        scaler.scale(loss_of(model, second) / 2).backward()
        scaler.unscale_(optimizer)
        norms = zero3.parameter_norms(model)
        total = zero3.clip_grad_norm_(model, 1e9)
        assert total.item() == pytest.approx(torch.stack(list(norms.values())).norm().item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return zero3.full_state_dict(model, rank0_only=False)


def read_between_steps(rank: Rank) -> Parameters:
    """Everything that reads a model, writes it or measures it without changing a value."""

    def turn(model: nn.Module, step: int) -> None:
        with zero3.profile(model) as profile:
            loss_of(model, mine(rank, step)).backward()
        assert profile.transfers
        with zero3.resident(model), torch.no_grad():
            for _ in range(rank.number + 1):  # at their own pace
                loss_of(model, mine(rank, step))
        with zero3.full_params(model, writeback=True), torch.no_grad():
            value = model.get_parameter("4.1.bias")
            value += 0
        zero3.load_full_state_dict(model, zero3.full_state_dict(model))
        zero3.reset(model)
        assert "rank" in str(zero3.report(model))

    checked = zero3.check(LeavingOut(modules(rank), 0), mine(rank, 0), loss_of)
    assert not checked.differences and checked.compared, checked
    return train(rank, sharded(rank), turn)


def handed_over(rank: Rank) -> Parameters:
    """Every step begins with a new model and a new optimizer: twice from a checkpoint, then from full state dicts."""
    model = sharded(rank)
    optimizer = SGD.build(zero3.get_trainable_chunk(model))
    for step in range(STEPS):
        loss_of(model, mine(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        following = sharded(Rank(rank.number + 7, 2, rank.scratch))
        its_optimizer = SGD.build(zero3.get_trainable_chunk(following))
        if step < 2:
            path = rank.scratch / f"step-{step}"
            zero3.save_checkpoint(path, model, optimizer, extra={"step": step}, background=step == 1).wait()
            assert zero3.load_checkpoint(path, following, its_optimizer) == {"step": step}
        else:
            zero3.load_full_state_dict(following, zero3.full_state_dict(model))
            zero3.load_full_optimizer_state_dict(following, its_optimizer, zero3.full_optimizer_state_dict(model, optimizer))
        model, optimizer = following, its_optimizer
    return zero3.full_state_dict(model, rank0_only=False)


def zero_redundancy(rank: Rank) -> Parameters:
    """Whole models, a part of the optimizer each; the batch is the same, so that gradients need no averaging."""
    model = nn.Sequential(*odd_model(torch.float64))
    optimizer = zero3.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, **SGD.options)
    for step in range(STEPS):
        loss_of(model, sentences(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(0)
    assert rank.number or len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class LeavingOut(nn.Module):
    """Rank 1 never calls the third layer."""

    def __init__(self, layers: list[nn.Module], rank: int) -> None:
        super().__init__()
        self.layers, self.rank = nn.ModuleList(layers), rank

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if (number, self.rank) == (LEFT_OUT, 1) else layer(x)
        return x


def dynamic(rank: Rank) -> Parameters:
    layers = modules(rank)
    model = zero3.shard(LeavingOut(layers, rank.number), layers, policy=ShardingPolicy(dynamic=True))
    return train(rank, model, lambda model, step: loss_of(model, mine(rank, step)).backward())


def plain_dynamic() -> Parameters:
    model = LeavingOut(odd_model(torch.float64), 0)
    optimizer = SGD.build(model.parameters())
    for step in range(STEPS):
        for model.rank in range(2):
            (loss_of(model, sentences(step)[model.rank :: 2]) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


WAYS: dict[str, tuple[Callable[..., Parameters], tuple[int, ...]]] = {
    "stage 1": (stage, (1,)),
    "stage 2": (stage, (2,)),
    "step_guard": (guarded, ()),
    "unequal tokens": (unequal_tokens, ()),
    "whole, scaled, clipped, no_sync": (whole_and_scaled, ()),
    "read between steps": (read_between_steps, ()),
    "handed over": (handed_over, ()),
    "ZeroRedundancyOptimizer": (zero_redundancy, ()),
    "dynamic": (dynamic, ()),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_numbers_of_plain_torch(way: str) -> None:
    body, arguments = WAYS[way]
    expected = plain_dynamic() if way == "dynamic" else train_plain(odd_model(torch.float64), SGD, STEPS).parameters
    for found in on_ranks(2, body, *arguments):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
