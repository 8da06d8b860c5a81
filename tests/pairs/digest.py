"""The same bits: digests of lives as they are, beside those that a file keeps. What a rebuilding may not move, does not move.

python -m tests.pairs.digest                       every life of the file: which differ, and in what
python -m tests.pairs.digest --some 50 --seed 3    so many of them, drawn by the seed
python -m tests.pairs.digest --life "threads: no_sync"
python -m tests.pairs.digest --write               writes the file anew: for changes that are meant

A life is told by the kind of its ranks and by its rows (tests/pairs/rows.py). Kinds: threads; pieces (threads, whose gradients travel
from where they are); device (the simulated one, in order). Of each rank there are digests of

    losses        and all else that the life shows, in order
    gradients     as the optimizer has them before each step
    parameters    of the end: this rank's chunks, and full values
    optimizer     its full state at the end
    transfers     all that move tensors: which, how long, of which dtype, in which order
    order         the same with the waits for them, and with ranks' exchanges of words (threads alone)

Bits depend on the machine. The file says for which one it is, and nothing is compared on another. With ATEN_CPU_CAPABILITY=avx2 in the
environment, torch has the same kernels on every newer x86 processor: the file is written and compared so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero3
from tests.device.build import missing
from tests.pairs.exceptions import Names, all_pairs, is_free
from tests.pairs.life import Launch, Life, Place, Row, Sharded, World, shared
from tests.pairs.rows import ROWS, InBackward
from tests.pairs.threads import launch, scene
from tests.support.ranks import ThreadCommunicator, ThreadPartsCommunicator

FILE = Path(__file__).with_name("digests.json")
FIELDS = ("losses", "gradients", "parameters", "optimizer", "transfers", "order")
TIMES = 5  # so many pairs of each row on threads, at least
ON_DEVICE = 1  # and on the device
DIGITS = 8
OTHER_MACHINE = 2  # what the command returns
Digests = str  # of each field, by blanks; of each rank, by commas, or once if it is the same on all
Log = Callable[[Sharded], tuple[list[Any], list[Any]]]  # this rank's transfers, and the whole order


class Bits:
    """A digest that grows."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *what: object) -> None:
        for each in what:
            self._hash.update(f"{each.dtype} {tuple(each.shape)};".encode() if isinstance(each, Tensor) else f"{each};".encode())
            if isinstance(each, Tensor):
                self._hash.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

    def __str__(self) -> str:
        return self._hash.hexdigest()[:DIGITS]


class Watched(Row):
    """The last row of a life: what the optimizer is given. `in_backward` uses gradients up before: there its momenta tell of them."""

    def optimizer(self, one: Sharded, optimizer: Any) -> Any:
        seen = one.notes.setdefault("gradients", Bits())
        if any(isinstance(row, InBackward) for row in one.life.rows):
            return optimizer

        def watch(optimizer: torch.optim.Optimizer, *_: object) -> None:
            seen.add("step", *(p.grad for group in optimizer.param_groups for p in group["params"]))

        optimizer.register_step_pre_hook(watch)
        return optimizer


class Listening(ThreadCommunicator):
    """Its log has waits too."""

    def _post(self, kind: str, value: Tensor, numel: int) -> Callable[[], list[Any]]:
        arrive, begun = super()._post(kind, value, numel), self.log[-1]

        def wait() -> list[Any]:
            self.log.append(begun._replace(kind=f"wait for {kind}"))
            return arrive()

        return wait


class ListeningInPieces(Listening, ThreadPartsCommunicator):
    """`takes_pieces`, as gloo's."""


KINDS = {"threads": Listening, "pieces": ListeningInPieces}


def on_threads(kind: type[Listening]) -> Launch:
    def start(world: World, body: Callable[[Place], Any]) -> list[Any]:
        def rank(place: Place) -> Any:
            if world[0]:
                place.group.column.log = place.group.row.log  # one order for both
            return body(place)

        return launch(world, rank, kind)

    return start


