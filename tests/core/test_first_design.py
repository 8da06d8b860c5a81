"""The first published design of this kind, and what was wrong in it: one test a fault, each failing on that design.

(labml.ai's annotated Zero3: two chunks a layer, one fetch and one backup stream, prefetch of one layer, hooks that count.)
Here is what trained on wrong numbers or hung; see test_first_design_crashes.py for what crashed, test_ordering.py for
faults of ordering on a GPU, test_counts.py and test_memory.py for what was slow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, WORLDS, calls, mlp, rows, seeded, step
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_close, check_parity, full_gradients, full_parameters, in_place, on_ranks, sgd

X = rows(6)


# -- silently wrong


@WORLDS
def test_it_trains(world_size: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> list[float]:
        optimizer, losses = sgd(model.get_trainable_chunk()), []
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(model(X).pow(2).mean())
            losses[-1].backward()
            optimizer.step()
        return [loss.item() for loss in losses]

    for losses in on_ranks(world_size, mlp, body):
        assert losses[-1] < 0.5 * losses[0]


@WORLDS
def test_gradients_are_those_of_the_whole_batch(world_size: int) -> None:
    """The mean over ranks, not the sum: of one process on all rows, each rank taking its part of them."""
    plain = mlp()
    plain(X).pow(2).mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def body(model: Any, group: ThreadCommunicator) -> None:
        model(X[group.rank :: world_size]).pow(2).mean().backward()
        assert_close(full_gradients(model, group), expected, 1e-12, "gradients")

    on_ranks(world_size, mlp, body)


@WORLDS
def test_a_second_backward_adds_to_the_first(world_size: int) -> None:
    check_parity(mlp, lambda model, turn: [step(model, turn), step(model, turn)], world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_padding_is_zero_in_chunks_gradients_and_what_an_optimizer_makes_of_them(world_size: int) -> None:
    """Memory is filled with NaN where torch hands it out, and by the collectives until they are waited for."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=0.1)
        for _ in range(2):
            model(X).pow(2).mean().backward()
            optimizer.step()
        for layer in model:
            (chunk,) = layer._state.chunks
            padding = slice(max(0, chunk.layout.numel - group.rank * chunk.layout.shard_numel), None)
            gradient = chunk.shard.grad.as_subclass(Tensor)
            for tensor in (chunk.shard.detach(), gradient, *(v for v in optimizer.state[chunk.shard].values() if v.dim())):
                assert not tensor[padding].any()
                assert torch.isfinite(tensor).all()

    torch.use_deterministic_algorithms(True)
    try:
        on_ranks(world_size, lambda: seeded(*[lambda: nn.Linear(WIDTH, 2)] * 1, linear_back), body)
    finally:
        torch.use_deterministic_algorithms(False)


def linear_back() -> nn.Module:
    return nn.Linear(2, WIDTH)


