"""Which tensors of a checkpoint belong to which of a model's: names, shapes and kinds, before any value is read."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoint.safetensors_files import Stored
from ..names import named_tensors

__all__: list[str] = []


_PROBLEMS = ("missing", "unexpected", "stored twice", "other shapes", "other kinds", "not to be read by ranges")


class Part(NamedTuple):
    """A stored tensor, whole, and where its first element comes to lie in the model's flattened tensor."""

    stored: Stored
    offset: int


@dataclass
class Fit:
    """What of the file goes where. Keys are ids of the model's tensors; tied ones are one tensor with several names."""

    names: dict[int, list[str]]
    tensors: dict[int, Tensor]
    parts: dict[int, list[Part]] = field(default_factory=dict)
    again: dict[int, list[Stored]] = field(default_factory=dict)  # a tied tensor that is stored under its other names too


def fit(model: nn.Module, stored: Mapping[str, Stored], strict: bool) -> Fit:
    """Matches a checkpoint with a model. Names may have one more or one less of the model's `base_model_prefix`.

    Raises:
        ValueError: names that are missing or unexpected (if `strict`), stored twice, other shapes or kinds of values: all in one.
    """
    names: dict[int, list[str]] = {}
    tensors = dict(named_tensors(model))
    if isinstance(added := getattr(getattr(model, "base_model", None), "prefix", None), str) and hasattr(model, "peft_config"):
        model, tensors = model.get_base_model(), _without_adapters(tensors, added)  # type: ignore[operator]
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    found = Fit(names, {id(tensor): tensor for tensor in tensors.values()})
    renamer = _Renamer(model, tensors)
    problems: dict[str, list[str]] = {kind: [] for kind in _PROBLEMS}
    joined: dict[str, tuple[Any, dict[str, list[Stored]]]] = {}
    origin: dict[str, Stored] = {}
    for key in sorted(stored, key=_natural):
        name, converter, pattern = renamer(key)
        if name not in tensors:
            if not renamer.ignores(key) and not renamer.ignores(name):
                problems["unexpected"].append(key)
        elif converter is not None:
            joined.setdefault(name, (converter, {}))[1].setdefault(pattern, []).append(stored[key])
        elif name in origin:
            problems["stored twice"].append(f"{name}, as {origin[name].name} and as {key}")
        else:
            origin[name] = stored[key]
            _add_plain(found, name, tensors[name], stored[key], problems)
    for name, (converter, by_pattern) in joined.items():
        _add_joined(found, name, tensors[name], converter, by_pattern, problems)
    seen = {id(tensors[name]) for name in [*origin, *joined]}
    problems["missing"] = [ns[0] for key, ns in names.items() if key not in seen]
    if not strict:
        problems["missing"] = problems["unexpected"] = []
    if text := ". ".join(f"{kind}: {', '.join(items)}" for kind, items in problems.items() if items):
        raise ValueError(f"the checkpoint does not fit this {type(model).__name__}; nothing was loaded. {text}")
    return found


