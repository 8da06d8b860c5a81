"""The README's picture tells the bytes that a step takes: those of the formula that tests/core/test_memory.py counts."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.footprint import LAYERS, Formula

SCRIPT = Path(__file__).parents[2] / "docs" / "pictures" / "memory.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_pictures_bytes_are_those_of_the_memory_formula(script: dict[str, Any], depth: int) -> None:
    formula = Formula(3, depth)
    moments = {each.moment: sum(each[1:]) for each in script["step_of"](formula.S, 3, depth)}
    expected = {f"forward {i}": formula.forward_of(i) for i in LAYERS} | {"between": formula.between()}
    expected |= {f"backward {i}": formula.backward_of(i, accumulating=False) for i in LAYERS}
    assert moments == expected | {"clip, step": sum(formula.S), "zero_grad": 0}


def test_it_draws(script: dict[str, Any], tmp_path: Path) -> None:
    script["draw"](tmp_path / "memory.svg")
    assert "what lies where" in (tmp_path / "memory.svg").read_text().lower()
