"""Holds a run against its plan, by counters that memory's allocators keep anyway, and warns once if
it takes another amount.
"""

from __future__ import annotations

import ctypes
import warnings

import torch
from torch import nn

from ..access import states_of
from ..comm.streams import DeviceMemory, has_streams
from ..core.layer_state import chunks_of
from .ledger import nbytes_of
from .models import tensors_beside
from .setup import WORKSPACES
from .units import gib

__all__: list[str] = []

ALLOWED = 0.02  # of what was planned
# Bytes that a first step loads beside. In a process libraries, 4 MB here; on a device what its
# libraries work in.
LOADED, LOADED_ON_DEVICE = 2**24, WORKSPACES[1]
LOOKS_LESS = 8  # steps, after which less than was planned is worth a word
_MAPPED, _USED = 4, 7  # of these ten


class _Mallinfo(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_size_t * 10),)


class Heap:
    """What the C library has given out. It keeps no peak. A look takes some microseconds."""

    keeps_peak = False

    def __init__(self) -> None:
        self._ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._ask is not None:
            self._ask.restype = _Mallinfo
        before = self.now()
        large = torch.empty(2**24, dtype=torch.uint8)
        # another C library or allocator; other threads may give something back meanwhile
        if self.now() - before < large.nbytes // 2:
            raise RuntimeError(
                "this process's allocator does not tell what it has given out, so a run can't be "
                "held against its plan"
            )

    def now(self) -> int:
        if self._ask is None:
            return 0
        told = self._ask().bytes
        return int(told[_USED] + told[_MAPPED])

    peak = now

    def forget_peak(self) -> None:
        return None


class Watch:
    """Hooks around a model's forward.

    `peak`, `after_forward`: the bytes that were planned. `micro_batches`: in a step. `counter`:
    counts on the model's device.
    """

    def __init__(
        self,
        model: nn.Module,
        peak: int,
        after_forward: int,
        micro_batches: int,
        counter: DeviceMemory | Heap | None = None,
    ) -> None:
        self._peak, self._after_forward, self._micro_batches = peak, after_forward, micro_batches
        first = states_of(model)[0]
        self._rank = first.communicator.rank
        device = first.device
        self._counter = counter or (DeviceMemory(device) if has_streams(device) else Heap())
        # what is there beside the model
        self._others = self._counter.now() - _held_by(model, device)
        self._calls, self._most = 0, 0
        self._hooks = [  # the model holds the watch by them, and not the other way round
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after),
        ]

    def _before(self, module: nn.Module, args: object) -> None:
        """A forward begins: the first micro-batch's of a step, or another's."""
        if not (module.training and torch.is_grad_enabled()):
            return
        step, micro_batch = divmod(self._calls, self._micro_batches)
        self._calls += 1
        if micro_batch or not self._counter.keeps_peak:
            return
        if step == 1:
            self._counter.forget_peak()
        elif step > 1 and not step & (step - 1):  # a peak is not lost in between
            self._look(self._peak, step, "at the peak of a step")

    def _after(self, module: nn.Module, args: object, output: object) -> None:
        """A forward is over, and its outputs are there."""
        if not (module.training and torch.is_grad_enabled()) or self._counter.keeps_peak:
            return
        step = (self._calls - 1) // self._micro_batches
        if step:  # the optimizer's state is there
            self._look(self._after_forward, step, "at the end of a forward")

    def _look(self, planned: int, step: int, when: str) -> None:
        found = self._counter.peak() - self._others
        self._most = max(self._most, found)
        loaded = LOADED_ON_DEVICE if self._counter.keeps_peak else LOADED
        slack = ALLOWED * planned + loaded
        if found > planned + slack:
            self._warn(found, planned, when)
        elif step >= LOOKS_LESS and self._most < planned - slack:
            self._warn(self._most, planned, when)

    def _warn(self, found: int, planned: int, when: str) -> None:
        for hook in self._hooks:
            hook.remove()
        warnings.warn(
            f"rank {self._rank}: this run has left its plan: {when} it holds {gib(found)}, and "
            f"{gib(planned)} were planned ({found / planned - 1:+.0%}). Plan with the batch, the "
            "sequence, the policy and the optimizer that it has.",
            stacklevel=2,
        )


def _held_by(model: nn.Module, device: torch.device) -> int:
    """The bytes of a sharded model's chunks, and of what else its modules hold, in the memory of
    its device, so without files.
    """
    resting = [chunk for chunk in chunks_of(states_of(model)) if chunk.store.rests]
    away = {id(part.parameter) for chunk in resting for part in chunk.parts}
    # released parameters show nothing of their own
    beside = (each for each in tensors_beside(model) if not isinstance(each, nn.Parameter))
    every = (*model.parameters(), *model.buffers(), *beside)
    own = (tensor for tensor in every if id(tensor) not in away)
    return nbytes_of(tensor for tensor in own if tensor.device == device)
