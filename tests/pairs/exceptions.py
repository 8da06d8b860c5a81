"""Rows that do not simply live together: refused by name, or still missing. A test keeps each table true.

A key holds rows, or axes, which stand for all their rows; mostly two of them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tests.pairs.rows import AXIS_OF, ROWS

Names = tuple[str, ...]


class Refusal(NamedTuple):
    """How they are refused, and why that has to be. The error says the words of all rows."""

    error: type[Exception]
    reason: str


_REPEATS = Refusal(ValueError, "a rank that fails makes transfers that it knows: they may depend neither on data nor on who reads later")
_FOLLOWS = Refusal(ValueError, "a rank without data makes the others' transfers: they may depend neither on data nor on who reads later")
_CAUGHT = Refusal(RuntimeError, "whether all others have caught it is not known where there is no data; step_guard is for that")
_USED = Refusal(RuntimeError, "the gradient is gone before the backward ends: that is what in_backward is for")
_LOSES = Refusal(RuntimeError, "what is written would be quantised once more, and lose more")

EXCLUDED: dict[Names, Refusal] = {
    ("stage 1", "transactional"): Refusal(ValueError, "what is staged can be dropped: at stage 1 nothing is staged"),
    ("stage 1", "param_groups"): Refusal(ValueError, "the first who reads a gradient reduces it on all ranks: one may have no part"),
    ("stage 1", "offload_optimizer in_backward"): Refusal(ValueError, "no gradient is reduced before backward ends"),
    ("clip_grad_norm_", "offload_optimizer in_backward"): _USED,
    ("backward twice", "offload_optimizer in_backward"): _USED,
    ("backward twice", "linear_cross_entropy"): Refusal(RuntimeError, "its forward has made the gradient, which its one backward uses up"),
    ("GradScaler", "offload_optimizer in_backward"): _USED,
    ("named_gradients", "offload_optimizer in_backward"): _USED,
    ("full_gradients", "offload_optimizer in_backward"): _USED,
    ("forwards two", "offload_optimizer in_backward"): Refusal(RuntimeError, "what earlier micro-batches left steps what a forward needs"),
    ("stage 1", "joinable"): _FOLLOWS,
    ("dynamic", "joinable"): _FOLLOWS,
    ("exception", "joinable"): _CAUGHT,
    ("transactional", "joinable"): _CAUGHT,
    ("stage", "step_guard"): _REPEATS,
    ("dynamic", "step_guard"): _REPEATS,
    ("dynamic", "checkpointing reentrant"): Refusal(RuntimeError, "ranks would recompute different layers, each in a forward of its own"),
    ("dynamic", "one checkpoint reentrant"): Refusal(RuntimeError, "ranks would recompute different layers, each in a forward of its own"),
    ("dynamic", "one checkpoint not reentrant"): Refusal(ValueError, "a rank gathers all that a checkpoint holds, and others left it out"),
    ("joinable", "step_guard BatchFinder"): Refusal(ValueError, "ranks cut as many rows at once, and a rank without data has none to cut"),
    ("stage", "expert_parallel"): Refusal(ValueError, "what stage keeps whole, or its gradients, is what never is whole on a rank"),
    ("dynamic", "expert_parallel"): Refusal(ValueError, "a rank that leaves out a layer of experts would keep what others' tokens need"),
    ("expert_parallel", "joinable"): Refusal(ValueError, "a rank without data owns experts that others need: it calls the model, too"),
    ("expert_parallel True", "param_groups align"): Refusal(ValueError, "blocks of an optimizer's state would have cuts of their own"),
    ("dynamic", "optional"): Refusal(ValueError, "each rank leaves out what it likes, and tells nobody: towers are told of"),
    ("expert_parallel", "optional"): Refusal(ValueError, "a rank that calls no tower owns experts in it, which others' tokens need"),
    ("optional", "step_guard"): _REPEATS,
    ("optional", "sequences"): Refusal(ValueError, "ranks that hold parts of the same sequences have to call the same layers"),
    ("dynamic", "sequences"): Refusal(
        ValueError, "ranks that share sequences would leave out different layers, and exchange nothing there"
    ),
    ("expert_parallel", "sequences"): Refusal(ValueError, "tokens and heads would travel among different ranks of one mesh"),
    ("joinable", "sequences"): Refusal(ValueError, "a rank without data leaves a hole in the sequences that the others compute with"),
    ("quantize", "full_params"): _LOSES,
    ("expert_parallel quantised", "full_params"): _LOSES,
}

MISSING: dict[Names, str] = {}  # it only shrinks


def rows_of(key: str) -> list[str]:
    """The names of the rows that `key` stands for."""
    return [name for name in ROWS if key in (name, AXIS_OF[name])]


def all_of(key: Names) -> list[Names]:
    return list(itertools.product(*map(rows_of, key)))


def listed(names: Iterable[str], table: Mapping[Names, Any]) -> Any:
    """What `table` says of some of these rows. None: nothing."""
    given = set(names)
    return next((found for key, found in table.items() if any(given.issuperset(each) for each in all_of(key))), None)


def is_free(names: Iterable[str]) -> bool:
    """Whether they are to live together."""
    given = tuple(names)
    return all(listed(given, table) is None for table in (EXCLUDED, MISSING))


def all_pairs() -> list[Names]:
    """Two values of one axis never meet."""
    return [pair for pair in itertools.combinations(ROWS, 2) if AXIS_OF[pair[0]] != AXIS_OF[pair[1]]]


def triple(dice: random.Random, rows: list[str]) -> Names:
    """Three of `rows` that are to live together."""
    while True:
        names = tuple(dice.sample(rows, 3))
        if len({AXIS_OF[name] for name in names}) == 3 and is_free(names):
            return names
