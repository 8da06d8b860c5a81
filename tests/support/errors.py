"""docs/faq.md lists the errors that the package raises, as far as their texts stand where they are made. This reads them out of the source.

python -m tests.support.errors           the list
python -m tests.support.errors --write   puts it into docs/faq.md, behind its last heading
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faq.md"
HEADING = "## All errors, by their first words\n"
INTRODUCTION = """
A search on this page for an error's first words finds it here. "..." stands where a message has names and numbers. What to do stands
in the message itself; above is more about those that people meet. The list is read out of the source: a text that is put together
elsewhere than where it is raised is not in it.
"""
LETTERS = 12  # of a text that can be searched for


def text_of(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    if isinstance(node, ast.Name) and node.id in constants:
        return text_of(constants[node.id], {})
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(value.value if isinstance(value, ast.Constant) else "..." for value in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left, constants) or "...") + (text_of(node.right, constants) or "...")
    return ""


def either(node: ast.expr) -> list[ast.expr]:
    return [*either(node.body), *either(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def raised(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Kind and text of each error that is made with its text: where it is raised, or to be raised by others."""
    constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).endswith(("Error", "refuse", "Refused")) and node.args:
            given = [each for argument in node.args for each in either(argument)]
            texts = [" ".join(text_of(each, constants).split()) for each in given]
            if any(isinstance(argument, ast.IfExp) for argument in node.args):
                yield from ((name, text) for text in texts if sum(map(str.isalpha, text)) >= LETTERS)
                continue
            text = f"{texts[0]} of a sharded model: {texts[1]}" if name.endswith("refuse") and len(texts) == 3 else max(texts, key=len)
            if sum(map(str.isalpha, text)) >= LETTERS:
                yield name, text


def errors() -> dict[str, dict[str, str]]:
    """Room -> text -> kind."""
    found: dict[str, dict[str, str]] = {}
    for path in sorted((ROOT / "zero3").rglob("*.py")):
        room = path.relative_to(ROOT / "zero3").parts[0].removesuffix(".py")
        for kind, text in raised(ast.parse(path.read_text())):
            found.setdefault(room, {})[text] = kind.rpartition(".")[2]
    return found


def section() -> str:
    lines = [HEADING, INTRODUCTION]
    for room, texts in errors().items():
        lines.append(f"\n**`zero3/{room}`**\n\n")
        lines += [f"* `` {text} ``{f' ({kind})' if kind.endswith('Error') else ''}\n" for text, kind in sorted(texts.items())]
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the list into docs/faq.md")
    if parser.parse_args().write:
        PAGE.write_text(PAGE.read_text().partition(HEADING)[0].rstrip("\n") + "\n\n" + section())
    else:
        print(section())


if __name__ == "__main__":
    main()
