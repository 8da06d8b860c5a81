"""A made-up machine for step.py: a clock that goes by what is done, ranks that hold what this one holds, and lanes of transfers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero3.comm.communicator import SoloCommunicator
from zero3.comm.streams import Lanes

RANKS, BLOCKS, WIDTH, ROWS = 4, 4, 64, 32
LAYER = 4 * (8 * WIDTH**2 + 5 * WIDTH)  # bytes of a block's parameters

# How much of each is done in a unit of time. A block's forward takes a little more than one unit.
OPERATIONS = 16 * ROWS * WIDTH**2  # of matrix products
RECEIVED = 1.2 * LAYER * (RANKS - 1) / RANKS  # bytes, by a transfer
TOUCHED = 5.0 * LAYER  # bytes, by anything else

COLORS = {
    "chunks": "#1f77b4",
    "optimizer state": "#7f7f7f",
    "gradients": "#9467bd",
    "activations, temporaries": "#8cc084",
    "full parameters": "#ff9f40",
    "full gradients": "#e377c2",
}
REST = "activations, temporaries"


class Bar(NamedTuple):
    """Something in a lane, from `begin` to `end`."""

    lane: str
    what: str  # in the lane "compute": forward, backward, step, wait
    layer: int | None
    begin: float
    end: float


class Moment(NamedTuple):
    """A numbered function is called."""

    number: str
    layer: int | None
    time: float


@dataclass
class Recorded:
    bars: list[Bar] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    samples: list[tuple[float, dict[int, int]]] = field(default_factory=list)  # a time, and bytes by the number of a storage
    kinds: dict[int, str] = field(default_factory=dict)  # by the number of a storage

    def memory(self) -> tuple[list[float], dict[str, list[int]]]:
        """When it changed, and the bytes of each kind since. At one time first the most that stood then, last what is left."""
        by_time: dict[float, list[dict[int, int]]] = {}
        for time, sizes in self.samples:
            by_time.setdefault(time, []).append(sizes)
        chosen = [(time, sizes) for time, all_of in by_time.items() for sizes in (max(all_of, key=lambda s: sum(s.values())), all_of[-1])]
        steps: list[tuple[float, list[int]]] = []
        for time, sizes in chosen:
            step = [sum(size for number, size in sizes.items() if self.kinds.get(number, REST) == kind) for kind in COLORS]
            if not steps or steps[-1][1] != step:
                steps.append((time, step))
        return [time for time, _ in steps], {kind: [step[place] for _, step in steps] for place, kind in enumerate(COLORS)}


class Machine(TorchDispatchMode):
    """A clock that operations move on, and a look at every storage that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.on = 0.0, False
        self.recorded = Recorded()
        self.doing, self.layer = "forward", None
        self.moving: int | None = None  # the layer that is fetched or backed up
        self.link_free = 0.0  # when the transfers that were issued are over
        self._storages: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.look()  # at what was given back since the last operation
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self.number_of(tensor)
        self.look()
        if self.on and (time := time_of(func, args, made)):
            self.take(self.doing, self.now + time)
        return result

    def take(self, what: str, until: float) -> None:
        """Computation, or a wait, until then."""
        begin, self.now = self.now, until
        bars = self.recorded.bars
        last = next((number for number in reversed(range(len(bars))) if bars[number].lane == "compute"), None)
        if last is not None and bars[last][1:3] == (what, self.layer):
            bars[last] = bars[last]._replace(end=until)
        else:
            bars.append(Bar("compute", what, self.layer, begin, until))

    def wait_until(self, time: float) -> None:
        if self.on and time > self.now:
            self.take("wait", time)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """For what lanes do: it takes computation no time."""
        on, self.on = self.on, False
        yield
        self.on = on

    def number_of(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number, known = self._storages.get(storage._cdata, (0, None))
        if known is None or known() is None:
            self._count = number = self._count + 1
            self._storages[storage._cdata] = number, weakref.ref(storage)
        return number

    def tag(self, kind: str, tensor: Tensor) -> None:
        self.recorded.kinds[self.number_of(tensor)] = kind

    def look(self) -> None:
        if self.on:
            alive = [(number, storage()) for number, storage in self._storages.values()]
            self.recorded.samples.append((self.now, {number: storage.nbytes() for number, storage in alive if storage is not None}))


def time_of(func: Any, args: Sequence[Any], made: list[Tensor]) -> float:
    name = func.overloadpacket.__name__
    if name in ("mm", "addmm"):
        left, right = args[-2:] if name == "mm" else args[1:3]
        return float(2 * left.shape[0] * left.shape[1] * right.shape[1]) / OPERATIONS
    if not func._schema.is_mutable and any(each.alias_info is not None for each in func._schema.returns):
        return 0.0  # a view
    return sum(tensor.nbytes for tensor in made) / TOUCHED


class Moved(NamedTuple):
    """A transfer: how many bytes the rank receives, and how they come."""

    nbytes: int
    wait: Callable[[], object]


class Ranks(SoloCommunicator):
    """Rank 0 of several."""

    world_size = shards = RANKS

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def all_gather(self, full: Tensor, shard: Tensor, bounds: object = None) -> Moved:
        return Moved(full.nbytes - shard.nbytes, lambda: full.view(RANKS, -1).copy_(shard))

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: object = None) -> Moved:
        return Moved(full.nbytes - shard.nbytes, lambda: torch.mul(full.view(RANKS, -1)[0], RANKS, out=shard))

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: object = None) -> Moved:
        return Moved(0, lambda: shard.copy_(slices[0] if slices is not None else shard))

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        return [payload] * RANKS

    def lanes(self, device: torch.device) -> Lanes:
        return Lanes(Lane("fetch", self._machine), Lane("backup", self._machine))


class Lane:
    """Like a stream: no transfer begins before computation has come to where it was issued.

    Both lanes share a communicator, as they do by default: it makes one transfer after another.
    """

    def __init__(self, name: str, machine: Machine) -> None:
        self._name, self._machine = name, machine

    @contextmanager
    def issue(self) -> Iterator[None]:
        yield

    def complete(self, pending: Moved, then: Callable[[], None] | None = None) -> Landing:
        machine = self._machine
        if machine.on:
            begin = max(machine.link_free, machine.now)
            machine.link_free = begin + pending.nbytes / RECEIVED
            machine.recorded.bars.append(Bar(self._name, self._name, machine.moving, begin, machine.link_free))
        return Landing(machine.link_free, machine, [pending.wait, *([then] if then is not None else [])])


class Landing(NamedTuple):
    time: float
    machine: Machine
    actions: list[Callable[[], object]]

    def wait(self) -> None:
        self.machine.wait_until(self.time)
        with self.machine.beside():
            while self.actions:
                self.actions.pop(0)()
