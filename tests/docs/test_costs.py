"""The page of costs has a row for every option and every public function, and the figures that its command gives."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import zero3
from benchmarks.costs.main import OPTIONS, PAGE, cells_of, measured, row_of, written

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
TEXT = PAGE.read_text()
ROWS = re.findall(r"^\| `([\w=]+)`.*$", TEXT, re.M)
FREE = set(re.findall(r"`(\w+)`", TEXT.partition("These have no cost of their own:")[2]))
QUICK = ["reshard_after_forward", "no_sync"]


def test_every_policy_field_and_public_name_has_a_row_of_costs_or_is_said_to_have_none() -> None:
    rows = {row.partition("=")[0] for row in ROWS}
    assert rows >= {field.name for field in fields(zero3.ShardingPolicy)}
    assert rows | FREE >= set(zero3.__all__)
    assert len(ROWS) == len(set(ROWS)) and set(OPTIONS) - {"nothing"} == set(ROWS[: len(OPTIONS) - 1])


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_costs_is_whole_and_its_tests_say_the_name(name: str) -> None:
    cells = [cell.strip() for cell in row_of(TEXT, name).strip("| ").split(" | ")]
    assert len(cells) == 8 and all(cells)
    assert re.search(r"^\d.*; (0\.1\.0|next)$", cells[6]), "lines of yours, and a version that the changelog has"
    tests = re.findall(r"`(tests/[\w/]+\.py)`", cells[7])
    assert tests and re.search(rf"\b{name.partition('=')[0]}\b", "".join((ROOT / test).read_text() for test in tests))


def test_what_is_new_is_in_the_changelogs_newest_section() -> None:
    unreleased = (ROOT / "CHANGELOG.md").read_text().partition("\n## 0.1.0")[0]
    for name in ROWS:
        if "; next |" in row_of(TEXT, name):
            assert f"`{name}" in unreleased or f"{name}=" in unreleased, name


def same(names: list[str]) -> None:
    """Bytes and transfers exactly. The host's calls nearly: they change with each edit of the package, and with Python's version."""
    for name, cells in measured(names).items():
        written_here = cells_of(TEXT, name)
        assert written_here[:3] == cells[:3], name
        here, now = (float(each.strip("%+")) for each in (written_here[3], cells[3]))
        assert abs(here - now) <= max(6.0, 0.15 * abs(now)), f"{name}: {now} %, the page says {here}. Run the page's command"


def test_figures_of_costs_are_those_of_the_command() -> None:
    same(QUICK)


@pytest.mark.slow
def test_all_figures_of_costs_are_those_of_the_command() -> None:
    same([name for name in OPTIONS if name != "nothing"])
    assert cells_of(written(TEXT, "tile", ["a", "b", "c", "d"]), "tile") == ["a", "b", "c", "d"]
