"""What a process holds and sends: resident memory, live tensors, bytes on an interface, collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def sent_bytes(interface: str) -> int:
    """What the interface has sent so far, by the kernel's count."""
    return int(_row_of("/proc/self/net/dev", interface).split()[8])


def _row_of(path: str, name: str) -> str:
    rows = (line.strip() for line in Path(path).read_text().splitlines())
    return next(row.removeprefix(f"{name}:") for row in rows if row.startswith(f"{name}:"))


class Resident:
    """This process's resident memory above what it had at the start, under the default malloc."""

    def __init__(self) -> None:
        self._start = self._status("VmRSS")
        self.restart()

    def restart(self) -> None:
        """The peak is counted from here on."""
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return self._status("VmHWM") - self._start

    @staticmethod
    def _status(name: str) -> int:
        return int(_row_of("/proc/self/status", name).split()[0]) * 1024


class LiveBytes(TorchDispatchMode):
    """Inside, sees every tensor that is made: the bytes of storages that are alive, their peak, and the collectives asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak = 0
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks again with its local tensor, which is what takes memory
        name = str(func)
        if name.startswith("c10d."):
            self.collectives[name.split(".")[1].strip("_")] += 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((result, args)):  # arguments: a storage may have been resized since it was seen
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self._peak = max(self._peak, self.now)
        return result

    @property
    def now(self) -> int:
        alive = ((address, reference()) for address, reference in self._storages.items())
        sizes = {address: storage.nbytes() for address, storage in alive if storage is not None}
        self._storages = {address: self._storages[address] for address in sizes}
        return sum(sizes.values())

    def restart(self) -> None:
        """Peak and collectives are counted from here on."""
        self._peak = self.now
        self.collectives.clear()

    @property
    def peak(self) -> int:
        return self._peak
