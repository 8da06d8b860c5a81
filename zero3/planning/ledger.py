"""Counts the bytes of all living tensors by cause, at each operation of a step that runs on the
meta device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__: list[str] = []

ELSEWHERE = "elsewhere"  # the cause of what rests outside of the memory that is planned
CAUSES = ("chunks", "full_buffers", "gradients", "optimizer", "activations", "logits", "transfers")


@dataclass(slots=True)
class Moment:
    """A part of a step, such as the forward of one layer, and what was alive when it held most.

    Attributes:
        layer: The layer's name in the model. Empty where no layer is fetched.
        phase: "forward", "backward", or another word for where the step is.
        begun: The number of operations before it.
        peak: The most bytes of tensors that were alive in it.
        by_cause: What they were for.
        at: The number of operations before that.
    """

    layer: str
    phase: str
    begun: int = 0
    peak: int = 0
    by_cause: Counter[str] = field(default_factory=Counter)
    at: int = 0

    @property
    def name(self) -> str:
        """What people call it, such as "backward of model.layers.31"."""
        return f"{self.phase} of {self.layer}" if self.layer else self.phase


@dataclass(slots=True)
class _Allocation:
    """One storage."""

    nbytes: int
    cause: str
    born: int  # the ledger's clock when it was made, or last resized
    reference: weakref.ref[torch.UntypedStorage]


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, every tensor that is made is written down, with its cause. A storage leaves the
    ledger when it dies.

    `unit`: the allocator's, to which each storage is rounded up. `logits`: the size of the
    vocabulary; floating tensors whose last dimension has it are logits. `ran`: called with each
    operation, its arguments and its result. `compute`: makes each operation's result, of the
    function and its arguments.
    """

    def __init__(self, unit: int, logits: int, compute: Callable[..., Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit, self._logits = unit, logits
        self._held: dict[int, _Allocation] = {}  # by the storage's address
        self._resized: dict[int, _Allocation] = {}  # those that may be given back by a resize
        # the cause of what is made now; None: an activation, or logits
        self._cause: str | None = None
        self._clock = 0
        self.now = 0  # the bytes that are alive
        self.most_elsewhere = 0  # bytes
        self._totals: Counter[str] = Counter()
        self.moments: list[Moment] = []
        self._ran: Callable[..., None] = lambda *_: None
        self._compute = compute or (lambda func, args, kwargs: func(*args, **kwargs))

    def observed_by(self, ran: Callable[..., None]) -> None:
        """Each operation is told, with its arguments and its result."""
        self._ran = ran

    def begin_anew(self) -> None:
        """Forgets the moments, not what is held."""
        self.moments.clear()
        self.most_elsewhere = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # (Fused optimizers work in place. Not all of their kernels know the meta device.)
        in_place = func.__name__.startswith("_fused_") and "_." in func.__name__
        result = None if in_place else self._compute(func, args, kwargs or {})
        self._clock += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        self._ran(func, args, result)
        return result

    def begin(self, layer: str, phase: str) -> None:
        """A new moment begins, with what is alive now."""
        self._see_what_was_resized()
        self._clock += 1
        self.moments.append(
            Moment(layer, phase, self._clock, self.now, self._totals.copy(), self._clock)
        )

    @contextmanager
    def because(self, cause: str) -> Iterator[None]:
        """Context in which what is made has this cause."""
        before, self._cause = self._cause, cause
        try:
            yield
        finally:
            self._cause = before

    def note(self, tensor: Tensor, cause: str | None = None) -> None:
        """Writes down the tensor's storage. `cause`: its cause from now on."""
        self._see_what_was_resized()
        if tensor.layout not in (torch.strided, torch.jagged):  # sparse tensors have no storage
            return
        storage = tensor.untyped_storage()
        address, size = storage._cdata, -(-storage.nbytes() // self._unit) * self._unit
        held = self._held.get(address)
        if held is None:
            # lives as long as the memory, whoever holds it
            reference = weakref.ref(storage, lambda _: self._forget(address))
            held = self._held[address] = _Allocation(
                0, cause or self._cause or self._kind_of(tensor), self._clock, reference
            )
        if cause is not None and held.cause != cause:
            self._move(held, cause)
        if held.nbytes != size:
            self._count(held.cause, size - held.nbytes)
            held.nbytes, held.born = size, self._clock

    def claim(self, tensor: Tensor, cause: str, *, is_resized: bool = False) -> None:
        """As `note`, unless another cause than activations is known. `is_resized`: its memory is
        given back, and taken again, by resizing it.
        """
        held = self._held.get(address := tensor.untyped_storage()._cdata)
        unknown = held is None or held.cause in ("activations", "logits")
        self.note(tensor, cause if unknown else None)
        if is_resized:
            self._resized[address] = self._held[address]

    def _see_what_was_resized(self) -> None:
        for address, held in list(self._resized.items()):
            storage = held.reference()
            if storage is None or not storage.nbytes():
                del self._resized[address]
                self._count(held.cause, -held.nbytes)
                held.nbytes = 0

    def _kind_of(self, tensor: Tensor) -> str:
        if tensor.dim() < 2 or not tensor.is_floating_point():
            return "activations"
        if tensor.shape[-1] == self._logits:
            return "logits"
        # a head that computes by chunks makes its weight's gradient in forward
        return "gradients" if tuple(tensor.shape[:-1]) == (self._logits,) else "activations"

    def _count(self, cause: str, nbytes: int) -> None:
        self._totals[cause] += nbytes
        if cause == ELSEWHERE:
            self.most_elsewhere = max(self.most_elsewhere, self._totals[cause])
            return
        self.now += nbytes
        if self.moments and self.now > self.moments[-1].peak:
            moment = self.moments[-1]
            moment.peak, moment.by_cause, moment.at = self.now, self._totals.copy(), self._clock

    def _move(self, held: _Allocation, cause: str) -> None:
        """What a storage is for may be known later: the moment's peak learns it too."""
        before, held.cause = held.cause, cause
        if ELSEWHERE in (cause, before):
            self._count(before, -held.nbytes)
            self._count(cause, held.nbytes)
            return
        counts = [self._totals]
        if self.moments and held.born <= self.moments[-1].at:
            counts.append(self.moments[-1].by_cause)
        for count in counts:
            count[before] -= held.nbytes
            count[cause] += held.nbytes

    def _forget(self, address: int) -> None:
        held = self._held.pop(address)
        self._resized.pop(address, None)
        self._count(held.cause, -held.nbytes)


def tensors_in(held: Any) -> list[Tensor]:
    """In records and sequences, and in the attributes of what stands there (a `Workspace`)."""
    seen: dict[int, Any] = {}  # lists may hold themselves

    def is_known(each: Any) -> bool:
        known = id(each) in seen
        seen[id(each)] = each
        return known

    leaves = tree_leaves(held, is_leaf=is_known)
    inner = [value for leaf in leaves for value in getattr(leaf, "__dict__", {}).values()]
    return [each for each in (*leaves, *inner) if isinstance(each, Tensor)]


def share_memory(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Of each pair, a tensor and an empty one on meta: the second takes the memory that the first
    takes, so those of views share theirs.
    """
    memory: dict[int, torch.UntypedStorage] = {}
    for tensor, empty in pairs:
        if type(tensor) is Tensor and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            whole = empty.new_empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            shared = memory.setdefault(storage._cdata, whole)
            empty.set_(shared, tensor.storage_offset(), tensor.shape, tensor.stride())


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes that tensors take together. Views take no memory of their own."""
    sizes, limits = Counter[int](), dict[int, int]()
    dense = (tensor for tensor in tensors if tensor.layout == torch.strided)
    for tensor in {tensor.data_ptr(): tensor for tensor in dense}.values():
        storage = tensor.untyped_storage()
        sizes[storage._cdata] += tensor.nbytes
        limits[storage._cdata] = storage.nbytes()
    return sum(min(size, limits[address]) for address, size in sizes.items())
