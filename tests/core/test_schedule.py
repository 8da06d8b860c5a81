"""CallTrace as pure data: what a backward does, in which order.

The ranks of a model decide alone what they gather and reduce next. They stay together only because what this and ForwardOrder
say depends on the forward's calls, never on where gradients happen to flow: that is the main property below.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from zero3.core.schedule import Call, CallPhase, CallTrace, Step

Tree = tuple[str, list["Tree"]]  # type: ignore[misc]  # a layer's call, and the calls made inside it

LAYERS = "abcdef"  # few, so that most forwards call some layer again, beside itself or inside itself
trees = st.recursive(
    st.sampled_from(LAYERS).map(lambda layer: (layer, [])),
    lambda inner: st.tuples(st.sampled_from(LAYERS), st.lists(inner, max_size=3)),
    max_leaves=8,
)
forwards = st.lists(trees, min_size=1, max_size=5)


def record(forward: list[Tree]) -> CallTrace[str]:
    trace: CallTrace[str] = CallTrace()

    def call(tree: Tree) -> None:
        start = trace.begin()
        for inner in tree[1]:
            call(inner)
        trace.record(tree[0], start)

    for tree in forward:
        call(tree)
    return trace


def describe(steps: Iterator[Step[str]]) -> list[tuple[str, int, bool]]:
    return [("open" if step.opens else "close", step.call.index, step.reduce) for step in steps]


def whole_walk(trace: CallTrace[str]) -> list[tuple[str, int, bool]]:
    return [*describe(trace.advance(trace.calls[0])), *describe(trace.finish(complete=True))]


def position(walk: list[tuple[str, int, bool]], kind: str, call: Call[str]) -> int:
    return [step[:2] for step in walk].index((kind, call.index))


@given(forwards, st.lists(st.integers(0, 40), max_size=12))
def test_the_steps_do_not_depend_on_which_gradients_arrive(forward: list[Tree], arrivals: list[int]) -> None:
    """Any calls, in any order, any number of times, if only none arrives after its call is over; then `finish`."""
    expected = whole_walk(record(forward))
    trace = record(forward)
    steps = []
    for arrival in arrivals:
        call = trace.calls[arrival % len(trace.calls)]
        if call.phase is not CallPhase.CLOSED:
            steps += describe(trace.advance(call))
            assert call.phase is CallPhase.OPEN
    steps += describe(trace.finish(complete=True))
    assert steps == expected


@given(forwards)
def test_every_call_is_opened_once_and_then_closed_once(forward: list[Tree]) -> None:
    trace = record(forward)
    walk = whole_walk(trace)
    assert sorted(index for kind, index, _ in walk if kind == "open") == list(range(len(trace.calls)))
    assert sorted(index for kind, index, _ in walk if kind == "close") == list(range(len(trace.calls)))
    for call in trace.calls:
        assert position(walk, "open", call) < position(walk, "close", call)


@given(forwards)
def test_calls_are_opened_from_the_last_that_ended_to_the_first(forward: list[Tree]) -> None:
    trace = record(forward)
    opened = [index for kind, index, _ in whole_walk(trace) if kind == "open"]
    assert opened == sorted(opened, reverse=True)
    assert [call.end for call in trace.calls] == sorted(call.end for call in trace.calls)


@given(forwards)
def test_calls_one_after_another_are_never_open_together(forward: list[Tree]) -> None:
    """Else a backward would hold every layer it has passed."""
    trace = record(forward)
    walk = whole_walk(trace)
    for earlier in trace.calls:
        for later in trace.calls:
            if earlier.end < later.start:
                assert position(walk, "close", later) < position(walk, "open", earlier)


@given(forwards)
def test_an_outer_call_is_open_while_those_inside_it_are(forward: list[Tree]) -> None:
    trace = record(forward)
    walk = whole_walk(trace)
    for outer in trace.calls:
        for inner in trace.calls:
            if outer.start < inner.start and inner.end < outer.end:
                assert position(walk, "open", outer) < position(walk, "open", inner)
                assert position(walk, "close", inner) < position(walk, "close", outer)


@given(forwards)
def test_a_layer_is_reduced_once_when_all_its_calls_are_over(forward: list[Tree]) -> None:
    trace = record(forward)
    walk = whole_walk(trace)
    assert not any(reduce for kind, _, reduce in walk if kind == "open")
    reduced = [trace.calls[index].layer for _, index, reduce in walk if reduce]
    assert sorted(reduced) == sorted({call.layer for call in trace.calls})
    for layer in reduced:
        closings = [reduce for kind, index, reduce in walk if kind == "close" and trace.calls[index].layer == layer]
        assert closings == [False] * (len(closings) - 1) + [True]


@given(forwards, st.integers(0, 4))
def test_look_ahead_names_the_layers_that_are_opened_next(forward: list[Tree], depth: int) -> None:
    trace = record(forward)
    order = list(reversed(tuple(call.layer for call in trace.calls)))
    assert trace.upcoming(depth) == order[:depth]
    for step in trace.advance(trace.calls[0]):
        if step.opens:
            done = len(trace.calls) - step.call.index
            assert trace.upcoming(depth) == order[done : done + depth]
            assert trace.is_open(step.call.layer)
    assert trace.upcoming(depth) == []


@given(forwards, st.integers(0, 40))
def test_a_backward_that_is_not_complete_stops_at_the_last_gradient(forward: list[Tree], arrival: int) -> None:
    """`autograd.grad` for something in the middle gathers nothing below it."""
    trace = record(forward)
    call = trace.calls[arrival % len(trace.calls)]
    walk = [*describe(trace.advance(call)), *describe(trace.finish(complete=False))]
    opened = [index for kind, index, _ in walk if kind == "open"]
    assert opened == list(range(len(trace.calls) - 1, call.index - 1, -1))
    assert sorted(index for kind, index, _ in walk if kind == "close") == sorted(opened)


@given(forwards, st.integers(0, 40), st.booleans())
def test_a_second_backward_takes_the_same_steps(forward: list[Tree], arrival: int, finished: bool) -> None:
    """`retain_graph`, whether the backward before came to its end or raised in the middle."""
    trace = record(forward)
    for _ in trace.advance(trace.calls[arrival % len(trace.calls)]):
        pass
    if finished:
        assert describe(trace.finish(complete=True))
    else:
        trace.rewind()
    assert {call.phase for call in trace.calls} == {CallPhase.PENDING}
    assert not any(trace.is_open(layer) for layer in LAYERS)
    assert whole_walk(trace) == whole_walk(record(forward))


def test_a_gradient_that_comes_late_opens_its_call_again() -> None:
    trace = record([("a", []), ("b", [])])
    first, second = trace.calls
    assert describe(trace.advance(first)) == [("open", 1, False), ("close", 1, True), ("open", 0, False)]
    assert describe(trace.advance(second)) == [("open", 1, False)]
    assert describe(trace.finish(complete=True)) == [("close", 1, True), ("close", 0, True)]


def test_an_outer_layer_is_over_only_at_the_very_end() -> None:
    """The picture in the docstring of CallTrace."""
    trace = record([("outer", [("a", []), ("b", [])])])
    a, b, outer = trace.calls
    assert [(call.start, call.end) for call in (outer, a, b)] == [(1, 6), (2, 3), (4, 5)]
    assert describe(trace.advance(outer)) == [("open", 2, False)]
    assert describe(trace.advance(b)) == [("open", 1, False)]
    assert describe(trace.advance(a)) == [("close", 1, True), ("open", 0, False)]
    assert describe(trace.finish(complete=True)) == [("close", 0, True), ("close", 2, True)]


def test_a_tape_knows_its_layers() -> None:
    trace = record([("a", []), ("b", []), ("a", [])])
    assert tuple(call.layer for call in trace.calls) == ("a", "b", "a")
    assert trace.holds("a") and trace.holds("b") and not trace.holds("c")
    assert not describe(CallTrace[str]().finish(complete=True))
