"""The tool that puts faults into the package: which places it finds, what it takes for caught, and that it goes on where it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.chosen import FAULTS, path_of
from tests.mutation.coverage_map import CoverageMap, Seen, bits, each_bit, lines_by_test, some_of_each_function_first
from tests.mutation.drawing import Finding, Record, difference, report
from tests.mutation.places import changed, compiles, function_around, lines_of_functions, places_in
from tests.mutation.tree import ROOT, Run, Told, joined, sources
from tests.mutation.verdicts import CAUGHT, NOT_RUN, STILLBORN, SURVIVED, TIMED_OUT, UNCLEAR, judge, stages

pytestmark = pytest.mark.slow

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


def mapped(**tests: tuple[str, float, list[int]]) -> CoverageMap:
    """Of core/x.py."""
    return CoverageMap({name: Seen(seconds, {"core/x.py": bits(lines)}) for name, seconds, lines in tests.values()})


def test_what_runs_a_place_is_its_statement_or_the_functions_of_its_file() -> None:
    bodies = lines_of_functions(SOURCE)
    assert {6, 7, 16} <= bodies and not bodies & {1, 2, 3, 4, 5}
    assert function_around(SOURCE, 10) == range(5, 17) and function_around(SOURCE, 3) == range(1, 18)
    by_text = {SOURCE[place.start : place.stop].decode(): place for place in places_in(SOURCE)}
    assert by_text["3"].runs == (3, 3) and by_text["a.seen += 1"].runs == (12, 12)
    seen = mapped(b=("tests/core/test_b.py::test_1", 1.0, [1, 3, 12]), a=("tests/test_a.py::test_2", 1.0, [1, 3]))
    for text in ("3", "a.seen += 1"):
        assert seen.running("core/x.py", SOURCE, by_text[text]) == ["tests/core/test_b.py::test_1"], "at import everything runs in all"
    assert seen.running("core/x.py", SOURCE, by_text["del a[1:x]"]) == []


def test_tests_of_rare_lines_come_first_then_those_of_the_same_name_then_of_the_same_room_then_the_fastest() -> None:
    names = ["test_slow.py::t", "test_fast.py::t", "core/test_other.py::t", "optim/test_x.py::t"]
    seen = mapped(**{name: (f"tests/{name}", 9.0 if "slow" in name else 1.0, [7]) for name in names})
    place = next(place for place in places_in(SOURCE) if place.line == 7)
    found = [test.removeprefix("tests/") for test in seen.running("core/x.py", SOURCE, place)]
    assert found == ["optim/test_x.py::t", "core/test_other.py::t", "test_fast.py::t", "test_slow.py::t"]
    seen.tests["tests/test_slow.py::t"].lines["core/x.py"] |= bits([8])
    assert seen.running("core/x.py", SOURCE, place)[0] == "tests/test_slow.py::t"
    likely = CoverageMap({"long": Seen(9.0, {}), "a": Seen(1.0, {}), "b": Seen(2.0, {}), "c": Seen(3.0, {}), "d": Seen(0.5, {})})
    assert likely.chosen(["long", "a"], 2.0) == ["long", "a"], "never none"
    assert likely.chosen(["a", "long", "b", "c", "d"], 7.0) == ["a", "b", "d", "c"], "half for the likeliest, half for the fastest"


def test_a_test_of_many_parameters_lets_others_before_its_fourth() -> None:
    assert some_of_each_function_first(["a[1]", "a[2]", "a[3]", "a[4]", "b"]) == ["a[1]", "a[2]", "a[3]", "b", "a[4]"]


def test_stages_hold_every_test_once_in_order() -> None:
    lines = CoverageMap({str(number): Seen(1.0, {}) for number in range(20)})
    assert [(len(some), seconds) for some, seconds in stages(lines, list(lines.tests))] == [(2, 2.0), (15, 15.0), (3, 3.0)]


class Scripted:
    """A tree whose tests say what they are told to."""

    def __init__(self, *runs: Run, imports: bool = True) -> None:
        self.runs, self.imports = list(runs), lambda: imports

    def run(self, *_: Any) -> Run:
        return self.runs.pop(0)

    def holding(self, *_: Any) -> Any:
        return nullcontext()


def said(*outcomes: str, code: int | None = 1, text: str = "") -> Run:
    """By the tests x::0, x::1, ..."""
    return Run(code, {f"x::{number}": Told(number, outcome, 1.0, text) for number, outcome in enumerate(outcomes)})


TESTS = CoverageMap({f"x::{number}": Seen(1.0, {}) for number in range(2)})
VERDICTS: dict[str, tuple[Run, bool, str]] = {
    "a test fails": (said("passed", "failed"), True, CAUGHT),
    "all pass": (said("passed", "passed", code=0), True, SURVIVED),
    "a renamed file is no catch": (said(code=4), True, UNCLEAR),
    "an error while collecting is no catch": (said(code=2), True, UNCLEAR),
    "nothing imports": (said(code=2), False, STILLBORN),
    "a file of tests that can't be collected": (Run(2, {"tests/test_x.py": Told(0, "failed", 0.0, "")}), True, CAUGHT),
    "no file can": (Run(2, {"tests/test_x.py": Told(0, "failed", 0.0, "")}), False, STILLBORN),
    "an interpreter that died": (said("passed", code=-11), True, UNCLEAR),
    "an error around the tests": (said("passed", "passed", code=3), True, UNCLEAR),
    "a test that is gone": (said("passed", code=0), True, UNCLEAR),
    "a run that was ended": (said("passed", code=None), True, UNCLEAR),
    "a run that was ended after a test had failed": (said("failed", code=None), True, CAUGHT),
    "a test that did not end": (said("failed", text="Failed: Timeout (>60.0s) from pytest-timeout."), True, TIMED_OUT),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_only_a_test_that_fails_has_caught_a_fault(name: str) -> None:
    run, imports, expected = VERDICTS[name]
    verdict = judge(Scripted(run, imports=imports), TESTS, "x.py", b"pass", list(TESTS.tests))  # type: ignore[arg-type]
    assert verdict.kind == expected, verdict


def test_what_does_not_compile_or_is_not_run_is_told_apart() -> None:
    assert judge(Scripted(), TESTS, "x.py", b"if:", list(TESTS.tests)).kind == STILLBORN  # type: ignore[arg-type]
    assert judge(Scripted(), TESTS, "x.py", b"pass", []).kind == NOT_RUN  # type: ignore[arg-type]


def test_set_up_call_and_tear_down_are_one_test() -> None:
    parts = [
        (2, "x::0", "passed", 1.0, ""),
        (2, "x::0", "failed", 2.0, "why"),
        (2, "x::0", "passed", 3.0, ""),
        (3, "x::1", "skipped", 0.0, ""),
    ]
    assert joined(map(json.dumps, parts)) == {"x::0": Told(2, "failed", 6.0, "why"), "x::1": Told(3, "skipped", 0.0, "")}


def test_a_traced_run_tells_which_test_runs_which_lines(tmp_path: Path) -> None:
    """In the test's own process, and in what it shares with others."""
    (tmp_path / "zero3").mkdir()
    (tmp_path / "zero3/__init__.py").touch()
    (tmp_path / "zero3/x.py").write_text("def f(a):\n    if a:\n        return 1\n    return 2\n")
    text = "import pytest\nimport zero3.x as x\nx.f(0)\n@pytest.fixture(scope='module')\ndef shared():\n    x.f(0)\n"
    text += "def test_1():\n    assert x.f(1) == 1\ndef test_0(shared):\n    assert x.f(0) == 1\n"
    (tmp_path / "test_x.py").write_text(text)
    shutil.copy(ROOT / "tests/mutation/lines_seen.py", tmp_path / "sitecustomize.py")
    job = {"folder": str(tmp_path), "wanted": [], "arguments": ["test_x.py", "-p", "no:cacheprovider"], "limit": 60}
    asked = json.dumps({**job, "environment": {"ZERO3_LINES_SEEN": str(tmp_path)}})
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "tests.mutation.server"]
    answer = subprocess.run(command, input=asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(answer.stdout) == 1, (tmp_path / "output").read_text()
    told = joined((tmp_path / "told").read_text().splitlines())
    assert {name: (each.number, each.outcome) for name, each in told.items()} == {
        "test_x.py::test_1": (2, "passed"),
        "test_x.py::test_0": (3, "failed"),
    }
    seen = lines_by_test((tmp_path / "lines").read_text().splitlines())
    assert {number: list(each_bit(of["x.py"] & 0b11100)) for number, of in seen.items()} == {0: [2, 4], 1: [2, 4], 2: [2, 3], 3: [2, 4]}


def test_a_record_goes_on_and_is_bound_to_the_package(tmp_path: Path) -> None:
    now: dict[str, Any] = {"seed": 7, "digest": "now"}
    record = Record(tmp_path / "draw-7.jsonl", now)
    diff = difference("core/x.py", SOURCE, SOURCE.replace(b"x < LIMIT", b"x <= LIMIT"))
    record.add(Finding(3, "core/x.py", 10, "Lt to <=", diff, SURVIVED, "2 test files pass", 9.0))
    record.add(Finding(5, "core/x.py", 7, "never", "", CAUGHT, "core/test_x.py::test_y", 9.0))
    record.add(Finding(6, "core/x.py", 2, "constant", "", STILLBORN, "it does not compile", 0.0))
    again = Record(record.path, now)
    assert again.findings == record.findings and len(again.counted) == 2
    text = "\n".join(report(again))
    assert text.startswith("1 of 2 caught (0 by a test that timed out), 1 more can't be imported.")
    assert "| zero3/core/x.py:10 | Lt to <= | SURVIVED: 2 test files pass | |" in text and "\n+        if x <= LIMIT:" in text
    with pytest.raises(SystemExit, match="another state of the package"):
        Record(record.path, {**now, "digest": "later"})
    assert [finding.verdict for finding in Record(record.path, now, again=True).findings] == [CAUGHT, STILLBORN]
    assert len(Record(record.path, now).findings) == 2, "what lived is forgotten in the file too"
    Record(record.path, now).doubt({"core/test_x.py::test_y"})
    assert [finding.verdict for finding in Record(record.path, now).findings] == [UNCLEAR, STILLBORN], "it fails without a fault too"
    assert Record(record.path, {**now, "digest": "later"}, anew=True).findings == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_chosen_fault_applies_once_compiles_and_names_tests_that_are_there(fault: Any) -> None:
    right = (ROOT / "zero3" / fault.file).read_text()
    assert right.count(fault.right) == 1, f"{fault.right!r} stands {right.count(fault.right)} times in zero3/{fault.file}"
    assert compiles(right.replace(fault.right, fault.wrong).encode())
    assert all((ROOT / path_of(test)).is_file() for test in fault.tests.split())
