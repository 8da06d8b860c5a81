"""The table of bytes in docs/models.md, and what was counted."""

from __future__ import annotations

import pytest

from benchmarks.experts.main import counted
from benchmarks.experts.models import BEGIN, COLUMNS, END, PAGE, Mixture, made, row, tried


def rows() -> dict[str, list[str]]:
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    return {cell[0].strip("`"): cell for cell in cells}


def test_every_row_of_the_table_of_bytes_is_what_its_sizes_give() -> None:
    found = rows()
    assert len(found) > 50 and set(found) <= set(tried(PAGE.read_text()))
    for kind, cells in found.items():
        assert len(cells) == len(COLUMNS)
        assert cells == row(kind, Mixture(*map(int, cells[1:6])))


@pytest.mark.parametrize("kind", ["nemotron_h", "zaya", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_sizes_in_the_table_are_those_of_transformers(kind: str) -> None:
    of = made(kind)
    assert of is not None
    assert rows()[kind] == row(kind, of)


@pytest.mark.parametrize(("experts", "used", "ranks"), [(8, 2, 4), (16, 4, 3), pytest.param(32, 8, 8, marks=pytest.mark.slow)])
def test_the_formula_of_the_table_gives_what_is_counted(experts: int, used: int, ranks: int) -> None:
    """Tokens are drawn, so they don't use experts quite alike."""
    of = Mixture(1, experts, used, 48, 0)
    sent, need = counted(of, ranks, 400, "balanced")
    assert sent <= 1.05 * need
    assert sent == pytest.approx(of.at_home(ranks, 400, 2), rel=0.08)
