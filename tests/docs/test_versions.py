"""docs/reliability.md's table of versions and the ranges that pyproject.toml declares say the same; and what `make versions` keeps."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import versions
from tests.mutation.tree import ROOT
from tests.versions import ALL, HUGGING_FACE, MODELS, TORCH, WRITTEN, Environment, Result, Results, counted, run, sources, table

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (WRITTEN.search(versions.PAGE.read_text()) or [""])[0].splitlines()
    if re.match(r"\| \d", line)
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = [*PROJECT["dependencies"], *(each for extra in PROJECT["optional-dependencies"].values() for each in extra)]
PASSES: Result = {"passed": 3, "skipped": 1, "failed": [], "seconds": 2, "date": "2026-11-22"}
FAILS: Result = {**PASSES, "failed": ["tests.core.test_calls.test_it"], "date": "2026-11-23"}
NEWEST = Environment(TORCH[-1], *HUGGING_FACE[-1])


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_the_table_has_all_pairs() -> None:
    assert {tuple(row[:3]) for row in ROWS} >= {(torch, *pair) for torch in TORCH for pair in HUGGING_FACE}


@pytest.mark.parametrize(("column", "package"), [(0, "torch"), (1, "transformers"), (2, "peft")])
def test_declared_ranges_begin_with_the_tables_lowest_and_leave_out_what_fails(column: int, package: str) -> None:
    lowest = min((row[column] for row in ROWS), key=numbers)
    failing = {row[column] for row in ROWS if row[5] != "0"} - {row[column] for row in ROWS if row[5] == "0"}
    wanted = ",".join([f"{package}>={lowest.removesuffix('.0')}", *(f"!={version}" for version in sorted(failing, key=numbers))])
    ranges = {each for each in DECLARED if re.match(rf"{package}\b(?!-)", each)}
    assert ranges == {wanted}


def files(groups: tuple[str, ...]) -> set[Path]:
    named = [ROOT / "tests" / group for group in groups]
    return {path for group in named for path in ([group] if group.is_file() else group.rglob("test_*.py"))}


def test_all_tests_that_import_transformers_or_peft_are_among_those_of_models() -> None:
    imports = re.compile(r"""^\s*(import|from) (transformers|peft)\b|importorskip\("(transformers|peft)""", re.M)
    assert files(MODELS) <= files(ALL)
    assert not {path for path in files(ALL) - files(MODELS) if imports.search(path.read_text())}


def test_a_report_is_counted() -> None:
    report = """<testsuites><testsuite>
        <testcase classname="tests.a" name="passes"/><testcase classname="tests.a" name="skipped"><skipped/></testcase>
        <testcase classname="tests.a" name="fails[1]"><failure/></testcase><testcase classname="" name="tests.b"><error/></testcase>
    </testsuite></testsuites>"""
    assert counted(ElementTree.fromstring(report)) == {"passed": 1, "skipped": 1, "failed": [".tests.b", "tests.a.fails[1]"]}


def test_the_table_gets_rows_and_names_of_failures_and_keeps_those_of_others() -> None:
    other = Environment("2.9.1", *HUGGING_FACE[0])
    text = table(table("", {NEWEST: [PASSES, FAILS]}), {other: [PASSES]})
    assert [line for line in text.splitlines() if re.match(r"\| \d", line)] == [
        f"| {' | '.join(other)} | of models | 3 | 0 | 1 | 2026-11-22 |", f"| {' | '.join(NEWEST)} | all | 6 | 1 | 2 | 2026-11-23 |",
    ]  # fmt: skip
    assert f"* {NEWEST}: `tests.core.test_calls.test_it`" in text
    assert "Failed" not in table(text, {NEWEST: [PASSES]}), "what passes now"


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_and_old_results_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def tested(environment: Environment, group: str) -> Result:
        asked.append(group)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return FAILS if group == ALL[0] else PASSES

    monkeypatch.setattr(versions, "tested", tested)
    monkeypatch.setattr(Environment, "install", lambda self: None)
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        run([NEWEST], Results(path), again=False)
    assert not Results(path).whole()
    assert run([NEWEST], Results(path), again=False) == 1, "the failure that was found before the interrupt"
    assert asked == [*ALL[:3], *ALL[2:]]
    assert list(Results(path).whole()) == [NEWEST]
    monkeypatch.setattr(versions, "sources", lambda group: "others" if group == ALL[1] else sources(group))
    assert not Results(path).whole()
    assert Results(path).of(NEWEST, ALL[1]) is None and Results(path).of(NEWEST, ALL[0]) is not None
