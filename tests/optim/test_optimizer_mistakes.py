"""Optimizers that are made or used wrongly: an error that says what to do, on all ranks."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedulers

import zero3
from tests.optim.test_optimizer_use import loss_of, net
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group


def over_originals(model: Any, group: Any) -> tuple[Any, optim.Optimizer]:
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return zero3.shard(model, process_group=group), optimizer


def over_originals_on_meta(model: Any, group: Any) -> tuple[Any, optim.Optimizer]:
    """Other objects take the place of parameters on the meta device, so that nothing ever reaches those of before."""
    with torch.device("meta"):
        model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    zero3.materialize(zero3.shard(model, device="cpu", process_group=group))
    return model, optimizer


def over_chunks(model: Any, group: Any) -> tuple[Any, optim.Optimizer]:
    model = zero3.shard(model, process_group=group)
    return model, optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)


def over_chunks_twice(model: Any, group: Any) -> tuple[Any, optim.Optimizer]:
    model = zero3.shard(model, process_group=group)
    chunks = zero3.get_trainable_chunk(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, optim.SGD([*chunks, chunks[0]], lr=0.1)


def over_others(model: Any, group: Any) -> tuple[Any, optim.Optimizer]:
    model = zero3.shard(model, process_group=group)
    return model, optim.SGD(zero3.get_trainable_chunk(zero3.shard(net(), process_group=group)), lr=0.1)


def unfrozen_later(model: Any, group: Any) -> tuple[Any, optim.Optimizer]:
    model.blocks[0].requires_grad_(False)
    model, optimizer = over_chunks(model, group)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(True)
    return model, optimizer


def rates_by_rank(model: Any, group: Any) -> tuple[Any, optim.Optimizer]:
    """As a schedule leaves them that goes by each rank's own loss."""
    model, optimizer = over_chunks(model, group)
    following = schedulers.ReduceLROnPlateau(optimizer, patience=0)
    improves = 0.5 if zero3.report(model).rank == 0 else 0.0
    for step in range(3):
        following.step(1.0 - step * improves)
    return model, optimizer


def train(model: Any, optimizer: optim.Optimizer) -> None:
    loss_of(model, 0).backward()
    optimizer.step()


def check(model: Any, optimizer: optim.Optimizer) -> None:
    zero3.check_optimizer(model, optimizer)


def clip(model: Any, optimizer: optim.Optimizer) -> None:
    loss_of(model, 0).backward()
    zero3.clip_grad_norm_(zero3.get_trainable_chunk(model), 1.0)  # type: ignore[arg-type]


def clip_by_torch(model: Any, optimizer: optim.Optimizer) -> None:
    loss_of(model, 0).backward()
    nn.utils.clip_grad_norm_(zero3.get_trainable_chunk(model), 1.0)


MADE_WRONGLY: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "before sharding": (over_originals, train, RuntimeError, r"'weight' of layer .* is released.*get_trainable_chunk"),
    "before sharding, checked": (over_originals, check, ValueError, r"'weight' of the unsharded model.* after sharding"),
    "before sharding, zeroed": (over_originals, lambda m, o: o.zero_grad(), RuntimeError, r"is released.*get_trainable_chunk"),
    "before sharding, on meta": (over_originals_on_meta, train, RuntimeError, r"^grad: 'weight' of layer .*get_trainable_chunk"),
    "before sharding, on meta, checked": (over_originals_on_meta, check, ValueError, r"of the unsharded model.* after sharding"),
    "a chunk twice": (over_chunks_twice, check, ValueError, r"hold more than once these parameters of layer the root \(Net\)"),
    "another model's chunks": (over_others, check, ValueError, r"no optimizer holds these parameters of layer 'blocks\.0'"),
    "unfrozen later": (unfrozen_later, check, ValueError, r"no optimizer holds these parameters of layer 'blocks\.0'"),
    "rates by rank": (rates_by_rank, check, ValueError, r"check_optimizer: rank 0: SGD, group 0: .*lr=0\.1.*rank 1: .*lr=0\.0"),
    "rates by rank, saved": (
        rates_by_rank, lambda m, o: zero3.save_checkpoint(Path(os.devnull, "nowhere"), m, o), ValueError,
        r"ranks differ in the optimizer's groups",
    ),
    "a list that holds no optimizer": (
        over_chunks, lambda m, o: zero3.check_optimizer(m, [o, 3]), TypeError, r"rank 0: expected a torch\.optim\.Optimizer, .*found int"
    ),
    "clipping chunks": (over_chunks, clip, TypeError, r"expected the sharded model, an nn\.Module, found a list: pass the model"),
    "clipping by torch": (over_chunks, clip_by_torch, RuntimeError, r"use zero3\.clip_grad_norm_\(model, max_norm\)"),
    "options instead of a function": (
        over_chunks, lambda m, o: zero3.param_groups(m, {"lr": 1}), TypeError, r"options must be a function .*found a dict"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE_WRONGLY)
def test_what_is_wrong_says_what_to_do(name: str) -> None:
    make, use, kind, message = MADE_WRONGLY[name]

    def body(group: ThreadCommunicator) -> None:
        model, optimizer = make(models[group.rank], process_group(group))
        with pytest.raises(kind, match=message):
            use(model, optimizer)

    models = [net() for _ in range(2)]
    run_ranks(2, body)


STEPS: dict[str, Any] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": optim.AdamW,
    "AdamW, fused": lambda p: optim.AdamW(p, fused=True),
    "Adagrad": optim.Adagrad,
    "Adafactor": optim.Adafactor,
    "LBFGS": optim.LBFGS,
    "Rprop": optim.Rprop,
}


@pytest.mark.parametrize("meta", [False, True], ids=["here", "on meta"])
@pytest.mark.parametrize("name", STEPS)
def test_step_of_an_optimizer_made_before_shard_says_what_to_do(name: str, meta: bool) -> None:
    """Whatever the optimizer asks first, and wherever its parameters were. So does one that is made later over what was kept of before."""
    with torch.device("meta" if meta else "cpu"):
        model = net()
    optimizer, kept = STEPS[name](model.parameters()), list(model.parameters())
    zero3.materialize(zero3.shard(model, device="cpu"))

    def closure() -> float:
        (loss := loss_of(model, 0)).backward()
        return float(loss.detach())

    closure()
    for use in (lambda: optimizer.step(closure), lambda: optimizer.zero_grad(), lambda: STEPS[name](kept)):
        with pytest.raises(RuntimeError, match=r"is released.* An optimizer that holds it must be made after the model was sharded, from"):
            use()


def test_check_optimizer_takes_several_in_a_list_as_one_by_one() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        first, *rest = zero3.get_trainable_chunk(model)
        both = [optim.SGD([first], lr=0.1), optim.AdamW(rest)]
        for given in ([both], [{"a": both[0], "b": both[1]}], both, [both[:1], both[1]]):
            zero3.check_optimizer(model, *given)
        with pytest.raises(ValueError, match="no optimizer holds"):
            zero3.check_optimizer(model, both[:1])

    models = [net() for _ in range(2)]
    run_ranks(2, body)
