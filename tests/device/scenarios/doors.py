"""Parameters outside of compute: files, full parameters, layers fetched by hand."""

from __future__ import annotations

import torch
from torch import Tensor

import zero3
from tests.device.scenarios.registry import scenario
from tests.device.training import Me, loss_of, sgd, sharded, train, update, values


@scenario
def save_and_load(me: Me) -> list[Tensor]:
    """A checkpoint, written while training goes on; another model goes on from it."""
    model = sharded(me)
    optimizer = sgd(model)
    train(model, me, 2, optimizer)
    saved = zero3.save_checkpoint(me.directory / "checkpoint", model, optimizer, background=True)
    went_on = train(model, me, 2, optimizer)
    saved.wait()
    other = sharded(me, seed=1)
    optimizer = sgd(other)
    zero3.load_checkpoint(me.directory / "checkpoint", other, optimizer)
    return [*went_on, *train(other, me, 2, optimizer)]


@scenario
def full_params_and_load(me: Me) -> list[Tensor]:
    model = sharded(me)
    train(model, me, 1)
    with zero3.full_params(model, writeback=True), torch.no_grad():
        model.first.weight.mul_(0.5)  # type: ignore[operator,union-attr]
    state = zero3.full_state_dict(model)
    zero3.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
    return train(model, me, 2)


@scenario
def resident(me: Me) -> list[Tensor]:
    """Ranks evaluate as often as they like, between two steps."""
    model = sharded(me)
    seen = train(model, me, 1)
    with zero3.resident(model), torch.no_grad():
        seen += [loss_of(model, me, step) for step in range(20, 21 + me.rank)]
    return [*seen, *train(model, me, 1)]


@scenario
def by_hand(me: Me) -> list[Tensor]:
    model = sharded(me)
    optimizer = sgd(model)
    zero3.set_forward_order(model, list(model.blocks))
    for step in range(3):
        zero3.fetch(model.blocks[step])
        for micro in range(2):
            with zero3.no_sync(model):
                loss_of(model, me, 10 * step + micro).backward()
        zero3.reduce_gradients(model)
        update(optimizer)
        zero3.release(model)
    return values(model)


@scenario
def set_trainable(me: Me) -> list[Tensor]:
    model = sharded(me)
    seen = train(model, me, 1)
    zero3.set_trainable(model, lambda name, info: "norm" in name or "blocks.3" in name)
    seen += train(model, me, 2)
    zero3.set_trainable(model, lambda name, info: True)
    return [*seen, *train(model, me, 1)]
