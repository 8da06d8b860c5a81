"""How a full-size model would be cut, found out on the meta device: no weights, no ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zero3.auto_wrap import choose, tied_across
from zero3.modules import find_parameters

from .tiny import model_types


def measure(kind: str) -> dict[str, Any]:
    """Elements of the whole, of the largest layer and of the root's own, and how much of the root is there because it is tied."""
    try:
        with torch.device("meta"):
            model = getattr(transformers, model_types()[kind][1])(CONFIG_MAPPING[kind]())
    except Exception as error:
        return {"error": f"no model: {type(error).__name__}: {' '.join(str(error).split())[:120]}"}
    try:
        return cut(model)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def cut(model: nn.Module) -> dict[str, Any]:
    parts = choose(model, None)
    tied = tied_across(model, [tuple(module for _, module in part) for part in parts])
    layers = [each for part in parts for each in part]
    wrapped = {id(module) for _, module in layers}
    places = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)

    def own(unit: nn.Module) -> list[nn.Parameter]:
        found = find_parameters(unit, lambda module: module is not unit and id(module) in wrapped, elsewhere=tied)
        return [sites.parameter for sites in found]

    sizes = {name: sum(parameter.numel() for parameter in own(module)) for name, module in layers}
    root = [*own(model), *(sites.parameter for sites in tied.values())]
    largest = max(sizes, key=lambda name: sizes[name])
    return {
        "numel": sum(parameter.numel() for parameter in model.parameters()),
        "layers": len(layers),
        "largest": sizes[largest],
        "largest_layer": largest,
        "root": sum(parameter.numel() for parameter in root),
        "tied": sum(parameter.numel() for parameter in root if places[id(parameter)] > 1),
    }
