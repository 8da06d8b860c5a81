"""Matches peft's own files of adapters with the adapters of a sharded model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from ..checkpoint.contents import Contents, listed, names_apart
from ..checkpoint.safetensors_files import INDEX, SINGLE
from ..comm.plain_values import kind_of
from ..names import innermost
from .index_maps import Computed, Whole
from .key_mapping import Fit
from .outputs import outputs_of_adapter

__all__: list[str] = []

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
# for the results
_MATTERS = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora"),
    *("rank_pattern", "alpha_pattern", "fan_in_fan_out"),
)


def places_of_adapters(model: nn.Module, path: Path) -> dict[str, Path]:
    """Maps each adapter of a peft model to the directory that has its files. Empty: `path` has the
    files of a whole model, or the model has no adapters. Raises ValueError if there are files for
    some of the adapters only.
    """
    adapters = getattr(innermost(model), "peft_config", None)
    if not isinstance(adapters, dict) or any((path / name).is_file() for name in (SINGLE, INDEX)):
        return {}
    places = {}
    for adapter in adapters:  # peft writes "default" into the directory, others into their own
        if (path / adapter / FILE).is_file():
            places[adapter] = path / adapter
        elif (path / FILE).is_file() and (adapter == "default" or len(adapters) == 1):
            places[adapter] = path
    if places and (missing := [adapter for adapter in adapters if adapter not in places]):
        raise ValueError(
            f"{path} has files of the adapters {', '.join(places)}, and none of "
            f"{', '.join(missing)}; nothing was loaded"
        )
    return places


def fit_adapter(model: nn.Module, adapter: str, place: Path, stored: dict[str, Any]) -> Fit:
    """Matches the files of an adapter with the model. Raises ValueError if names, shapes or kinds
    of values differ, or the adapter's configuration does, or the files hold prompts and not what
    computes them. One error names all problems.
    """
    model, contents = innermost(model), Contents(model, "load_pretrained")
    outputs = {output.name: output for output in outputs_of_adapter(model, adapter, contents, None)}
    problems = names_apart(outputs, stored)
    both = [(output, stored[name]) for name, output in outputs.items() if name in stored]
    apart: dict[str, list[str]] = {
        "other shapes": [],
        "other kinds": [],
        "other options": _other_options(model, adapter, place),
        "not the trained values": [],
    }
    for output, file in both:
        name = output.name
        if file.shape != output.shape:
            apart["other shapes"].append(f"{name} has {file.shape}, expected {output.shape}")
        if kind_of(file.dtype) != kind_of(output.dtype):
            apart["other kinds"].append(f"{name} is {file.dtype}")
        if isinstance(output.index_map, Computed):
            apart["not the trained values"].append(
                f"{name} was computed by a prompt encoder, and training goes on from "
                "zero3.save_checkpoint"
            )
    problems += listed(apart)
    if problems:
        raise ValueError(
            f"{place} does not fit the adapter {adapter!r} of this model; nothing was loaded. "
            f"{'. '.join(problems)}"
        )
    parameters = {name: each.sites.parameter for name, each in contents.parameters.items()}
    by_name = parameters | contents.others
    fit = Fit(model, {}, {})
    for output, file in both:
        tensor = by_name[output.index_map.sources[0]]
        fit.names[id(tensor)], fit.tensors[id(tensor)] = [output.name], tensor
        fit.maps[id(tensor)] = Whole(file, file.shape)
    return fit


def _other_options(model: Any, adapter: str, place: Path) -> list[str]:
    """Options with which the same values compute something else."""
    here = model.peft_config[adapter].to_dict()
    there = json.loads((place / CONFIG).read_text()) if (place / CONFIG).is_file() else {}
    plain = {key: getattr(value, "value", value) for key, value in here.items()}
    return [
        f"{key} is {there[key]!r}, expected {plain[key]!r}"
        for key in _MATTERS
        if key in there and key in plain and there[key] != plain[key]
    ]
