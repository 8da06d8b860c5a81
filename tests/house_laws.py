"""Laws that the house does not keep everywhere yet: what breaks them stands in `house_laws.json`, and the lists only shrink.

Whoever mends a place runs `python -m tests.house_laws`, which strikes it from its list, and never adds one. It tells the house's figures.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import zero3

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zero3"
TESTS = Path(__file__).parent
COLUMNS = 100
HANDED_ON = "Travelling"  # the record that stages hand on, as `gradient`: each writes into it
TORCH_S = {"Tensor": torch.Tensor, "nn.Parameter": nn.Parameter}  # as bases of ours, which have fields already
PUBLIC, FACES = frozenset(zero3.__all__), ("__main__", "integrations")  # a user's names, and modules that users import
AXES = ("stores", "wires", "stages", "faces", "conductors")  # a file of these rooms is one value of an axis
LISTS = Path(__file__).with_suffix(".json")
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
LINES = {path.relative_to(PACKAGE).as_posix(): path.read_text().splitlines() for path in sorted(PACKAGE.rglob("*.py"))}

Place = str  # a file of the package, and what stands there


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for file, tree in TREES.items():
        yield from ((file, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for file, tree in TREES.items():
        yield from ((file, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def imported_names(file: str) -> Iterator[tuple[str, str]]:
    """Name in the file, and the file of the package that it comes from."""
    package = ["zero3", *file.split("/")[:-1]]
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            parts = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                for path in ("/".join([*parts[1:], alias.name]), "/".join(parts[1:])):
                    found = next((name for name in (f"{path}.py", f"{path}/__init__.py") if parts[0] == "zero3" and name in TREES), None)
                    if found is not None:
                        yield alias.asname or alias.name, found
                        break


IMPORTED = {file: dict(imported_names(file)) for file in TREES}


def is_frozen(node: ast.ClassDef) -> bool:
    """Whether it is a record whose fields nobody can assign."""
    named = any("NamedTuple" in ast.unparse(base) for base in node.bases)
    return named or any("frozen=True" in ast.unparse(decorator) for decorator in node.decorator_list)


def fields_of(node: ast.ClassDef) -> set[str]:
    """What a class declares, or gives itself, but for what it has from torch's tensors (`data`, `__class__`)."""
    bases = {ast.unparse(base) for base in node.bases}
    torch_s = {field for name, kind in TORCH_S.items() if name in bases for field in dir(kind)}
    declared = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    return (
        declared
        | {
            target.attr
            for target in ast.walk(node)
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store) and ast.unparse(target.value) == "self"
        }
        - torch_s
    )


def core_imports_comm_alone() -> Iterator[Place]:
    for file, names in IMPORTED.items():
        rooms = {found.split("/")[0].removesuffix(".py") for found in names.values()}
        if file.startswith("core/"):
            yield from (f"{file} imports {room}" for room in rooms - {"core", "comm"})


def no_class_inherits_from_another_file() -> Iterator[Place]:
    """But for protocols and exceptions."""
    kinds = {(file, node.name): node for file, node in classes()}
    for file, node in classes():
        for base in node.bases:
            name = ast.unparse(base).split("[")[0]
            other = kinds.get((IMPORTED[file].get(name, ""), name))
            if other is not None and not {"Protocol", "Exception", "ValueError", "RuntimeError"} & {ast.unparse(b) for b in other.bases}:
                yield f"{file} {node.name}({name})"


def a_field_is_assigned_in_its_class_s_file() -> Iterator[Place]:
    """Names alone are known here, no types. Fields of frozen records, which can't be assigned, and what torch's modules hold
    (`torch.autograd.backward`) are others' of the same name.
    """
    owners = defaultdict(set)
    handed_on = next(fields_of(node) for _, node in classes() if node.name == HANDED_ON)
    for file, node in classes():
        for field in fields_of(node) if node.name != HANDED_ON and not is_frozen(node) else ():
            owners[field].add(file)
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Store):
                continue
            whose = ast.unparse(node.value)
            elsewhere = whose not in ("self", "cls") and not whose.startswith("torch.")
            elsewhere = elsewhere and not (whose == "gradient" and node.attr in handed_on)
            if elsewhere and owners[node.attr] and file not in owners[node.attr]:
                yield f"{file} {ast.unparse(node)}"


