"""Where a fault may be put into a source, and what the source looks like with it. Every change of one place is a `Place`."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: (r"-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.Div: (r"/", "*"),
    ast.FloorDiv: (r"//", "*"),
    ast.Mod: (r"%", "//"),
    ast.Pow: (r"\*\*", "*"),
    ast.BitAnd: (r"&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.BitXor: (r"\^", "|"),
    ast.LShift: (r"<<", ">>"),
    ast.RShift: (r">>", "<<"),
    ast.And: (r"\band\b", "or"),
    ast.Or: (r"\bor\b", "and"),
    ast.Lt: (r"<", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}
KEPT_DECORATORS = re.compile(r"property|staticmethod|classmethod|dataclass|contextmanager|overload|abstractmethod|setter|cached_property")
MESSAGES = re.compile(r"(Error|Exception|Interrupt|refuse|warn|warning|info|debug|NamingFailures|named|Subject|agree\w*|record_function)$")

UNSEEN = frozenset({"strict", "stacklevel"})  # of zip() where lengths are equal; of a warning: nobody could tell


class Place(NamedTuple):
    """One change of one source."""

    kind: str
    line: int
    start: int  # in bytes
    stop: int
    text: str  # instead of what stands there
    runs: tuple[int, int]  # first and last line of what runs where the change counts


def changed(source: bytes, place: Place) -> bytes:
    return source[: place.start] + place.text.encode() + source[place.stop :]


def places_in(source: bytes) -> list[Place]:
    """All of them, in the order of the source. Some can't be compiled: see `compiles`."""
    found = sorted(_Finder(source).places(), key=lambda place: (place.start, place.stop, place.kind, place.text))
    return [place for place in found if changed(source, place) != source]


def lines_of_functions(source: bytes) -> set[int]:
    """Those of their bodies: what runs when they are called."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    bodies = [node.body[0] if isinstance(node, ast.FunctionDef) else node.body for node in functions]
    return {line for node, body in zip(functions, bodies, strict=True) for line in range(body.lineno, (node.end_lineno or body.lineno) + 1)}


def function_around(source: bytes, line: int) -> range:
    """The lines of the innermost function that `line` stands in, or of the whole source."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    around = [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in functions]
    return min((lines for lines in around if line in lines), key=len, default=range(1, source.count(b"\n") + 2))


def compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def places(self) -> Iterator[Place]:
        yield from self._below(ast.parse(self._source), (1, len(self._starts)), message=False)

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset), self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        start, stop = self._span(node)
        return self._source[start:stop].decode()

    def _below(self, node: ast.AST, runs: tuple[int, int], *, message: bool) -> Iterator[Place]:
        """`runs`: lines of what surrounds it. `message`: it is a part of a text for people."""
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not self._left_out(child, node):
                    told = message or isinstance(child, ast.Raise | ast.JoinedStr) or (isinstance(child, ast.Call) and self._tells(child))
                    yield from self._of(child, self._lines(child, runs), message=told)
                    yield from self._below(child, self._lines(child, runs), message=told)

    def _left_out(self, node: ast.AST, parent: ast.AST) -> bool:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        typing = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        types = isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in ("Literal", "Callable", "TypeVar", "Mapping")
        listed = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__slots__")
        listed = listed or (isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "__all__")
        protocol = isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases)
        alias = isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and isinstance(parent, ast.Module | ast.Assign)
        return docstring or typing or types or listed or protocol or alias or isinstance(node, ast.Import | ast.ImportFrom)

    def _tells(self, call: ast.Call) -> bool:
        return MESSAGES.search(ast.unparse(call.func)) is not None

    def _lines(self, node: ast.AST, around: tuple[int, int]) -> tuple[int, int]:
        """What runs if a fault in `node` counts. Of a function's signature that is its body: the signature itself runs at import."""
        if isinstance(node, ast.FunctionDef):
            return node.body[0].lineno, node.end_lineno or node.lineno
        if isinstance(node, ast.ClassDef | ast.arguments | ast.arg) or not hasattr(node, "lineno"):
            return around
        if isinstance(node, ast.stmt):
            headed = getattr(node, "body", None)  # the head of an `if` or a loop
            last = headed[0].lineno - 1 if isinstance(headed, list) and headed else node.end_lineno or node.lineno
            return node.lineno, max(last, node.lineno)
        return around

    def _of(self, node: ast.AST, runs: tuple[int, int], *, message: bool) -> Iterator[Place]:
        for kind in (_operators, _constants, _branches, _statements, _calls):
            for name, start, stop, text in kind(self, node, message):
                yield Place(name, self._line_of(start), start, stop, text, runs)

    def _line_of(self, start: int) -> int:
        return bisect_right(self._starts, start)

    def between(self, left: ast.AST, right: ast.AST, pattern: str) -> tuple[int, int] | None:
        """Where an operator stands."""
        start, stop = self._span(left)[1], self._span(right)[0]
        found = re.search(pattern, self._source[start:stop].decode())
        return None if found is None else (start + found.start(), start + found.end())


