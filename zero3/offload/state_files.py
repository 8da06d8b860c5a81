"""An optimizer's state in mapped files, and how it comes there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..scratch.mapped_files import MappedFiles

__all__: list[str] = []


class StateFiles:
    """Memory for the state of one optimizer, beside the chunks in one directory."""

    def __init__(self, directory: str) -> None:
        self.files = MappedFiles(directory)
        self._reserved: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def reserve(self, numel: int, dtype: torch.dtype) -> None:
        """
        Raises:
            OSError: The disk is full.
            ValueError: There is no such directory.
        """
        self._reserved[numel, dtype].append(self.files.empty(numel, dtype))

    def place(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A 1-D tensor with any values. None, at first with a warning, if there is no room."""
        if reserved := self._reserved[numel, dtype]:
            return reserved.pop()
        return self.files.place(numel, dtype, "state of the optimizer")

    def take_in(self, state: MutableMapping[str, Any]) -> None:
        """Moves those tensors of one parameter's state into files that are not there yet."""
        for key, value in state.items():
            if type(value) is not Tensor or not value.ndim or value.device.type != "cpu":
                continue
            place = None if value in self.files else self.place(value.numel(), value.dtype)
            if place is not None:
                state[key] = place.view(value.shape).copy_(value)


class ZerosInFiles(TorchFunctionMode):
    """Inside, an optimizer that makes state as zeros like a parameter makes it in a file, so that
    it is never in memory.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], files: StateFiles) -> None:
        super().__init__()
        self._own = {id(parameter) for parameter in parameters}
        self._files = files

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if (
            func is torch.zeros_like
            and id(args[0]) in self._own
            and options.keys() <= {"memory_format", "dtype"}
        ):
            like = args[0]
            place = self._files.place(like.numel(), options.get("dtype") or like.dtype)
            if place is not None:
                return place.zero_().view(like.shape)
        return func(*args, **options)
