"""With which versions of torch, transformers and peft does the package work? Environments of their own, tests in each, and a table.

make versions                              each of TORCH with each of HUGGING_FACE below
make versions ARGS="--torch 2.14.1"        another version in place of those; so do --transformers and --peft

Environments stand in .versions/ and are made when they are first needed, by pip as it is configured here. Those of one torch share it: it
takes gigabytes where it brings CUDA's libraries. With the newest transformers and peft the tests of ALL run, with others those of MODELS,
in both cases but for those marked slow, one folder after the other. Each has its result in .versions/results.json at once, so a run that
was ended goes on where it was. What has a result for the package and these tests as they are now is not run again, unless --again says so.
At the end the table in docs/reliability.md gets the rows of all environments that have been tested whole, and the names of tests that
failed. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tests.mutation.tree import ROOT, digest

TORCH = ("2.11.0", "2.15.0")  # the lowest, and the newest; .ci/run tests what stands in requirements/lock.txt
HUGGING_FACE = (("5.1.0", "0.18.0"), ("5.23.0", "0.21.2"))  # transformers and peft, likewise
NOT = {  # pages, figures, the simulated device, faults in the code, and how it is laid out: they depend on no version
    "benchmarks", "device", "docs", "mutation", "test_architecture.py", "test_names.py", "test_readme.py", "test_unpickling.py",
}  # fmt: skip
TESTS = ROOT / "tests"
ALL = tuple(sorted({path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")} - NOT))
MODELS = (  # of ALL, what uses transformers or peft
    "huggingface", "core/test_common_modules.py", "guards/test_new_parameters.py", "core/test_precision_processes.py",
    "guards/test_requires_grad.py", "core/test_autograd.py", "checkpoint/test_end_to_end.py", "resilience/test_restarts.py", "uneven",
    "commands", "examples", "experts/test_models.py", "integrations", "offload", "planning", "quantized", "sequences",
    "towers/test_transformers.py",
    "test_auto_wrap.py", "test_forward_methods.py", "test_generate.py", "test_group_adapters.py", "test_materialize.py",
    "test_integer_options.py", "test_own_names.py", "test_shard_architectures.py", "test_shard_models.py", "test_shard_parts.py",
)  # fmt: skip
TOOLS = ("hypothesis", "matplotlib", "numpy", "pytest", "pytest-timeout", "tqdm")  # of the lock's versions; all else as pip finds it
FOLDER = ROOT / ".versions"
PAGE = ROOT / "docs/reliability.md"
WRITTEN = re.compile(r"(?<=<!-- written by make versions -->\n).*?(?=<!-- as far as this -->)", re.S)
WARNINGS = ("-o", "filterwarnings=error:::zero3")  # ours are errors; what others say of each other's versions is not our fault
LIMIT = 3600.0  # seconds, after which the tests of a folder are ended

Result = dict[str, Any]  # passed, skipped, failed (names), seconds, date, sources


class Environment(NamedTuple):
    torch: str
    transformers: str
    peft: str

    def __str__(self) -> str:
        return f"torch {self.torch}, transformers {self.transformers}, peft {self.peft}"

    @property
    def groups(self) -> tuple[str, ...]:
        return ALL if (self.transformers, self.peft) == HUGGING_FACE[-1] else MODELS

    @property
    def python(self) -> Path:
        return FOLDER / f"torch-{self.torch}-transformers-{self.transformers}-peft-{self.peft}" / "bin/python"

    def install(self) -> None:
        """The upper environment sees what the lower one holds, and pip takes that for installed."""
        base = FOLDER / f"torch-{self.torch}" / "bin/python"
        torch = f"torch=={self.torch}"
        made(base, [torch], [])
        locked = (ROOT / "requirements/lock.txt").read_text().splitlines()
        tools = [line for line in locked if line.partition("==")[0] in TOOLS]
        made(self.python, [*tools, torch, f"transformers=={self.transformers}", f"peft=={self.peft}"], [site_packages(base)])


def site_packages(python: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(python.parents[1])}))


def made(python: Path, packages: list[str], seen: list[Path]) -> None:
    """A virtual environment with `packages`, which sees the packages in the folders `seen` too; made unless it is there, whole."""
    stamp, wanted = python.parents[1] / "installed", "\n".join(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"installing into {python.parents[1].name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", python.parents[1]], check=True)
    for folder in seen:  # relative, so that .versions may be moved
        (site_packages(python) / "seen.pth").write_text(f"{os.path.relpath(folder, site_packages(python))}\n")
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages], check=True)
    stamp.write_text(wanted)


def tested(environment: Environment, group: str) -> Result:
    """What pytest says of one folder or file of tests."""
    report = FOLDER / "report.xml"
    report.unlink(missing_ok=True)
    command = [environment.python, "-m", "pytest", "-q", "--no-header", "--tb=short", "-m", "not slow", "-p", "no:cacheprovider", *WARNINGS]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    log = environment.python.parents[1] / f"{group.replace('/', '-')}.log"
    began = time.monotonic()
    with log.open("w") as output:
        try:
            code = subprocess.run(
                [*command, f"--junit-xml={report}", f"tests/{group}"],
                cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT, timeout=LIMIT,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = -1
    result: Result = {"seconds": round(time.monotonic() - began), "date": date.today().isoformat()}
    if report.exists():
        return result | counted(ElementTree.parse(report))
    return result | {"passed": 0, "skipped": 0, "failed": [f"tests/{group}: no result, exit code {code}"]}


def counted(report: Any) -> Result:
    """Of pytest's JUnit report: how many tests passed and were skipped, and the names of the others."""
    cases = list(report.iter("testcase"))
    failed = [f"{case.get('classname')}.{case.get('name')}" for case in cases if {"failure", "error"} & {child.tag for child in case}]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": sorted(set(failed))}


