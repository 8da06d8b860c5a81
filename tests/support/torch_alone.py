"""Runs commands' `--help` as on a machine that has torch and what torch needs, and nothing else.

    python -m tests.support.torch_alone COMMAND ...     # "examples/ema.py", or "zero3 inspect" for a module and its arguments

Prints a line of JSON a command: how it ended and what it printed. One process imports torch; each command runs in a fork of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


class OnlyTorch:
    """A finder that asks before all others, and does not find what torch can do without."""

    def __init__(self) -> None:
        needed = {found.name for found in _with_requirements("torch")}
        self._refused = {module for module, owners in packages_distributions().items() if not needed.intersection(owners)}
        self._refused -= set(sys.stdlib_module_names) | {path.stem for path in ROOT.iterdir()}

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] in self._refused:
            raise ModuleNotFoundError(f"No module named {name!r} (torch does not need it)", name=name)
        return None


def _with_requirements(name: str, known: frozenset[str] = frozenset()) -> Iterator[Distribution]:
    """The installed distributions that one needs, itself included."""
    try:
        found = distribution(name)
    except PackageNotFoundError:  # for another system, or Python
        return
    yield found
    for requirement in found.requires or []:
        needed = re.match(r"[\w.-]+", requirement)
        if needed and "extra ==" not in requirement and needed.group() not in known:
            yield from _with_requirements(needed.group(), known | {name, needed.group()})


def _help(command: str) -> tuple[int | str | None, str]:
    """Exit code, and what was printed."""
    name, *arguments = command.split()
    sys.argv = [name, *arguments, "--help"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            if name.endswith(".py"):
                sys.path[0] = str((ROOT / name).parent)  # as for `python NAME`
                runpy.run_path(str(ROOT / name), run_name="__main__")
            else:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            code: int | str | None = "it went on after --help"
        except SystemExit as error:
            code = error.code
        except BaseException:
            code = "an exception"
            traceback.print_exc(file=printed)
    return code, printed.getvalue()


def main(commands: Sequence[str]) -> None:
    sys.meta_path.insert(0, OnlyTorch())  # type: ignore[arg-type]  # typeshed wants a base class
    import torch  # noqa: F401  # once for all

    for command in commands:
        sys.stdout.flush()
        if not (child := os.fork()):
            code, printed = _help(command)
            print(json.dumps({"command": command, "code": code, "printed": printed}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
