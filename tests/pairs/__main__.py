"""Tries pairs of capabilities on threads, and counts them.

python -m tests.pairs                          every pair
python -m tests.pairs --rows                   the names of rows
python -m tests.pairs --pair "stage 2" no_sync  these rows, two or more
python -m tests.pairs --triples 1000           so many triples at random
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
import traceback
from collections import Counter

import torch

from tests.pairs.exceptions import EXCLUDED, MISSING, Names, all_pairs, listed, triple
from tests.pairs.rows import ROWS
from tests.pairs.threads import lead


def kind_of(names: Names) -> str:
    tables = {"excluded": EXCLUDED, "missing": MISSING}
    return next((kind for kind, table in tables.items() if listed(names, table) is not None), "tried")


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.pairs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="list the rows")
    parser.add_argument("--pair", nargs="+", metavar="ROW", help="try these rows together, whatever the lists say")
    parser.add_argument("--triples", type=int, metavar="N", help="try N triples, drawn by the seed")
    parser.add_argument("--seed", type=int, help="of lives, and of triples (default: 0, and the time for triples)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    if options.rows:
        print("\n".join(ROWS))
        return 0
    seed = options.seed if options.seed is not None else int(time.time()) if options.triples else 0
    dice, counts = random.Random(seed), Counter[str]()
    drawn = [triple(dice, list(ROWS)) for _ in range(options.triples or 0)]
    todo = [tuple(options.pair)] if options.pair else drawn or all_pairs()
    for names in todo:
        kind = "tried" if options.pair else kind_of(names)
        counts[kind] += 1
        if kind != "tried":
            continue
        try:
            lead(names, seed)
        except Exception as error:
            counts["found wrong"] += 1
            print(f"{' + '.join(names)}: {type(error).__name__}: {error}", flush=True)
            if options.pair:
                traceback.print_exc()
    print(f"seed {seed}, {len(ROWS)} rows: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["found wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
