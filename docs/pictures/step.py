"""Draws step.svg: what one rank holds over a training step, and what its lanes do. Needs matplotlib.

    python docs/pictures/step.py

The step is a real one, of `zero3.shard` on rank 0 of 4, and the bytes are those of live tensors' storages. Two things are made
up. The other ranks are thought to hold what this one holds. The clock goes by what is done: a matrix product takes its
operations, a transfer the bytes that the rank receives, anything else its bytes. So the picture is the same on every machine.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3
from zero3.access import states_of
from zero3.comm.communicator import SoloCommunicator
from zero3.comm.streams import Lanes
from zero3.core.autograd import inside_backward

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
NUMBERS = {  # the functions that docs/design.md numbers
    "Runtime.begin_pass": "F1", "Runtime.pre_forward": "F2", "Runtime.post_forward": "F4", "Runtime.end_pass": "F5", "Backward.begin": "B1",
    "Backward._before": "B2", "GradientReducer.add": "B4", "Backward._back_up": "B5", "Backward._end": "B6", "clip_grad_norm_": "S1",
}  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


# -- recording


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


def watch(machine: Machine, model: nn.Module) -> None:
    """Who computes, what moves, and what each storage holds: methods are replaced for that, as `zero3.profile` does."""

    def fetch(layer: int | None, method: Callable[[], None]) -> None:
        backward, asked = inside_backward(), machine.now
        method()
        machine.recorded.moments.append(Moment("B3", layer, asked) if backward else Moment("F3", layer, machine.now))
        machine.layer, machine.doing = layer, "backward" if backward else "forward"  # type: ignore[assignment]

    def start_fetch(layer: int | None, method: Callable[[], None]) -> None:
        machine.moving = layer
        method()

    def add(method: Callable[[int, Tensor], None], key: int, gradient: Tensor) -> None:
        machine.tag("full gradients", gradient)
        method(key, gradient)

    def back_up(layer: int | None, method: Callable[..., Any], *args: Any) -> Any:
        machine.moving = layer
        backups = method(*args)
        for tensor in (tensor for backup in backups for tensor in backup.held):
            machine.tag("full gradients", tensor)
        return backups

    numbers = {id(layer._state): number for number, layer in enumerate(zero3.layer.layers_of(model))}  # type: ignore[attr-defined]
    for state in states_of(model):
        layer = numbers.get(id(state))
        vars(state).update({"fetch": partial(fetch, layer, state.fetch), "start_fetch": partial(start_fetch, layer, state.start_fetch)})
        gradients = state.gradients
        vars(gradients).update({"add": partial(add, gradients.add), "back_up": partial(back_up, layer, gradients.back_up)})
        for chunk in state.chunks:
            machine.tag("full parameters", chunk.full.tensor)
            machine.tag("chunks", chunk.shard.data)


@contextmanager
def noting(machine: Machine, model: nn.Module) -> Iterator[None]:
    """Notes when the numbered functions are called."""
    numbers = {id(state): number for number, state in enumerate(states_of(model)[:BLOCKS])}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (number := NUMBERS.get(frame.f_code.co_qualname)) is not None:
            held = frame.f_locals
            state = held.get("state", getattr(held.get("call"), "layer", None))
            layer = machine.layer if number == "B4" else numbers.get(id(state))
            machine.recorded.moments.append(Moment(number, layer, machine.now))

    before = sys.getprofile()
    machine.on = True
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        machine.on = False


def record() -> Recorded:
    """One step, after two others."""
    torch.manual_seed(0)
    machine = Machine()
    with machine:
        model = zero3.shard(nn.Sequential(*(Block() for _ in range(BLOCKS))), layers=Block, process_group=Ranks(machine))
        chunks = zero3.get_trainable_chunk(model)
        optimizer = torch.optim.AdamW(chunks)
        batch = torch.randn(ROWS, WIDTH)

        def step() -> None:
            loss = model(batch).pow(2).mean()
            loss.backward()
            machine.layer, machine.doing = None, "step"
            for chunk in chunks:
                machine.tag("gradients", chunk.grad.as_subclass(Tensor))  # type: ignore[union-attr]
            zero3.clip_grad_norm_(model, 1.0)
            machine.recorded.moments.append(Moment("S2", None, machine.now))
            optimizer.step()
            optimizer.zero_grad()
            machine.look()

        step()
        step()
        watch(machine, model)
        for value in (value for state in optimizer.state.values() for value in state.values()):
            machine.tag("optimizer state", value)
        machine.recorded.moments.clear()
        with noting(machine, model):
            step()
    return machine.recorded


# -- drawing

BARS = {"forward": "#1f77b4", "backward": "#4d9bd6", "step": "#7f7f7f", "wait": "#d62728", "fetch": "#ff9f40", "backup": "#e377c2"}
LANES = ("backup", "fetch", "compute")
TOLD = 1  # the layer whose numbers are written into the picture
AFTER = 0.4  # of the picture, behind the step
CLOSE = 0.3  # labels nearer than this would overlap


def draw_memory(axes: Any, recorded: Recorded) -> None:
    times, bands = recorded.memory()
    times.append(recorded.samples[-1][0] + AFTER)
    base = [0.0] * len(times)
    for kind, band in bands.items():
        top = [low + size / LAYER for low, size in zip(base, [*band, band[-1]], strict=True)]
        axes.fill_between(times, base, top, step="post", color=COLORS[kind], linewidth=0, label=kind)
        base = top
    axes.set(ylim=(0, 1.12 * max(base)), ylabel="bytes, in one layer's parameters")
    axes.set_title(f"What a rank holds over a step ({RANKS} ranks, {BLOCKS} layers, AdamW; a plain process: 16, and activations)")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", fontsize=8, ncols=2, frameon=False)


def draw_lanes(axes: Any, recorded: Recorded) -> None:
    for bar in recorded.bars:
        place, width = LANES.index(bar.lane), bar.end - bar.begin
        axes.broken_barh([(bar.begin, width)], (place - 0.38, 0.76), facecolor=BARS[bar.what], edgecolor="white", linewidth=0.5)
        text = f"{bar.what} {bar.layer}" if bar.layer is not None and bar.what != "wait" else bar.what
        axes.text((bar.begin + bar.end) / 2, place, text, ha="center", va="center", fontsize=7, color="white", clip_on=True)
    axes.set(ylim=(-0.6, 3.5), xlabel="time, counted in operations and bytes (a layer's forward is about 1)")
    axes.set_yticks(range(len(LANES)), LANES)


def draw_numbers(axes: Any, recorded: Recorded) -> None:
    """The numbers of one layer's calls, and of those that come once in a step."""
    once, told, found = {"F1", "F5", "B1", "B6", "S1", "S2"}, set[str](), dict[float, list[str]]()
    for number, layer, time in sorted(recorded.moments, key=lambda moment: moment.time):
        if (number in once and number not in told) or layer == TOLD:
            told.add(number)
            if number not in found.setdefault(time, []):
                found[time].append(number)
    places = [float("-inf"), *found, float("inf")]
    for before, time, after in zip(places, places[1:], places[2:], strict=False):
        side = "right" if after - time < CLOSE else "left" if time - before < CLOSE else "center"
        axes.axvline(time, color="#444444", linewidth=0.6, linestyle=":")
        axes.text(time, 2.5, "\n".join(found[time]), ha=side, va="bottom", fontsize=7, linespacing=0.95)


def draw(path: Path, recorded: Recorded | None = None) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    recorded = recorded if recorded is not None else record()
    settings = {"svg.hashsalt": "zero3", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 10}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(11, 5.6), layout="constrained", facecolor="white")
        memory, lanes = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1))
        draw_memory(memory, recorded)
        draw_lanes(lanes, recorded)
        draw_numbers(lanes, recorded)
        lanes.set_xlim(0, recorded.samples[-1][0] + AFTER)
        for axes in (memory, lanes):
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
