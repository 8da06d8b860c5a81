"""docs/design.md leads to the code, and the code back to it: reading order, numbers, and the order in which a step comes by them."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.test_architecture import FLOORS, SOURCES, TREES, imports_of, source_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/design.md").read_text()
READING = [name.removesuffix(".py") for name in re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", PAGE, re.M)]
NUMBER = r"\[((?:[FBS]|fetch |release |backup )\d)\]"


class Stop(NamedTuple):
    """One of the walk's paragraphs: `**[F2] ...: `Runtime.pre_forward`, `core/runtime.py`.**`."""

    number: str
    function: str
    source: str


STOPS = [
    Stop(number, *re.findall(r"`([\w.]+)`, `([\w/]+)\.py`", heading)[-1])
    for number, heading in re.findall(rf"^\*\*{NUMBER} (.*?)\*\*", PAGE, re.M | re.S)
]


def text_of(stop: Stop) -> str:
    """The source of the function that a paragraph names."""
    *classes, name = stop.function.split(".")
    body: list[Any] = TREES[stop.source].body
    for each in classes:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == each)
    function = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
    return "\n".join(SOURCES[stop.source].read_text().splitlines()[function.lineno - 1 : function.end_lineno])


def test_the_reading_list_needs_no_jumps() -> None:
    """Each file imports, of those on the list, only files that stand above it; and the gradient's path is on it."""
    assert set(READING) >= {"core/chunk", "core/gradient_buffer", "core/flow", "core/account", "core/backward", "core/runtime", "layer"}
    for place, source in enumerate(READING):
        imported = {source_of(name) for name in imports_of(source)}
        assert not imported & set(READING[place:]), f"{source} comes too early"


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.number)
def test_a_numbers_function_cites_it(stop: Stop) -> None:
    assert f"[{stop.number}]" in text_of(stop)


def test_every_number_is_explained_once_and_every_citation_leads_to_one() -> None:
    numbers = [stop.number for stop in STOPS]
    assert len(numbers) == len(set(numbers))
    cited = {number for path in SOURCES.values() for number in re.findall(NUMBER, path.read_text())}
    assert cited == set(numbers) == set(re.findall(NUMBER, PAGE))


def test_a_step_comes_by_the_numbers_in_the_pages_order() -> None:
    """Of one layer, and of all, in the step that the page's picture was recorded from."""
    script = runpy.run_path(str(ROOT / "docs/pictures/step.py"))
    once = {"F1", "F5", "B1", "B6", "S1", "S2"}
    moments = [number for number, layer, _ in script["record"]().moments if number in once or layer == script["TOLD"]]
    in_order = list(dict.fromkeys(moments))
    assert in_order == [stop.number for stop in STOPS if " " not in stop.number]


def test_the_floors_that_contributors_read_are_those_of_the_law() -> None:
    rows = re.findall(r"^  \| (\d+) \| (.+?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert {int(number): set(re.findall(r"`(\w+)`", rooms)) for number, rooms in rows} == dict(enumerate(FLOORS))
