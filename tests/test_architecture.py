"""The laws of the house (CONTRIBUTING.md), read from the sources: who may import whom, and who may touch what of torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from enum import Enum
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import zero3

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zero3"

# The house from the ground up. A room is a folder, or a file at the package's top; it imports from rooms on lower floors alone.
FLOORS = (
    {"casting", "comm", "quantized", "scratch", "tables"},
    {"policy"},
    {"core"},
    {"modules", "slices"},
    {"experts", "guards", "stores", "wires", "stages", "faces", "conductors", "pinning"},
    {"build"},
    {"layer", "auto_wrap"},
    {"sequential", "access", "sequences", "towers"},
    {"shard", "names", "resilience", "forward_methods", "by_hand", "door"},
    {"optim"},
    {"checkpoint", "zero1", "uneven", "diagnose"},
    {"huggingface", "formats", "initial_values", "offload"},
    {"integrations", "planning"},
    {"commands", "materialize"},
    {"__init__", "__main__"},
)

SOURCES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}
INNER = [name for name in SOURCES if name not in ("__init__", "__main__")]


def floor_of(source: str) -> int:
    """`source`: a path below `zero3/`, without its suffix."""
    room = source.split("/")[0]
    found = [number for number, rooms in enumerate(FLOORS) if room in rooms]
    return found[0] if found else pytest.fail(f"zero3/{room} has no floor: give it one in FLOORS")


def source_of(name: str) -> str | None:
    """The file of the package that `name`, absolute and dotted, stands for, or lies in."""
    parts = name.split(".")[1:] if name.split(".")[0] == "zero3" else []
    paths = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((found for path in paths for found in (path, f"{path}/__init__") if found in SOURCES), None)


def dotted_name(source: str) -> str:
    return source.replace("/", ".").removesuffix("__init__").removesuffix("__main__").rstrip(".")


def imports_of(source: str) -> Iterator[str]:
    """What a file imports, as absolute dotted names; `from a import b` gives `a.b`."""
    package = ["zero3", *source.split("/")[:-1]]
    for node in ast.walk(TREES[source]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            yield from (".".join([*base, *(node.module or "").split("."), alias.name]).replace("..", ".") for alias in node.names)


def names_in(source: str) -> Iterator[str]:
    """Every dotted name that a file's code writes: `torch.cuda.Stream` gives itself, `torch.cuda` and `torch`."""
    for node in ast.walk(TREES[source]):
        if isinstance(node, ast.Attribute | ast.Name):
            yield ast.unparse(node)
    yield from imports_of(source)


def sources_that_write(pattern: str) -> set[str]:
    return {source for source in SOURCES if any(re.search(pattern, name) for name in names_in(source))}


@pytest.mark.parametrize("source", SOURCES)
def test_a_room_imports_only_from_lower_floors(source: str) -> None:
    own, room = floor_of(source), source.split("/")[0]
    for name in imports_of(source):
        imported = source_of(name)
        if imported is not None and imported.split("/")[0] != room:
            assert floor_of(imported) < own, f"floor {own} imports {name} of floor {floor_of(imported)}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """So files have floors too, within a room as well."""
    imported = {source: {found for name in imports_of(source) if (found := source_of(name)) is not None} for source in SOURCES}
    list(TopologicalSorter(imported).static_order())  # raises CycleError, which names them


def test_every_floor_is_inhabited() -> None:
    assert {source.split("/")[0] for source in SOURCES} == set().union(*FLOORS)


# Files outside comm that read a communicator's `rank`, `shard_rank` or `replica`, and how often. The list only ever shrinks.
RANKS_READ = {
    "access": 1, "checkpoint/contents": 2, "core/chunk": 1,
    "build/construction": 2, "diagnose/report": 1,
    "integrations/trainer_checkpoints": 3, "integrations/transformers": 1, "optim/clipping": 1, "optim/norms": 1, "planning/absent": 1,
    "planning/setup": 2, "planning/watching": 1, "resilience/replay": 1, "resilience/step_guard": 1,
    "wires/coded": 1, "zero1/ranks": 1,
}  # fmt: skip


def ranks_read(node: ast.AST) -> Iterator[str]:
    """But for those in f-strings, which are messages."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr in ("rank", "shard_rank", "replica"):
        yield node.attr
    for child in ast.iter_child_nodes(node) if not isinstance(node, ast.JoinedStr) else ():
        yield from ranks_read(child)


def test_rank_is_a_word_of_comm() -> None:
    """On a mesh a rank has a number among all ranks, and its slice has another one, which a chunk knows (`index`, `pieces`)."""
    found = {source: len(list(ranks_read(tree))) for source, tree in TREES.items() if not source.startswith("comm/")}
    assert {source: count for source, count in found.items() if count} == RANKS_READ


@pytest.mark.parametrize("source", ["core/layout", "core/schedule", "diagnose/timeline", "comm/log", "tables"])
def test_the_ground_floor_is_plain_python(source: str) -> None:
    imported = [name for name in imports_of(source) if not name.startswith("zero3.tables.")]  # which is one of them
    assert not [name for name in imported if name.split(".")[0] in ("torch", "numpy", "zero3")]


