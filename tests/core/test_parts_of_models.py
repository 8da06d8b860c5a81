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


def test_a_module_of_a_layer_of_several_is_refused_as_any_part() -> None:
    def part(group: ThreadCommunicator) -> None:
        model: Any = seeded(Player)[0]
        zero3.shard(model, layers=[(model.blocks[0], model.blocks[2])], process_group=process_group(group))
        with pytest.raises(ValueError, match=r"this Zero3Layer is a part of .* shares a chunk of layer .*, outside of it"):
            zero3.get_trainable_chunk(model.blocks[0])
        zero3.get_trainable_chunk(model)

    run_ranks(2, part)


def test_a_chunk_that_was_thawed_just_before_is_refused_too() -> None:
    def part(group: ThreadCommunicator) -> None:
        model = players()
        for player in model.values():
            player.head.requires_grad_(False)
        zero3.shard(model, process_group=process_group(group))
        zero3.get_trainable_chunk(model["makes"])
        for chunk in model.parameters():
            chunk.requires_grad_()
        with pytest.raises(ValueError, match=r"judges\.head\.weight, judges\.head\.bias, outside of it"):
            zero3.get_trainable_chunk(model["makes"])

    run_ranks(2, part)


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
    (text,) = told  # once in a run
    assert text.startswith("embed.weight: these parameters train, and are in no layer."), text


