"""What each of transformers' mixtures would send in a step for experts, by formula, in the size of its configuration's defaults.

    python -m benchmarks.experts.models            # the table of docs/models.md, in a few minutes; it is written there

Modules are made on the meta device. The formula is held to counted bytes by tests/experts/test_bytes.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.common.report import markdown, progress
from zero3.experts.finding import count_of, cuts, is_experts

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- bytes of experts -->\n", "<!-- /bytes of experts -->"
RANKS, TOKENS, ITEMSIZE = 8, 8192, 2
COLUMNS = ["type", "layers", "experts", "of a token", "width", "numbers of an expert", "gathered, GB", "at home, GB"]
# a configuration's names for the experts of a token
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k", "experts_per_token", "top_k")


class Mixture(NamedTuple):
    layers: int
    experts: int
    used: int  # by a token
    width: int
    numbers: int  # parameters of one expert

    def gathered(self, ranks: int = RANKS, itemsize: int = ITEMSIZE) -> float:
        """Bytes that a rank sends, if all experts are gathered twice and their gradients reduced once."""
        return 3 * self.layers * self.experts * self.numbers * itemsize * (ranks - 1) / ranks

    def at_home(self, ranks: int = RANKS, tokens: int = TOKENS, itemsize: int = ITEMSIZE) -> float:
        """Bytes that the first rank sends, if tokens use all experts alike: twice there, twice back, weights with the first and the last,
        and four bytes for each number of an expert."""
        bounds = cuts(self.experts, ranks)
        sizes = [end - first for first, end in pairwise(bounds)]
        reach = [1 - math.comb(self.experts - size, self.used) / math.comb(self.experts, self.used) for size in sizes]
        there, back = sum(reach[1:]), (ranks - 1) * reach[0]
        wide, weights = self.width * itemsize, self.used * itemsize
        return self.layers * tokens * (there * (2 * wide + weights + 4 * self.used) + back * (2 * wide + weights))


def mixture_of(model: nn.Module, config: Any) -> Mixture | None:
    """None: it has no experts, or their number for a token is not known."""
    found = [module for module in model.modules() if is_experts(module)]
    text = config.get_text_config()
    used = next((value for name in _USED if type(value := getattr(text, name, None)) is int), None)
    if not found or used is None:
        return None
    each = sum(parameter.numel() for parameter in found[0].parameters(recurse=False)) // count_of(found[0])
    return Mixture(len(found), count_of(found[0]), used, text.hidden_size, each)


def made(kind: str) -> Mixture | None:
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    return mixture_of(model, config)


def row(kind: str, of: Mixture) -> list[str]:
    return [f"`{kind}`", *map(str, of), f"{of.gathered() / 1e9:.1f}", f"{of.at_home() / 1e9:.1f}"]


def table(found: Iterable[tuple[str, Mixture]]) -> str:
    return markdown(COLUMNS, [row(*each) for each in found])


def tried(page: str) -> list[str]:
    """The types that the page calls right."""
    listed = page.split("\nRight: ", 1)[1].split("\n\n", 1)[0]
    return [kind.strip(" `\n.") for kind in listed.split(",")]


def main() -> None:
    page, found, others = PAGE.read_text(), [], []
    for kind in tried(page):
        try:
            of = made(kind)
        except Exception as error:
            of = None
            progress(f"{kind}: {type(error).__name__}: {str(error)[:100]}")
        progress(f"{kind}: {of}")
        found += [(kind, of)] if of else []
        others += [] if of else [f"`{kind}`"]
    before, _, rest = page.partition(BEGIN)
    text = table(found) + (
        f"\n\nNot in the table, because its defaults don't make a model, or none with experts: {', '.join(others)}." if others else ""
    )
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