def test_one_door_to_torch_distributed() -> None:
    """But for the classes and hooks that torch's DDP asks those to use who work with it: they can't be reached otherwise."""
    assert sources_that_write(r"^torch\.distributed\b|^dist\.") == {"comm/process_group", "comm/gloo", "comm/factory", "comm/ddp"}
    ddp = {name for name in imports_of("comm/ddp") if name.startswith("torch")}
    joining = {f"torch.distributed.algorithms.join.{name}" for name in ("Join", "JoinHook", "Joinable")}
    assert ddp == joining | {"torch.Tensor", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook"}


def members_of(tree: ast.AST) -> Iterator[str]:
    """The names of methods and attributes that a file's classes have."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (item.name for item in node.body if isinstance(item, ast.FunctionDef))
            yield from (item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def asked_for(tree: ast.AST) -> Iterator[str]:
    """The attributes that a file asks for by name, though an object may lack them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            yield str(node.args[1].value)


def test_core_does_not_tell_our_own_classes_apart_by_their_attributes() -> None:
    """A class declares what it has. Marks on torch's parameters, and what users' communicators may lack, can't be declared."""
    ours = {name for tree in TREES.values() for name in members_of(tree) if not name.startswith(("zero3_", "__"))}
    rooms = {source: tree for source, tree in TREES.items() if source.startswith(("core/", "build/", "guards/"))}
    asked = {(source, name) for source, tree in rooms.items() for name in asked_for(tree) if name in ours}
    assert asked == {("build/construction", "all_to_all")}


def test_one_door_to_accelerators() -> None:
    assert sources_that_write(r"^torch\.(accelerator|Stream|Event)\b") == {"comm/streams"}
    assert sources_that_write(r"^torch\.cuda\b") == set()


def test_one_door_to_storages() -> None:
    def asks_for_one(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("untyped_storage", "storage")

    asking = {source for source in SOURCES if any(asks_for_one(node) for node in ast.walk(TREES[source]))}
    counting = {"planning/ledger"}  # asks how large storages are, and resizes none
    assert asking == {"core/full_buffer"} | counting
    assert sources_that_write(r"\bUntypedStorage\b") == {"core/full_buffer"} | counting


def test_private_names_of_torch_are_in_two_files_of_a_step() -> None:
    """`torch._x` of any depth, imported or written. (`_version`, `_base` and a module's `_parameters` have no public twin,
    and have been what they are since torch 1.0: they are not counted.) No step needs the others: plans see every operation, and name
    kernels; torch.compile is told where its graphs end."""
    others = {"planning/kernels", "planning/ledger", "guards/compiled"}
    assert sources_that_write(r"^torch(\.\w+)*\._|_execution_engine") == {"core/autograd", "slices"} | others


TORCHS_OWN = frozenset(
    {"_version", "_base", "_parameters", "_buffers", "_modules", "_backward_hooks", "_post_accumulate_grad_hooks", "_sequence_nr"}
)


@pytest.mark.parametrize("source", [source for source in SOURCES if source.startswith("core/")])
def test_no_object_of_a_step_uses_a_private_field_of_another_one(source: str) -> None:
    """But for those of its own class, so of its own file, and those of torch that have no public twin."""
    nodes = list(ast.walk(TREES[source]))
    private = [node for node in nodes if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr)]
    own = {node.attr for node in private if ast.unparse(node.value) == "self"}
    own |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    others = [node for node in private if ast.unparse(node.value) not in ("self", "sys") and not ast.unparse(node).startswith("torch.")]
    assert not [ast.unparse(node) for node in others if node.attr not in own | TORCHS_OWN]


def can_change(value: object) -> bool:
    containers = (MutableSequence, MutableSet, MutableMapping, Iterator, torch.Tensor)
    made = getattr(type(value), "__dataclass_params__", None)
    ours = type(value).__module__.startswith("zero3") and not isinstance(value, Enum)
    return isinstance(value, containers) or (ours and not (made is not None and made.frozen))


@pytest.mark.parametrize("source", SOURCES)
def test_no_state_outlives_a_model(source: str) -> None:
    """Ranks live as threads of one process in most tests: what a module or a class kept, they would share."""
    needed = {"integrations/lightning": "lightning", "quantized/fused": "triton"}
    if source in needed:
        pytest.importorskip(needed[source])
    module = importlib.import_module(f"zero3.{dotted_name(source)}".rstrip("."))
    held = {name: value for name, value in vars(module).items() if name != "__all__"}
    for class_name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__ and not issubclass(value, Enum):
            held |= {f"{class_name}.{name}": attribute for name, attribute in vars(value).items()}
    made_by_python = re.compile(r"(^|\.)(__\w+__|_field_defaults)$")
    assert not [name for name, value in held.items() if can_change(value) and not made_by_python.search(name)]
    assert not [node.lineno for node in ast.walk(TREES[source]) if isinstance(node, ast.Global)]
    assert not [name for name in names_in(source) if re.search(r"\b(lru_cache|functools\.cache|ContextVar|threading\.local)\b", name)]


def test_one_logger() -> None:
    calls = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert {ast.unparse(call) for call in calls if ast.unparse(call.func).endswith("getLogger")} == {"logging.getLogger('zero3')"}


@pytest.mark.parametrize("source", SOURCES)
def test_no_assert_statement(source: str) -> None:
    """`python -O` drops them, and what they guard must hold there too."""
    assert not [node.lineno for node in ast.walk(TREES[source]) if isinstance(node, ast.Assert)]


# Their signatures are those of the functions that they stand for.
_LIKE_OTHERS = {"optim/grad_scaler: step", "integrations/transformers: train"}


def test_no_parameter_can_be_meant_by_a_keyword_of_the_user() -> None:
    """What takes `*args, **kwargs` passes on what is another's: its own parameters have no names."""
    functions = [
        (f"{source}: {getattr(node, 'name', 'lambda')}", node.args)
        for source in SOURCES
        for node in ast.walk(TREES[source])
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and node.args.vararg and node.args.kwarg
    ]
    named = {name: [each.arg for each in (*found.args, *found.kwonlyargs) if each.arg not in ("self", "cls")] for name, found in functions}
    assert functions
    assert {name for name, own in named.items() if own and not name.endswith("__init__")} == _LIKE_OTHERS


@pytest.mark.parametrize("source", SOURCES)
def test_every_file_says_what_it_is_for(source: str) -> None:
    assert ast.get_docstring(TREES[source])


@pytest.mark.parametrize("source", [source for source in INNER if not source.endswith("__init__")])
def test_inner_modules_export_nothing(source: str) -> None:
    """But for the integrations: users import those that carry a library's name themselves."""
    exported = {
        "integrations/accelerate": ["Zero3Accelerator"],
        "integrations/lightning": ["Zero3FabricStrategy", "Zero3Strategy"],
        "integrations/transformers": ["Zero3Mixin", "Zero3Trainer"],
    }
    names = next(n for n in ast.walk(TREES[source]) if isinstance(n, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(n))
    assert names.value is not None and ast.literal_eval(names.value) == exported.get(source, [])


def test_nothing_imports_the_integrations_but_one_another() -> None:
    """`import zero3` must do without the libraries that they are for."""
    imported = {source: {found for name in imports_of(source) if (found := source_of(name)) is not None} for source in SOURCES}
    assert not {s for s, found in imported.items() if not s.startswith("integrations/") and any("integrations" in f for f in found)}


def test_the_package_exports_its_public_names_and_nothing_else() -> None:
    public = {name for name, value in vars(zero3).items() if not name.startswith("_") and not isinstance(value, ModuleType)}
    assert public == set(zero3.__all__)
    assert zero3.__all__ == sorted(zero3.__all__)


@pytest.mark.parametrize("name", zero3.__all__)
def test_public_names_are_documented_and_annotated(name: str) -> None:
    value = getattr(zero3, name)
    assert value.__module__.startswith("zero3."), "public names are our own"
    functions = {name: value}
    if isinstance(value, type):
        # a dataclass and a module say in the class's docstring what they are made with
        functions = {name: value.__init__}
        inherited = dir(nn.Module) if issubclass(value, nn.Module) else ()
        for method, held in vars(value).items():
            if inspect.isfunction(held) and not method.startswith("_") and method not in inherited:
                functions[method] = held
    for function_name, function in functions.items():
        text = inspect.getdoc(value if function_name == name else function) or ""
        assert len(text) > 20, f"{function_name} has no docstring"
        signature = inspect.signature(function)
        for parameter in signature.parameters.values():
            if parameter.name != "self":
                assert parameter.annotation is not parameter.empty, f"{function_name}({parameter.name}) has no type"
                assert re.search(rf"\b{parameter.name}\b", text), f"{function_name}({parameter.name}) is not documented"
        assert signature.return_annotation is not signature.empty or function_name == name, f"{function_name} returns what?"


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        return [path for path in ROOT.rglob("*") if path.is_file() and not re.search(r"/(\.venv|\.git|__pycache__)/", path.as_posix())]
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_is_long() -> None:
    assert not [path for path in tracked_files() if path.suffix == ".py" and len(path.read_text().splitlines()) > 700]


def test_no_file_names_the_machine_it_was_written_on() -> None:
    """Paths of a home or a mount, and package registries other than the public ones."""
    machine = re.compile(r"(?<![\w.])/(work|farm|home/\w+|root|opt/pypi[\w-]*|opt/wheels)(/|\b)")
    registry = re.compile(r"https?://(?!pypi\.org/|download\.pytorch\.org/)[^\s\"')]*/(simple|whl)\b|file:///")
    found = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if path != Path(__file__):
            found += [f"{path.relative_to(ROOT)}: {match.group()}" for rule in (machine, registry) for match in rule.finditer(text)]
    assert not found