class Results:
    """What is known, in a file that is written after every folder of tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, Result]] = json.loads(path.read_text()) if path.exists() else {}
        self._sources = {group: sources(group) for group in {*ALL, *MODELS}}

    def of(self, environment: Environment, group: str) -> Result | None:
        """None: it is not known of the sources as they are."""
        result = self._known.get(str(environment), {}).get(group)
        return result if result is not None and result["sources"] == self._sources[group] else None

    def keep(self, environment: Environment, group: str, result: Result) -> None:
        self._known.setdefault(str(environment), {})[group] = {**result, "sources": self._sources[group]}
        self._path.write_text(json.dumps(self._known, indent=1))

    def whole(self) -> dict[Environment, list[Result]]:
        """Environments of whose tests all are known, with the sources as they are."""
        known = [Environment(*(part.split(" ")[1] for part in name.split(", "))) for name in self._known]
        results = {environment: [self.of(environment, group) for group in environment.groups] for environment in known}
        return {environment: [r for r in found if r is not None] for environment, found in results.items() if None not in found}


def table(before: str, whole: dict[Environment, list[Result]]) -> str:
    """`before`, with the rows of environments that have been tested `whole`; rows of others stay."""
    lines = before.splitlines()
    rows = {tuple(line.strip("| ").split(" | ")[:3]): line for line in lines if re.match(r"\| \d", line)}
    names = [line for line in lines if line.startswith("* ") and line[2:].partition(":")[0] not in map(str, whole)]
    for environment, results in whole.items():
        failed = [test for result in results for test in result["failed"]]
        passed, skipped = (sum(result[kind] for result in results) for kind in ("passed", "skipped"))
        tests, last = "all" if environment.groups == ALL else "of models", max(result["date"] for result in results)
        rows[environment] = f"| {' | '.join([*environment, tests, str(passed), str(len(failed)), str(skipped), last])} |"
        names += [f"* {environment}: `{test}`" for test in failed]
    head = ["| torch | transformers | peft | tests | passed | failed | skipped | date |", "|---|---|---|---|---|---|---|---|"]
    ordered = sorted(rows, key=lambda versions: [[int(part) for part in version.split(".")] for version in versions])
    return "\n".join([*head, *(rows[versions] for versions in ordered), *(["", "Failed:", "", *names] if names else [])]) + "\n"


def sources(group: str) -> str:
    """A hash of what these tests stand on."""
    tests = ROOT / "tests" / group
    folders = (ROOT / "zero3", ROOT / "examples", ROOT / "tests/support")
    paths = {path for folder in folders for path in folder.rglob("*.py")} | ({tests} if tests.is_file() else set(tests.rglob("*.py")))
    return digest({path.relative_to(ROOT).as_posix(): path.read_bytes() for path in sorted(paths)})


def run(environments: Iterable[Environment], results: Results, *, again: bool) -> int:
    failures = 0
    for environment in environments:
        print(environment, flush=True)
        try:
            environment.install()
        except subprocess.CalledProcessError as error:
            print(f"  can't be installed: {error}", flush=True)
            failures += 1
            continue
        for number, group in enumerate(environment.groups, 1):
            result = None if again else results.of(environment, group)
            if result is None:
                result = tested(environment, group)
                results.keep(environment, group, result)
            failures += len(result["failed"])
            counts = f"{result['passed']} passed, {len(result['failed'])} failed, {result['skipped']} skipped"
            print(f"  {number}/{len(environment.groups)} {group}: {counts} ({result['seconds']} s)", flush=True)
            for name in result["failed"]:
                print(f"    failed: {name}", flush=True)
    return failures


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="VERSION", help=f"in place of {' '.join(TORCH)}")
    parser.add_argument("--transformers", metavar="VERSION", help="with --peft, in place of HUGGING_FACE")
    parser.add_argument("--peft", metavar="VERSION", help="with --transformers")
    parser.add_argument("--again", action="store_true", help="run also what has a result")
    options = parser.parse_args()
    if (options.transformers is None) != (options.peft is None):
        parser.error("--transformers and --peft go together")
    return options


def main() -> int:
    options = parsed()
    pairs = HUGGING_FACE if options.peft is None else ((options.transformers, options.peft),)
    FOLDER.mkdir(exist_ok=True)
    results = Results(FOLDER / "results.json")
    failures = run([Environment(torch, *pair) for torch in options.torch for pair in pairs], results, again=options.again)
    page = PAGE.read_text()
    text = WRITTEN.sub(lambda before: table(before.group(), results.whole()), page)
    PAGE.write_text(text)
    print(*WRITTEN.findall(text))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
