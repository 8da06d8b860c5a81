"""Do the tests see? Faults, put into a copy of the package one at a time; each has to be caught, by a test that fails.

make mutants                        those that were chosen by hand; ARGS="padding": whose names contain a word
make mutants SEED=7 COUNT=100       drawn at random from all places of zero3/, each judged by the test files that run its line

Drawn ones need a map of which test file runs which lines. It is made when it is first needed (or by --map), which takes some
times as long as the tests, and is kept with all findings in .mutants/: a run that was ended goes on where it was, and a larger
COUNT goes on where a smaller one ended. What no test catches is listed with its diff in .mutants/draw-SEED.md, to be judged: is
it a fault, and which test is missing? Exit code 1 if anything lives or is unclear.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.mutation.chosen import FAULTS, is_caught, verdict_of
from tests.mutation.coverage_map import CoverageMap, build
from tests.mutation.drawing import draw, report
from tests.mutation.tree import ROOT, copied, digest, sources
from tests.mutation.verdicts import Baseline

FOLDER = ROOT / ".mutants"


def judge_chosen(words: list[str]) -> int:
    chosen, lived = [fault for fault in FAULTS if all(word in fault.name for word in words)], 0
    baseline = Baseline(FOLDER / "baseline.json", digest(sources()))
    with copied() as tree:
        for number, fault in enumerate(chosen, 1):
            began = time.monotonic()
            verdict = verdict_of(fault, tree, baseline)
            lived += not is_caught(verdict)
            print(f"{number}/{len(chosen)} {verdict.kind:9} {fault.name}: {verdict.why} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - lived} of {len(chosen)} caught")
    return int(lived > 0)


def judge_drawn(options: argparse.Namespace) -> int:
    lines = coverage_map(options)
    record = draw(options.seed, options.count, FOLDER, lines, only=options.only, jobs=options.jobs, anew=options.fresh)
    text = "\n".join(report(record))
    record.path.with_suffix(".md").write_text(f"# Faults drawn by seed {options.seed}\n\n{text}\n")
    print(text)
    return int("SURVIVED" in text or "NOT RUN" in text or "UNCLEAR" in text)


def coverage_map(options: argparse.Namespace) -> CoverageMap:
    FOLDER.mkdir(exist_ok=True)
    known = CoverageMap.load(FOLDER / "lines.json")
    if options.old_map and known is not None:
        return known
    return build(FOLDER / "lines.json", anew=options.rebuild, only=options.tests)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the names of chosen faults; all by default")
    parser.add_argument("--seed", type=int, help="draw faults by this number")
    parser.add_argument("--count", type=int, default=100, help="how many are drawn (%(default)s)")
    parser.add_argument("--only", default="", metavar="PATH", help="draw from files of zero3/ whose paths begin so, such as core/")
    parser.add_argument("--tests", default="tests/", metavar="PATH", help="judge by test files whose paths begin so (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="faults judged at a time, each in a copy of its own (%(default)s)")
    parser.add_argument("--fresh", action="store_true", help="forget what this seed has found before")
    parser.add_argument("--map", action="store_true", help="make the map of lines, and stop")
    parser.add_argument("--rebuild", action="store_true", help="make the whole map anew, also where the package has not changed")
    parser.add_argument("--old-map", action="store_true", help="use the map of an earlier state, though lines have moved")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if options.map:
        coverage_map(options)
        return 0
    return judge_chosen(options.words) if options.seed is None else judge_drawn(options)


if __name__ == "__main__":
    sys.exit(main())
