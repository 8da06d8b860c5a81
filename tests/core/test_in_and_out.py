"""What goes in and out of a layer, and what of the wrapped module is read through it: as with the unwrapped module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, WORLDS, calls, linear, mean_square, seeded
from tests.support.reference import Turn, as_one_layer, check_parity, in_place, nested


@dataclass
class Pair:
    first: Any
    second: Any


class Named(NamedTuple):
    first: Any
    second: Any


class Cache:
    """An object of nobody's acquaintance, with slots."""

    __slots__ = ("kept",)


def cache_of(value: Tensor) -> Cache:
    cache = Cache()
    cache.kept = [{"deep": value}]
    return cache


def unnest(out: Any) -> tuple[Tensor, Tensor]:
    pair, more = out["x"][0]
    return pair.first, more["y"].second[0]


PACKINGS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list": (lambda a, b: [a, None, [b, "text"]], lambda out: (out[0], out[2][0])),
    "dict": (lambda a, b: {"a": a, "b": b, "n": 3}, lambda out: (out["a"], out["b"])),
    "dataclass": (Pair, lambda out: (out.first, out.second)),
    "named tuple": (Named, lambda out: (out.first, out.second)),
    "nest": (lambda a, b: {"x": [(Pair(a, None), {"y": Named(None, [b])})]}, unnest),
    "object": (lambda a, b: (a, cache_of(b)), lambda out: (out[0], out[1].kept[0]["deep"])),
}


class Packed(nn.Sequential):
    """The first layer packs two outputs, the second is called with keywords, and the model returns a dict."""

    def __init__(self, packing: str) -> None:
        pack, self.unpack = PACKINGS[packing]
        super().__init__(
            *seeded(
                calls(lambda m, x: pack(m.a(x).tanh(), m.b(x))),
                calls(lambda m, x, *, other, scale, nothing=None: {"sum": m.a(x * scale) + m.b(other), "nothing": nothing}),
            )
        )

    def forward(self, x: Tensor) -> dict[str, Any]:
        first, second = self.unpack(self[0](x))
        return self[1](first, other=second, scale=2.0)


@WORLDS
@pytest.mark.parametrize("shard", [in_place, nested, as_one_layer])
@pytest.mark.parametrize("packing", PACKINGS)
def test_anything_goes_in_and_comes_out(world_size: int, shard: Any, packing: str) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        out = model(turn.tensor(3, WIDTH))
        assert out["nothing"] is None
        loss = out["sum"].pow(2).mean()
        loss.backward()
        return loss

    check_parity(lambda: Packed(packing), program, world_size=world_size, shard=shard)


@WORLDS
@pytest.mark.parametrize("used", ["first", "second", "both"])
def test_each_output_brings_its_gradient(world_size: int, used: str) -> None:
    class Both(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            first, second = self[0](x)
            return self[1](first if used == "first" else second if used == "second" else first * second)

    def build() -> nn.Module:
        return Both(*seeded(calls(lambda m, x: (m.a(x).tanh(), m.b(x))), linear))

    check_parity(build, mean_square, world_size=world_size, shard=in_place)


@WORLDS
def test_a_layer_may_return_nothing_that_has_a_gradient(world_size: int) -> None:
    class Counting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            assert self[0](x) == 3
            assert self[1](x) is None
            return self[2](x)

    def build() -> nn.Module:
        return Counting(*seeded(calls(lambda m, x: len(m.a(x))), calls(lambda m, x: None), linear))

    check_parity(build, mean_square, world_size=world_size, shard=in_place)
    check_parity(build, mean_square, world_size=world_size, shard=nested)


def test_zero3layer_reads_attributes_through_and_nothing_else() -> None:
    module = seeded(linear, nn.Tanh)
    module.kind = "attention"
    layer = zero3.Zero3Layer(module, 0, 1)
    assert layer.kind == "attention"
    layer.kind = "mine"
    assert module.kind == "attention"
    with pytest.raises(TypeError):
        len(layer)
    with pytest.raises(TypeError):
        layer[0]
    with pytest.raises(AttributeError, match="nobody"):
        layer.nobody  # noqa: B018


def test_train_and_eval_of_a_zero3layer_reach_the_wrapped_module() -> None:
    layer = zero3.Zero3Layer(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    assert not layer.eval().module[1].training
    assert layer.train().module[1].training
