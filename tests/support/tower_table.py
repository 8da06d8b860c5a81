"""What `optional=None` takes of each class of transformers that has sub-configurations: the table of docs/models.md.

python -m tests.support.tower_table --write    writes it anew
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import defaultdict
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.architectures.tiny import model_types, tiny_config
from zero3.towers.choosing import choose_towers

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- towers -->\n", "<!-- end of towers -->\n"
NO_MODEL = "no small model could be made"


def kinds() -> list[str]:
    return [kind for kind in model_types() if getattr(CONFIG_MAPPING[kind], "sub_configs", None)]


def chosen(kind: str) -> str:
    """The names of its towers, of a small model without values."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(transformers, model_types()[kind][1])(tiny_config(kind))
    except Exception:  # of any kind: a library that is not there, a size that is too small
        return NO_MODEL
    found = list(choose_towers(model, None))
    return ", ".join(f"`{name}`" for name in found) or "nothing"


def table(of: dict[str, str]) -> str:
    rows = defaultdict[str, list[str]](list)
    for kind, found in of.items():
        rows[found].append(f"`{kind}`")
    last = ("nothing", NO_MODEL)
    order = sorted(rows, key=lambda found: (found in last, -len(rows[found]), found))
    return "".join(f"| {found} | {', '.join(rows[found])} |\n" for found in order)


def told() -> dict[str, str]:
    """What the page says, by type."""
    text = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = re.findall(r"^\| (.*?) \| (`.*`) \|$", text, re.MULTILINE)
    return {kind: found for found, listed in rows for kind in re.findall(r"`(.*?)`", listed)}


def main() -> None:
    logging.disable()
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    rows = table({kind: chosen(kind) for kind in kinds()})
    PAGE.write_text(f"{before}{BEGIN}| towers | types |\n|---|---|\n{rows}{END}{after}")


if __name__ == "__main__":
    main() if "--write" in sys.argv else sys.exit(__doc__)