def log_of_threads(one: Sharded) -> tuple[list[Any], list[Any]]:
    """Payloads of exchanges are words, which may be said otherwise: their lengths don't count."""
    group = getattr(one.group, "row", one.group)
    order = ["exchange" if entry.kind == "exchange" else tuple(entry) for entry in group.log]
    return [entry for entry in order if entry != "exchange" and not entry[0].startswith("wait")], [*order, group.told]


def digest_of(life: Life, start: Launch, folder: Path, log: Log) -> Digests:
    """Leads a life whose last row is `Watched`."""

    def tell(one: Sharded) -> list[Bits]:
        found = [Bits() for _ in FIELDS]
        losses, _, parameters, optimizer, transfers, order = found
        for each, entries in zip((transfers, order), log(one), strict=True):  # first: what follows makes transfers too
            each.add(*entries)
        for (_, place), value in one.shown.items():
            losses.add(place, value)
        found[1] = one.notes["gradients"]
        parameters.add(*one.model.parameters(), *flat(zero3.full_state_dict(one.model, rank0_only=False)))
        optimizer.add(*flat(zero3.full_optimizer_state_dict(one.model, one.optimizer)))
        return found

    chapters = [[list(map(str, rank)) for rank in ranks] for ranks in shared(life, start, folder, tell)]
    fields = [[rank[number] for ranks in chapters for rank in ranks] for number in range(len(FIELDS))]
    return " ".join(each[0] if len(set(each)) == 1 else ",".join(each) for each in fields)


def flat(tree: Any) -> list[object]:
    """Its leaves, each after its keys, in an order that does not depend on who made the tree."""
    if isinstance(tree, dict):
        return [part for key in sorted(tree, key=str) for part in (key, *flat(tree[key]))]
    if isinstance(tree, (list, tuple)):
        return [part for each in tree for part in flat(each)]
    return [tree]


def rows_of(name: str) -> list[Row]:
    names = name.partition(": ")[2].split(" + ")
    return [*(row for own, row in ROWS.items() if own in names), Watched()]


def found_on_threads(name: str) -> Digests:
    with scene() as folder:
        return digest_of(Life(rows_of(name)), on_threads(KINDS[name.partition(": ")[0]]), folder, log_of_threads)


# -- which lives


def drawn(rows: Iterable[str], times: int) -> list[Names]:
    """Pairs that have each row so many times."""
    given, counts, found = set(rows), Counter[str](), []
    pairs = [pair for pair in all_pairs() if given.issuperset(pair) and is_free(pair)]
    random.Random("pairs").shuffle(pairs)
    for pair in pairs:
        if min(counts[name] for name in pair) < times:
            counts.update(pair)
            found.append(pair)
    return found


def all_lives() -> list[str]:
    dice, streams = random.Random("kinds"), [name for name, row in ROWS.items() if row.streams]
    names = [f"{kind}: {name}" for kind in KINDS for name in ROWS]
    names += [f"{dice.choice(list(KINDS))}: {' + '.join(pair)}" for pair in drawn(ROWS, TIMES)]
    names += [f"device: {name}" for name in streams]
    return names + [f"device: {' + '.join(pair)}" for pair in drawn(streams, ON_DEVICE)]


# -- this machine


def arithmetic() -> str:
    """A digest of what torch itself computes here, so that nothing is said of zero3 that is true of the machine."""
    bits = Bits()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.linspace(-1, 1, 40 * 24, dtype=torch.float64).sin().to(dtype)
        weight = nn.Parameter(values.view(40, 24))
        hidden = nn.functional.layer_norm(torch.tanh(values.view(40, 24) @ weight.t()), (40,))
        nn.functional.cross_entropy(hidden, torch.arange(40)).backward()
        bits.add(hidden, weight.grad)
    return str(bits)


def machine() -> dict[str, str]:
    return {"torch": torch.__version__, "cpu": torch.backends.cpu.get_cpu_capability(), "arithmetic": arithmetic()}