@WORLDS
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip_grad_norm_is_by_the_norm_of_the_whole_model(world_size: int, norm_type: float) -> None:
    plain = mlp()
    plain(X).pow(2).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def body(model: Any, group: ThreadCommunicator) -> None:
        model(X[group.rank :: world_size]).pow(2).mean().backward()
        if world_size > 1:
            with pytest.raises(RuntimeError, match=r"zero3\.clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(model.get_trainable_chunk(), 0.01, norm_type)
        assert torch.allclose(zero3.clip_grad_norm_(model, 0.01, norm_type), norm, rtol=1e-12)
        assert_close(full_gradients(model, group), expected, 1e-12, "clipped gradients")

    on_ranks(world_size, mlp, body)


@WORLDS
def test_one_unused_parameter_costs_its_layer_nothing(world_size: int) -> None:
    check_parity(lambda: seeded(*[calls(lambda m, x: m.a(x).tanh())] * 2), step, world_size=world_size)


@WORLDS
def test_an_output_may_be_a_dict(world_size: int) -> None:
    class Dicts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for child in self:
                x = child(x)["x"]
            return x

    check_parity(lambda: Dicts(*seeded(*[calls(lambda m, x: {"x": m.a(x).tanh()})] * 3)), step, world_size=world_size, shard=in_place)


@WORLDS
def test_a_forward_without_backward_leaves_no_stale_weights(world_size: int) -> None:
    plain = mlp()
    plain(X).pow(2).mean().backward()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter -= 0.1 * parameter.grad
    expected = plain(X)

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = sgd(model.get_trainable_chunk())
        model(X).pow(2).mean().backward()
        model(X)
        optimizer.step()
        assert torch.allclose(model(X), expected, rtol=0, atol=1e-12)

    on_ranks(world_size, mlp, body)


@WORLDS
@pytest.mark.parametrize("scaler", [torch.amp.GradScaler])
def test_gradscaler_of_all_ranks_skips_what_one_finds_infinite(world_size: int, scaler: Any) -> None:
    """With torch's own loss scaler. The infinity lies in one rank's slice of the gradient."""

    def body(model: Any, group: ThreadCommunicator) -> list[float]:
        before = full_parameters(model)
        optimizer, scaling = sgd(model.get_trainable_chunk()), scaler("cpu", init_scale=8.0)
        x = X.clone()
        scaling.scale(model(x).pow(2).mean()).backward()
        if group.rank == 0:
            model.get_trainable_chunk()[0].grad.as_subclass(Tensor)[0] = float("inf")
        scaling.step(optimizer)
        scaling.update()
        assert_close(full_parameters(model), before, 0, "a step that should have been skipped")
        optimizer.zero_grad()
        scaling.scale(model(x).pow(2).mean()).backward()
        scaling.step(optimizer)
        scaling.update()
        assert_close(full_parameters(model), expected, 1e-12, "a step with the scale divided out")
        return scaling.get_scale()

    plain = mlp()
    plain(X).pow(2).mean().backward()
    expected = {name: parameter.detach() - 0.1 * parameter.grad for name, parameter in plain.named_parameters()}
    assert on_ranks(world_size, mlp, body) == [4.0] * world_size


def test_ranks_with_different_models_are_told() -> None:
    def body(group: ThreadCommunicator) -> None:
        module = nn.Linear(3, 4 if group.rank == 0 else 5)
        with pytest.raises(ValueError, match=r"rank 0: parameter weight: shape \(4, 3\).*rank 1: parameter weight: shape \(5, 3\)"):
            zero3.Zero3Layer(module, process_group=group)
        assert type(module.weight) is nn.Parameter

    run_ranks(2, body)


def test_layers_of_equal_size_called_in_opposite_orders_do_not_swap_weights() -> None:
    def body(group: ThreadCommunicator) -> None:
        a, b = (zero3.Zero3Layer(child, process_group=group) for child in models[group.rank])
        model = zero3.Zero3Layer(nn.ModuleList([a, b]), process_group=group)
        model.module.forward = lambda x: a(b(x)) if group.rank else b(a(x))
        with pytest.raises(ValueError, match=r"(?s)rank 0: .*; rank 1: .*same order"):
            model(X)

    models = [mlp(2) for _ in range(2)]
    run_ranks(2, body)


# -- hangs, and slow


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_parameter_unused_on_one_rank_only(world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        for module in model.modules():
            module.rank = turn.rank
        return step(model, turn)

    check_parity(lambda: seeded(*[calls(lambda m, x: m.a(x) if m.rank else m.b(x))] * 2), program, world_size=world_size)


@WORLDS
def test_a_frozen_prefix_is_neither_gathered_in_backward_nor_kept(world_size: int) -> None:
    def build() -> nn.Module:
        model = mlp(4)
        model[0].requires_grad_(False)
        model[1].requires_grad_(False)
        return model

    def body(model: Any, group: ThreadCommunicator) -> list[str]:
        model(X).sum().backward()
        loss = model(X).sum()
        fetched = [layer._state.presence.value for layer in model]
        start = len(group.log)
        loss.backward()
        assert fetched[:3] == ["released"] * 3, "the last layer is kept for the backward that may come"
        return [kind for kind, *_ in group.log[start:] if kind != "exchange"]

    for made in on_ranks(world_size, build, body):
        assert made == (["all_gather", "reduce_scatter", "reduce_scatter"] if world_size > 1 else [])
