"""Matches the tensors of a checkpoint with those of a model, by names, shapes and kinds, before any
value is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

from ..checkpoint.contents import listed
from ..checkpoint.extra_state import extra_state_modules
from ..checkpoint.lazy import Lazy
from ..comm.plain_values import kind_of
from ..modules import own_module_name, unwrapped
from ..names import innermost, named_tensors
from .conversions import Conversions
from .index_maps import IndexMap, TracedTensor, Untraceable, Whole, traced
from .left_out import may_be_left_out
from .outputs import has_adapters, is_adapted

__all__: list[str] = []


T = TypeVar("T")
_BASE = "base_model.model."  # before the names of peft's base
_PROBLEMS = (
    *("missing", "unexpected", "stored twice"),
    *("other shapes", "other kinds", "not to be converted here"),
)


@dataclass
class Fit:
    """The match, by ids of the model's tensors. A tied tensor is one, with several names."""

    owner: nn.Module  # the model that the files belong to; for a peft model, its base
    names: dict[int, list[str]]
    tensors: dict[int, Tensor]
    maps: dict[int, IndexMap[Lazy]] = field(default_factory=dict)
    # further copies of tied tensors, under other names
    again: dict[int, list[IndexMap[Lazy]]] = field(default_factory=dict)
    # tensors that no file holds, because the model computes them
    left_out: set[int] = field(default_factory=set)
    # the extra state of modules that take it as a tensor, by name
    extra: dict[str, Lazy] = field(default_factory=dict)
    # readers of the tensors that the files hold quantised, see `packed`
    packed: dict[int, Any] = field(default_factory=dict)
    used: list[Any] | None = None  # see `Conversions.used`


def fit(model: nn.Module, stored: Mapping[str, Lazy], strict: bool) -> Fit:
    """Matches a checkpoint with a model. Names may have one more or one less of the model's
    `base_model_prefix`. Raises ValueError if names are missing or unexpected (if `strict`) or
    stored twice, or shapes or kinds of values differ. One error names all problems.
    """
    tensors, copies = dict(named_tensors(model)), dict[str, tuple[str, Tensor]]()
    if has_adapters(model) and isinstance(getattr(model.base_model, "prefix", None), str):
        model, tensors = model.get_base_model(), without_adapters(model, tensors)  # type: ignore[operator]
        tensors, copies = _copies_apart(tensors)
    fitting = _Fitting(innermost(model), tensors, extra_state_modules(model))
    for key in fitting.conversions.sorted(stored):
        fitting.add(stored[key])
    fitting.convert()
    found, problems = fitting.found, fitting.problems
    missing = {
        key: names
        for key, names in found.names.items()
        if key not in found.maps and not fitting.failed.intersection(names)
    }
    found.left_out = {
        key
        for key, names in missing.items()
        if any(may_be_left_out(found.owner, name) for name in names)
    }
    problems["missing"] = [names[0] for key, names in missing.items() if key not in found.left_out]
    if not strict:
        problems["missing"] = problems["unexpected"] = []
    if texts := listed(problems):
        raise ValueError(
            f"the checkpoint does not fit this {type(found.owner).__name__}; nothing was loaded. "
            f"{'. '.join(texts)}"
        )
    found.used = fitting.conversions.used
    for name, (original, copy) in copies.items():
        if (index_map := found.maps.get(id(tensors.get(original)))) is not None:
            found.names[id(copy)], found.tensors[id(copy)] = [name], copy
            found.maps[id(copy)] = index_map
    return found


def _copies_apart(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, tuple[str, Tensor]]]:
    """Returns the tensors of a peft model's base by the base's own names; and those copies of them
    that adapters train in their place (`modules_to_save`), with the name of what they begin as.
    """
    own, copies = dict[str, Tensor](), dict[str, tuple[str, Tensor]]()
    for name, tensor in tensors.items():
        module, saved, rest = name.partition(".modules_to_save.")
        if saved:
            copies[name] = (f"{module}.{rest.partition('.')[2]}", tensor)
        else:
            own[name.replace(".original_module.", ".")] = tensor
    return own, copies


