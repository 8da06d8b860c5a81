"""docs/tasks.md: a newcomer's tasks are told on the pages, and done by tests."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.programs import ROOT

DOCS = ROOT / "docs"
ROWS = [line.strip("| ").split(" | ") for line in (DOCS / "tasks.md").read_text().splitlines() if line.startswith("|")][2:]


@cache
def told(page: str) -> str:
    return " ".join((DOCS / page).resolve().read_text().split())


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def missing(row: list[str]) -> list[str]:
    """What of a row is not so."""
    _, page, code, shown = row
    (link,) = re.findall(r"\]\(([^)]+)\)", page)
    file, _, name = shown.strip("`").partition("::")
    found = [] if code.removeprefix("`").removesuffix("`") in told(link) else [code]
    return found + ([] if (ROOT / file).is_file() and (not name or name in functions_of(ROOT / file)) else [shown])


def test_there_are_many_tasks_and_no_two_alike() -> None:
    assert len(ROWS) >= 40 and len({tuple(row) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_task_is_told_on_its_page_and_done_by_its_test(row: list[str]) -> None:
    assert not missing(row)


def test_a_task_that_is_told_nowhere_is_seen() -> None:
    wrong = ["fly", "[plans](plan.md)", "`zero3.fly()`", "`tests/docs/test_tasks.py::test_flying`"]
    assert missing(wrong) == wrong[2:]
