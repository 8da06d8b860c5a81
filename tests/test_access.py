"""full_params, full_state_dict, load_full_state_dict: the whole parameters outside of compute, read and written."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import WIDTH, WORLDS, calls, linear, mlp, rows, seeded
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_at_rest, assert_close, check_parity, full_parameters, in_sequence, nested, on_ranks, sgd

X = rows(3)


def weight(model: Any, layer: int = 0) -> nn.Parameter:
    return model[layer].module[0].weight


def break_off(model: Any, error: Exception | None) -> None:
    """Changes a weight, to be written back, and raises `error`."""
    with zero3.full_params(model, writeback=True), torch.no_grad():
        weight(model).zero_()
        if error is not None:
            raise error


# -- full_params


@WORLDS
def test_full_params_of_a_part_through_its_own_module(world_size: int) -> None:
    plain = mlp()

    def body(model: Any, group: ThreadCommunicator) -> None:
        part = model[1].module[0]
        with zero3.full_params(part):
            assert [name for name, _ in part.named_parameters()] == ["weight", "bias"]
            assert torch.equal(part.weight, plain[1][0].weight)
            with zero3.full_params(model[1]):
                assert torch.equal(part.weight, plain[1][0].weight)
            assert torch.equal(part.weight, plain[1][0].weight), "the inner block must not take it away"
            with pytest.raises(RuntimeError, match="released"):
                weight(model, 0).sum()
        assert_at_rest(model)

    on_ranks(world_size, mlp, body)


@WORLDS
def test_writeback_makes_rank_0s_changes_everybodys(world_size: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        with zero3.full_params(model, writeback=True), torch.no_grad():
            weight(model, 0).fill_(group.rank + 3)
            weight(model, 1).data = torch.full((WIDTH, WIDTH), group.rank + 4.0, dtype=torch.float64)
        found = full_parameters(model)
        assert found["0.0.weight"].eq(3).all()
        assert found["1.0.weight"].eq(4).all()
        assert torch.equal(found["2.0.weight"], mlp_weight)
        assert_at_rest(model)

    mlp_weight = mlp()[2][0].weight.detach()
    on_ranks(world_size, mlp, body)


@pytest.mark.parametrize("world_size", [2, 3])
def test_full_params_without_writeback_lose_changes(world_size: int) -> None:
    """On one rank the parameters are the chunk, and stay changed."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        before = full_parameters(model)
        with zero3.full_params(model), torch.no_grad():
            weight(model).zero_()
        with pytest.raises(ValueError, match="mine"):
            break_off(model, ValueError("mine"))
        assert_close(full_parameters(model), before, 0, "parameters")
        assert_at_rest(model)

    on_ranks(world_size, mlp, body)


def test_writeback_after_an_exception_on_one_rank_writes_nothing_anywhere() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        before = full_parameters(model)
        mine = group.rank == 1
        with pytest.raises(KeyError if mine else RuntimeError, match="the key" if mine else "rank 1.*KeyError.*Nothing was written"):
            break_off(model, KeyError("the key") if mine else None)
        assert_close(full_parameters(model), before, 0, "parameters")
        assert_at_rest(model)

    on_ranks(2, mlp, body)