def misfit(kept: dict[str, Any]) -> str:
    """Why the file says nothing of this machine. "": it does."""
    differ = [f"{name} {kept[name]}, here {here}" for name, here in machine().items() if kept[name] != here]
    return f"{FILE.name} was written on another machine: {'; '.join(differ)}" if differ else ""


# -- comparison


def difference(kept: Digests, found: Digests) -> list[str]:
    """The fields that differ."""
    if len(kept.split()) != len(found.split()):
        return ["number of fields"]
    return [field for field, old, new in zip(FIELDS, kept.split(), found.split(), strict=False) if old != new]


def look(names: list[str]) -> dict[str, Digests | Exception]:
    """Leads lives. Those on the device are in a process of their own, which must have the device before torch."""
    found: dict[str, Digests | Exception] = {}
    for name in names:
        if not name.startswith("device: "):
            try:
                found[name] = found_on_threads(name)
            except Exception as error:
                found[name] = error
    asked = [name for name in names if name.startswith("device: ")]
    if asked and not missing():
        environment = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
        command = [sys.executable, "-m", "tests.device.digest"]
        run = subprocess.run(command, input="\n".join(asked), env=environment, stdout=subprocess.PIPE, text=True)
        lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
        found |= {name: digests if digests else RuntimeError(error) for name, digests, error in lines}
        found |= {name: RuntimeError(f"the device's process ended: {run.returncode}") for name in asked if name not in found}
    return found


def screen(kept: dict[str, Digests], found: dict[str, Digests | Exception]) -> list[str]:
    """What to say, on one screen: each life that differs, in what, and which rows they have in common."""
    lines, fields, rows = [], Counter[str](), Counter[str]()
    for name, digests in found.items():
        if isinstance(digests, Exception):
            differ, said = ["raised"], f"raised {type(digests).__name__}: {str(digests)[:150]}"
        else:
            differ = difference(kept[name], digests)
            said = ", ".join(differ)
        if differ:
            lines.append(f"{name}: {said}")
            fields.update(differ)
            rows.update(name.partition(": ")[2].split(" + "))
    few = lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else [])
    summary = f"{len(found)} lives compared, {len(lines)} differ"
    if lines:
        summary += f": {', '.join(f'{count} in {field}' for field, count in fields.most_common())}"
        few.append(f"most often: {', '.join(f'{row} ({count})' for row, count in rows.most_common(6))}")
    return [*few, summary]


def write() -> int:
    found = look(all_lives())
    for name, error in found.items():
        if isinstance(error, Exception):
            print(f"{name} is left out: {type(error).__name__}: {error}")
    head = "".join(f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in machine().items())
    lives = ",\n".join(f"{json.dumps(name)}: {json.dumps(digests)}" for name, digests in found.items() if isinstance(digests, str))
    FILE.write_text(f'{{\n{head}"lives": {{\n{lives}\n}}}}\n')
    print(f"{len(found)} lives written to {FILE}")
    return int(any(isinstance(each, Exception) for each in found.values()))


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.pairs.digest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the file anew")
    parser.add_argument("--some", type=int, metavar="N", help="compare N lives of the file, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="for --some")
    parser.add_argument("--life", nargs="+", metavar="NAME", help="compare these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    if options.write:
        return write()
    kept = json.loads(FILE.read_text())
    if said := misfit(kept):
        print(f"{said}. Nothing was compared: write it here, on the code of before")
        return OTHER_MACHINE
    names = options.life or list(kept["lives"])
    if unknown := [name for name in names if name not in kept["lives"]]:
        parser.error(f"not in {FILE.name}: {', '.join(unknown)}")
    if options.some is not None:
        names = sorted(random.Random(options.seed).sample(names, min(options.some, len(names))))
    found = look(names)
    if left := len(names) - len(found):
        print(f"{left} lives on the device were left out: {missing()}")
    print("\n".join(screen(kept["lives"], found)))
    return int(any(isinstance(each, Exception) or each != kept["lives"][name] for name, each in found.items()))


if __name__ == "__main__":
    sys.exit(main())
