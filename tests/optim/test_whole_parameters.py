"""Models that train in whole parameters, on threads and over gloo: what they may be, and what they do besides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero3
from tests.support.inside import chunks_of
from tests.support.models import WORLDS
from tests.support.param_groups import Options, all_whole, build, matrices_whole, mean, plain_groups, run_plain, steps
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.training import loss_of, odd_model, sentences


def trained(rank: Rank, options: Options) -> tuple[list[float], dict[str, Tensor]]:
    model = zero3.Zero3Sequential([zero3.Zero3Layer(module) for module in build(rank.number)])
    groups = zero3.param_groups(model, options)
    losses = steps(model, torch.optim.SGD(groups, lr=0.3, momentum=0.9), rank.number, rank.world_size)
    return losses, zero3.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("options", [matrices_whole, all_whole])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_as_processes_train_whole_parameters(world_size: int, options: Options) -> None:
    losses, state = run_plain(options)
    found = on_ranks(world_size, trained, options)
    assert mean([mine for mine, _ in found]) == pytest.approx(losses, rel=1e-9)
    for _, mine in found:
        assert all(torch.allclose(mine[name], value, rtol=0, atol=1e-12) for name, value in state.items())


def through_sockets(rank: Rank) -> tuple[list[float], dict[str, Tensor]]:
    os.environ["ZERO3_HOST_MEMORY"] = "0"
    return trained(rank, all_whole)


def test_whole_parameters_through_sockets_where_ranks_own_nothing_of_a_layer() -> None:
    losses, state = run_plain(all_whole)
    found = on_ranks(4, through_sockets, fresh=True)
    assert mean([mine for mine, _ in found]) == pytest.approx(losses, rel=1e-9)
    assert all(torch.allclose(found[0][1][name], value, rtol=0, atol=1e-12) for name, value in state.items())


class Tied(nn.Module):
    """Blocks in a list, and a readout that is the embedding: the root's own layer holds the tied weight."""

    def __init__(self) -> None:
        super().__init__()
        embedding, *blocks, readout = odd_model(torch.float64)
        self.embedding, self.blocks, self.norm = embedding, nn.ModuleList(blocks), readout[0]
        self.head = nn.Linear(7, 13, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("options", [matrices_whole, lambda name, info: {"lr": 0.1 if "norm" in name else 0.3}])
@WORLDS
def test_a_sharded_model_of_any_class_has_groups_too(world_size: int, options: Options) -> None:
    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]]:
        model = zero3.shard(models[group.rank], process_group=group if world_size > 1 else None)
        loss_of(model, sentences(7)).backward()  # learns its order
        model.zero_grad()
        groups = zero3.param_groups(model, options)
        assert "blocks.0.norm.weight" in asked or options is matrices_whole
        losses = steps(model, torch.optim.SGD(groups, lr=0.3, momentum=0.9), group.rank, world_size)
        return losses, zero3.full_state_dict(model, rank0_only=False)

    asked = {name for name, _ in Tied().named_parameters()}
    models, plain = [Tied() for _ in range(world_size)], Tied()
    found = run_ranks(world_size, body)
    losses = steps(plain, torch.optim.SGD(plain_groups(plain, options), lr=0.3, momentum=0.9), 0, 1)
    assert mean([mine for mine, _ in found]) == pytest.approx(losses, rel=1e-9)
    for _, state in found:
        assert all(torch.allclose(state[name], value, rtol=0, atol=1e-12) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("options", [matrices_whole, all_whole])
def test_a_file_fills_what_was_cut_anew(options: Options, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        layers = [zero3.Zero3Layer(module, process_group=group, device="cpu") for module in models[group.rank]]
        model = zero3.Zero3Sequential(layers)
        zero3.param_groups(model, options)
        zero3.load_pretrained(model, tmp_path)
        return zero3.full_state_dict(model, rank0_only=False)

    with torch.device("meta"):
        models = [odd_model(torch.float64) for _ in range(3)]
    values = nn.Sequential(*odd_model(torch.float64, 3)).state_dict()
    save_file(values, tmp_path / "model.safetensors")
    for found in run_ranks(3, body):
        assert all(torch.equal(found[name], value) for name, value in values.items())


def test_what_is_cast_to_travel_is_cut_anew_without_a_cast() -> None:
    def body(group: ThreadCommunicator) -> dict[str, Any]:
        policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16)
        layers = [zero3.Zero3Layer(module, policy=policy, process_group=group) for module in models[group.rank]]
        model = zero3.Zero3Sequential(layers)
        groups = zero3.param_groups(model, matrices_whole)
        assert any(chunk.layout.bounds is not None for chunk in chunks_of(model))
        state = zero3.full_state_dict(model, rank0_only=False)
        loss_of(model, sentences(0)).backward()
        assert all(p.grad.dtype == torch.float32 for group_ in groups for p in group_["params"] if p.numel())
        return state

    models = [odd_model(torch.float32, rank) for rank in range(3)]
    for found in run_ranks(3, body):
        assert all(torch.equal(found[name], value) for name, value in nn.Sequential(*odd_model()).state_dict().items())


@pytest.mark.parametrize("options", [matrices_whole, lambda name, info: {"lr": 0.1 if "norm" in name else 0.3}])
def test_parameters_that_stay_whole_between_steps_follow_their_parts(options: Options) -> None:
    """Stage 2, through two divisions, and with a part that is given other data."""

    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]]:
        policy = zero3.ShardingPolicy(stage=2)
        layers = [zero3.Zero3Layer(module, policy=policy, process_group=group) for module in models[group.rank]]
        model, losses = zero3.Zero3Sequential(layers), []
        for turn in range(2):
            groups = zero3.param_groups(model, options if turn else all_whole)
            losses += steps(model, torch.optim.SGD(groups, lr=0.3), group.rank, 3, range(4 * turn, 4 * turn + 4))
        for part in model.get_trainable_chunk():
            part.data = part.data * 2
        losses += steps(model, torch.optim.SGD(groups, lr=0.3), group.rank, 3, range(8, 10))
        return losses, zero3.full_state_dict(model, rank0_only=False)

    models, plain = [odd_model(torch.float64, rank) for rank in range(3)], nn.Sequential(*odd_model(torch.float64))
    expected = steps(plain, torch.optim.SGD(plain_groups(plain, all_whole), lr=0.3), 0, 1)
    expected += steps(plain, torch.optim.SGD(plain_groups(plain, options), lr=0.3), 0, 1, range(4, 8))
    for parameter in plain.parameters():
        parameter.data = parameter.data * 2
    expected += steps(plain, torch.optim.SGD(plain_groups(plain, options), lr=0.3), 0, 1, range(8, 10))
    found = run_ranks(3, body)
    assert mean([losses for losses, _ in found]) == pytest.approx(expected, rel=1e-9)
    for _, state in found:
        assert all(torch.allclose(state[name], value, rtol=0, atol=1e-11) for name, value in plain.state_dict().items())


