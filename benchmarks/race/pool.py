"""Would a pool of full buffers reserve less? The allocator's model on the log of a step, with and without one.

    python -m benchmarks.race.pool 8b 8 1x2048 none

With the pool, a full buffer that is released waits for the next one of its size, and its memory is never the allocator's again.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.common.report import markdown
from benchmarks.race.machines import H100_500W
from benchmarks.race.models import SHAPES
from benchmarks.race.recorders import recorders
from tests.device.clock import HOSTS, Clocks

GIB = 2**30


def full_sizes(name: str, ranks: int) -> set[int]:
    """Bytes of the layers' full buffers in bf16: embedding, block, readout."""
    shape = SHAPES[name]
    ends = shape.words * shape.width
    block = (shape.parameters - 2 * ends - shape.width) // shape.blocks
    return {2 * -(-numel // ranks) * ranks for numel in (ends, block, ends + shape.width)}


def pooled(log: Iterable[Any], sizes: set[int]) -> Iterator[Any]:
    """The log as if buffers of these sizes came from a pool, which takes what it lacks from the allocator, for good."""
    slots: dict[float, int] = defaultdict(int)  # that are free, by size
    taken: dict[int, float] = {}
    for entry in log:
        kind, ident, nbytes = entry[0], entry[3], entry[5]
        if kind == "a" and nbytes in sizes:
            taken[ident] = nbytes
            if slots[nbytes]:
                slots[nbytes] -= 1
                continue
        elif kind == "f" and ident in taken:
            slots[taken.pop(ident)] += 1
            continue
        yield entry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("ranks", type=int)
    parser.add_argument("batch")
    parser.add_argument("checkpointing")
    options = parser.parse_args()
    with recorders(1) as process, tempfile.NamedTemporaryFile() as file:
        process.run({**vars(options), "system": "zero3", "settings": {}, "log": file.name})
        log = pickle.load(file)
    rows = []
    for name, entries in (("no pool", log), ("pool", pooled(log, full_sizes(options.model, options.ranks)))):
        for expandable in (False, True):
            step = Clocks(H100_500W, HOSTS["launches"], expandable=expandable).replay(entries := list(entries))[-1]
            settings = "expandable segments" if expandable else "torch's default"
            rows.append([name, settings, f"{step.allocated / GIB:.2f}", f"{step.reserved / GIB:.2f}", step.segments])
    print("Simulated; no GPU was used.\n")
    print(markdown(["", "allocator", "allocated GiB", "reserved GiB", "segments"], rows))


if __name__ == "__main__":
    main()
