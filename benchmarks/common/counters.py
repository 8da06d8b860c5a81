"""What a process holds and sends: resident memory, live tensors, bytes on an interface, collectives."""

from __future__ import annotations

import os
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


def send_by_sockets() -> None:
    """From now on zero3, in this process, sends to ranks of its own host as to others: so that what it sends is counted."""
    os.environ["ZERO3_HOST_MEMORY"] = "0"


def count_reads() -> list[int]:
    """From now on the bytes of each read that zero3 makes in files of safetensors are added to the list that this returns."""
    from zero3.checkpoint import safetensors_files

    reads: list[int] = []
    read = safetensors_files.read_bytes

    def counted(*arguments: Any) -> int:
        reads.append(read(*arguments))
        return reads[-1]

    safetensors_files.read_bytes = counted
    return reads


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
        self._sizes: dict[int, tuple[int, object]] = {}  # by address: bytes, and the reference that tells of the end
        self._resize = torch.UntypedStorage.resize_
        self.now = self.peak = 0
        self.collectives: Counter[str] = Counter()

    def __enter__(self) -> LiveBytes:
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks again with its local tensor, which is what takes memory
        name = str(func)
        if name.startswith("c10d."):
            self.collectives[name.split(".")[1].strip("_")] += 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.device.type != "meta":
                self._note(leaf.untyped_storage())
        return result

    def restart(self) -> None:
        """Peak and collectives are counted from here on."""
        self.peak = self.now
        self.collectives.clear()

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        self._resize(storage, size)
        self._note(storage)
        return storage

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        known, reference = self._sizes.get(address, (0, None))
        if reference is None:
            reference = weakref.ref(storage, lambda _: self._forget(address))  # lives as long as the memory, whoever holds it
        self._sizes[address] = (size, reference)
        self.now += size - known
        self.peak = max(self.peak, self.now)

    def _forget(self, address: int) -> None:
        self.now -= self._sizes.pop(address, (0, None))[0]
