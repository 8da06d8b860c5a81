"""The pictures tell what is so: the README's the bytes of docs/memory.md's formula, the design page's what a step does."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.footprint import LAYERS, Bytes, Formula

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    pytest.importorskip("matplotlib")
    return runpy.run_path(str(PICTURES / "memory.py"))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_pictures_bytes_are_those_of_the_memory_formula(script: dict[str, Any], depth: int) -> None:
    formula = Formula(3, depth, unit=Bytes(trailers_of=0))  # they are too small to be drawn
    moments = {each.moment: sum(each[1:]) for each in script["step_of"](formula.S, 3, depth)}
    expected = {f"forward {i}": formula.forward_of(i) for i in LAYERS} | {"between": formula.between()}
    expected |= {f"backward {i}": formula.backward_of(i, accumulating=False) for i in LAYERS}
    assert moments == expected | {"clip, step": sum(formula.S), "zero_grad": 0}


def test_it_draws(script: dict[str, Any], tmp_path: Path) -> None:
    script["draw"](tmp_path / "memory.svg")
    assert "what lies where" in (tmp_path / "memory.svg").read_text().lower()


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    return runpy.run_path(str(PICTURES / "step_machine.py")) | runpy.run_path(str(PICTURES / "step.py"))


@pytest.fixture(scope="module")
def recorded(step: dict[str, Any]) -> Any:
    return step["record"]()


def test_the_steps_picture_holds_as_many_bytes_as_the_memory_page_says(step: dict[str, Any], recorded: Any) -> None:
    layer, number, chunk = step["LAYER"], step["BLOCKS"], step["LAYER"] // step["RANKS"]
    _, bands = recorded.memory()
    assert max(bands["full parameters"]) == 2 * layer
    trailer = 4 * 4  # of a layer's four parameters, behind each slice of its gradient
    assert layer < max(bands["full gradients"]) <= 2 * (layer + step["RANKS"] * trailer)
    assert max(bands["gradients"]) == number * (chunk + trailer)
    held = {kind: band[-1] for kind, band in bands.items()}
    stand_ins = 4 * number  # a NaN a layer, behind what released parameters show
    assert held["chunks"] == number * chunk and held["optimizer state"] == 2 * number * chunk + 4 * number
    assert held["full parameters"] == held["full gradients"] == held["gradients"] == 0
    assert stand_ins <= held["activations, temporaries"] <= stand_ins + 4 * step["ROWS"] * step["WIDTH"] + 1000  # the batch, the loss


def test_the_steps_picture_shows_transfers_beside_the_computation_that_the_page_names(step: dict[str, Any], recorded: Any) -> None:
    last = step["BLOCKS"] - 1
    begins = {(bar.what, bar.layer): bar.begin for bar in recorded.bars if bar.what != "fetch"}
    fetches = [bar for bar in recorded.bars if bar.what == "fetch"]
    order = [*range(last + 1), *reversed(range(last))]  # the last layer is fetched once
    assert [bar.layer for bar in fetches] == order
    backups = {bar.layer: bar for bar in recorded.bars if bar.what == "backup"}
    for fetch, before in zip(fetches[1:], [*order[:last], *range(last, 0, -1)], strict=True):
        phase = "forward" if fetch in fetches[: last + 1] else "backward"
        behind = backups.get(before + 1) if phase == "backward" else None  # issued just before, by the same communicator
        assert fetch.begin == (behind.end if behind is not None else begins[phase, before]), "it is issued when the layer before begins"
        assert fetch.end <= begins[phase, fetch.layer], "it ends before its own layer begins"
    for layer in range(1, last + 1):
        assert begins["backup", layer] == begins["backward", layer - 1], "a layer is backed up when the next one opens"
    compute = sorted((bar for bar in recorded.bars if bar.lane == "compute"), key=lambda bar: bar.begin)
    assert all(abs(one.end - other.begin) < 1e-9 for one, other in pairwise(compute)), "computation, or a wait, at all times"
    assert [bar.what for bar in compute].count("wait") == 2, "for the first fetch and for the last backup"


def test_the_steps_picture_is_the_present_one(step: dict[str, Any], recorded: Any, tmp_path: Path) -> None:
    """What is written in it: another version of matplotlib draws other lines. If it is not: `python docs/pictures/step.py`."""
    pytest.importorskip("matplotlib")
    step["draw"](tmp_path / "step.svg", recorded)
    drawn, there = (re.findall(r"<text[^>]*>([^<]+)</text>", (folder / "step.svg").read_text()) for folder in (tmp_path, PICTURES))
    assert drawn == there and {"forward 1", "backup 1", "B6"} <= set(there)


def test_the_picture_of_gates_is_its_script_s() -> None:
    script = runpy.run_path(str(PICTURES / "towers.py"))
    assert (PICTURES / "towers.svg").read_text() == script["svg"]()
