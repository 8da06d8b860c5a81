"""What a rank's ring of last transfers costs its host: one entry, one ring, and a whole step with rings and without. And how long
`python -m zero3 hang` takes for the rings of many ranks.

    python benchmarks/overhead/ring.py --help

An entry: what a layer's conductor takes with the ring around it, less what it takes without; CPU time of the thread, medians over
rounds. A step: the stack of small layers of main.py, twice in one process, with a ring and without. They take turns, step by step.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import quantiles
from time import perf_counter_ns, process_time_ns, thread_time_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
from torch import nn

from benchmarks.common.alone import rank_zero_of
from benchmarks.common.ranks import alone
from benchmarks.common.report import markdown, median, write
from benchmarks.common.systems import SYSTEMS
from benchmarks.overhead.main import WIDTH, Small

SWITCH = "ZERO3_RING_DIR"
CALLS = 5000  # in a round


class _Nothing:
    """The conductor inside: what is conducted is not done."""

    def conduct(self, what: object, *, absent: bool = False) -> None:
        return None


def _nanoseconds(call: Callable[[], object]) -> float:
    """CPU time of one call."""
    begin = thread_time_ns()
    for _ in range(CALLS):
        call()
    return (thread_time_ns() - begin) / CALLS


def entries(rounds: int) -> dict[str, float]:
    """Nanoseconds beyond those without a ring: a transfer, and a mark; and of the ring's stores alone. Microseconds: a ring is made."""
    import zero3
    from zero3.access import states_of
    from zero3.comm.ring import Ring
    from zero3.conductors.noting import Noting
    from zero3.core.collectives import Fetch, Gather

    with tempfile.TemporaryDirectory() as place, rank_zero_of(2):
        os.environ[SWITCH] = place
        model = zero3.shard(nn.Sequential(nn.Linear(8, 8)), layers=nn.Linear)
        state = next(iter(states_of(model)))
        inner = _Nothing()
        noting, ring = Noting(inner), state.log.ring
        code = ring.code("gathering", state.label, state.chunks.identity)
        found: dict[str, list[float]] = {"a transfer": [], "a mark": [], "the stores alone": []}
        for _ in range(rounds):
            for name, what, marks in (("a transfer", Gather(state), 1), ("a mark", Fetch(state), 2)):  # waiting, and computing

                def around(what: Any = what) -> None:
                    noting.conduct(what)

                def without(what: Any = what) -> None:
                    inner.conduct(what)

                found[name].append((_nanoseconds(around) - _nanoseconds(without)) / marks)
            found["the stores alone"].append(_nanoseconds(lambda: ring.put(code, 1)) - _nanoseconds(lambda: None))
        made = []
        for number in range(rounds):
            begin = perf_counter_ns()
            Ring(Path(place), number, 0, 2)
            made.append((perf_counter_ns() - begin) / 1e3)
        return {name: median(values) for name, values in found.items()} | {"a ring is made": median(made)}


def steps(layers: int, count: int) -> dict[str, list[float]]:
    """CPU seconds of each forward and backward of two models in one process, one with a ring and one without, which take turns."""
    torch.set_flush_denormal(True)  # collectives that do nothing leave what was in memory
    with tempfile.TemporaryDirectory() as place, rank_zero_of(2) as transfers:
        trainings = {}
        for name, where in (("with a ring", place), ("without", "0")):
            os.environ[SWITCH] = where
            trainings[name] = SYSTEMS["zero3"]([Small() for _ in range(layers)], "adamw", device="cpu")
        x, found = torch.randn(4, WIDTH), {name: list[float]() for name in trainings}
        for step in range(3 + count):
            if step == 2:
                transfers.replace()
            for name in sorted(trainings, reverse=step % 2 == 1):
                begin = thread_time_ns()
                trainings[name].backward(trainings[name].model(x).sum())
                found[name].append((thread_time_ns() - begin) / 1e9)
                trainings[name].update()
    return {name: values[3:] for name, values in found.items()}


def _fill(ring: Any, stops: bool, layers: int, where: int, forwards: int) -> None:
    """With forwards and backwards, to the reduction of layer `where` in the last one, or to the computation before it."""
    from zero3.comm.ring import BACKWARD, FORWARD

    kinds = ("gathering", "waiting", "computing", "reducing")
    codes = [[ring.code(doing, f"'model.layers.{layer}' (LlamaDecoderLayer)", layer) for doing in kinds] for layer in range(layers)]
    for forward in range(forwards):
        for direction, order in ((FORWARD, range(layers)), (BACKWARD, range(layers)[::-1])):
            ring.turn(direction)
            for layer in order:
                gathers, waits, computes, reduces = codes[layer]
                ring.put(gathers, forward)
                ring.put(waits, forward, 0)
                ring.put(computes, forward, 0)
                ends = direction == BACKWARD and forward == forwards - 1 and layer == where
                if direction == BACKWARD and not (ends and stops):
                    ring.put(reduces, forward)
                if ends:
                    return


def hang(ranks: int) -> dict[str, float]:
    """Seconds and lines of `hang` for full rings of so many ranks, one of which is stuck in the backward of a layer."""
    from zero3.__main__ import main as command
    from zero3.comm.ring import Ring

    stuck, layers = 2 * ranks // 3, 32
    where = layers // 2
    with tempfile.TemporaryDirectory() as place:
        for rank in range(ranks):
            _fill(Ring(Path(place), 1, rank, ranks), rank == stuck, layers, where, forwards=100)
        said, begin, spent = io.StringIO(), perf_counter_ns(), process_time_ns()
        with redirect_stdout(said):
            status = command(["hang", place])
        took, spent = (perf_counter_ns() - begin) / 1e9, (process_time_ns() - spent) / 1e9
    text = said.getvalue()
    if status or f"rank {stuck} is behind: in layer 'model.layers.{where}'" not in text:
        raise RuntimeError(f"hang does not name rank {stuck} in layer {where}: {text}")
    return {"seconds": took, "CPU seconds": spent, "lines": float(text.count("\n"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help=f"of {CALLS} entries each; default: %(default)s")
    parser.add_argument("--layers", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="with and without, in turns; 0: none; default: %(default)s")
    parser.add_argument("--ranks", type=int, default=64, help="whose rings `hang` joins; default: %(default)s")
    parser.add_argument("--output", type=Path, help="a folder for the table and all that was measured")
    args = parser.parse_args()
    entry = alone(entries, args.rounds)
    units = {name: "us" if name == "a ring is made" else "ns" for name in entry}
    tables = markdown(["what", "takes"], [[name, f"{value:.0f} {units[name]}"] for name, value in entry.items()])
    joined = alone(hang, args.ranks)
    spent = f"{joined['seconds']:.2f} s after its imports ({joined['CPU seconds']:.2f} s of CPU time), {joined['lines']:.0f} lines"
    tables += f"\n\n`hang` on {args.ranks} full rings: {spent}"
    found = alone(steps, args.layers, args.steps) if args.steps else {}
    if found:
        ratios = [with_ring / without for with_ring, without in zip(*found.values(), strict=True)]
        rows = [[name, f"{min(each) * 1e3:.2f}", f"{median(each) * 1e3:.2f}"] for name, each in found.items()]
        tables += "\n\n" + markdown(["step", "CPU ms, least", "median"], rows)
        low, middle, high = quantiles(ratios, n=4)
        tables += f"\n\nwith a ring / without, step by step: {middle:.3f} (half of them {low:.3f} to {high:.3f})"
    write(args.output, "ring", {"entry": entry, "hang": joined, "steps": found}, tables)


if __name__ == "__main__":
    main()
