"""tensors_in: every tensor in whatever a module takes or returns, once. And notes in threads."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero3.core.autograd import note_in_thread, noted_in_thread, tensors_in

a, b, c = (torch.full((2,), float(i)) for i in range(3))

Pair = namedtuple("Pair", "first second")


@dataclass
class Record:
    one: Any
    two: Any = None


@dataclass(slots=True)
class Slotted:
    one: Any
    two: Any = None


class SlottedChild(Slotted):
    __slots__ = ("three",)


class OneSlot:
    __slots__ = "held"


class Cache:
    """As transformers' caches: tensors in lists in objects in a list."""

    def __init__(self, *layers: Any) -> None:
        self.layers = [SimpleNamespace(keys=layer, values=layer, is_sliding=False) for layer in layers]


def one_slot(value: Any) -> OneSlot:
    made = OneSlot()
    made.held = value
    return made


def slotted_child(value: Any) -> SlottedChild:
    made = SlottedChild(a)
    made.three = value
    return made


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (a, [a]),
        (None, []),
        ("text", []),
        (3.5, []),
        ([a, (b, [c])], [a, b, c]),
        ({"x": a, "y": {"z": b}}, [a, b]),
        (OrderedDict(x=a), [a]),
        (MappingProxyType({"x": a}), [a]),
        ({a}, [a]),
        (Pair(a, b), [a, b]),
        (Record(a, [Record(b, c)]), [a, b, c]),
        (Slotted(a, {"x": b}), [a, b]),
        (slotted_child(c), [a, c]),
        (one_slot(a), [a]),
        (SimpleNamespace(x=a, y=None), [a]),
        (Cache(a, b), [a, b]),
        (nn.Parameter(a), [a]),
        (Tensor, []),
        (lambda: a, []),
        (SimpleNamespace(library=torch, x=a), [a]),
    ],
)
def test_tensors_are_found_wherever_outputs_put_them(value: Any, expected: list[Tensor]) -> None:
    found = list(tensors_in(value))
    assert sorted(tensor.data_ptr() for tensor in found) == sorted(tensor.data_ptr() for tensor in expected)


def test_parameters_of_modules_are_not_outputs() -> None:
    """An output that refers to its model does not make all weights escape."""
    assert list(tensors_in({"model": nn.Linear(2, 2), "logits": a})) == [a]


def test_transformers_outputs() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    assert list(tensors_in(outputs.BaseModelOutputWithPast(last_hidden_state=a))) == [a]


def nested(depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def test_the_walk_goes_eight_deep() -> None:
    assert list(tensors_in(nested(8, a))) == [a]
    assert list(tensors_in(nested(9, a))) == []


def test_what_refers_to_itself_ends() -> None:
    loop: dict[str, Any] = {"tensor": a}
    loop["self"] = loop
    (found,) = tensors_in(loop)
    assert found is a


@dataclass(eq=False)
class Neighbour:
    tensor: Tensor
    others: list[Neighbour] = field(default_factory=list)


def test_a_web_of_objects_is_walked_once() -> None:
    """Objects that all know each other: by paths, 30 to the power of 4 of them."""
    web = [Neighbour(torch.ones(1)) for _ in range(30)]
    for neighbour in web:
        neighbour.others = web
    assert len(list(tensors_in(web[0]))) == 30


def test_a_note_in_the_thread_owns_what_it_holds() -> None:
    """torch 2.11's does not."""
    value = nn.Identity()
    before = sys.getrefcount(value)
    for _ in range(5):
        note_in_thread("test", value)
        assert sys.getrefcount(value) == before + 1
    assert noted_in_thread("test") is value
    note_in_thread("test", None)
    assert sys.getrefcount(value) == before and noted_in_thread("test") is None
