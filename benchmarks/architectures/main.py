"""Every architecture of transformers, small: is it sharded what it is unsharded?

    python benchmarks/architectures/main.py --help

Of each class a model is made from its own default configuration with small sizes and random weights. Two gloo processes train it,
with experts at home if it has any, with checkpointing, with LoRA on all its linear layers, generate, load and save; plain copies of it
do the same, and say what is right.
`--sizes` builds the default configurations themselves, without memory, and says how large the root's own layer is beside the others.
Results go into a file line by line, and what is in it already is not done again: a sweep that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

from benchmarks.common.report import markdown, progress

_GOOD = ("ok", "-")  # "-": the class has no such thing
CHECKS = ("step", "experts", "checkpointing", "LoRA", "generate", "load", "save")
Row = dict[str, Any]


def parse_options() -> argparse.Namespace:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=Path("results"), metavar="DIR", help="for architectures.jsonl or sizes.jsonl (results)"
    )
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="types of models, as config.model_type (all)")
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="what classes are for, such as CAUSAL_LM (all)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="of one check of one class (120)")
    parser.add_argument("--again", choices=("failed", "all"), help="does those again that failed, or all, though they are in the file")
    parser.add_argument("--sizes", action="store_true", help="full-size models on the meta device: how large is the root?")
    parser.add_argument("--table", action="store_true", help="prints the table of what is in the file, and does nothing else")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    path = options.output / ("sizes.jsonl" if options.sizes else "architectures.jsonl")
    rows = {row["type"]: row for row in map(json.loads, path.read_text().splitlines() if path.exists() else ())}
    if not options.table:
        sweep(options, path, rows)
    print(sizes_table(rows.values()) if options.sizes else table(rows.values()))


def sweep(options: argparse.Namespace, path: Path, rows: dict[str, Row]) -> None:
    try:
        import peft  # noqa: F401  here, so that ranks have it
        import transformers
    except ModuleNotFoundError as missing:
        raise SystemExit(f"this needs the package {missing.name!r}: pip install transformers peft") from None
    from benchmarks.architectures.sizes import measure
    from benchmarks.architectures.sweep import try_class
    from benchmarks.architectures.tiny import model_types

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    kinds = {kind: what for kind, what in model_types().items() if not options.tasks or what[0] in options.tasks}
    unknown = set(options.types or ()) - set(kinds)
    if unknown:
        raise SystemExit(f"transformers {transformers.__version__} has no model of type {', '.join(sorted(unknown))}")
    wanted = [kind for kind in kinds if not options.types or kind in options.types]
    again = {"failed": lambda row: not good(row), "all": lambda row: True, None: lambda row: False}[options.again]
    wanted = [kind for kind in wanted if kind not in rows or again(rows[kind])]
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    for number, kind in enumerate(wanted, 1):
        began, (task, name) = time.monotonic(), kinds[kind]
        found = measure(kind) if options.sizes else {"checks": try_class(kind, options.ranks, options.timeout)}
        rows[kind] = {"type": kind, "class": name, "task": task, **found, "seconds": round(time.monotonic() - began, 1), **versions}
        with path.open("a") as file:
            file.write(json.dumps(rows[kind]) + "\n")
        bad = found.get("error") or "; ".join(f"{check}: {text}" for check, text in found.get("checks", {}).items() if text not in _GOOD)
        progress(f"{number} of {len(wanted)}, {rows[kind]['seconds']:.0f} s: {kind} ({name}) {bad or 'ok'}"[:300])


def good(row: Row) -> bool:
    """Nothing that plain can do came out otherwise."""
    return not row.get("error") and all(text in _GOOD or is_plain(text) for text in row.get("checks", {}).values())


def is_plain(text: str) -> bool:
    return text.startswith(("plain fails", "no model"))


def table(rows: Iterable[Row]) -> str:
    ordered = sorted(rows, key=lambda row: row["type"])
    built = [row for row in ordered if "build" not in row["checks"]]
    words = {row["type"]: [_word(row["checks"].get(check, "")) for check in CHECKS] for row in built}
    counts = [Counter(column) for column in zip(*words.values(), strict=True)]
    summary = markdown(["", *CHECKS], [[word, *(count[word] for count in counts)] for word in ("ok", "wrong", "plain fails", "-")])
    body = markdown(["type", "class", *CHECKS], [[row["type"], row["class"], *words[row["type"]]] for row in built])
    bad = [f"* {row['type']}, {check}: {text[:160]}" for row in built for check, text in row["checks"].items() if _word(text) == "wrong"]
    left = [
        f"* {row['type']} ({row['class']}): {row['checks']['build'].removeprefix('no model: ')[:110]}"
        for row in ordered
        if row not in built
    ]
    versions = ", ".join(f"{name} {ordered[0].get(name)}" for name in ("torch", "transformers", "peft")) if ordered else ""
    parts = [f"{len(built)} classes ({versions}).", summary, "What is wrong:", "\n".join(bad) or "Nothing.", body]
    return "\n\n".join([*parts, f"Not tried, {len(left)}, for no small model or no inputs were found:", "\n".join(left)])


def _word(text: str) -> str:
    return text if text in ("ok", "-", "") else "plain fails" if is_plain(text) else "wrong"


def sizes_table(rows: Iterable[Row]) -> str:
    measured = [row for row in rows if "root" in row]
    larger = sorted((row for row in measured if row["root"] > row["largest"]), key=lambda row: -row["root"] / row["largest"])
    free = [row for row in larger if row["root"] - row["tied"] > row["largest"]]
    columns = ["type", "class", "M parameters", "layers", "largest layer, M", "root, M", "of it tied, M", "root / largest"]
    cells = []
    for row in larger:
        numbers = [f"{row[what] / 1e6:.1f}" for what in ("largest", "root", "tied")]
        cells.append(
            [row["type"], row["class"], f"{row['numel'] / 1e6:.0f}", row["layers"], *numbers, f"{row['root'] / row['largest']:.2f}"]
        )
    errors = [f"* {row['type']} ({row['class']}): {row['error']}" for row in rows if row.get("error")]
    head = f"{len(measured)} classes. The root is larger than every other layer in {len(larger)}; without what is tied, in {len(free)}."
    return "\n\n".join([head, markdown(columns, cells), f"Not measured, {len(errors)}:", "\n".join(errors)])


if __name__ == "__main__":
    main()
