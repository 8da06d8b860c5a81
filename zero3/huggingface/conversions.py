"""Asks transformers how it converts names and tensors between the files of a model and the
model.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..modules import own_module_name, own_name

__all__: list[str] = []


def is_of_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


class Unwrapped:
    """A model as conversions see it: without torch's wrappers, with released parameters."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._model = model
        self._tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property  # type: ignore[misc]
    # transformers before 5.4 chooses renamings by the names of the model's classes
    def __class__(self) -> type[Any]:
        return type(self._model)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self._model.named_modules():
            yield own_module_name(name), module

    def get_parameter(self, name: str) -> Any:
        return self._tensors[name] if name in self._tensors else self._model.get_parameter(name)


class Conversions:
    """Maps the keys of a file to the names of a model. It follows transformers, if the model is one
    of its, and the base prefix.
    """

    def __init__(
        self, model: nn.Module, expected: Mapping[str, Tensor], more: Iterable[str] = ()
    ) -> None:
        self._expected = {*expected, *more}
        self._prefix = getattr(model, "base_model_prefix", "") or ""
        self._model = Unwrapped(model, expected)
        # transformers' module for loading; None: files have the model's own names
        self._loading: Any = None
        self._transforms: list[Any] = []
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        ignored = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        # early files store these buffers, which models compute now
        for name, _ in model.named_buffers():
            if name.endswith("rotary_emb.inv_freq"):
                ignored.append(r"rotary_emb\.inv_freq")
            if name.endswith("position_ids"):
                ignored.append(r"(^|\.)position_ids$")
        self._ignored = [re.compile(pattern) for pattern in ignored]
        if is_of_transformers(model):
            mapping = importlib.import_module("transformers.conversion_mapping")
            self._loading = own = importlib.import_module("transformers.core_model_loading")
            self._transforms = mapping.get_model_conversion_mapping(self._model)
            self._renamings = [t for t in self._transforms if isinstance(t, own.WeightRenaming)]
            self._converters = [t for t in self._transforms if isinstance(t, own.WeightConverter)]

    def __call__(self, key: str) -> tuple[str, Any, str]:
        """Returns the name in the model, or the key if none fits; the tensor's converter, or None;
        and the key's pattern in it.
        """
        key = own_name(key)
        if self._loading is not None:
            renamed, pattern = self._loading.rename_source_key(
                key, self._renamings, self._converters
            )
            name = self._with_prefix(renamed)
            if name in self._expected or self._with_prefix(key) not in self._expected:
                fit = (c for c in reversed(self._converters) if pattern in c.source_patterns)
                return name, next(fit, None), pattern or ""
        return self._with_prefix(key), None, ""

    def convert(
        self, converter: Any, name: str, collected: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Tensor]:
        """Runs `converter` on tensors by its patterns. Returns the results by names of the model,
        of which `name` is the first.
        """
        own = copy.deepcopy(converter)
        for pattern, tensors in collected.items():
            for tensor in tensors:
                own.add_tensor(name, name, pattern, tensor)
        return _singles(own.convert(name, model=self._model, config=self._model.config))

    def sorted(self, keys: Iterable[str]) -> list[str]:
        """Sorts keys as transformers does. The order of experts depends on it."""
        return sorted(keys, key=getattr(self._loading, "dot_natural_key", None) or _natural)

    @property
    def used(self) -> list[Any] | None:
        """The conversions that were made. transformers notes them on a model, to save the same
        names again. None: it notes nothing.
        """
        if self._loading is None:
            return None
        return [
            t for t in self._transforms if not hasattr(t, "was_used") or t.was_used()
        ]  # transformers before 5.6 can't tell: it notes all

    def _with_prefix(self, key: str) -> str:
        dotted = f"{self._prefix}."
        variants = (key, dotted + key, key.removeprefix(dotted)) if self._prefix else (key,)
        return next((name for name in variants if name in self._expected), key)

    def ignores(self, key: str) -> bool:
        return any(pattern.search(key) for pattern in self._ignored)


def reverted(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns `tensors` as transformers writes them into files, or None if it writes them as they
    are. Raises an exception if a conversion can't be reversed. The error is one of transformers or
    of a tensor.
    """
    if not is_of_transformers(model):
        return None
    loading = importlib.import_module("transformers.core_model_loading")
    return _singles(loading.revert_weight_conversion(Unwrapped(model, tensors), dict(tensors)))


def _singles(made: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _natural(key: str) -> list[tuple[int, str]]:
    """A sort key by which numbers in names count by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
