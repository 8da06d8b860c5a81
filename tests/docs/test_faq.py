"""Every message that docs/faq.md quotes is one that the package raises or logs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import errors

ROOT = Path(__file__).parents[2]
QUOTES = [" ".join(quote.split()) for quote in re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/faq.md").read_text(), re.M | re.S)]
CAUSES = ("ValueError", "TypeError", "RuntimeError", "NotReducedError", "OSError", "refuse", "_of_transfer", "warning")


def pattern_of(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """What a text may look like: constants as they are, anything where a value is put in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(pattern_of(value, constants) for value in node.values)
    if isinstance(node, ast.FormattedValue) and ast.unparse(node.value) in constants:
        return pattern_of(constants[ast.unparse(node.value)], constants)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = re.split(r"\s+", re.sub(r"%[sd]", "\0", node.value))
        return r"\s*".join(map(re.escape, words)).replace(re.escape("\0"), ".+")
    return ".*"


def message_of(call: ast.Call, constants: dict[str, ast.expr]) -> str:
    texts = [pattern_of(argument, constants) for argument in call.args]
    if ast.unparse(call.func) == "refuse" and len(texts) == 3:
        return rf"{texts[0]} of a sharded model: {texts[1]}\. Use {texts[2]}\."
    return texts[0]


def patterns() -> Iterator[str]:
    for path in sorted((ROOT / "zero3").rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in CAUSES and node.args:
                yield message_of(node, constants)
            elif isinstance(node, ast.JoinedStr):  # some messages are made before they are raised
                yield pattern_of(node, constants)


def letters_of(pattern: str) -> int:
    """How many of a message are not put in."""
    return len(re.findall(r"\w", re.sub(r"\\s|\.[*+]", "", pattern)))


PATTERNS = [(re.compile(rf"(rank \d+: )?{pattern}", re.S), letters_of(pattern)) for pattern in patterns()]


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote[:50])
def test_a_quoted_message_is_in_the_source(quote: str) -> None:
    found = max((letters for pattern, letters in PATTERNS if pattern.fullmatch(quote)), default=0)
    assert found >= 20, f"no message of the package looks like: {quote}"


def test_a_message_that_nobody_raises_is_seen() -> None:
    quote = QUOTES[0].replace("before wrapping layers", "after lunch")
    assert not [pattern for pattern, letters in PATTERNS if letters >= 20 and pattern.fullmatch(quote)]
    assert len(QUOTES) > 30


def test_every_error_stands_on_the_page() -> None:
    """`python -m tests.support.errors --write` puts it there."""
    assert (ROOT / "docs/faq.md").read_text().endswith("\n\n" + errors.section())