Change = tuple[str, int, int, str]


def _operators(finder: _Finder, node: ast.AST, message: bool) -> Iterator[Change]:
    pairs: list[tuple[ast.AST, ast.AST, ast.AST]] = []
    if isinstance(node, ast.BinOp):
        pairs = [(node.left, node.op, node.right)]
    elif isinstance(node, ast.BoolOp):
        pairs = [(left, node.op, right) for left, right in zip(node.values, node.values[1:], strict=False)]
    elif isinstance(node, ast.Compare):
        operands = [node.left, *node.comparators]
        pairs = list(zip(operands, node.ops, operands[1:], strict=False))
    elif isinstance(node, ast.AugAssign):
        pairs = [(node.target, node.op, node.value)]
    for left, operator, right in pairs:
        pattern, other = OPERATORS.get(type(operator), ("", ""))
        if pattern and (at := finder.between(left, right, pattern)) is not None:
            yield f"{type(operator).__name__} to {other}", *at, other
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield f"{type(node.op).__name__} dropped", *finder._span(node), f"({finder._text(node.operand)})"


def _constants(finder: _Finder, node: ast.AST, message: bool) -> Iterator[Change]:
    if not isinstance(node, ast.Constant) or message:
        return
    value: object = node.value
    if isinstance(value, bool):
        yield "constant", *finder._span(node), str(not value)
    elif isinstance(value, int):
        yield "constant", *finder._span(node), str(value + 1)
        if value > 1:
            yield "constant", *finder._span(node), str(value - 1)
    elif isinstance(value, float):
        yield "constant", *finder._span(node), repr(2 * value + 1)
    elif isinstance(value, str):
        yield "constant", *finder._span(node), repr(value + "x")


def _branches(finder: _Finder, node: ast.AST, message: bool) -> Iterator[Change]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        span, text = finder._span(node.test), finder._text(node.test)
        yield "branches swapped", *span, f"(not ({text}))"
        if not isinstance(node, ast.While):
            yield "always", *span, f"(({text}) or True)"
            yield "never", *span, f"(({text}) and False)"
    elif isinstance(node, ast.comprehension):
        for condition in node.ifs:
            yield "filter dropped", *finder._span(condition), "True"
    elif isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield "bound dropped", *finder._span(bound), ""


def _statements(finder: _Finder, node: ast.AST, message: bool) -> Iterator[Change]:
    stored = isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Attribute | ast.Subscript) for outer in node.targets for target in ast.walk(outer)
    )  # a name that is not there would raise
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise) or stored:
        yield "statement removed", *finder._span(node), "pass"
    elif isinstance(node, ast.Return):
        if node.value is None:
            yield "return removed", *finder._span(node), "pass"
        elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
            yield "None returned", *finder._span(node), "return None"
    elif isinstance(node, ast.Break | ast.Continue):
        yield (
            "loop goes on" if isinstance(node, ast.Break) else "loop ends",
            *finder._span(node),
            ("continue" if isinstance(node, ast.Break) else "break"),
        )
    elif isinstance(node, ast.With):
        for item in node.items:
            if item.optional_vars is None:
                yield "context left out", *finder._span(item.context_expr), '__import__("contextlib").nullcontext()'
    elif isinstance(node, ast.FunctionDef):
        for decorator in node.decorator_list:
            if not KEPT_DECORATORS.search(ast.unparse(decorator)):
                start, stop = finder._span(decorator)
                yield "decorator dropped", start - 1, stop, ""


def _calls(finder: _Finder, node: ast.AST, message: bool) -> Iterator[Change]:
    if not isinstance(node, ast.Call) or message:
        return
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in UNSEEN:
            start, stop = finder._span(keyword)
            after = re.match(rb"\s*,", finder._source[stop:])
            before = re.search(rb",\s*$", finder._source[:start])
            if after is not None:
                stop += after.end()
            elif before is not None:
                start = before.start()
            yield f"{keyword.arg}= left out", start, stop, ""
