"""What stands beside the package: the citation, issue forms and the nightly workflow."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import zero3

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
