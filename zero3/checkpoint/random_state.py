"""The random generators of this process: torch's for the CPU and the device, Python's, and numpy's
if numpy is imported.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def generators(device: torch.device) -> tuple[dict[str, Tensor], str]:
    """Returns the states of torch's generators as tensors, and those of the others as JSON."""
    tensors = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        tensors["device"] = torch.get_device_module(device).get_rng_state(device)
    version, numbers, gauss = random.getstate()
    others: dict[str, Any] = {"python": [version, list(numbers), gauss]}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        others["numpy"] = [kind, [int(key) for key in keys], *rest]
    return tensors, json.dumps(others)


def restore(device: torch.device, tensors: Mapping[str, Tensor], text: str) -> None:
    torch.set_rng_state(tensors["cpu"])
    if device.type != "cpu" and "device" in tensors:
        torch.get_device_module(device).set_rng_state(tensors["device"], device)
    others = json.loads(text)
    version, numbers, gauss = others["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in others and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(tuple(others["numpy"]))
