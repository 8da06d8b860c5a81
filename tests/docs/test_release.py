"""What stands beside the package: the citation, issue forms and the nightly workflow."""

from __future__ import annotations

import ast
import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import zero3
from tests.support.public import public

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent.parent
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_citation_has_the_version_of_the_package() -> None:
    said = read(ROOT / "CITATION.cff")
    assert said["version"] == zero3.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(said)


@pytest.mark.parametrize("form", [path for path in FORMS if path.stem != "config"], ids=lambda path: path.stem)
def test_issue_forms_ask_for_what_helps(form: Path) -> None:
    said = read(form)
    assert {"name", "description", "body"} <= set(said)
    asked = {field["id"] for field in said["body"] if field.get("validations", {}).get("required")}
    assert asked >= (
        {"report", "log", "versions"} if form.stem == "bug" else {"hardware", "versions", "command", "configuration", "result"}
    )


def test_the_nightly_workflow_runs_a_target_that_exists() -> None:
    steps = read(ROOT / ".github" / "workflows" / "versions.yml")["jobs"]["newest"]["steps"]
    targets = {target for step in steps for target in re.findall(r"make ([a-z-]+)", step.get("run", ""))}
    assert targets == {"versions"}
    assert re.search(r"^versions:", (ROOT / "Makefile").read_text(), re.M)


def test_the_changelog_has_this_version_and_its_day() -> None:
    found = re.search(rf"^## {re.escape(zero3.__version__)} \((\d{{4}}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert found and date.fromisoformat(found[1])


# -- what 0.x promises

RELEASES = sorted(Path(__file__).parent.glob("releases/*.json"))
WARNING = re.compile(r"^zero3\.[\w.]+ is deprecated since \d+\.\d+, and goes in \d+\.\d+: use .+$")


def broken(before: dict[str, list[str]], now: dict[str, list[str]], deprecated: set[str]) -> list[str]:
    """What a script that was written for a release no longer finds."""
    gone = [name for name in before if name not in now and name not in deprecated]
    rows = [(name, key) for name, keys in before.items() if name in now for key in keys]
    return gone + [f"{name}({key}=)" for name, key in rows if key not in now[name] and f"{name}.{key}" not in deprecated]


def deprecations(source: str) -> list[str]:
    """The texts of `warnings.warn(text, DeprecationWarning)`, with anything put in as `*`."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call) and "DeprecationWarning" in ast.unparse(node)]
    texts = [call.args[0] for call in calls if ast.unparse(call.func) == "warnings.warn"]
    return [text.value if isinstance(text, ast.Constant) else "*" for text in texts]


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_names_and_parameters_of_a_release_are_there_or_deprecated(release: Path) -> None:
    told = [text for path in (ROOT / "zero3").rglob("*.py") for text in deprecations(path.read_text())]
    assert not [text for text in told if not WARNING.match(text)]
    names = {text.split()[0].removeprefix("zero3.") for text in told}
    assert not broken(json.loads(release.read_text()), public(), names)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    changes = (ROOT / "CHANGELOG.md").read_text()
    for name in names:
        assert f"zero3.{name} is deprecated" in tests and f"`{name}" in changes, name


def test_what_a_release_would_miss_is_seen() -> None:
    before = {"shard": ["model", "layers"], "old": [], "Kind.method": ["self"]}
    assert broken(before, {"shard": ["model"]}, set()) == ["old", "Kind.method", "shard(layers=)"]
    assert not broken(before, {"shard": ["model"]}, {"old", "Kind.method", "shard.layers"})
    text = "zero3.old is deprecated since 0.2, and goes in 0.3: use zero3.new"
    assert deprecations(f"warnings.warn({text!r}, DeprecationWarning, stacklevel=2)") == [text] and WARNING.match(text)
    assert not WARNING.match("old is deprecated")


def test_this_version_has_a_file_of_what_it_promises() -> None:
    assert zero3.__version__ in {path.stem for path in RELEASES}


def test_each_version_says_how_to_move_to_it() -> None:
    """But for the first: nobody comes from an earlier one."""
    *sections, _ = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)[1:]
    assert sections and all(re.search(r"^### Moving to ", section, re.M) for section in sections)
