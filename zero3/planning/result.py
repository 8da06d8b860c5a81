"""The result of a plan: its numbers, a table that people read, and a picture."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from ..access import states_of
from ..policy import ShardingPolicy
from ..tables import table
from .cluster import Cluster
from .ledger import CAUSES, Moment
from .setup import Setup, Towers
from .trace import peak_of
from .units import gib
from .watching import Watch

__all__: list[str] = []

_COLORS = ("tab:gray", "tab:green", "tab:purple", "tab:brown", "tab:blue", "tab:cyan", "tab:red")
_LABELS = 40  # at most, along the picture


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy of `Plan.compare`.

    Attributes:
        policy: The policy.
        peak_bytes: The most bytes of tensors that a rank holds in a step.
        seconds: The time of a step. None without a cluster, and if chunks rest elsewhere.
        fits: Whether it fits into the plan's memory. None without.
    """

    policy: ShardingPolicy
    peak_bytes: int
    seconds: float | None
    fits: bool | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What `plan` found. `str(plan)` is a table.

    Attributes:
        peak_bytes: The most bytes of tensors that a rank holds in a step after the first.
        by_cause: What they are for. Keys: `chunks` (with buffers, and the few bytes that released
            parameters show), `full_buffers`, `gradients`, `optimizer`, `activations`, `logits`,
            `transfers`. The values add up to `peak_bytes`.
        unknown: The least and the most that comes on top: CUDA's context, workspaces, NCCL and
            fragmentation, none of them on the CPU; and with experts at home what it takes that all
            ranks' tokens come to this one, in the most alone. In bytes.
        where: The moment of the peak, such as "backward of model.layers.31".
        memory: The bytes that a rank has. None: not given.
        fits: Whether the peak and the upper end of `unknown` fit into `memory`. None without
            `memory`.
        largest_batch: The most sequences that a micro-batch may have; 0 if not even one fits. None
            without `memory`.
        largest_sequence: The most tokens that a sequence may have at this batch, in blocks of 128;
            0 if not even one block fits. None without `memory`.
        advice: If it does not fit: the command line's options that make it fit with the least
            change. `()` if it fits, if nothing that was tried does, and without `memory`.
        advised_bytes: The peak with `advice`. None without advice.
        policy: The policy to train with. It is the given one. Where `memory` has room for it,
            nothing is offloaded, frozen parameters stay from step to step (`resident_bytes`, as
            much as fits), and trainable ones from forward to backward
            (`reshard_after_forward=False`). Where the given one does not fit, it is that of
            `advice`.
        seconds: The time of a step, an estimate by which settings are compared: on one GPU plans
            were up to 20 % too long, and less than half of the truth where values are quantised; on
            a mesh with replicas most are too long (docs/plan.md has the figures). None without a
            cluster, and if chunks rest elsewhere.
        attention: The kernels of attention, and the number of their calls in a micro-batch,
            recomputation included.
        parameters: The number of the model's elements.
        trainable: The number of those that train.
        after_forward: The most bytes that are there when a micro-batch's forward ends, outputs
            included: what `watch` looks at on CPUs.
        offloaded_bytes: With `policy.offload`, the most bytes that rest elsewhere, in host memory
            or in files: chunks, gradients and the optimizer's state; on a GPU with what the
            optimizer's step makes on the way, since it runs on the host. Otherwise 0.
        memory_meant: How `memory` was understood, such as "what a card of 80 GB offers". Empty
            where that is plain.
        unplanned: What the plan leaves out of a model that takes more than text, in words: images,
            sound. Empty: nothing.
        dtypes: The dtypes or formats of `masters` (what the optimizer updates), of what is
            `frozen`, of `compute`, and of the `reduction` of gradients.
        towers: What not every rank calls: its `names`, its `layers`, and what they move
            (`text_exchanges`, `exchanges`, `image_bytes`). None: the model has no towers.
        moments: A `Moment` for each part of the step, in order: what a rank holds in it at most.
        setup: What was planned: the model without values, and the arguments.
        cluster: The cluster that was given.
    """

    peak_bytes: int
    by_cause: Mapping[str, int]
    unknown: tuple[int, int]
    where: str
    memory: int | None
    fits: bool | None
    largest_batch: int | None
    largest_sequence: int | None
    advice: tuple[str, ...]
    advised_bytes: int | None
    policy: ShardingPolicy
    seconds: float | None
    attention: Mapping[str, int]
    parameters: int
    trainable: int
    after_forward: int
    offloaded_bytes: int
    memory_meant: str
    unplanned: str
    dtypes: Mapping[str, str]
    towers: Towers | None
    moments: tuple[Moment, ...] = field(repr=False)
    setup: Any = field(repr=False)
    cluster: Cluster | None = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Returns what `--json` prints: the attributes under their names, without `moments`."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.repr}
        return found | {
            "by_cause": dict(self.by_cause),
            "unknown": list(self.unknown),
            "advice": list(self.advice),
            "policy": repr(self.policy),
            "attention": dict(self.attention),
            "dtypes": dict(self.dtypes),
            "towers": None if self.towers is None else self.towers._asdict(),
        }

    def compare(self, policies: Iterable[ShardingPolicy]) -> list[Comparison]:
        """Plans the same with other policies, and ranks them: what fits before what does not, the
        fastest first.

        Args:
            policies: The policies to compare.

        Returns:
            A `Comparison` for each policy. Those without a time come last of what fits, or does
            not; of these, first what holds least.

        Example::

            policies = [zero3.ShardingPolicy(prefetch_depth=depth) for depth in (0, 1, 2)]
            for found in plan.compare(policies):
                print(found.policy, found.seconds, found.peak_bytes)
        """
        if isinstance(policies, ShardingPolicy):
            raise TypeError("policies must be several, such as a list, found one ShardingPolicy")

        def order(each: Comparison) -> tuple[bool, bool, float, int]:
            return each.fits is False, each.seconds is None, each.seconds or 0.0, each.peak_bytes

        with self.setup.tell.until_over():
            return sorted(map(self._with, policies), key=order)

    def _with(self, policy: ShardingPolicy) -> Comparison:
        setup = self.setup.but(policy=policy)
        trace = setup.trace()
        peak, most = peak_of(trace.measure(*setup.sizes))[0], trace.peak(*setup.sizes)
        seconds = None if self.cluster is None else setup.seconds(trace, self.cluster)
        fits = None if self.memory is None else most + setup.unknown(most)[1] <= self.memory
        return Comparison(policy, peak, seconds, fits)

    def watch(self, model: nn.Module) -> None:
        """Warns once if a run of `model` takes over 2 % more or less than was planned, with both
        numbers.

        Call it on each rank after `shard`, before the first step. It looks at counters that
        allocators keep anyway. On a GPU that is the peak of what tensors take, reset after the
        first step, at steps 2, 4, 8 and so on. On a CPU no counter keeps a peak: it is what the C
        library has given out at the end of each forward, against `after_forward`; up to 16 MiB
        there tell nothing, because Python's own objects are among them. Less than planned is said
        after eight steps. Forwards in `eval` mode or under `no_grad` are left out. A model that was
        sharded with the plan's `policy`, where that is not the given one, is held against a plan
        for it, which is made now.

        Args:
            model: The sharded model.

        Raises:
            ValueError: `model` is not sharded.
            RuntimeError: The device's allocator, or the C library, does not tell what it has given
                out.

        Example::

            plan = zero3.plan(directory, ranks=8, memory="24GiB", sequence=4096)
            model = zero3.shard(model, policy=plan.policy)
            plan.watch(model)
        """
        setup, peak, after_forward = self.setup, self.peak_bytes, self.after_forward
        has = [state.policy for state in states_of(model)]
        if not _is_one_of(setup.policy, has) and _is_one_of(self.policy, has):
            trace = setup.but(policy=self.policy).trace()
            peak, after_forward = trace.peak(*setup.sizes), trace.after_forward
        Watch(model, peak, after_forward, setup.accumulation)

    def draw(self, path: str | PathLike[str]) -> None:
        """Draws the memory of a step, part by part, by cause.

        Args:
            path: The picture's file; its suffix says the format.

        Raises:
            RuntimeError: matplotlib is not installed.
            ValueError: matplotlib knows no format with this suffix.
            OSError: The file can't be written.
        """
        _draw(self.moments, self.memory, path)

    def __str__(self) -> str:
        lines = [
            f"  {name:<14} {value:>12}  {remark}".rstrip()
            for name, value, remark in _rows(self, self.setup)
        ]
        return "\n".join([_title(self, self.setup), *lines])

    def _repr_html_(self) -> str:
        return table(_title(self, self.setup), _rows(self, self.setup))


def _is_one_of(policy: ShardingPolicy, found: Iterable[ShardingPolicy]) -> bool:
    """Whether a layer has it. (The model's configuration may bring a format.)"""
    return any(
        policy == (other if policy.quantize else replace(other, quantize=None)) for other in found
    )


_Row = tuple[str, str, str]  # a name, a value, a remark


def _title(plan: Plan, setup: Setup) -> str:
    train = (
        "all of them train" if plan.trainable == plan.parameters else f"{plan.trainable:,} train"
    )
    micro = f", {setup.accumulation} micro-batches a step" if setup.accumulation > 1 else ""
    mesh = "" if setup.mesh is None else f" ({setup.mesh[0]} replicas of {setup.mesh[1]} shards)"
    if setup.sequence_parallel > 1:
        mesh += f", parts of sequences over {setup.sequence_parallel} ranks"
    seen = "" if setup.pictures is None else f" with {setup.pictures.told}"
    return (
        f"{plan.parameters:,} parameters, {train}; rank {setup.rank} of {setup.ranks}{mesh} on "
        f"{setup.device}; a micro-batch is {setup.batch} x {setup.sequence} tokens{seen}{micro}"
    )


def _rows(plan: Plan, setup: Setup) -> Iterator[_Row]:
    """One for each cause, then what limits, what fits, and what would."""
    yield "dtypes", "", "; ".join(f"{what} {kind}" for what, kind in plan.dtypes.items())
    for cause in CAUSES:
        if plan.by_cause[cause]:
            yield cause.replace("_", " "), gib(plan.by_cause[cause]), ""
    yield "peak", gib(plan.peak_bytes), f"in the {plan.where}; most of it {_most(plan)}"
    if plan.unknown[1]:
        low, high = (gib(end) for end in plan.unknown)
        what = ["CUDA's context, workspaces, NCCL, fragmentation"] if setup.device == "cuda" else []
        what += ["all tokens to one rank's experts"] if setup.policy.expert_parallel else []
        yield "and on top", f"{low} to {high}", f"{'; '.join(what)}: estimates"
    if plan.offloaded_bytes:
        offload = setup.policy.offload
        where = "host memory" if offload == "cpu" else f"files in {offload}"
        rests = f"rests in {where}: chunks, gradients, the optimizer's state"
        yield "offloaded", gib(plan.offloaded_bytes), rests
    yield from _of_towers(plan.towers)
    if plan.unplanned:
        yield "not planned", plan.unplanned, ""
    yield from _fitting(plan)
    if plan.attention:
        calls = (f"{name}, {count} calls" for name, count in plan.attention.items())
        yield "attention", ", ".join(calls), ""
    if plan.fits and plan.policy != setup.policy:
        yield "faster", repr(plan.policy), "fits too, and moves less"
    if plan.seconds is not None:
        tokens = setup.batch * setup.sequence * setup.accumulation / plan.seconds
        known = "an estimate to compare settings by" + (
            "; with replicas mostly too long" if setup.replicas > 1 else ""
        )
        yield "a step", f"{plan.seconds:.3f} s", f"{tokens:,.0f} tokens a second and rank: {known}"
    elif plan.cluster is not None:
        yield "a step", "not known", ("plans do not know how fast what is offloaded comes and goes")


def _of_towers(towers: Towers | None) -> Iterator[_Row]:
    if towers is None:
        return
    moves = f"text on all ranks moves none of them, in {towers.text_exchanges} exchanges at gates"
    yield "towers", f"{towers.layers} layers", f"{', '.join(towers.names)}: {moves}"
    if towers.image_bytes is not None:
        more = f"more to each rank if any has these images, in {towers.exchanges} exchanges"
        yield "images move", gib(towers.image_bytes), f"{more}, a micro-batch"


def _fitting(plan: Plan) -> Iterator[_Row]:
    if plan.memory is None:
        return
    left = plan.memory - plan.peak_bytes - plan.unknown[1]
    verdict = (
        f"fits, and leaves {gib(left)}" if plan.fits else f"does not fit: {gib(-left)} too much"
    )
    meant = f" ({plan.memory_meant})" if plan.memory_meant else ""
    yield "memory", gib(plan.memory), f"{verdict}{meant}"
    batch, sequence = plan.largest_batch or "none fits", plan.largest_sequence or "less than 128"
    most = f"at this sequence; largest sequence at this batch: {sequence}"
    yield "largest batch", f"{batch}", most
    if plan.advice and plan.advised_bytes is not None:
        yield "it fits with", " ".join(plan.advice), f"peak {gib(plan.advised_bytes)}"
    elif not plan.fits:
        tried = "smaller batches, checkpoints, bf16, offload, more ranks, adapters, four bits"
        yield "it fits with", "nothing that was tried", tried


def _most(plan: Plan) -> str:
    cause = max(CAUSES, key=lambda cause: plan.by_cause[cause])
    return f"{cause.replace('_', ' ')} ({plan.by_cause[cause] / plan.peak_bytes:.0%})"


def check_target(path: str | PathLike[str]) -> None:
    """Leaves nothing behind, and an existing file as it is.

    Raises:
        RuntimeError: matplotlib is not installed.
        ValueError: matplotlib knows no format with the suffix.
        OSError: The file can't be written.
    """
    if find_spec("matplotlib") is None:
        raise RuntimeError("a picture of a plan needs matplotlib: pip install matplotlib")
    file, canvas = Path(path), import_module("matplotlib.figure").Figure().canvas
    if file.suffix[1:].lower() not in (known := canvas.get_supported_filetypes()):
        raise ValueError(
            f"a picture's file must end in one of {', '.join(f'.{suffix}' for suffix in known)}, "
            f"found {str(path)!r}"
        )
    try:
        with file.open("ab") if file.exists() else tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise type(error)(
            f"the picture {str(path)!r} can't be written: {error.strerror}. Name a file in a "
            "directory that is there"
        ) from None


def _draw(moments: Sequence[Moment], memory: int | None, path: str | PathLike[str]) -> None:
    """Draws a bar for each moment, as high as what was alive when it held most."""
    check_target(path)
    figure = import_module("matplotlib.figure").Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots()
    places = range(len(moments))
    bottoms = [0.0] * len(moments)
    for cause, color in zip(CAUSES, _COLORS, strict=True):
        heights = [moment.by_cause[cause] / 2**30 for moment in moments]
        if any(heights):
            label = cause.replace("_", " ")
            axes.bar(places, heights, width=1.0, bottom=bottoms, color=color, label=label)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    highest = max(places, key=lambda place: moments[place].peak)
    peak, top = f"{moments[highest].peak / 2**30:.2f} GiB", (highest, bottoms[highest])
    axes.annotate(peak, top, ha="center", va="bottom", fontsize=8)
    if memory is not None:
        axes.axhline(memory / 2**30, color="black", linestyle="--", linewidth=1, label="memory")
    shown = list(places)[:: max(1, -(-len(moments) // _LABELS))]
    axes.set_xticks(shown, [moments[place].name for place in shown], rotation=90, fontsize=6)
    axes.set_ylabel("GiB on a rank")
    axes.margins(x=0, y=0.12)
    over = {"loc": "upper center", "bbox_to_anchor": (0.5, 1.12), "ncols": len(CAUSES) + 1}
    axes.legend(**over, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