@WORLDS
def test_what_is_kept_of_full_params_stays_readable(world_size: int) -> None:
    """Also when the layer has been fetched and trained again. It is what it was, but on one rank the chunk itself."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        before = full_parameters(model)
        with zero3.full_params(model):
            states, view, data = model.state_dict(), weight(model).detach().t(), weight(model).data
        optimizer = sgd(model.get_trainable_chunk())
        for _ in range(2):
            if world_size > 1:
                assert_close(dict(states), before, 0, "state dict")
                assert torch.equal(view.t(), before["0.0.weight"])
                assert torch.equal(data, before["0.0.weight"])
            model(X).sum().backward()
            optimizer.step()
        assert torch.isfinite(view).all()

    on_ranks(world_size, mlp, body)


@WORLDS
def test_writeback_refuses_a_new_parameter_in_the_place_of_one(world_size: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        before = full_parameters(model)
        says = r"rank \d.*'0.weight' of layer .*replaced.*\.data"
        with pytest.raises(RuntimeError, match=says), zero3.full_params(model, writeback=True):
            model[0].module[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))
        assert_close(full_parameters(model), before, 0, "parameters")
        model(X).sum().backward()

    on_ranks(world_size, mlp, body)


@WORLDS
def test_full_params_between_forward_and_backward(world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        loss = model(turn.tensor(3, WIDTH)).pow(2).mean()
        sharded = isinstance(model, zero3.Zero3Sequential)
        norm = sum(value.abs().sum() for value in (full_parameters(model) if sharded else dict(model.named_parameters())).values())
        loss.backward()
        return loss, norm

    check_parity(mlp, program, world_size=world_size)


@WORLDS
def test_full_params_around_a_step(world_size: int) -> None:
    """Nothing is gathered then, and gradients are reduced all the same."""

    def program(model: nn.Module, turn: Turn) -> Any:
        if not isinstance(model, zero3.Zero3Sequential):
            loss = model(turn.tensor(3, WIDTH)).pow(2).mean()
            loss.backward()
            return loss
        with zero3.full_params(model):
            loss = model(turn.tensor(3, WIDTH)).pow(2).mean()
            loss.backward()
        return loss

    check_parity(mlp, program, world_size=world_size)


def test_a_module_without_layers_has_no_full_params() -> None:
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"), zero3.full_params(nn.Linear(2, 2)):
        pass


# -- a hundred times


def everything(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
    """All that a loop may do in a step, exceptions included."""
    optimizer.zero_grad()
    x = X.clone().requires_grad_()
    with zero3.no_sync(model):
        model(x).sum().backward()
    with zero3.step_guard(model):
        model(x).sum().backward()
    torch.autograd.grad(model(x).sum(), x)
    model(x)
    with torch.no_grad():
        model(x)
    with zero3.full_params(model, writeback=True):
        pass
    zero3.full_state_dict(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(x[:, 1:])
    optimizer.step()
    group.log.clear()


def count_alive() -> tuple[int, int]:
    """Python's objects, and the bytes of tensors."""
    gc.collect()
    objects = gc.get_objects()
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in objects
        if type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided
    }
    return len(objects), sum(storages.values())


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_nothing_piles_up_over_a_hundred_steps(world_size: int) -> None:
    """Of all that a loop may do, exceptions included: neither live bytes nor Python objects."""

    counts: list[tuple[int, int]] = []

    def build() -> nn.Module:
        return seeded(calls(lambda m, x: m.a(x).tanh()), calls(lambda m, x: m.b(x).tanh()))

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = sgd(model.get_trainable_chunk())

        def alive() -> tuple[int, int]:
            meet(group)
            if group.rank == 0:
                counts.append(count_alive())
            meet(group)
            return counts[-1]

        for _ in range(3):
            everything(model, optimizer, group)
        alive()  # whoever asks a tensor for its storage makes an object that stays
        before = alive()
        for _ in range(100):
            everything(model, optimizer, group)
        after = alive()
        assert after[1] == before[1]
        assert after[0] < before[0] + 100

    on_ranks(world_size, build, body)


def meet(group: ThreadCommunicator) -> None:
    group.all_reduce(torch.zeros(0))  # of no bytes: the other rank may still hold it


@WORLDS
def test_full_params_of_an_outer_layer_show_those_inside(world_size: int) -> None:
    plain = seeded(calls(lambda m, x: m.b(m.a(x))))[0]

    def body(model: Any, group: ThreadCommunicator) -> None:
        assert_close(full_parameters(model), dict(plain.named_parameters()), 0, "parameters")

    on_ranks(world_size, lambda: seeded(calls(lambda m, x: m.b(m.a(x))))[0], body, nested)


OUTER: dict[str, Callable[[nn.Module], Any]] = {
    "resident": zero3.resident,
    "full_params": zero3.full_params,
    "writeback": lambda model: zero3.full_params(model, writeback=True),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("how", ["writeback", "load_full_state_dict"])
@pytest.mark.parametrize("stage", [2, 3])
@WORLDS
def test_values_written_inside_an_outer_context_are_seen_there_by_all_ranks(world_size: int, how: str, outer: str, stage: Any) -> None:
    """Rank 0's values win. The other ranks went on with the old ones until the outer context ended."""

    def build() -> nn.Module:
        return seeded(linear, linear)

    other = seeded(linear, linear, seed=7)
    values = {name: value.clone() for name, value in other.state_dict().items()}
    expected = other(X).detach()

    def shard(model: nn.Module, group: Any, policy: Any) -> nn.Module:
        return in_sequence(model, group, zero3.ShardingPolicy(stage=stage))

    def body(model: Any, group: ThreadCommunicator) -> None:
        model(X).sum().backward()
        with OUTER[outer](model):
            if how == "load_full_state_dict":
                zero3.load_full_state_dict(model, values if group.rank == 0 else None)
            else:
                with zero3.full_params(model, writeback=True), torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(values[name] if group.rank == 0 else torch.full_like(parameter, 7))
            found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            if outer == "resident":
                with torch.no_grad():
                    assert torch.equal(model(X), expected)
        assert_close(found, values, 0, "values inside")
        assert_close(full_parameters(model), values, 0, "values afterwards")
        assert torch.allclose(model(X), expected, rtol=1e-12)

    on_ranks(world_size, build, body, shard)


OF_A_MODEL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("fetch", "release", "reset", "resident", "no_sync", "materialize", "report", "full_params", "parked"), ()),
    **dict.fromkeys(("reduce_gradients", "full_state_dict", "named_gradients", "full_gradients", "step_guard", "stream_weights"), ()),
    **dict.fromkeys(("get_trainable_chunk", "parameter_norms"), ()),
    "set_trainable": ({},),
    "param_groups": ({},),
    "clip_grad_norm_": (1.0,),
    "set_forward_order": ([],),
    "joinable": (print,),
    "check": (None,),
}