def nobody_writes_into_others_by_name() -> Iterator[Place]:
    """`vars(x)[..] =`, `x.__dict__[..] =`, `x.__class__ =` and setattr."""
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.expr) else ""
            stored = isinstance(getattr(node, "ctx", None), ast.Store)
            if stored and isinstance(node, ast.Subscript) and (text.startswith("vars(") or ".__dict__[" in text):
                yield f"{file} {text.partition('[')[0]}[..]"
            elif (stored and text.endswith(".__class__")) or (isinstance(node, ast.Call) and text.startswith("setattr(")):
                yield f"{file} {text.partition('(')[0]}"


def a_class_s_name_stands_in_one_file() -> Iterator[Place]:
    """With an underscore before it or not."""
    files = defaultdict(set)
    for file, node in classes():
        files[node.name.lstrip("_")].add(file)
    yield from (f"{file} {name}" for name, found in files.items() if len(found) > 1 for file in found)


def a_class_has_at_most_15_attributes() -> Iterator[Place]:
    """But for frozen records, and for those that torch's modules are."""
    for file, node in classes():
        if not is_frozen(node) and len(fields_of(node)) > 15:
            yield f"{file} {node.name}"


def stand_ins(file: str) -> set[str]:
    """Functions that are called in the place of another package's, which prescribes their parameters: they stand beside it in a table of
    its functions, or in an `Override` of its method.
    """
    found = []
    for node in ast.walk(TREES[file]):
        if isinstance(node, ast.Dict):
            found += [(ast.unparse(key), value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            found.append((ast.unparse(node.targets[0].slice), node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Override":
            found.append(("torch.", node.args[-1]))
    values = [value for key, value in found if re.match(r"(torch|nn|Tensor)\.", key)]
    return {name for value in values for each in ast.walk(value) for name in [getattr(each, "attr", getattr(each, "id", ""))]}


def a_function_has_at_most_6_parameters() -> Iterator[Place]:
    """But for public ones, whose names stand in `__init__`, those that begin with an underscore twice, `stand_ins`, and kernels, to
    which Triton gives each number by itself.
    """
    public = {name for file, names in IMPORTED.items() if file == "__init__.py" for name in names}
    for file, node in functions():
        arguments = [a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
        bools = [a for a in arguments if a.annotation is not None and ast.unparse(a.annotation) == "bool"]
        exempt = public | stand_ins(file) | {"__init__"}
        is_kernel = any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
        if node.name not in exempt and not is_kernel and (len(arguments) > 6 or len(bools) > 1):
            yield f"{file} {node.name}"


def a_function_has_at_most_30_statements() -> Iterator[Place]:
    """Those of functions inside of it too. Lines would count how the formatter breaks them."""
    for file, node in functions():
        if sum(isinstance(each, ast.stmt) for each in ast.walk(node)) - 1 - (ast.get_docstring(node) is not None) > 30:
            yield f"{file} {node.name}"


def offered(file: str) -> set[str]:
    """The functions that it has for others."""
    return {node.name for node in TREES[file].body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def a_small_file_has_more_than_one_reader() -> Iterator[Place]:
    """A file of under 80 lines that one file alone imports is a part of that file. But for one value of an axis: it lies in a room of
    such values, or beside it lies another file with the same functions, and the reader takes either (a format of checkpoints).
    """
    readers = defaultdict(set)
    for file, names in IMPORTED.items():
        for found in names.values():
            readers[found].add(file)
    for file, lines in LINES.items():
        beside = [other for other in TREES if other != file and other.rpartition("/")[0] == file.rpartition("/")[0]]
        is_value = file.startswith(AXES) or any(offered(file) and offered(file) == offered(other) for other in beside)
        if len(lines) < 80 and not file.endswith("__init__.py") and len(readers[file]) == 1 and not is_value:
            yield file


def dotted(node: ast.AST) -> str:
    """`a.b.c`, or "" if it is no such name."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def inner_names(tree: ast.Module) -> Iterator[str]:
    """The dotted names of the package's inside that a test's file writes: in an import, as an attribute, or as a text, for `patch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module != "zero3" or alias.name not in PUBLIC)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            name = node.value if isinstance(node, ast.Constant) else dotted(node)
            if isinstance(name, str) and re.fullmatch(r"zero3(\.\w+)+", name) and name.split(".")[1] not in PUBLIC:
                yield name


def tests_go_through_public_faces() -> Iterator[Place]:
    """Names of `zero3.__all__`, the command line and the integrations. But for a module's own tests: `tests/core/test_layout.py` may
    import `core/layout.py`. Each inner module of a file counts once.
    """
    for path in sorted(TESTS.rglob("*.py")):
        modules = set()
        for name in inner_names(ast.parse(path.read_text())):
            parts = name.split(".")[1:]
            paths = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
            inner = name.startswith("zero3.") and parts[0] not in FACES
            modules |= {next((f"{each}.py" for each in paths if f"{each}.py" in TREES), "")} if inner else set()
        place = path.relative_to(ROOT).as_posix()
        own = {each for each in modules if place == "/".join(["tests", *each.split("/")[:-1][:1], f"test_{Path(each).name}"])}
        yield from (place for module in modules - own if module)


def lines_have_at_most_100_columns() -> Iterator[Place]:
    """But for comments to tools at their ends, which can't be broken. (The formatter leaves these out, too.)"""
    code = re.compile(r"\s*# (type: ignore|noqa|fmt: ).*")
    yield from (file for file, lines in LINES.items() for line in lines if len(code.sub("", line)) > COLUMNS)


LAWS: dict[str, Callable[[], Iterator[Place]]] = {
    law.__name__: law
    for law in (
        core_imports_comm_alone,
        no_class_inherits_from_another_file,
        a_field_is_assigned_in_its_class_s_file,
        nobody_writes_into_others_by_name,
        a_class_s_name_stands_in_one_file,
        a_class_has_at_most_15_attributes,
        a_function_has_at_most_6_parameters,
        a_function_has_at_most_30_statements,
        a_small_file_has_more_than_one_reader,
        lines_have_at_most_100_columns,
        tests_go_through_public_faces,
    )
}


def length(file: str) -> int:
    """In lines of at most 100 columns: a longer one counts as often as it would have to be cut."""
    return sum(max(1, -(-len(line) // COLUMNS)) for line in LINES[file])


def closure(first: set[str]) -> set[str]:
    """These files, and all of the package that they import by way of others."""
    found: set[str] = set()
    while first:
        found |= first
        first = {name for file in first for name in IMPORTED[file].values()} - found
    return found


def figures() -> Iterator[tuple[str, set[str]]]:
    core = {file for file in LINES if file.startswith("core/")}
    yield "core", core
    yield "closure of core", closure(core)
    yield "closure of core/runtime", closure({"core/runtime.py"})
    yield "whole package", set(LINES)


def broken(law: str) -> dict[Place, int]:
    """How often each place breaks it."""
    return dict(sorted(Counter(LAWS[law]()).items()))


def allowed(law: str) -> dict[Place, int]:
    found: dict[Place, int] = json.loads(LISTS.read_text())[law]
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, prog="python -m tests.house_laws").parse_args()
    lists = json.loads(LISTS.read_text())
    for law in LAWS:
        now = broken(law)
        lists[law] = {place: min(count, now[place]) for place, count in lists[law].items() if place in now}
        print(f"{sum(lists[law].values()):6} {law.replace('_', ' ')}")
    LISTS.write_text(json.dumps(lists, indent=1) + "\n")
    for name, files in figures():
        print(f"{sum(map(length, files)):6} lines of at most {COLUMNS} columns in {len(files)} files: {name}")


if __name__ == "__main__":
    main()
