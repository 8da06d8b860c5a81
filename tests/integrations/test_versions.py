"""Integrations say so when their library is missing, or is of a version that nobody has tried."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from zero3.integrations import versions

LOCK = dict(re.findall(r"^([\w-]+)==(.+)$", (Path(__file__).parents[2] / "requirements" / "lock.txt").read_text(), re.M))


def test_the_versions_that_are_known_are_those_that_the_tests_run_with() -> None:
    assert all(f"{LOCK[library]}.".startswith(known) for library, known in versions.KNOWN.items())


def test_a_library_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(ImportError, match=r"zero3\.integrations\.accelerate needs accelerate.*pip install 'zero3\[transformers\]'"):
        versions.require("accelerate", "zero3.integrations.accelerate")
    with pytest.raises(ImportError, match=r"needs trl.*zero3\[trl\]"):
        versions.require("trl", "Zero3Mixin")


def test_another_version_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "5.230.1")
    with pytest.warns(UserWarning, match=r"tested with transformers 5\.23\.\*, and found 5\.230\.1.*compare the losses"):
        versions.require("transformers", "zero3.integrations.transformers")
    monkeypatch.setattr(versions, "version", lambda name: "5.23.7")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.require("transformers", "zero3.integrations.transformers")


def test_zero3_alone_imports_none_of_them() -> None:
    code = "import sys, zero3; print(sorted({'transformers', 'accelerate', 'trl', 'peft', 'datasets', 'lightning'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