def use(name: str, model: Any) -> None:
    found = getattr(zero3, name)(model, *OF_A_MODEL[name])
    with found if hasattr(found, "__enter__") else nullcontext():
        pass


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_what_is_no_model_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"expected the sharded model, an nn\.Module, found a list: pass the model"):
        use(name, [nn.Linear(2, 2)])


def layers_of_mlp(group: ThreadCommunicator) -> zero3.Zero3Sequential:
    return zero3.Zero3Sequential([zero3.Zero3Layer(module, process_group=group) for module in mlp()])


CONTEXTS: dict[str, Callable[[nn.Module], Any]] = {
    "full_params": zero3.full_params,
    "writeback": lambda model: zero3.full_params(model, writeback=True),
    "resident": zero3.resident,
    "of one layer": lambda model: zero3.full_params(model[1]),
}


@pytest.mark.parametrize("context", CONTEXTS)
@WORLDS
def test_a_step_inside_is_refused_before_it_changes_anything(world_size: int, context: str) -> None:
    """On one rank, whose chunks are the parameters, it counts. Steps of others count everywhere."""
    plain = mlp()
    x = rows(3)
    plain(x).pow(2).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    inside = CONTEXTS[context]

    def body(group: ThreadCommunicator) -> str:
        model, other = layers_of_mlp(group), layers_of_mlp(group)
        optimizers = [torch.optim.SGD(each.get_trainable_chunk(), lr=0.1) for each in (model, other)]
        for each in (model, other):
            each(x).pow(2).mean().backward()
        text = ""
        with inside(model):
            optimizers[1].step()
            if group.world_size == 1:
                optimizers[0].step()
            else:
                with pytest.raises(RuntimeError, match=r"the SGD would step layer .* inside zero3.full_params or zero3.resident") as caught:
                    optimizers[0].step()
                text = str(caught.value)
        before = zero3.full_state_dict(model, rank0_only=False)
        assert group.world_size == 1 or all(torch.equal(a, b) for a, b in zip(before.values(), mlp().state_dict().values(), strict=True))
        if group.world_size > 1:
            optimizers[0].step()
        for each in (model, other):
            for found, wanted in zip(zero3.full_state_dict(each, rank0_only=False).values(), plain.state_dict().values(), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
        return text

    assert len(set(run_ranks(world_size, body))) == 1


def test_what_does_not_train_a_pinned_layer_steps() -> None:
    """An optimizer holds a frozen layer that stays fetched while the others train."""

    def body(group: ThreadCommunicator) -> None:
        model = layers_of_mlp(group)
        for chunk in model[0].parameters():
            chunk.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(rows(3)).pow(2).mean().backward()
        before = zero3.full_state_dict(model, rank0_only=False)
        with zero3.resident(model[0]):
            optimizer.step()
        after = zero3.full_state_dict(model, rank0_only=False)
        assert [torch.equal(before[name], after[name]) for name in before] == [True] * 2 + [False] * 4

    run_ranks(2, body)


@WORLDS
def test_reduce_gradients_in_a_backwards_hook_is_refused_by_name(world_size: int) -> None:
    plain = mlp()
    plain(rows(3)).pow(2).mean().backward()

    def body(group: ThreadCommunicator) -> str:
        model, told = layers_of_mlp(group), list[str]()

        def hook(gradient: Tensor) -> None:
            with pytest.raises(RuntimeError, match=r"zero3\.reduce_gradients inside a backward") as caught:
                zero3.reduce_gradients(model)
            told.append(str(caught.value))
            zero3.named_gradients(model)

        y = model[1](model[0](rows(3)))
        y.register_hook(hook)
        model[2](y).pow(2).mean().backward()
        assert_gradients(model, plain)
        (text,) = told
        return text

    assert len(set(run_ranks(world_size, body))) == 1


def assert_gradients(model: nn.Module, plain: nn.Module) -> None:
    with zero3.full_gradients(model) as gradients:
        for found, parameter in zip(gradients.values(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-14)


READ: dict[str, Callable[[nn.Module], Any]] = {
    "full_params": zero3.full_params,
    "resident": zero3.resident,
    "full_state_dict": lambda model: nullcontext(zero3.full_state_dict(model)),
}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("way", READ)
@WORLDS
def test_reading_in_a_recomputation_and_in_a_backwards_hook_spoils_nothing(world_size: int, way: str, reentrant: bool) -> None:
    plain = mlp()
    plain(rows(3)).pow(2).mean().backward()

    def body(group: ThreadCommunicator) -> None:
        model, other = layers_of_mlp(group), layers_of_mlp(group)

        def first(x: Tensor) -> Tensor:
            with READ[way](other):
                return model[0](x)

        def hook(gradient: Tensor) -> None:
            with READ[way](model):
                pass

        y = model[1](checkpoint(first, rows(3).requires_grad_(), use_reentrant=reentrant))
        y.register_hook(hook)
        model[2](y).pow(2).mean().backward()
        assert_gradients(model, plain)

    run_ranks(world_size, body)