class Pair(nn.Module):
    """Two modules, each with a parameter of the same name, and the root's own one under that name too: all share a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(4, bias=False) for _ in range(2))
        self.weight = nn.Parameter(torch.empty(4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        for number, parameter in enumerate(self.parameters(), 1):
            nn.init.uniform_(parameter, number, number + 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.second(self.first(x) * self.weight)


PARTS: dict[str, Callable[[Any], nn.Module]] = {
    "a part of the root's own layer": lambda model: model.first,
    "several": lambda model: model.blocks,
    "a part of a layer": lambda model: model.blocks[1],
    "the whole": lambda model: model,
}


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest) -> Callable[[Any], nn.Module]:
    return PARTS[request.param]


def pair(group: ThreadCommunicator, plain: nn.Module, **policy: Any) -> Any:
    model: Any = copy.deepcopy(plain)
    return zero3.shard(model, layers=[*model.blocks], policy=zero3.ShardingPolicy(**policy), process_group=process_group(group))


def rows_of(rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def mean_gradients(plain: nn.Module, world_size: int) -> nn.Module:
    for rank in range(world_size):
        (plain(rows_of(rank)).pow(3).mean() / world_size).backward()
    return plain


@pytest.mark.parametrize("ignored", [(), ("second", "blocks.1.bias")], ids=["all sharded", "some ignored"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_norms_are_those_of_the_part(part: Callable[[Any], nn.Module], world_size: int, ignored: tuple[str, ...]) -> None:
    plain = seeded(Pair)[0]

    def measure(group: ThreadCommunicator) -> list[dict[str, Tensor]]:
        model = pair(group, plain, ignored=lambda name, info: name.startswith(ignored) if ignored else False)
        model(rows_of(group.rank)).pow(3).mean().backward()
        return [zero3.parameter_norms(part(model), of=of) for of in ("grad", "param")]  # type: ignore[arg-type]

    found = run_ranks(world_size, measure)
    expected = dict(part(mean_gradients(plain, world_size)).named_parameters())
    for gradients, values in found:
        assert list(gradients) == list(values) == list(expected)
        for name, parameter in expected.items():
            torch.testing.assert_close(gradients[name], parameter.grad.norm(), rtol=1e-12, atol=0)
            torch.testing.assert_close(values[name], parameter.detach().norm(), rtol=1e-12, atol=0)


class Normed(Player):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x)).pow(3).mean() + self.head.bias.pow(2).sum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_counts_and_scales_the_ignored_ones_of_the_part_alone(world_size: int) -> None:
    plain = seeded(Normed)[0]

    def clip(group: ThreadCommunicator) -> Tensor:
        model = pair(group, plain, ignored=lambda name, info: name in ("head.bias", "norm.weight", "norm.bias"))
        model(rows_of(group.rank)).backward()
        before = [each.grad.clone() for each in (*model.norm.parameters(), model.head.bias)]
        norm = zero3.clip_grad_norm_(model.head, 1e-3)
        after = [each.grad for each in (*model.norm.parameters(), model.head.bias)]
        assert all(map(torch.equal, before[:2], after[:2])) and not torch.equal(before[2], after[2])
        return norm

    found = run_ranks(world_size, clip)
    for rank in range(world_size):
        (plain(rows_of(rank)) / world_size).backward()
    for norm in found:
        expected = nn.utils.get_total_norm([each.grad for each in plain.head.parameters()])
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)


def training(model: nn.Module) -> dict[str, bool]:
    with zero3.full_params(model):
        return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2])
def test_set_trainable_of_a_part_changes_and_asks_for_that_alone(part: Callable[[Any], nn.Module], world_size: int) -> None:
    plain = seeded(Pair)[0]
    names = [name for name, _ in part(plain).named_parameters()]
    inside = {id(parameter) for parameter in part(plain).parameters()}

    def change(group: ThreadCommunicator) -> None:
        model = pair(group, plain)
        for frozen in (True, False):
            zero3.set_trainable(model, lambda name, info, frozen=frozen: frozen == (name == "second.weight"))
            before = training(model)
            for trains in (False, True, False):
                asked: list[str] = []
                zero3.set_trainable(part(model), lambda name, info: bool(asked.append(name)) or trains)  # noqa: B023
                assert asked == names
                expected = {n: trains if id(p) in inside else before[n] for n, p in plain.named_parameters()}
                assert training(model) == expected
        zero3.set_trainable(model, lambda name, info: True)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        model(rows_of(group.rank)).pow(3).mean().backward()
        optimizer.step()
        for name, value in zero3.full_state_dict(model, rank0_only=False).items():
            torch.testing.assert_close(value, expected_values[name], rtol=0, atol=1e-12)

    stepped = mean_gradients(copy.deepcopy(plain), world_size)
    torch.optim.SGD(stepped.parameters(), lr=0.1).step()
    expected_values = stepped.state_dict()
    run_ranks(world_size, change)


def test_what_param_groups_left_out_stays_in_its_chunk_when_a_part_beside_it_changes() -> None:
    plain = seeded(Pair)[0]

    def change(group: ThreadCommunicator) -> None:
        model = pair(group, plain)
        groups = zero3.param_groups(model, lambda name, info: None if name == "second.weight" else {})
        optimizer = torch.optim.SGD(groups, lr=0.1)
        zero3.set_trainable(model.first, lambda name, info: True)  # as it is
        model(rows_of(group.rank)).pow(3).mean().backward()
        optimizer.step()
        assert training(model)["second.weight"]
        torch.testing.assert_close(zero3.full_state_dict(model, rank0_only=False)["second.weight"], plain.second.weight.detach())

    run_ranks(2, change)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_part_that_is_loaded_into_meta_leaves_what_shares_its_chunk_without_values(world_size: int) -> None:
    plain = seeded(Pair)[0]

    def load(group: ThreadCommunicator) -> Tensor:
        with torch.device("meta"):
            model: Any = Pair().double()
        zero3.shard(model, process_group=process_group(group), device=torch.device("cpu"))
        for path in ("blocks", "first", "second"):
            zero3.load_full_state_dict(model.get_submodule(path), plain.get_submodule(path).state_dict())
            missing = "parameter weight" if path == "second" else r"parameter .*second\.weight"
            with pytest.raises(RuntimeError, match=rf"layer the root \(Pair\) has no values yet for: {missing}\. "):
                model(rows_of(0))
        with pytest.raises(ValueError, match="missing: weight"):
            zero3.load_full_state_dict(model, {"second.weight": torch.zeros(4)}, strict=False)
        zero3.load_full_state_dict(model, {"weight": plain.weight.detach()}, strict=False)
        return model(rows_of(0))

    for found in run_ranks(world_size, load):
        torch.testing.assert_close(found, plain(rows_of(0)), rtol=0, atol=1e-12)


def test_materialize_refuses_a_part_of_a_layer_by_the_names_of_the_others() -> None:
    def draw(group: ThreadCommunicator) -> str:
        model = pair(group, seeded(Pair)[0])
        with pytest.raises(ValueError, match=r"materialize of a LayerNorm, a part of .* have .*second\.weight.* outside of it") as caught:
            zero3.materialize(model.first)
        return str(caught.value)

    assert len(set(run_ranks(2, draw))) == 1


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


def test_a_model_in_a_new_list_at_each_step_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def steps(group: ThreadCommunicator) -> None:
        model = Mixed(group)
        for _ in range(3):
            zero3.clip_grad_norm_(nn.ModuleList([model]), 1.0)

    run_ranks(1, steps)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["0.embed.weight"]
