"""What is public: names, their parameters, fields and methods. `python -m tests.support.public` prints it, for the file of a release."""

from __future__ import annotations

import inspect
import json
from typing import Any

import zero3


def parameters_of(value: Any) -> list[str]:
    return [each.name for each in inspect.signature(value).parameters.values()]


def public() -> dict[str, list[str]]:
    """Of each name, and of each method of a class (`Name.method`): the parameters. A class's are those of its constructor."""
    found = {}
    for name in zero3.__all__:
        value = getattr(zero3, name)
        found[name] = parameters_of(value)
        if isinstance(value, type):
            methods = {key: each for key, each in vars(value).items() if not key.startswith("_") and inspect.isfunction(each)}
            found |= {f"{name}.{key}": parameters_of(each) for key, each in methods.items()}
    return found


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(parameters)}" for name, parameters in sorted(public().items())]
    print("{\n" + ",\n".join(rows) + "\n}")
