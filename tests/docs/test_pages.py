"""What README and the pages in docs/ say of code: names, keywords, files and links that exist, and examples that parse."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import zero3
import zero3.integrations  # a room that does not come with the package

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
YOURS = {"script.py"}  # files that a reader makes


def blocks_of(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def prose_of(text: str) -> str:
    """Without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def code_of(text: str) -> Iterator[str]:
    """Every piece of Python: fenced blocks, and spans such as `zero3.shard(model)` or `with zero3.no_sync(model):`."""
    yield from blocks_of(text, "python")
    for span in re.findall(r"`([^`\n]+)`", prose_of(text)):
        if re.search(r"\b(zero3\.|ShardingPolicy\()", span) and "/" not in span:
            yield f"{span} pass" if span.endswith(":") else span


def calls_in(code: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return  # a span that is no whole statement
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_zero3_exist(page: Path) -> None:
    named = set(re.findall(r"\bzero3\.(\w+)\b(?!\.(?:py|md))", page.read_text()))
    assert not [name for name in named if not hasattr(zero3, name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keywords_of_calls_exist(page: Path) -> None:
    for code in code_of(page.read_text()):
        for call in calls_in(code):
            name = ast.unparse(call.func).removeprefix("zero3.")
            if name in zero3.__all__:
                taken = inspect.signature(getattr(zero3, name)).parameters
                if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
                    unknown = [keyword.arg for keyword in call.keywords if keyword.arg not in taken]
                    assert not unknown, f"{name} has no argument {unknown[0]}: {code}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_parse(page: Path) -> None:
    for code in blocks_of(page.read_text(), "python"):
        ast.parse(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """As `examples/ema.py`, as `core/chunk.py` in the package, and as links."""
    text = prose_of(page.read_text())
    named = re.findall(r"`((?:[\w.-]+/)*[\w-]+\.py)\b", text)
    missing = [name for name in named if name not in YOURS and not any((start / name).is_file() for start in (ROOT, ROOT / "zero3"))]
    links = [target for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if target]
    assert not missing + [target for target in links if not (page.parent / target).exists()]


def test_every_row_from_fsdp2_names_the_tests_that_show_it() -> None:
    """Tests that say each name and keyword of the row."""
    section = (ROOT / "docs" / "migrating.md").read_text().partition("## From FSDP2")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    assert rows
    assert not [row for row in rows if not re.search(r"\| `tests/[\w/]+\.py`(, `tests/[\w/]+\.py`)* \|$", row)]
    for row in rows:
        ours, tests = row.split(" | ")[1], "".join((ROOT / name).read_text() for name in re.findall(r"`(tests/[\w/]+\.py)`", row))
        said = {word for word in re.findall(r"zero3\.(\w+)", ours) if word != "ShardingPolicy"} | set(re.findall(r"\b(\w+)=", ours))
        assert not [word for word in said if not re.search(rf"\b{word}\b", tests)], row
