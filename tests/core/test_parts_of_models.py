"""What is not the whole of a sharded model: a part of it, or a model that holds more than layers."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import seeded
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group


class Player(nn.Module):
    """Its small head has no layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def players() -> nn.ModuleDict:
    return nn.ModuleDict({"makes": seeded(Player, seed=1)[0], "judges": seeded(Player, seed=2)[0]})


def sharded(group: ThreadCommunicator) -> nn.ModuleDict:
    return zero3.shard(players(), process_group=process_group(group))


WAYS: dict[str, Callable[[nn.ModuleDict], Any]] = {
    "get_trainable_chunk": lambda model: zero3.get_trainable_chunk(model["makes"]),
    "param_groups": lambda model: zero3.param_groups(model["makes"], lambda name, info: {}),
    "clip_grad_norm_": lambda model: zero3.clip_grad_norm_(model["makes"], 1.0),
    "check_optimizer": lambda model: zero3.check_optimizer(model["makes"], torch.optim.SGD(zero3.get_trainable_chunk(model))),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_part_that_shares_a_chunk_with_another_is_refused_by_the_names_of_those(way: str) -> None:
    def part(group: ThreadCommunicator) -> str:
        with pytest.raises(
            ValueError, match=r"this Player is a part of .*judges\.head\.weight, judges\.head\.bias, outside of it"
        ) as caught:
            WAYS[way](sharded(group))
        return str(caught.value)

    assert len(set(run_ranks(2, part))) == 1


def duel(model: Any, optimizers: dict[str, torch.optim.Optimizer], x: Tensor) -> None:
    for step in range(4):
        for player, other in (("judges", "makes"), ("makes", "judges")):
            loss = model[player](x + step).sub(model[other](x)).pow(2).mean()
            loss.backward()
            optimizers[player].step()
            for each in optimizers.values():
                each.zero_grad()


def split(model: nn.Module) -> dict[str, list[dict[str, Any]]]:
    groups = zero3.param_groups(model, lambda name, info: {"player": name.partition(".")[0]})
    found: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        found.setdefault(group["player"], []).append(group)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_of_the_whole_by_names_give_each_part_an_optimizer_of_its_own(world_size: int) -> None:
    def adams(of: Callable[[str], Iterable[Any]]) -> dict[str, torch.optim.Optimizer]:
        return {"makes": torch.optim.AdamW(of("makes"), lr=0.02), "judges": torch.optim.AdamW(of("judges"), lr=0.1, weight_decay=0.3)}

    plain = players()
    x = torch.randn(3, 4, dtype=torch.float64)
    before = copy.deepcopy(plain.state_dict())
    duel(plain, adams(lambda name: plain[name].parameters()), x)

    def train(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = sharded(group)
        zero3.load_full_state_dict(model, before)
        duel(model, adams(split(model).__getitem__), x)
        return zero3.full_state_dict(model)

    found = run_ranks(world_size, train)[0]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


class Mixed(nn.Module):
    """Some of it is wrapped by hand."""

    def __init__(self, group: ThreadCommunicator) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = zero3.Zero3Layer(nn.Linear(4, 4), process_group=process_group(group))


def test_parameters_that_train_in_no_layer_are_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zero3")

    def get(group: ThreadCommunicator) -> None:
        model = Mixed(group)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model))
        zero3.check_optimizer(model, optimizer)
        model.embed.requires_grad_(False)
        zero3.get_trainable_chunk(model)
        zero3.get_trainable_chunk(zero3.Zero3Layer(Mixed(group), process_group=process_group(group)))

    run_ranks(2, get)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all(text.startswith("embed.weight: these parameters train, and are in no layer.") for text in told), told


def train_beside(model: Mixed) -> None:
    x = model.embed(torch.arange(3))
    zero3.backward(model.block(x).pow(2).sum(), 3, model)


@pytest.mark.parametrize("way", [
    train_beside, zero3.parameter_norms, lambda model: zero3.clip_grad_norm_(model, 1.0),
], ids=["backward", "parameter_norms", "clip_grad_norm_"])  # fmt: skip
def test_what_is_called_in_each_step_tells_once_of_parameters_in_no_layer(
    way: Callable[[Mixed], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "zero3")
    walks: list[Any] = []
    walk = nn.Module.named_parameters
    monkeypatch.setattr(Mixed, "named_parameters", lambda *args, **options: walks.append(args) or walk(*args, **options))

    def steps(group: ThreadCommunicator) -> None:
        model = Mixed(group)
        way(model)
        walks.clear()
        way(model)

    run_ranks(1, steps)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("embed.weight: these parameters train, and are in no layer.")
    assert "count them in norms" in told and "such as DDP, clips and steps them itself" in told
    assert not walks or way is zero3.parameter_norms, "which walks anyway"
