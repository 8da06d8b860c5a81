"""Tensors that leave a layer by another way than its output, and layers that do other things on other ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import WIDTH, WORLDS, Calls, calls, linear, mean_square, mlp, seeded
from tests.support.ranks import RanksDisagree, ThreadCommunicator, run_ranks
from tests.support.reference import Turn, as_one_layer, check_parity, in_place, in_sequence, nested, process_group

KINDS = pytest.mark.parametrize("use_reentrant", [False, True])


class Wired(nn.Sequential):
    """A model of two layers, called as `wiring(first, second, x)` says."""

    def __init__(self, wiring: Callable[..., Tensor], first: Callable[..., Any]) -> None:
        super().__init__(*seeded(calls(first), linear))
        self.wiring = wiring

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self[0], self[1], x)


def keep(module: Calls, x: Tensor, value: Any) -> Tensor:
    module.kept = value
    return x.detach() * 1


def fill(x: Tensor, container: Any, value: Tensor) -> Tensor:
    container["key"] = value
    return x.detach() * 1


WAYS_OUT: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    # what the first layer does with the input, how the model goes on
    "an attribute": (lambda m, x: keep(m, x, m.b(m.a(x).tanh())), lambda f, s, x: s(f(x)) + f.kept),
    "an attribute that is a list": (lambda m, x: keep(m, x, [m.b(m.a(x).tanh())]), lambda f, s, x: s(f(x)) + f.kept[0]),
    "an attribute that needs no weights": (lambda m, x: keep(m, x, x + m.b.bias), lambda f, s, x: s(f(x)) + f.kept),
    "a cache among the arguments": (
        lambda m, x, cache: fill(x, cache, m.b(m.a(x).tanh())),
        lambda f, s, x: (lambda cache: s(f(x, cache=cache)) + cache["key"])({}),
    ),
    "an argument changed in place": (
        lambda m, x: (x.add_(m.b(m.a(x.clone()).tanh())), None)[1],
        lambda f, s, x: (lambda y: (f(y), s(y))[1])(x * 1),
    ),
    "a view of an argument changed in place": (
        lambda m, x: (x[:, 1:].add_(m.b(m.a(x.clone()).tanh())[:, 1:]), None)[1],
        lambda f, s, x: (lambda y: (f(y), s(y))[1])(x * 1),
    ),
    "a view of a weight that is kept": (lambda m, x: keep(m, x, m.a.weight.t()), lambda f, s, x: s(f(x)) @ f.kept),
    "a view of a weight that is returned": (
        lambda m, x: (m.a(x), m.b.weight[:, :], m.b.weight.view(-1)[:WIDTH]),
        lambda f, s, x: (lambda y, weight, row: s(y) @ weight + row)(*f(x)),
    ),
    "a view of a weight without gradient": (
        lambda m, x: (m.a(x), m.b.weight.detach()),
        lambda f, s, x: (lambda y, weight: s(y) @ weight)(*f(x)),
    ),
}


@WORLDS
@pytest.mark.parametrize("shard", [in_place, nested])
@pytest.mark.parametrize("way", WAYS_OUT)
def test_gradients_find_a_layer_by_any_way_that_a_tensor_left_it(world_size: int, shard: Any, way: str) -> None:
    first, wiring = WAYS_OUT[way]
    check_parity(lambda: Wired(wiring, first), mean_square, world_size=world_size, shard=shard)


@WORLDS
def test_views_of_weights_may_leave_a_layer_in_inference_mode(world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        with torch.inference_mode():
            quiet = model(turn.tensor(3, WIDTH)).clone()
        return quiet, mean_square(model, turn)

    first, wiring = WAYS_OUT["a view of a weight that is returned"]
    check_parity(lambda: Wired(wiring, first), program, world_size=world_size, shard=nested)


@pytest.mark.parametrize("way", [way for way in WAYS_OUT if "view of a weight" in way])
def test_views_of_weights_may_leave_a_layer_that_stays_whole(way: str) -> None:
    first, wiring = WAYS_OUT[way]
    check_parity(lambda: Wired(wiring, first), mean_square, steps=3, shard=nested, policy=zero3.ShardingPolicy(stage=2))


def test_a_layer_that_stays_whole_hides_its_parameters_though_a_view_of_one_is_in_use() -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(modules[group.rank], policy=zero3.ShardingPolicy(stage=2), process_group=group)
        view = layer(torch.ones(1, WIDTH, dtype=torch.float64))
        with pytest.raises(RuntimeError, match="released"):
            layer.module.b.weight.sum()
        assert view.isfinite().all()

    modules = list(seeded(*[calls(lambda m, x: m.b.weight.t())] * 2))
    run_ranks(2, body)


def test_a_parameter_that_is_returned_keeps_no_memory() -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(modules[group.rank], process_group=group)
        (chunk,) = layer._state.chunks
        buffer = chunk.full
        layer(torch.ones(1, WIDTH, dtype=torch.float64))
        assert chunk.full is buffer, "it was left to a view"

    modules = list(seeded(*[calls(lambda m, x: (m.a(x), m.b.weight))] * 2))
    run_ranks(2, body)


@WORLDS
def test_a_parameter_itself_is_of_no_use_outside_its_layer(world_size: int) -> None:
    """A view of it is: see above. The parameter is one object, in and out of the layer, and hidden now."""

    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(models[group.rank], process_group=process_group(group))
        with torch.no_grad():
            weight = layer(torch.ones(1, WIDTH, dtype=torch.float64))
        assert weight.shape == (WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match=r"'a\.weight' of layer Calls is released.*full_params"):
            weight.sum()

    models = [seeded(calls(lambda m, x: m.a.weight))[0] for _ in range(world_size)]
    run_ranks(world_size, body)


def test_a_gradient_that_comes_by_a_way_that_nobody_saw_is_an_error() -> None:
    """Not garbage: the weights that such a gradient needs are not there, or not yet."""

    def body(group: ThreadCommunicator) -> None:
        mine: list[Tensor] = []
        models[group.rank][0].function = lambda m, x: (mine.append(m.b(m.a(x).tanh())), x.detach())[1]
        model = in_sequence(models[group.rank], group, zero3.ShardingPolicy())
        loss = model(torch.ones(3, WIDTH, dtype=torch.float64)).sum() + mine.pop().sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(torch.ones(3, WIDTH, dtype=torch.float64)).sum().backward()

    models = [seeded(calls(lambda m, x: x), linear, linear) for _ in range(2)]
    run_ranks(2, body)


# -- ranks that do other things inside a layer


SKIPS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the input": lambda m, x: x if m.skip else m.a(x).tanh(),
    "a view of the input": lambda m, x: x.view(-1).view(x.shape) if m.skip else m.a(x).tanh(),
    "one parameter": lambda m, x: m.b(x) if m.skip else m.a(m.b(x)).tanh(),
    "another parameter": lambda m, x: m.b(x) if m.skip else m.a(x),
    "a detached input": lambda m, x: x.detach() if m.skip else m.a(x),
    "nothing with a gradient": lambda m, x: torch.ones_like(x) if m.skip else m.a(x),
}


def skipping(model: nn.Module, turn: Turn) -> Any:
    for module in model.modules():
        if isinstance(module, Calls):
            module.skip = (turn.rank + turn.step) % 2 == 0
    return mean_square(model, turn)


@WORLDS
@pytest.mark.parametrize("shard", [in_sequence, nested])
@pytest.mark.parametrize("skip", SKIPS)
def test_a_layer_may_use_other_parameters_on_other_ranks(world_size: int, shard: Any, skip: str) -> None:
    def build() -> nn.Module:
        return seeded(linear, calls(SKIPS[skip]), linear)

    check_parity(build, skipping, world_size=world_size, shard=shard, steps=3)


@WORLDS
@pytest.mark.parametrize("around", [False, True])
@KINDS
def test_what_is_trainable_may_be_unused_on_a_rank(world_size: int, around: bool, use_reentrant: bool) -> None:
    def part(m: Any, x: Tensor) -> Tensor:
        return m.b(x) if m.skip else m.b(x) + m.a(x).tanh()

    def block(m: Any, x: Tensor) -> Tensor:
        return checkpoint(lambda y: part(m, y), x, use_reentrant=use_reentrant, preserve_rng_state=False)

    def build() -> nn.Module:
        model = seeded(linear, calls(block if around else part), linear)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".a." in name)
        return model

    check_parity(build, skipping, world_size=world_size, steps=3)


@WORLDS
@pytest.mark.parametrize("shard", [as_one_layer, nested])
def test_a_rank_may_cut_the_graph_between_layers(world_size: int, shard: Any) -> None:
    class Cut(nn.Sequential):
        rank = 0

        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            return self[2](self[1](y.detach() if self.rank == 0 else y))

    def program(model: nn.Module, turn: Turn) -> Any:
        (model.module if isinstance(model, zero3.Zero3Layer) else model).rank = turn.rank
        loss = model(turn.tensor(3, WIDTH)).pow(2).mean()
        loss.backward()
        return loss

    check_parity(lambda: Cut(*mlp(3)), program, world_size=world_size, shard=shard)


@WORLDS
def test_ranks_may_have_batches_of_other_sizes_even_none(world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        x = turn.tensor((turn.rank + turn.step) % 3, WIDTH, requires_grad=True)
        loss = model(x).pow(2).sum()
        loss.backward()
        return loss, x.grad

    check_parity(mlp, program, world_size=world_size, steps=3)


# -- which layers are called


class Ordered(nn.Sequential):
    """Calls its children in another order every step."""

    orders: tuple[tuple[int, ...], ...] = ((0, 1, 2), (2, 1), (0, 1, 2), (1,), (2, 0, 1, 0), (2, 1), (0, 1, 2))
    step = 0

    def forward(self, x: Tensor) -> Tensor:
        for index in self.orders[self.step]:
            x = self[index](x)
        return x


@WORLDS
@pytest.mark.parametrize("shard", [in_place, nested])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_all_ranks_may_skip_layers_or_call_them_in_another_order(world_size: int, shard: Any, depth: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        (model.module if isinstance(model, zero3.Zero3Layer) else model).step = turn.step
        return mean_square(model, turn)

    policy = zero3.ShardingPolicy(prefetch_depth=depth)
    check_parity(lambda: Ordered(*mlp(3)), program, world_size=world_size, shard=shard, steps=7, policy=policy)


def test_ranks_that_turn_to_other_orders_that_both_know_do_not_swap_weights() -> None:
    """The layers are of equal size, so that the transfers themselves would pass."""

    def body(group: ThreadCommunicator) -> None:
        model = Ordered(*models[group.rank])
        model.orders = ((0, 1), (1, 0), (0, 1) if group.rank == 0 else (1, 0))
        sharded = nested(model, group, zero3.ShardingPolicy(prefetch_depth=0))
        x = torch.ones(1, WIDTH, dtype=torch.float64)
        for model.step in (0, 1):
            sharded(x).sum().backward()
        model.step = 2
        with pytest.raises((ValueError, RuntimeError, RanksDisagree)):
            sharded(x)

    models = [list(mlp(2)) for _ in range(2)]
    run_ranks(2, body)


@WORLDS
@pytest.mark.parametrize("shard", [in_place, nested])
def test_a_layer_whose_output_is_not_used_gets_zeros(world_size: int, shard: Any) -> None:
    class Unused(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            self[1](y)
            return self[2](y)

    check_parity(lambda: Unused(*mlp(3)), mean_square, world_size=world_size, shard=shard)


@WORLDS
def test_a_zero3sequential_may_stand_inside_a_zero3layer(world_size: int) -> None:
    def shard(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
        model[1] = in_sequence(model[1], group, policy)
        return as_one_layer(model, group, policy)

    check_parity(lambda: seeded(linear, lambda: mlp(3), linear), mean_square, world_size=world_size, shard=shard)
