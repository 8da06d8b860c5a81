"""Faults drawn at random from all places of the package. What was found is kept, so that a run that was ended goes on."""

from __future__ import annotations

import argparse
import difflib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from tests.mutation.coverage_map import TRACED_LIMIT, CoverageMap
from tests.mutation.places import changed, places_in
from tests.mutation.tree import Tree, copied, digest, sources
from tests.mutation.verdicts import CAUGHT, STILLBORN, TIMED_OUT, UNCLEAR, judge


class Finding(NamedTuple):
    """One line of the record."""

    number: int  # of the place, among all
    file: str
    line: int
    kind: str
    diff: str
    verdict: str
    why: str
    seconds: float

    @property
    def title(self) -> str:
        return f"zero3/{self.file}:{self.line} {self.kind}"


class Record:
    """Findings of one seed over one state of the package, a line each. `again`: what lived is forgotten, to be judged by better tests."""

    def __init__(self, path: Path, header: dict[str, Any], *, anew: bool = False, again: bool = False) -> None:
        self.path, self._header = path, header
        lines = path.read_text().splitlines() if path.exists() and not anew else []
        if lines and json.loads(lines[0]) != header:
            raise SystemExit(f"{path} was made for another state of the package, or other tests: --fresh begins anew")
        self.findings = [Finding(*json.loads(line)) for line in lines[1:]]
        if again:
            self.findings = [finding for finding in self.findings if finding.verdict in (CAUGHT, TIMED_OUT, STILLBORN)]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._save()

    def _save(self) -> None:
        self.path.write_text("\n".join(json.dumps(line) for line in (self._header, *self.findings)) + "\n")

    def doubt(self, failing: set[str]) -> None:
        """These tests fail without a fault too: they have caught nothing."""
        for number, finding in enumerate(self.findings):
            if finding.verdict in (CAUGHT, TIMED_OUT) and finding.why in failing:
                self.findings[number] = finding._replace(verdict=UNCLEAR, why=f"this fails without the fault too: {finding.why}")
        self._save()

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        with self.path.open("a") as file:
            file.write(json.dumps(finding) + "\n")

    @property
    def counted(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict != STILLBORN]


def draw(options: argparse.Namespace, folder: Path, lines: CoverageMap) -> Record:
    """Judges `options.count` faults of the package, or of the parts `options.only`; those that it can't be imported with don't count."""
    package, count, jobs = sources(), options.count, options.jobs
    only = options.only or [""]
    every = [(file, place) for file, source in package.items() if file.startswith(tuple(only)) for place in places_in(source)]
    name = "-".join([f"draw-{options.seed}", *(part for path in only for part in path.split("/") if part)])
    header = {"seed": options.seed, "digest": digest(package), "tests": options.tests}
    record = Record(folder / f"{name}.jsonl", header, anew=options.fresh, again=options.again)
    done = {finding.number for finding in record.findings}
    order = (number for number in random.Random(options.seed).sample(range(len(every)), len(every)) if number not in done)
    print(f"{len(every)} places; {len(record.counted)} of {count} were judged before", flush=True)
    with ExitStack() as open_trees, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Tree] = SimpleQueue()
        for _ in range(jobs):
            free.put(open_trees.enter_context(copied()))

        def judged(number: int) -> Finding:
            file, place = every[number]
            tree, began = free.get(), time.monotonic()
            try:
                source = changed(package[file], place)
                tests = lines.chosen(lines.running(file, package[file], place), options.seconds)
                verdict = judge(tree, lines, file, source, tests)
            finally:
                free.put(tree)
            diff = difference(file, package[file], source)
            return Finding(number, file, place.line, place.kind, diff, verdict.kind, verdict.why, time.monotonic() - began)

        under_way: set[Future[Finding]] = set()
        while len(record.counted) < count:
            while len(under_way) < min(jobs, count - len(record.counted)) and (number := next(order, None)) is not None:
                under_way.add(pool.submit(judged, number))
            if not under_way:
                break
            over, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for finding in (future.result() for future in over):
                record.add(finding)
                told = f"{len(record.counted)}/{count} {finding.verdict:9} {finding.title}: {finding.why}"
                print(f"{told} ({finding.seconds:.0f} s)", flush=True)
        catching = sorted({finding.why for finding in record.findings if finding.verdict in (CAUGHT, TIMED_OUT)})
        record.doubt(set(free.get().run(catching, TRACED_LIMIT).failed) if catching else set())
    return record


def difference(file: str, before: bytes, after: bytes) -> str:
    both = [text.decode().splitlines() for text in (before, after)]
    return "\n".join(list(difflib.unified_diff(*both, f"zero3/{file}", f"zero3/{file}", lineterm="", n=2)))


def report(record: Record) -> Iterator[str]:
    """For people: what to judge, and the sums."""
    counts = Counter(finding.verdict for finding in record.findings)
    caught, counted = counts[CAUGHT] + counts[TIMED_OUT], len(record.counted)
    yield f"{caught} of {counted} caught ({counts[TIMED_OUT]} by a test that timed out), {counts[STILLBORN]} more can't be imported."
    living = sorted((finding for finding in record.counted if finding.verdict not in (CAUGHT, TIMED_OUT)), key=lambda each: each.title)
    if living:
        yield "\n| place | change | tests | judged |\n|---|---|---|---|"
        for finding in living:
            yield f"| zero3/{finding.file}:{finding.line} | {finding.kind} | {finding.verdict}: {finding.why} | |"
    for finding in living:
        yield f"\n### {finding.title}\n\n```diff\n{finding.diff}\n```"