def test_gradients_that_stay_whole_have_no_parts() -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(models[group.rank], policy=zero3.ShardingPolicy(stage=1), process_group=group)
        with pytest.raises(ValueError, match="stage=1"):
            zero3.param_groups(layer, all_whole)
        layer(torch.ones(2, 1)).sum().backward()
        assert zero3.parameter_norms(layer)["bias"].item() == 2.0

    models = [nn.Linear(1, 1) for _ in range(3)]
    run_ranks(3, body)


def test_param_groups_inside_inference_mode_train() -> None:
    def body(group: ThreadCommunicator) -> Tensor:
        layer = zero3.Zero3Layer(models[group.rank], process_group=group)
        with torch.inference_mode():
            groups = zero3.param_groups(layer, all_whole)
        optimizer = torch.optim.SGD(groups, lr=0.5)
        layer(torch.ones(2, 1)).sum().backward()
        optimizer.step()
        return zero3.full_state_dict(layer, rank0_only=False)["bias"]

    models = [nn.Linear(1, 1) for _ in range(2)]
    before = models[0].bias.detach().clone()
    assert all(torch.equal(bias, before - 0.5 * 2) for bias in run_ranks(2, body))


def test_param_groups_where_nothing_is_trainable() -> None:
    layers = [zero3.Zero3Layer(nn.Linear(1, 1).requires_grad_(False)) for _ in range(2)]
    assert zero3.param_groups(zero3.Zero3Sequential(layers), all_whole) == []


def test_param_groups_makes_new_chunks_only_where_cuts_change() -> None:
    def ids_of(model: nn.Module) -> list[int]:
        return [id(chunk) for chunk in chunks_of(model)]

    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(models[group.rank], process_group=group)
        made = ids_of(layer)
        zero3.param_groups(layer, lambda name, info: {"lr": info.ndim})
        assert ids_of(layer) == made
        zero3.param_groups(layer, all_whole)
        cut = ids_of(layer)
        assert not set(cut) & set(made) and len(cut) == 1, "and none for what is left, where nothing is"
        zero3.param_groups(layer, all_whole)
        assert ids_of(layer) == cut

    models = [nn.Linear(3, 3) for _ in range(2)]
    run_ranks(2, body)


class Rows(torch.optim.SGD):
    """Keeps a number a row."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.numel():
                self.state[parameter]["rows"] = torch.zeros(len(parameter))


class BesideNothing(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.before, self.weight, self.after = (nn.Parameter(torch.ones(each)) for each in ((0, 3), shape, (0,)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.after.sum() + self.before.sum()


@pytest.mark.parametrize("world_size", [1, 2])
def test_state_of_a_whole_parameter_beside_empty_ones_is_its_own(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(modules[group.rank], process_group=group if world_size > 1 else None)
        optimizer = Rows(zero3.param_groups(layer, all_whole), lr=0.1)
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        state = zero3.full_optimizer_state_dict(layer, optimizer, rank0_only=False)["state"]["weight"]
        assert {key: tuple(value.shape) for key, value in state.items()} == {"rows": (4,)}
        zero3.load_full_optimizer_state_dict(layer, optimizer, zero3.full_optimizer_state_dict(layer, optimizer))

    modules = [BesideNothing(4, 3) for _ in range(world_size)]
    run_ranks(world_size, body)


def test_state_of_a_chunk_that_is_one_vector_beside_nothing_is_the_vectors() -> None:
    layer = zero3.Zero3Layer(BesideNothing(4))
    (chunk,) = layer.get_trainable_chunk()
    optimizer = torch.optim.SGD([chunk], lr=0.1)
    optimizer.state[chunk]["pair"] = torch.tensor([1.0, 2.0])
    state = zero3.full_optimizer_state_dict(layer, optimizer)["state"]
    assert {name: {key: value.tolist() for key, value in values.items()} for name, values in state.items()} == {
        "weight": {"pair": [1.0, 2.0]}
    }
