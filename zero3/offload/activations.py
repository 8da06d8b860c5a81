"""Activations leave the device's memory between forward and backward, and come back ahead of their
use.

Parameters never do: most of what autograd saves under full sharding are views of the layers' full
buffers, which are freed after forward anyway. A hook that copied those would keep the whole model.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..comm.plain_values import integer
from ..comm.streams import Lane, has_streams, lanes_for
from ..core.full_buffer import shows_parameters
from ..policy import place_of
from .rests import InHostMemory, InScratchFile, Rest, ScratchFile

__all__: list[str] = []

# The C library keeps freed memory for later. glibc's dynamic threshold lets large tensors lie in
# the heap, too, once one was freed.
_malloc_trim: Callable[[int], object] = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
_LOOKS_BACK = 32  # tensors among which those to read ahead are looked for


def offload_activations(
    to: str | os.PathLike[str] = "cpu", *, min_bytes: int = 1 << 16
) -> AbstractContextManager[object]:
    """Context for a forward: what the graph saves goes out, and comes back ahead of its use in
    backward.

    Views of parameters are never among it. Gradients are the same, to the bit. Works for any model,
    sharded or not. Beside gradient checkpointing it takes the inputs of the blocks, which is much
    in deep models alone.

    Args:
        to: "cpu": from an accelerator to pinned memory of the host, beside the computation. (Of a
            model on the CPU, nothing moves.) Or a directory, on a local disk: to a file there,
            without a name, which vanishes with the process.
        min_bytes: Smaller tensors stay.

    Returns:
        The context. It may be entered again, in every step; so it keeps its file and its stream.

    Raises:
        ValueError: There is no such directory, or no file can be made in it; or `min_bytes` is
            negative. (A disk that is full later is a warning: what finds no place stays in memory.)
        TypeError: `to` is no text and no path, or `min_bytes` no integer.
        RuntimeError: In backward: a tensor was changed in place before its copy was made.

    Example::

        with zero3.offload_activations():
            loss = loss_of(model, batch)
        loss.backward()
    """
    place = place_of(to, 'to must be "cpu" or a directory')
    if integer(min_bytes) is None:
        raise TypeError(f"min_bytes must be an integer, found {min_bytes!r}")
    if min_bytes < 0:
        raise ValueError(f"min_bytes must be 0 or more, found {min_bytes}")
    return _Offloaded(None if to == "cpu" else place, min_bytes)


class _Offloaded(saved_tensors_hooks):
    def __init__(self, directory: str | None, min_bytes: int) -> None:
        self._store = _Depot(ScratchFile(directory) if directory is not None else None, min_bytes)
        super().__init__(self._store.pack, self._store.unpack)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._store.trim()


class _Depot:
    """All tensors that rest elsewhere, by number, in the order in which the graph has saved
    them.
    """

    def __init__(self, file: ScratchFile | None, min_bytes: int) -> None:
        self._file, self._min_bytes = file, min_bytes
        self._lanes: dict[torch.device, Lane] = {}
        # the graph holds them
        self._saved: WeakValueDictionary[int, _Activation] = WeakValueDictionary()
        self._count = self.gave_back = 0
        self._leaving: deque[int] = deque()  # those whose own memory is not free yet
        # forwards may run in several threads, and so do backwards of several devices
        self._lock = threading.RLock()

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Tensor | _Activation:
        if not self._goes(tensor):
            return tensor
        with self._lock:
            self._leaving = deque(number for number in self._leaving if number in self._saved)
            leaving = [self._saved[number] for number in self._leaving]
            if (saved := next((saved for saved in leaving if saved.is_of(tensor)), None)) is None:
                saved = self._send(tensor)
                at_once = self._largest_before(saved.number)
                while sum(other.nbytes for other in leaving) > at_once:
                    leaving.pop(0).leave()
                    self._leaving.popleft()
                    self.gave_back += saved.nbytes
                self.trim(but=at_once)
            return saved

    def trim(self, but: int = 0) -> None:
        """Returns to the system what has left, unless that is less than `but` bytes. On the host,
        freed memory else stays the process's.
        """
        if self._file is not None and self.gave_back > but:
            self.gave_back = 0
            _malloc_trim(0)

    def _goes(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
            return False
        if tensor.nbytes < self._min_bytes or tensor.numel() < 2:
            return False
        if isinstance(tensor._base, nn.Parameter) or shows_parameters(tensor):
            return False
        if tensor.is_conj() or tensor.is_neg():  # its bytes are not its values
            return False
        return self._file is not None or has_streams(tensor.device)

    def _send(self, tensor: Tensor) -> _Activation:
        is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        dense = tensor if is_dense else tensor.contiguous()
        flat = dense.as_strided((dense.numel(),), (1,))
        lane = self._lane(flat.device)
        file = self._file
        rest = InHostMemory(flat, lane) if file is None else InScratchFile(file, flat, lane)
        saved = self._saved[self._count] = _Activation(self._count, dense, flat, rest)
        self._leaving.append(self._count)
        self._count += 1
        return saved

    def _before(self, number: int) -> list[_Activation]:
        """Those tensors that the graph has saved shortly before, the last one first."""
        before = reversed(range(max(0, number - _LOOKS_BACK), number))
        found = (self._saved.get(earlier) for earlier in before)
        return [saved for saved in found if saved is not None]

    def _largest_before(self, number: int) -> int:
        """About so many bytes are on their way out, or back, at any time. (Logits that are saved
        last hold up no blocks' inputs.)
        """
        return max((saved.nbytes for saved in self._before(number)), default=0)

    def _lane(self, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = lanes_for(device).backup
        return self._lanes[device]

    @torch.no_grad()
    def unpack(self, packed: Tensor | _Activation) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with self._lock:
            tensor, ahead, at_once = packed.take(), 0, self._largest_before(packed.number)
            for saved in self._before(packed.number):
                if ahead < at_once:
                    ahead += saved.come()
        return tensor


class _Activation:
    """One tensor of the graph's. It lives as long as the part of the graph that needs it."""

    def __init__(self, number: int, dense: Tensor, flat: Tensor, rest: Rest) -> None:
        self.number, self.nbytes = number, dense.nbytes
        self._shape, self._stride, self._dtype = dense.shape, dense.stride(), dense.dtype
        self._flat: Tensor | None = flat  # 1-D, while it is in the memory that it is used in
        self._rest, self._coming = rest, False
        # None once the copy is made: whoever writes then, changes no copy
        self._version: int | None = flat._version

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the same tensor, saved by another operation."""
        flat = self._flat
        if flat is None:
            return False
        # alive, so nothing else can lie there
        mine = (self._shape, self._stride, self._dtype, flat.data_ptr(), self._version)
        its = (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr(), tensor._version)
        return mine == its

    def leave(self) -> None:
        """Frees the tensor's own memory, once the copy is made. It stays if no place is found for
        it.
        """
        if self._rest.left():
            self._check()
            self._flat = self._version = None

    def _check(self) -> None:
        if self._flat is not None and self._version not in (None, self._flat._version):
            raise RuntimeError(
                "a tensor that backward needs was changed in place, after forward had saved it "
                f"and before zero3.offload_activations had copied it: shape {list(self._shape)}, "
                f"{self._dtype}. Without offload, autograd would refuse it in backward"
            )

    def come(self) -> int:
        """Begins the way back. Returns the bytes that are on it, or back."""
        if self._flat is None and not self._coming:
            self._rest.come()
            self._coming = True
        return self.nbytes

    def take(self) -> Tensor:
        self.come()
        self._check()
        if self._flat is None:
            self._flat, self._coming = self._rest.arrived().view(self._dtype), False
        return self._flat.as_strided(self._shape, self._stride)
