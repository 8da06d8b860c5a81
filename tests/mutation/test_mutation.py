"""The tool that puts faults into the package: which places it finds, what it takes for caught, and that it goes on where it was."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.chosen import FAULTS, path_of
from tests.mutation.coverage_map import CoverageMap
from tests.mutation.drawing import Finding, Record, difference, report
from tests.mutation.places import changed, compiles, lines_of_functions, places_in
from tests.mutation.tree import ROOT, Run, sources
from tests.mutation.verdicts import CAUGHT, HANGS, NOT_RUN, STILLBORN, SURVIVED, UNCLEAR, Baseline, batches, judge

SOURCE = b'''"""A docstring."""
import os
LIMIT = 3
@no_grad()
def f(a: int | None, flag=True) -> "str":
    """Another, with a < b."""
    if a is None and not flag:  # caf\xc3\xa9
        raise ValueError(f"a is {a}, expected {1}")
    for x in a:
        if x < LIMIT:
            continue
        a.seen += 1
        a.add(x, twice=x + 2, once=g)
    with lock:
        del a[1:x]
    return [y for y in a if y] if flag else -x
'''


def changes() -> dict[str, set[tuple[str, str]]]:
    """By kind: what stood there, and what stands there."""
    found: dict[str, set[tuple[str, str]]] = {}
    for place in places_in(SOURCE):
        found.setdefault(place.kind, set()).add((SOURCE[place.start : place.stop].decode(), place.text))
    return found


def test_places_are_of_every_kind_and_change_what_they_say() -> None:
    found = changes()
    assert found["Is to is not"] == {("is", "is not")} and found["And to or"] == {("and", "or")}
    assert found["Lt to <="] == {("<", "<=")}, "and not what stands in a docstring"
    assert found["Add to -"] == {("+", "-")} or found["Add to -"] == {("+", "-"), ("+=", "-=")}
    assert ("not flag", "(flag)") in found["Not dropped"] and ("-x", "(x)") in found["USub dropped"]
    assert ("3", "4") in found["constant"] and ("3", "2") in found["constant"] and ("True", "False") in found["constant"]
    assert {("x < LIMIT", "(not (x < LIMIT))"), ("flag", "(not (flag))")} <= found["branches swapped"]
    assert ("x < LIMIT", "((x < LIMIT) or True)") in found["always"] and ("x < LIMIT", "((x < LIMIT) and False)") in found["never"]
    assert {("a.seen += 1", "pass"), ("a.add(x, twice=x + 2, once=g)", "pass"), ("del a[1:x]", "pass")} <= found["statement removed"]
    assert found["loop ends"] == {("continue", "break")} and found["filter dropped"] == {("y", "True")}
    assert found["context left out"] == {("lock", '__import__("contextlib").nullcontext()')}
    assert found["bound dropped"] == {("1", ""), ("x", "")} and found["decorator dropped"] == {("@no_grad()", "")}
    assert found["twice= left out"] == {("twice=x + 2,", "")} and found["once= left out"] == {(", once=g", "")}
    assert len(found["None returned"]) == 1


def test_annotations_docstrings_imports_and_messages_are_left_alone() -> None:
    texts = {text for pairs in changes().values() for text, _ in pairs}
    assert not [text for text in texts if "docstring" in text or text in ("os", "|", '"str"', "1}", '"a is"')]
    raised = [place for place in places_in(SOURCE) if place.line == 8]
    assert [place.kind for place in raised] == ["statement removed"]


def test_every_place_of_the_package_is_a_change_and_nearly_all_compile() -> None:
    package = sources()
    every = [(source, place) for source in package.values() for place in places_in(source)]
    assert len(every) > 5000 and all(changed(source, place) != source for source, place in every)
    some = every[:: len(every) // 200]
    assert sum(compiles(changed(source, place)) for source, place in some) > 0.97 * len(some)


def test_what_runs_a_place_is_its_statement_or_the_functions_of_its_file() -> None:
    bodies = lines_of_functions(SOURCE)
    assert {6, 7, 16} <= bodies and not bodies & {1, 2, 3, 4, 5}
    by_text = {SOURCE[place.start : place.stop].decode(): place for place in places_in(SOURCE)}
    assert by_text["3"].runs == (3, 3) and by_text["a.seen += 1"].runs == (12, 12)
    seen = CoverageMap("", {"tests/core/test_b.py": {"core/x.py": [1, 3, 12]}, "tests/test_a.py": {"core/x.py": [1, 3]}})
    for text in ("3", "a.seen += 1"):
        assert seen.running("core/x.py", SOURCE, by_text[text]) == ["tests/core/test_b.py"], "at import everything runs in all"
    assert seen.running("core/x.py", SOURCE, by_text["del a[1:x]"]) == []


def test_tests_of_the_same_name_come_first_then_of_the_same_room_then_the_fastest() -> None:
    files = {f"tests/{name}.py": {"core/chunk.py": [7]} for name in ("test_slow", "test_fast", "core/test_other", "optim/test_chunk")}
    seen = CoverageMap("", files, {"tests/test_slow.py": 9.0, "tests/test_fast.py": 1.0})
    place = next(place for place in places_in(SOURCE) if place.line == 7)
    names = [test.removeprefix("tests/").removesuffix(".py") for test in seen.running("core/chunk.py", SOURCE, place)]
    assert names == ["optim/test_chunk", "core/test_other", "test_fast", "test_slow"]


def test_batches_hold_every_file_once_in_order() -> None:
    tests = [str(number) for number in range(30)]
    assert [name for batch in batches(tests) for name in batch] == tests and [len(batch) for batch in batches(tests)] == [1, 4, 16, 9]


class Told:
    """A tree whose tests say what they are told to."""

    def __init__(self, *runs: Run, imports: bool = True) -> None:
        self.runs, self.imports = list(runs), lambda: imports

    def run(self, *_: Any, **__: Any) -> Run:
        return self.runs.pop(0)

    def holding(self, *_: Any) -> Any:
        return nullcontext()


FINE = Run(0, (), 1.0, "")
VERDICTS: dict[str, tuple[list[Run], bool, str]] = {
    "a test fails": ([FINE, Run(1, ("core/test_a.py::test_b",), 1.0, "")], True, CAUGHT),
    "all pass": ([FINE, FINE], True, SURVIVED),
    "a renamed file is no catch": ([FINE, Run(4, (), 1.0, "")], True, UNCLEAR),
    "an error while collecting is no catch": ([FINE, Run(2, (), 1.0, "")], True, UNCLEAR),
    "nothing imports": ([FINE, Run(2, (), 1.0, "")], False, STILLBORN),
    "an interpreter that died": ([FINE, Run(-11, (), 1.0, "")], True, UNCLEAR),
    "an error around a test, and a test fails": ([FINE, Run(1, (), 1.0, ""), Run(1, ("x::y",), 1.0, "")], True, CAUGHT),
    "an error around a test alone": ([FINE, Run(1, (), 1.0, ""), Run(1, (), 1.0, "")], True, UNCLEAR),
    "nothing ends": ([FINE, Run(None, (), 999.0, "")], True, HANGS),
    "it fails without a fault": ([Run(1, ("x::y",), 1.0, "")], True, NOT_RUN),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_only_a_test_that_fails_and_passes_without_the_fault_has_caught_it(name: str, tmp_path: Path) -> None:
    runs, imports, expected = VERDICTS[name]
    verdict = judge(Told(*runs, imports=imports), Baseline(tmp_path / "baseline.json", ""), "x.py", b"pass", ["tests/test_x.py"])  # type: ignore[arg-type]
    assert verdict.kind == expected, verdict


def test_what_does_not_compile_or_is_not_run_is_told_apart(tmp_path: Path) -> None:
    baseline = Baseline(tmp_path / "baseline.json", "")
    assert judge(Told(), baseline, "x.py", b"if:", ["tests/test_x.py"]).kind == STILLBORN  # type: ignore[arg-type]
    assert judge(Told(), baseline, "x.py", b"pass", []).kind == NOT_RUN  # type: ignore[arg-type]


def test_a_baseline_is_run_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    assert Baseline(path, "now").seconds(Told(FINE), "tests/test_x.py") == 1.0  # type: ignore[arg-type]
    assert Baseline(path, "now").seconds(Told(), "tests/test_x.py") == 1.0  # type: ignore[arg-type]
    assert Baseline(path, "later").seconds(Told(Run(1, ("x::y",), 2.0, "")), "tests/test_x.py") is None  # type: ignore[arg-type]


def test_a_record_goes_on_and_is_bound_to_the_package(tmp_path: Path) -> None:
    record = Record(tmp_path / "draw-7.jsonl", 7, "now", anew=False)
    diff = difference("core/x.py", SOURCE, SOURCE.replace(b"x < LIMIT", b"x <= LIMIT"))
    record.add(Finding(3, "core/x.py", 10, "Lt to <=", diff, SURVIVED, "2 test files pass", 9.0))
    record.add(Finding(5, "core/x.py", 7, "never", "", CAUGHT, "core/test_x.py::test_y", 9.0))
    record.add(Finding(6, "core/x.py", 2, "constant", "", STILLBORN, "it does not compile", 0.0))
    again = Record(record.path, 7, "now", anew=False)
    assert again.findings == record.findings and len(again.counted) == 2
    text = "\n".join(report(again))
    assert text.startswith("1 of 2 caught (0 by hanging), 1 more can't be imported.")
    assert "| zero3/core/x.py:10 | Lt to <= | SURVIVED: 2 test files pass | |" in text and "\n+        if x <= LIMIT:" in text
    with pytest.raises(SystemExit, match="another state of the package"):
        Record(record.path, 7, "later", anew=False)
    assert Record(record.path, 7, "later", anew=True).findings == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_chosen_fault_applies_once_compiles_and_names_tests_that_are_there(fault: Any) -> None:
    right = (ROOT / "zero3" / fault.file).read_text()
    assert right.count(fault.right) == 1, f"{fault.right!r} stands {right.count(fault.right)} times in zero3/{fault.file}"
    assert compiles(right.replace(fault.right, fault.wrong).encode())
    assert all((ROOT / path_of(test)).is_file() for test in fault.tests.split())
