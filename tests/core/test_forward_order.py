"""ForwardOrder as pure data: which layer comes next in a forward, as far as it is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_schedule import LAYERS
from zero3.core.schedule import ForwardOrder

passes = st.lists(st.sampled_from(LAYERS), min_size=1, max_size=6)


def run(order: ForwardOrder[str], layers: str | list[str], depth: int = 2) -> list[tuple[bool, str]]:
    """A whole pass: for each layer, whether it was foreseen, and what was foreseen behind it."""
    order.begin()
    seen = []
    for index, layer in enumerate(layers):
        assert order.position == index
        seen.append((order.advance(layer), "".join(order.upcoming(depth))))
    order.learn()
    return seen


@given(passes, st.integers(0, 4))
def test_the_second_pass_is_foreseen(layers: list[str], depth: int) -> None:
    order: ForwardOrder[str] = ForwardOrder()
    assert run(order, layers, depth) == [(False, "")] * len(layers)
    ahead = ["".join(layers[i + 1 : i + 1 + depth]) for i in range(len(layers))]
    assert run(order, layers, depth) == [(True, text) for text in ahead]


@given(passes)
def test_an_expected_order_is_foreseen_from_the_first_pass(layers: list[str]) -> None:
    assert all(foreseen for foreseen, _ in run(ForwardOrder(layers), layers))


@given(st.lists(passes, max_size=ForwardOrder.MAX_KNOWN), passes)
def test_a_layer_is_foreseen_only_while_a_known_order_begins_so(before: list[list[str]], layers: list[str]) -> None:
    order: ForwardOrder[str] = ForwardOrder()
    for each in before:
        run(order, each)
    known = [any(each[:n] == layers[:n] for each in before) for n in range(1, len(layers) + 1)]
    assert all(known[i] for i, (foreseen, _) in enumerate(run(order, layers)) if foreseen)


@given(passes, passes)
def test_a_turn_from_one_known_order_to_another_is_not_foreseen(first: list[str], second: list[str]) -> None:
    """All ranks know both, but each turns by its own data: the turn needs a word between them, what follows does not."""
    order: ForwardOrder[str] = ForwardOrder()
    run(order, first)
    run(order, second)
    turn = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    assert [foreseen for foreseen, _ in run(order, first)] == [i != turn for i in range(len(first))]


@given(st.lists(passes, max_size=6), passes)
def test_what_is_foreseen_next_goes_on_a_known_order(before: list[list[str]], layers: list[str]) -> None:
    order: ForwardOrder[str] = ForwardOrder()
    for each in before:
        run(order, each)
    order.begin()
    for index, layer in enumerate(layers):
        order.advance(layer)
        ahead = [*layers[: index + 1], *order.upcoming(3)]
        assert any(each[: len(ahead)] == ahead for each in before) or not order.upcoming(3)


def test_training_and_evaluation_take_turns() -> None:
    order: ForwardOrder[str] = ForwardOrder("abc")
    run(order, "abd")
    assert run(order, "abc") == [(True, "bd"), (True, "d"), (False, "")]  # the one used last is expected first
    assert run(order, "abc") == [(True, "bc"), (True, "c"), (True, "")]
    assert run(order, "abd") == [(True, "bc"), (True, "c"), (False, "")]
    assert run(order, "axe") == [(True, "bd"), (False, ""), (False, "")]
    assert run(order, "abd") == [(True, "xe"), (False, "d"), (True, "")]  # followed from the turn on


def test_a_pass_off_the_known_orders_foresees_nothing_any_more() -> None:
    order: ForwardOrder[str] = ForwardOrder("abc")
    assert run(order, "axc") == [(True, "bc"), (False, ""), (False, "")]
    assert run(order, "axc") == [(True, "xc"), (True, "c"), (True, "")]


def test_a_pass_that_ends_early_leaves_the_order_known() -> None:
    order: ForwardOrder[str] = ForwardOrder("abc")
    run(order, "ab")
    assert run(order, "abc") == [(True, "bc"), (True, "c"), (True, "")]


def test_a_pass_that_goes_on_is_learned_whole() -> None:
    order: ForwardOrder[str] = ForwardOrder("ab")
    assert run(order, "abc") == [(True, "b"), (True, ""), (False, "")]
    assert run(order, "abc") == [(True, "bc"), (True, "c"), (True, "")]


@pytest.mark.parametrize("used_again", [False, True])
def test_the_order_not_used_for_longest_is_forgotten(used_again: bool) -> None:
    order: ForwardOrder[int] = ForwardOrder()
    last = ForwardOrder.MAX_KNOWN - 1

    def foreseen(layer: int) -> bool:
        order.begin()
        order.advance(layer)
        found = bool(order.upcoming(1))
        order.advance(-layer)
        order.learn()
        return found

    assert not any(foreseen(layer) for layer in range(last + 1))
    for _ in range(3 if used_again else 0):  # an order used often counts once
        assert foreseen(0)
    assert not foreseen(last + 1)  # one too many: 0 goes, or 1 if 0 was used since
    assert not foreseen(1 if used_again else 0)
    assert foreseen(3 if used_again else 2)  # the next in line


def test_a_pass_that_calls_nothing_teaches_nothing() -> None:
    order: ForwardOrder[str] = ForwardOrder("ab")
    run(order, "")
    assert run(order, "ab") == [(True, "b"), (True, "")]
