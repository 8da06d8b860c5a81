"""Sizes of models as flags of a command."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any, Self


class Flags:
    """A dataclass of integers, each of which is a flag."""

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("size of the model, and of a rank's batch")
        for field in cls._fields():
            group.add_argument(f"--{field.name}", type=int, default=field.default, help="default: %(default)s")

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> Self:
        return cls(**{field.name: getattr(args, field.name) for field in cls._fields()})

    @classmethod
    def _fields(cls) -> Any:
        return fields(cls)  # type: ignore[arg-type]