def _without_adapters(tensors: Mapping[str, Tensor], added: str) -> dict[str, Tensor]:
    """A peft model's tensors under the names that they had before peft: no checkpoint of the base holds what it `added`."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if not any(part.startswith(added) for part in name.split("."))
    }


def _add_plain(found: Fit, name: str, tensor: Tensor, stored: Stored, problems: dict[str, list[str]]) -> None:
    if stored.shape != tuple(tensor.shape):
        problems["other shapes"].append(f"{name} has {stored.shape}, expected {tuple(tensor.shape)}")
    elif (kind := _kind(stored.dtype)) != _kind(tensor.dtype):
        problems["other kinds"].append(f"{name} is {kind} ({stored.dtype}), expected {_kind(tensor.dtype)} ({tensor.dtype})")
    elif id(tensor) in found.parts:
        found.again.setdefault(id(tensor), []).append(stored)
    else:
        found.parts[id(tensor)] = [Part(stored, 0)]


def _add_joined(
    found: Fit, name: str, tensor: Tensor, converter: Any, by_pattern: Mapping[str, list[Stored]], problems: dict[str, list[str]]
) -> None:
    """Several stored tensors that transformers joins into one, as long as each stays a range of the flattened whole.

    `[MergeModulelist(0)]` stacks (experts), `[Concatenate(0)]` lays end to end, both one after another interleave.
    """
    columns = [by_pattern.get(pattern, []) for pattern in converter.source_patterns]
    operations = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in converter.operations]
    if operations in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        rows = [list(row) for row in zip(*columns, strict=False)]
        shape = (len(rows), sum(s.shape[0] for s in rows[0] if s.shape), *rows[0][0].shape[1:]) if rows else ()
    elif operations == [("Concatenate", 0)]:
        rows = [[stored for column in columns for stored in column]]
        shape = (sum(s.shape[0] for s in rows[0] if s.shape), *rows[0][0].shape[1:])
    else:
        done = ", ".join(operation for operation, _ in operations)
        remedy = "use from_pretrained on rank 0, and meta on the others"
        problems["not to be read by ranges"].append(f"{name} (transformers makes it by {done}: {remedy})")
        return
    row_shapes = {tuple(s.shape for s in row) for row in rows}
    whole = len({len(column) for column in columns}) == 1 and len(row_shapes) == 1 and len({s.shape[1:] for row in rows for s in row}) == 1
    if not whole or shape != tuple(tensor.shape):
        shapes = ", ".join(f"{len(column)} of {column[0].shape if column else 'nothing'}" for column in columns)
        problems["other shapes"].append(f"{name} is to be joined from {shapes}; expected {tuple(tensor.shape)} in all")
        return
    offset = 0
    for stored in [stored for row in rows for stored in row]:
        if (kind := _kind(stored.dtype)) != _kind(tensor.dtype):
            problems["other kinds"].append(f"{stored.name} is {kind} ({stored.dtype}), expected {_kind(tensor.dtype)} ({tensor.dtype})")
        found.parts.setdefault(id(tensor), []).append(Part(stored, offset))
        offset += stored.numel


def _kind(dtype: torch.dtype) -> str:
    """Values are converted within a kind only. Float8 is one of its own: without its scales it means nothing."""
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return "float8"
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def _natural(key: str) -> list[tuple[int, str]]:
    """Numbers in names by their value: experts are stacked in this order."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]


class _Renamer:
    """A key of the file to a name of the model: as transformers renames (if the model is one of its), and by the base prefix."""

    def __init__(self, model: nn.Module, expected: Mapping[str, Tensor]) -> None:
        self._expected = expected
        self._prefix = getattr(model, "base_model_prefix", "") or ""
        self._rename: Callable[[str], tuple[str, str | None]] | None = None
        self._converters: dict[str, Any] = {}
        ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        for name, _ in model.named_buffers():  # buffers that were stored once and are computed now
            if name.endswith("rotary_emb.inv_freq"):
                ignored.append(r"rotary_emb\.inv_freq")
            if name.endswith("position_ids"):
                ignored.append(r"(^|\.)position_ids$")
        self._ignored = [re.compile(pattern) for pattern in ignored]
        if (transformers := sys.modules.get("transformers")) is not None and isinstance(model, transformers.PreTrainedModel):
            self._follow_transformers(model)

    def _follow_transformers(self, model: nn.Module) -> None:
        try:
            conversion_mapping = importlib.import_module("transformers.conversion_mapping")
            core_model_loading = importlib.import_module("transformers.core_model_loading")
        except ImportError:  # before transformers 5 files and models had the same names
            return
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
        self._converters = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        self._rename = lambda key: core_model_loading.rename_source_key(key, renamings, converters)

    def __call__(self, key: str) -> tuple[str, Any, str]:
        """The model's name, or what comes nearest; the converter that makes it out of several keys, and the key's place in it."""
        if self._rename is not None:
            renamed, pattern = self._rename(key)
            name = self._with_prefix(renamed)
            if name in self._expected or self._with_prefix(key) not in self._expected:
                return name, self._converters.get(pattern) if pattern is not None else None, pattern or ""
        return self._with_prefix(key), None, ""

    def _with_prefix(self, key: str) -> str:
        dotted = f"{self._prefix}."
        variants = (key, dotted + key, key.removeprefix(dotted)) if self._prefix else (key,)
        return next((name for name in variants if name in self._expected), key)

    def ignores(self, key: str) -> bool:
        return any(pattern.search(key) for pattern in self._ignored)
