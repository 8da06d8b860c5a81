"""Do the tests see? Faults, put into a copy of the package one at a time; each has to be caught, by a test that fails.

make mutants                        those that were chosen by hand; ARGS="padding": whose names contain a word
make mutants SEED=7 COUNT=100       drawn at random from all places of zero3/, each judged by the tests that run its line

Both need a map of which test runs which lines. It is made when it is first needed (or by --map), which takes about twice as long as
the tests, and is kept with all findings in .mutants/: a run that was ended goes on where it was, and a larger COUNT goes on where a
smaller one ended. What no test catches is listed with its diff in .mutants/draw-SEED.md, to be judged: is it a fault, and which test is
missing? After new tests --again judges those once more. Exit code 1 if anything lives or is unclear.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.mutation.chosen import FAULTS, tests_of, verdict_of
from tests.mutation.coverage_map import build
from tests.mutation.drawing import draw, report
from tests.mutation.tree import ROOT, copied

FOLDER = ROOT / ".mutants"
LINES = FOLDER / "lines"


def judge_chosen(words: list[str]) -> int:
    chosen, lived = [fault for fault in FAULTS if all(word in fault.name for word in words)], 0
    lines = build(LINES, tuple({test for fault in chosen for test in tests_of(fault)}))
    with copied() as tree:
        for number, fault in enumerate(chosen, 1):
            began = time.monotonic()
            verdict = verdict_of(fault, tree, lines)
            lived += not verdict.is_caught
            print(f"{number}/{len(chosen)} {verdict.kind:9} {fault.name}: {verdict.why} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - lived} of {len(chosen)} caught")
    return int(lived > 0)


def judge_drawn(options: argparse.Namespace) -> int:
    record = draw(options, FOLDER, build(LINES, tuple(options.tests or ["tests/"]), slow=options.slow))
    text = "\n".join(report(record))
    record.path.with_suffix(".md").write_text(f"# Faults drawn by seed {options.seed}\n\n{text}\n")
    print(text)
    return int("SURVIVED" in text or "NOT RUN" in text or "UNCLEAR" in text)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the names of chosen faults; all by default")
    parser.add_argument("--seed", type=int, help="draw faults by this number")
    parser.add_argument("--count", type=int, default=100, help="how many are drawn (%(default)s)")
    parser.add_argument("--only", action="append", metavar="PATH", help="draw from files of zero3/ that begin so (core/); repeatable")
    parser.add_argument("--tests", action="append", metavar="PATH", help="judge by test files whose paths begin so (tests/); repeatable")
    parser.add_argument("--jobs", type=int, default=1, help="faults judged at a time, each in a copy of its own (%(default)s)")
    parser.add_argument("--again", action="store_true", help="judge once more what lived before: there are new tests")
    parser.add_argument("--fresh", action="store_true", help="forget what this seed has found before")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests for each fault, the likeliest ones first (%(default)s)")
    parser.add_argument("--slow", action="store_true", help="judge by tests marked slow too, and by those that start programs")
    parser.add_argument("--map", action="store_true", help="make the map of lines, and stop")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    if options.map:
        build(LINES, tuple(options.tests or ["tests/"]), slow=options.slow)
        return 0
    return judge_chosen(options.words) if options.seed is None else judge_drawn(options)


if __name__ == "__main__":
    sys.exit(main())
