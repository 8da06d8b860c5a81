"""Several optimizers over one model: saved together, loaded in any order, at any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import zero3
from tests.support.checkpoints import assert_same, resumed
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_close, process_group

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
WORDS, WIDTH = 11, 6


def build() -> nn.Module:
    """The same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS, bias=False))


def is_matrix(name: str, ndim: int) -> bool:
    return ndim == 2 and name not in ("0.weight", "4.weight")


def muon_and_adamw(groups: Iterable[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    """As Muon is used: for the matrices inside, and an AdamW for the rest, with weight decay for some."""
    matrices, rest = [g for g in groups if g["kind"] == "muon"], [g for g in groups if g["kind"] == "adamw"]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def options(name: str, info: Any) -> dict[str, Any]:
    if is_matrix(name, info.ndim):
        return {"kind": "muon", "whole": True}
    return {"kind": "adamw", "weight_decay": 0.1 if info.ndim > 1 else 0.0}


def plain_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    named = [(name, parameter, is_matrix(name, parameter.ndim)) for name, parameter in model.named_parameters()]
    muon = {"kind": "muon", "params": [p for _, p, matrix in named if matrix]}
    wide = {"kind": "adamw", "weight_decay": 0.1, "params": [p for _, p, matrix in named if not matrix and p.ndim > 1]}
    flat = {"kind": "adamw", "weight_decay": 0.0, "params": [p for _, p, matrix in named if not matrix and p.ndim == 1]}
    return muon_and_adamw([muon, wide, flat])


def sharded(model: nn.Module, group: ThreadCommunicator) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = zero3.shard(model, nn.Sequential, process_group=process_group(group))
    return model, muon_and_adamw(zero3.param_groups(model, options))


def train(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], steps: Iterable[int]) -> None:
    """All ranks take the same words, so that a plain model can follow."""
    for step in steps:
        words = torch.randint(WORDS, (8,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(words), words.roll(1)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def snapshot(model: nn.Module, optimizers: Any) -> Any:
    return zero3.full_state_dict(model, rank0_only=False), zero3.full_optimizer_state_dict(model, optimizers, rank0_only=False)


def on_threads(world_size: int, body: Callable[[nn.Module, list[torch.optim.Optimizer], ThreadCommunicator], Any]) -> list[Any]:
    models = [build() for _ in range(world_size)]
    return run_ranks(world_size, lambda group: body(*sharded(models[group.rank], group), group))


GIVEN: dict[str, Callable[[list[torch.optim.Optimizer]], Any]] = {
    "a list": lambda optimizers: optimizers,
    "a tuple the other way round": lambda optimizers: tuple(reversed(optimizers)),
    "a dict": lambda optimizers: dict(zip(("matrices", "rest"), optimizers, strict=True)),
}


@pytest.mark.parametrize(("given", "world_size", "to"), [("a list", 2, 3), ("a tuple the other way round", 3, 1), ("a dict", 1, 2)])
def test_muon_and_adamw_go_on_at_another_number_of_ranks(given: str, world_size: int, to: int, tmp_path: Path) -> None:
    reference = build()
    optimizers = plain_optimizers(reference)
    train(reference, optimizers, range(3))
    expected = dict(get_optimizer_state_dict(reference, optimizers, options=FULL))
    expected = deepcopy(expected)
    train(reference, optimizers, range(3, 5))

    def save(model: nn.Module, optimizers: list[torch.optim.Optimizer], group: ThreadCommunicator) -> Any:
        train(model, optimizers, range(3))
        zero3.save_checkpoint(tmp_path, model, optimizers)
        return snapshot(model, optimizers)

    def load(model: nn.Module, optimizers: list[torch.optim.Optimizer], group: ThreadCommunicator) -> Any:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 7.0
        zero3.load_checkpoint(tmp_path, model, GIVEN[given](optimizers))
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.02, 0.01]
        found = snapshot(model, optimizers)
        train(model, optimizers, range(3, 5))
        return found, zero3.full_state_dict(model, rank0_only=False)

    saved = on_threads(world_size, save)[0]
    assert_same([sorted(group["params"]) for group in saved[1]["param_groups"]], [sorted(g["params"]) for g in expected["param_groups"]])
    assert saved[1]["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert_close(saved[1]["state"][name], state, 1e-4, name)
    for found, after in on_threads(to, load):
        assert_same(found, saved)
        assert_close(after, reference.state_dict(), 1e-4, "five steps of plain torch")


@pytest.mark.parametrize("world_size", [1, 2])
def test_load_full_optimizer_state_dict_of_several_from_plain_torch_and_back(world_size: int) -> None:
    reference = build()
    optimizers = plain_optimizers(reference)
    train(reference, optimizers, range(2))
    given = reference.state_dict(), deepcopy(dict(get_optimizer_state_dict(reference, optimizers, options=FULL)))
    given = deepcopy(given)

    def body(model: nn.Module, optimizers: list[torch.optim.Optimizer], group: ThreadCommunicator) -> Any:
        zero3.load_full_state_dict(model, given[0] if group.rank == 0 else None)
        zero3.load_full_optimizer_state_dict(model, optimizers, given[1] if group.rank == 0 else None)
        return snapshot(model, optimizers)

    values, state = on_threads(world_size, body)[0]
    assert_same(state["state"], {name: state_ for name in state["state"] if (state_ := given[1]["state"][name])})
    assert state["state"].keys() == given[1]["state"].keys()
    again = build()
    again.load_state_dict(values)
    others = plain_optimizers(again)
    set_optimizer_state_dict(again, others, state, options=StateDictOptions(full_state_dict=True))
    train(again, others, range(2, 4))
    train(reference, optimizers, range(2, 4))
    assert_same(dict(again.state_dict()), dict(reference.state_dict()))


def gan() -> nn.ModuleDict:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.ModuleDict({"makes": nn.Linear(3, 5), "judges": nn.Linear(5, 1)}).double()


def duel(model: Any, optimizers: list[torch.optim.Optimizer], steps: Iterable[int]) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        noise = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        real = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        for player, sign in enumerate((1.0, -1.0)):
            model.zero_grad()
            made = model["makes"](noise)
            (sign * (model["judges"](made).mean() - model["judges"](real).mean())).backward()
            optimizers[player].step()


def test_two_of_one_kind_that_train_against_each_other(tmp_path: Path) -> None:
    def adams(first: Any, second: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(first, lr=0.1), torch.optim.Adam(second, lr=0.02, betas=(0.5, 0.9))]

    reference = gan()
    duel(reference, adams(reference["makes"].parameters(), reference["judges"].parameters()), range(5))

    def shard(model: Any, group: ThreadCommunicator) -> Any:
        for name in model:
            model[name] = zero3.Zero3Layer(model[name], process_group=process_group(group))
        return model, adams(*(zero3.get_trainable_chunk(model[name]) for name in model))

    assert_close(resumed(tmp_path, gan, shard, duel), reference.state_dict(), 1e-12, "five rounds")


def other(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)


MISTAKES: dict[str, tuple[Callable[[nn.Module, list[torch.optim.Optimizer]], Any], type[Exception], str]] = {
    "two for one": (
        lambda model, both: [*both, other(model)],
        ValueError,
        r"rank 1: a \w+ and a SGD hold the same parameter .*: give each parameter to one of the optimizers",
    ),
    "one twice": (lambda model, both: [both[0], both[0]], ValueError, r"rank 1: a Muon and a Muon hold the same parameter"),
    "no optimizer": (lambda model, both: [both[0], 3], TypeError, r"rank 1: expected a torch\.optim\.Optimizer, .* found int"),
    "none at all": (lambda model, both: [], TypeError, r"rank 1: expected a torch\.optim\.Optimizer, .* found list"),
    "a generator": (lambda model, both: (o for o in both), TypeError, r"rank 1: expected a torch\.optim\.Optimizer, .* found generator"),
    "of another model": (
        lambda model, both: [both[0], torch.optim.SGD([nn.Parameter(torch.ones(3))])],
        ValueError,
        r"rank 1: group 0 of the SGD has a parameter \(3,\) that is not of this model",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_save_checkpoint_names_mistakes_of_one_rank_on_all(mistake: str, tmp_path: Path) -> None:
    wrong, kind, message = MISTAKES[mistake]

    def body(model: nn.Module, both: list[torch.optim.Optimizer], group: ThreadCommunicator) -> None:
        def given() -> Any:
            return wrong(model, both) if group.rank == 1 else both

        for call in (
            lambda: zero3.save_checkpoint(tmp_path / "run", model, given()),
            lambda: zero3.full_optimizer_state_dict(model, given()),
            lambda: zero3.load_full_optimizer_state_dict(model, given(), {}),
        ):
            with pytest.raises(kind, match=message):
                call()
        assert not (tmp_path / "run").exists()

    on_threads(2, body)


def moments(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [dict(state) for optimizer in optimizers for state in optimizer.state.values()]


def test_load_checkpoint_names_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    def save(model: nn.Module, both: list[torch.optim.Optimizer], group: ThreadCommunicator) -> None:
        train(model, both, range(1))
        zero3.save_checkpoint(tmp_path / "both", model, both)
        zero3.save_checkpoint(tmp_path / "muon", model, both[0])

    def load(group: ThreadCommunicator) -> None:
        model, both = sharded(models[group.rank], group)
        with pytest.raises(
            ValueError, match=r"unknown: .*0\.weight.*saved was the state of Muon and AdamW, and here is Muon: pass as many"
        ):
            zero3.load_checkpoint(tmp_path / "both", model, both[0])
        with pytest.raises(ValueError, match=r"missing: .*0\.weight.*saved was the state of Muon, and here is Muon and AdamW"):
            zero3.load_checkpoint(tmp_path / "muon", model, both)
        assert not moments(both)

        def all_matrices(name: str, info: Any) -> dict[str, Any]:
            return {"kind": "muon", "whole": True} if info.ndim == 2 else options(name, info)

        swapped = muon_and_adamw(zero3.param_groups(model, all_matrices))
        with pytest.raises(ValueError, match=r"trained by AdamW when it was saved, and given to Muon here: 0\.weight, 4\.weight"):
            zero3.load_checkpoint(tmp_path / "both", model, swapped)
        assert not moments(swapped)

    on_threads(2, save)
    models = [build() for _ in range(3)]
    run_ranks(3, load)


def test_plain_parameters_beside_layers_may_have_their_own(tmp_path: Path) -> None:
    """A parameter that no layer holds is trained on every rank; its state is rank 0's to write."""

    def body(group: ThreadCommunicator) -> list[Tensor]:
        model = nn.Sequential(models[group.rank][0], zero3.Zero3Layer(models[group.rank][1], process_group=process_group(group)))
        both = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(zero3.get_trainable_chunk(model))]
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        zero3.save_checkpoint(tmp_path, model, {"a": both[0], "b": both[1]})
        expected = moments(both)
        both = [torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(zero3.get_trainable_chunk(model))]
        zero3.load_checkpoint(tmp_path, model, both)
        assert_same(moments(both), expected)
        return [state["momentum_buffer"] for state in expected[:2]]

    with torch.random.fork_rng(devices=[]):
        models = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)) for _ in range(2)]
    run_ranks(2, body)
