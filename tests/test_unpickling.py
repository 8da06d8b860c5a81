"""Nothing in the package or its examples unpickles what a file or another rank brings, read from the sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_architecture import ROOT, SOURCES

UNPICKLES = re.compile(
    r"^(pickle|_pickle|cPickle|cloudpickle|dill|joblib|shelve|marshal|jsonpickle)(\.|$)|^torch\.(jit\.load|hub|package)\b"
    r"|(^|(?<!ctypes)\.)\w+_object(_list)?$|^torch\.distributed\.(checkpoint|rpc)\b|^(np|numpy)\.load$"
)
TOLD_PLAINLY = [*SOURCES.values(), *sorted((ROOT / "examples").rglob("*.py"))]


def unpicklers(tree: ast.AST) -> list[str]:
    """What of a file's code could run code that a file, or another rank, brings: pickles, object collectives, careless loads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if UNPICKLES.search(alias.name)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if UNPICKLES.search(name) or name == "torch.load"]
        elif isinstance(node, ast.Attribute) and UNPICKLES.search(ast.unparse(node)):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            careful = [k for k in node.keywords if k.arg == "weights_only" and isinstance(k.value, ast.Constant) and k.value.value is True]
            found += [] if careful else [ast.unparse(node)]
        elif isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"):
            found.append(node.id)
    return found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load(x)", "torch.load(x, weights_only=False)",
        "torch.load(x, weights_only=y)", "from torch import load", "dist.broadcast_object_list(x)", "torch.jit.load(x)",
        "torch.distributed.all_gather_object(x, y)", "from torch.distributed import gather_object", "eval(x)",
        "dist.scatter_object_list(x, y)", "import torch.distributed.checkpoint as dcp",
    ],
)  # fmt: skip
def test_what_unpickles_is_seen(code: str) -> None:
    assert unpicklers(ast.parse(code))


@pytest.mark.parametrize("path", TOLD_PLAINLY, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_unpickled_from_disk_or_from_other_ranks(path: Path) -> None:
    """docs/reliability.md, what a checkpoint or a rank can do: no code."""
    assert not unpicklers(ast.parse(path.read_text()))
