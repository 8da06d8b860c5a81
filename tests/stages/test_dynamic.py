"""The order of all calls of a dynamic model, as pure data: what a rank that leaves layers out passes over."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from zero3.stages.dynamic import Event, StaticOrder


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_every_layer_begins_and_ends_once_whatever_is_called(steps: list[int], data: Any) -> None:
    depths = [0]
    for step in steps[1:]:
        depths.append(min(step, depths[-1] + 1))
    program: StaticOrder[int] = StaticOrder(enumerate(depths))
    program.begin()
    seen: list[Event[int]] = []
    everything = list(program.rest())
    assert len(everything) == 2 * len(depths)
    program.begin()
    chosen = sorted(data.draw(st.sets(st.integers(0, len(depths) - 1))))
    for layer in chosen:
        passed = program.until(layer, begins=True)
        assert passed is not None
        seen += [*passed, Event(layer, begins=True)]
    assert seen + program.rest() == everything
    for layer in range(len(depths)):
        begin, end = (everything.index(Event(layer, begins)) for begins in (True, False))
        inner = {event.layer for event in everything[begin + 1 : end]}
        assert all(depths[each] > depths[layer] for each in inner)
    assert program.until(0, begins=True) is None