def without_adapters(model: nn.Module, tensors: Mapping[str, T]) -> dict[str, T]:
    """Returns a peft model's tensors under the names of its base, without those that peft has
    added: beside the base of a module that it adapts, and outside of the model that it was given.
    """
    modules = model.named_modules(remove_duplicate=False)
    adapted = {own_module_name(name) for name, each in modules if is_adapted(unwrapped(each))}
    found = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        ends = (n for n in range(1, len(parts)) if ".".join(parts[:n]) in adapted)
        if name.startswith(_BASE) and all(parts[end] == "base_layer" for end in ends):
            kept = (part for part in parts if part not in ("base_layer", "token_adapter"))
            found[".".join(kept).removeprefix(_BASE)] = tensor
    return found


class _Fitting:
    """Takes stored tensors one by one. Those that are made from several follow at the end."""

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, Tensor], extra: Mapping[str, nn.Module]
    ) -> None:
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        self._tensors = tensors
        self._extra = extra
        self._origin: dict[str, str] = {}  # name in the model -> key in the file
        self._collected: dict[str, tuple[Any, dict[str, list[Lazy]]]] = {}
        self.conversions = Conversions(model, tensors, extra)
        self.found = Fit(model, names, {id(tensor): tensor for tensor in tensors.values()})
        self.failed: set[str] = set()  # names that are stored, but do not fit
        self.problems: dict[str, list[str]] = {kind: [] for kind in _PROBLEMS}

    def add(self, stored: Lazy) -> None:
        name, converter, pattern = self.conversions(stored.name)
        if name in self._extra:
            self.found.extra[name] = stored
        elif name not in self._tensors:
            if not self.conversions.ignores(stored.name) and not self.conversions.ignores(name):
                self.problems["unexpected"].append(stored.name)
        elif converter is not None:
            self._collected.setdefault(name, (converter, {}))[1].setdefault(pattern, []).append(
                stored
            )
        else:
            self._place(name, Whole(stored, stored.shape), stored.name)

    def convert(self) -> None:
        """Makes the tensors that transformers joins, cuts or rearranges."""
        for name, (converter, collected) in self._collected.items():
            given = {
                pattern: [traced(Whole(each, each.shape), each.dtype) for each in column]
                for pattern, column in collected.items()
            }
            targets = [
                name.replace(converter.target_patterns[0], target)
                for target in converter.target_patterns
            ]
            try:
                made = self.conversions.convert(converter, name, given)
            except Untraceable as reason:
                done = ", ".join(type(operation).__name__ for operation in converter.operations)
                remedy = "use from_pretrained on rank 0, and meta on the others"
                text = f"{name} (transformers makes it by {done}, and {reason}: {remedy})"
                self._fail(targets, "not to be converted here", text)
                continue
            except Exception as reason:  # of any kind: an operation refuses the shapes
                text = f"{name} can't be made from {_shapes(collected)}: {reason}"
                self._fail(targets, "other shapes", text)
                continue
            for target, tensor in made.items():
                if target in self._tensors and isinstance(tensor, TracedTensor):
                    key = next(iter(next(iter(collected.values())))).name
                    self._place(target, tensor.index_map, key, _shapes(collected))
                else:
                    self.problems["unexpected"].append(f"{target} (made from {_shapes(collected)})")

    def _place(
        self, name: str, index_map: IndexMap[Lazy], key: str, made_from: str | None = None
    ) -> None:
        tensor = self._tensors[name]
        kind = kind_of(tensor.dtype)
        wrong = [source for source in index_map.sources if kind_of(source.dtype) != kind]
        if name in self._origin:
            self.problems["stored twice"].append(f"{name}, as {self._origin[name]} and as {key}")
        elif index_map.shape != tuple(tensor.shape):
            how = "has" if made_from is None else f"is made from {made_from}, which gives"
            text = f"{name} {how} {index_map.shape}, expected {tuple(tensor.shape)}"
            self._fail([name], "other shapes", text)
        elif wrong:
            what = name if made_from is None else wrong[0].name
            found = f"{kind_of(wrong[0].dtype)} ({wrong[0].dtype})"
            text = f"{what} is {found}, expected {kind} ({tensor.dtype})"
            self._fail([name], "other kinds", text)
        elif id(tensor) in self.found.maps:
            self.found.again.setdefault(id(tensor), []).append(index_map)
        else:
            self.found.maps[id(tensor)] = index_map
        self._origin.setdefault(name, key)

    def _fail(self, names: list[str], kind: str, text: str) -> None:
        self.failed.update(names)
        self.problems[kind].append(text)


def _shapes(collected: Mapping[str, list[Lazy]]) -> str:
    return ", ".join(f"{len(column)} of {column[0].shape}" for column in collected.values())
