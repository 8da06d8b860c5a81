"""The race's tables and files, from figures that are made up; and a recording that is made twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.race import main, pool, runs, tables
from benchmarks.race.machines import CAPACITY, GIB, MACHINES
from benchmarks.race.runs import SOURCES, Run, digest
from benchmarks.race.validate import Verdict
from tests.device.clock import HOSTS

pytestmark = pytest.mark.no_device

CELL = Run("zero3", "8b", 8, 1, 2048)


def figures(seconds: float = 1.0, allocated: float = 10 * GIB, reserved: float = 20 * GIB, launches: int = 9) -> dict[str, Any]:
    one = {
        "seconds": seconds, "exposed": 0.1, "starved": 0.0, "launches": launches, "collectives": {"all_gather": 3},
        "moved": {"all_gather": 8}, "copies": [2, 1], "copied": [4, 2], "host_waits": 0, "waits": [], "allocated": allocated,
        "requested": 9 * GIB, "reserved": reserved, "phases": {"backward": 0.3, "clip": 0.8, "optimizer": 0.9},
    }  # fmt: skip
    return {"steps": {f"{machine}, {link}, {host}": one for machine in MACHINES for link in (400, 200, 100) for host in HOSTS}}


def results(ours: dict[str, Any], theirs: dict[str, Any], **more: Any) -> tables.Results:
    return {
        (CELL, "zero3"): ours,
        (CELL, "FSDP2"): theirs,
        (CELL, "FSDP2, last layer kept"): theirs,
        **{(CELL, n): f for n, f in more.items()},
    }


def test_times_have_an_equal_and_memory_has_none() -> None:
    """A step of 1.01 is equal, one of 1.03 is not. Memory of 1.002 is above its goal."""
    assert "1.010 (equal)" in tables.comparison(results(figures(1.01), figures(1.0)), [CELL])
    assert "**1.030**" in tables.comparison(results(figures(1.03), figures(1.0)), [CELL])
    told = tables.comparison(results(figures(allocated=10.02 * GIB), figures()), [CELL])
    assert "10.02 (**1.002**)" in told and "equal" not in told
    assert "10.00 (1.000)" in tables.comparison(results(figures(), figures()), [CELL])


def test_what_does_not_fit_says_so() -> None:
    most = CAPACITY[tables.MAIN] * GIB
    assert "does not fit" in tables.comparison(results(figures(reserved=1.01 * most), figures()), [CELL])
    assert "does not fit" in tables.per_cell(results(figures(), figures(reserved=1.01 * most)), [CELL])
    assert "does not fit" not in tables.comparison(results(figures(reserved=0.99 * most), figures()), [CELL])


def test_all_in_which_zero3_is_not_ahead_is_listed() -> None:
    assert tables.behind(results(figures(), figures()), CELL) == {}
    assert set(tables.behind(results(figures(1.001, 10.01 * GIB, 21 * GIB, 10), figures()), CELL)) == {
        "step ms", "allocated GiB", "reserved GiB", "launches",
    }  # fmt: skip
    told = tables.ahead(results(figures(), figures(), FSDP1=figures(0.9)), [CELL])
    assert "FSDP1" in told and "900.0 ms" in told and "launches" not in told


def test_each_way_in_which_the_host_counts_is_shown_and_each_table_says_simulated() -> None:
    made = results(figures(), figures(), DDP={"error": "OutOfMemoryError: none left"})
    for text in (tables.comparison(made, [CELL]), tables.ahead(made, [CELL]), tables.per_cell(made, [CELL])):
        assert tables.SIMULATED in text
    assert all(f"host {host}" in tables.per_cell(made, [CELL]) for host in HOSTS) and "none left" in tables.per_cell(made, [CELL])


def test_figures_are_kept_for_the_state_of_the_sources(tmp_path: Path) -> None:
    """Any change makes another name. Tests are no part of it."""
    for folder in SOURCES:
        (tmp_path / folder / "src").mkdir(parents=True)
    found = [digest(tmp_path)]
    for file in ("zero3/a.py", "tests/device/clock.py", "tests/device/src/costs.h", "benchmarks/race/models.py"):
        (tmp_path / file).write_text("1")
        found.append(digest(tmp_path))
        (tmp_path / file).write_text("2")
        found.append(digest(tmp_path))
    assert len(set(found)) == len(found)
    (tmp_path / "tests/device/test_a.py").write_text("1")
    assert digest(tmp_path) == found[-1]
    slugs = {CELL.slug, *(replace(CELL, **change).slug for change in ({"ranks": 9}, {"chosen": ("keep_last",)}, {"checkpointing": "full"}))}
    assert len(slugs) == 4


def test_a_run_that_ends_its_process_is_an_error_of_that_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, run: Run) -> Any:
        raise RuntimeError("out of room")

    monkeypatch.setattr(runs, "apart", fail)
    assert main.figures_of(CELL, tmp_path) == {"error": "RuntimeError: out of room"}
    assert not list(tmp_path.iterdir()), "an error is not kept"
    monkeypatch.setattr(runs, "apart", lambda name, run: figures())
    found = main.figures_of(CELL, tmp_path)
    monkeypatch.setattr(runs, "apart", fail)
    assert main.figures_of(CELL, tmp_path) == found


def test_tables_go_to_their_places_in_the_readme() -> None:
    page = "a\n<!-- cells -->\nold\n<!-- /cells -->\nb"
    assert main.written_into(page, {"cells": "new"}) == "a\n<!-- cells -->\n\nnew\n\n<!-- /cells -->\nb"
    with pytest.raises(ValueError, match="no place for 'other'"):
        main.written_into(page, {"other": "new"})
    readme = (Path(main.__file__).parent / "README.md").read_text()
    main.written_into(readme, dict.fromkeys(("validation", "comparison", "ahead", "cells"), ""))


def test_a_miss_is_printed_and_not_raised() -> None:
    assert f"{Verdict('memory', 1.2, 1.0)}" == "**+20.0%, a miss**"
    assert f"{Verdict('time', 1.05, 1.0, fitted=True)}" == "fitted, +5.0%"


def test_a_pool_gives_slots_to_full_buffers_of_one_size_alone() -> None:
    """What is asked for otherwise, as a gradient of the same size, gets memory of its own."""

    def entry(kind: str, ident: int = 0, nbytes: int = 0, name: str = "") -> tuple[Any, ...]:
        return kind, name, 0, ident, 0, nbytes

    mark = entry("m", name=runs.FULL_BUFFER)

    def full(ident: int, nbytes: int) -> list[tuple[Any, ...]]:
        return [mark, entry("a", ident, nbytes), mark]

    others = [entry("a", 3, 10), entry("f", 3), entry("k", name="mm")]
    log = [
        *full(1, 10),
        *full(2, 20),
        entry("f", 1),
        *others,
        *full(4, 10),
        *full(5, 10),
        entry("f", 4),
        entry("f", 2),
        *full(6, 10),
        *full(7, 20),
    ]
    assert list(pool.pooled(log)) == [entry("a", 1, 10), entry("a", 2, 20), *others, entry("a", 5, 10)]
