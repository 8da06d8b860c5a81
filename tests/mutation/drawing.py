"""Faults drawn at random from all places of the package. What was found is kept, so that a run that was ended goes on."""

from __future__ import annotations

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
from typing import NamedTuple

from tests.mutation.coverage_map import CoverageMap
from tests.mutation.places import changed, places_in
from tests.mutation.tree import Tree, copied, digest, sources
from tests.mutation.verdicts import CAUGHT, HANGS, STILLBORN, Baseline, judge


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
    """Findings of one seed over one state of the package, a line each."""

    def __init__(self, path: Path, seed: int, state: str, *, anew: bool) -> None:
        self.path = path
        header = {"seed": seed, "digest": state}
        lines = path.read_text().splitlines() if path.exists() and not anew else []
        if lines and json.loads(lines[0]) != header:
            raise SystemExit(f"{path} was made for another state of the package: --fresh begins anew")
        self.findings = [Finding(*json.loads(line)) for line in lines[1:]]
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n")

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)
        with self.path.open("a") as file:
            file.write(json.dumps(finding) + "\n")

    @property
    def counted(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict != STILLBORN]


def draw(seed: int, count: int, folder: Path, lines: CoverageMap, *, only: str = "", jobs: int = 1, anew: bool = False) -> Record:
    """Judges `count` faults drawn by `seed` from the files whose paths begin with `only`; those that no package lives with not counted."""
    package = sources()
    every = [(file, place) for file, source in package.items() if file.startswith(only) for place in places_in(source)]
    part = f"-{only.replace('/', '-').strip('-')}" if only else ""
    record = Record(folder / f"draw-{seed}{part}.jsonl", seed, digest(package), anew=anew)
    baseline = Baseline(folder / "baseline.json", digest(package))
    done = {finding.number for finding in record.findings}
    order = (number for number in random.Random(seed).sample(range(len(every)), len(every)) if number not in done)
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
                verdict = judge(tree, baseline, file, source, lines.running(file, package[file], place))
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
    return record


def difference(file: str, before: bytes, after: bytes) -> str:
    both = [text.decode().splitlines() for text in (before, after)]
    return "\n".join(list(difflib.unified_diff(*both, f"zero3/{file}", f"zero3/{file}", lineterm="", n=2)))


def report(record: Record) -> Iterator[str]:
    """For people: what to judge, and the sums."""
    counts = Counter(finding.verdict for finding in record.findings)
    caught, counted = counts[CAUGHT] + counts[HANGS], len(record.counted)
    yield f"{caught} of {counted} caught ({counts[HANGS]} by hanging), {counts[STILLBORN]} more can't be imported."
    living = sorted((finding for finding in record.counted if finding.verdict not in (CAUGHT, HANGS)), key=lambda each: each.title)
    if living:
        yield "\n| place | change | tests | judged |\n|---|---|---|---|"
        for finding in living:
            yield f"| zero3/{finding.file}:{finding.line} | {finding.kind} | {finding.verdict}: {finding.why} | |"
    for finding in living:
        yield f"\n### {finding.title}\n\n```diff\n{finding.diff}\n```"
