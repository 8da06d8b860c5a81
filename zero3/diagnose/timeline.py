"""The result of a profile: spans of computation, transfers and waits, with totals, advice and a
picture. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from types import MappingProxyType
from typing import Any, Literal

from ..tables import table

__all__: list[str] = []

Phase = Literal["forward", "backward"]
Kind = Literal["fetch", "backup", "exchange"]
SEEN = 2e-4  # seconds; after a wait of this length the end of the transfer is known exactly


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a layer's computation.

    Attributes:
        layer: The layer's name in the model.
        phase: "forward" or "backward".
        begin: Seconds from the beginning of the profile.
        end: Seconds from the beginning of the profile.
    """

    layer: str
    phase: Phase
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """One fetch or backup, or an exchange of parts of sequences, for which computation stands
    still. All times are seconds from the beginning of the profile.

    Attributes:
        layer: The layer's name in the model. For an exchange: that of the layer that computes.
        kind: "fetch", "backup" or "exchange".
        phase: "forward" or "backward".
        nbytes: The bytes that the rank receives.
        begin: When it was started.
        end: When it was over. On the CPU: when the computation saw that it was over.
        stopped: When the computation began to wait for it.
        resumed: When the computation went on.
    """

    layer: str
    kind: Kind
    phase: Phase
    nbytes: int
    begin: float
    end: float
    stopped: float
    resumed: float

    @property
    def exposed(self) -> float:
        """How many seconds the computation waited for the transfer."""
        return self.resumed - self.stopped


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer's share of a profile. Times are summed over all steps, in milliseconds.

    Attributes:
        label: The layer's name in the model.
        compute_ms: How long the layer computed.
        fetches: The number of its fetches.
        fetch_wait_ms: How long the computation waited for its parameters.
        backups: The number of its backups.
        backup_wait_ms: How long the computation waited until its gradients were reduced.
        nbytes: The bytes that the rank received for the layer.
        exchanges: The number of its exchanges of parts of sequences, for heads and back.
        exchange_ms: How long the computation stood still for them.
    """

    label: str
    compute_ms: float
    fetches: int
    fetch_wait_ms: float
    backups: int
    backup_wait_ms: float
    nbytes: int
    exchanges: int = 0
    exchange_ms: float = 0.0

    @property
    def exposed_ms(self) -> float:
        """How many milliseconds the computation waited for the layer's transfers."""
        return self.fetch_wait_ms + self.backup_wait_ms + self.exchange_ms


_HEADER = ("layer", "compute", "fetches", "exposed", "backups", "exposed", "MB")


class Profile:
    """What `profile` found. `str(profile)` is a table: a line for each layer, totals, and advice.

    Attributes:
        layers: A `LayerProfile` for each layer, in the order of their first fetch.
        seconds: The length of the profile.
        spans: Every `Span` of computation.
        transfers: Every `Transfer`.
        busiest: For each layer of experts that stay at home, by name: how many of this rank's rows
            of tokens go to the rank that gets most, over the mean of all ranks. 1.0: all get as
            many. Other ranks' tokens may prefer other experts; no transfer asks them: see `loads`.
        loads: For each of these layers: how many rows came to this rank, from all ranks, over those
            that it sent. Where ranks have as many tokens, the busiest rank of all is the one on
            which this is largest: print it on each.
        gates: Of a model with towers, the seconds that the host waited for each exchange at a gate.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.layers: list[LayerProfile] = []
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self.busiest: dict[str, float] = {}
        self.loads: dict[str, float] = {}
        self.gates: list[float] = []
        self._prefetch_depth = 1

    def _finish(
        self,
        seconds: float,
        spans: Iterable[Span],
        transfers: Iterable[Transfer],
        prefetch_depth: int,
    ) -> None:
        self.seconds, self._prefetch_depth = seconds, prefetch_depth
        self.spans = sorted(spans, key=lambda span: span.begin)
        self.transfers = sorted(transfers, key=lambda transfer: transfer.begin)
        labels = dict.fromkeys([t.layer for t in self.transfers] + [s.layer for s in self.spans])
        self.layers = [self._layer(label) for label in labels]

    def _layer(self, label: str) -> LayerProfile:
        fetches, backups, exchanges = (
            [t for t in self.transfers if t.layer == label and t.kind == kind]
            for kind in ("fetch", "backup", "exchange")
        )
        return LayerProfile(
            label=label,
            compute_ms=1e3 * sum(s.end - s.begin for s in self.spans if s.layer == label),
            fetches=len(fetches),
            fetch_wait_ms=1e3 * sum(fetch.exposed for fetch in fetches),
            backups=len(backups),
            backup_wait_ms=1e3 * sum(backup.exposed for backup in backups),
            nbytes=sum(transfer.nbytes for transfer in fetches + backups + exchanges),
            exchanges=len(exchanges),
            exchange_ms=1e3 * sum(exchange.exposed for exchange in exchanges),
        )

    @property
    def exposed_ms(self) -> float:
        """How many milliseconds the computation waited for transfers, in all."""
        return sum(layer.exposed_ms for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """The bytes that this rank received in all its transfers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def bytes_per_second(self) -> float:
        """The speed of the transfers that the computation waited for, since only their ends are
        exact. Without any, of all transfers.
        """
        seen = [t for t in self.transfers if t.exposed >= SEEN] or self.transfers
        busy = _union((t.begin, t.end) for t in seen)
        return sum(t.nbytes for t in seen) / busy if busy else 0.0

    @property
    def advice(self) -> list[str]:
        """Changes that would make the waits shorter, the most effective first. `[]` if the waits
        are short already.
        """
        exposed, seconds = self.exposed_ms / 1e3, self.seconds
        if not seconds or exposed < 0.05 * seconds:
            return []
        found = []
        if (exchanges := sum(layer.exchange_ms for layer in self.layers)) > 0.5 * self.exposed_ms:
            return [
                f"exchanges of parts of sequences take {exchanges:.0f} ms, and nothing hides them: "
                "keep the ranks of a group (sp) on one host, or divide sequences over fewer ranks."
            ]
        worst = max(self.layers, key=lambda layer: layer.exposed_ms)
        if len(self.layers) > 2 and worst.exposed_ms > 0.5 * self.exposed_ms:
            found.append(
                f"layer {worst.label} alone is waited for {worst.exposed_ms:.0f} ms: split it "
                "into several layers."
            )
        moving = _union((transfer.begin, transfer.end) for transfer in self.transfers)
        computing = max(seconds - exposed, 1e-9)
        if moving < computing and self._prefetch_depth < 4:
            found.append(
                f"transfers take {moving / seconds:.0%} of the time and could hide behind "
                f"computation: try ShardingPolicy(prefetch_depth={self._prefetch_depth + 1}), for "
                "the memory of one more layer."
            )
        else:
            found.append(
                "the link is the limit: larger batches, or several micro-batches a step inside "
                "zero3.no_sync, make more of each byte."
            )
        found.append(
            "ShardingPolicy(param_dtype=torch.bfloat16) halves the bytes of fp32 gathers; "
            "reshard_after_forward=False saves the second gather, for the memory of a whole "
            "layer each."
        )
        return found

    def __str__(self) -> str:
        width = max([len(layer.label) for layer in self.layers] + [5])
        lines = [
            f"{name:<{width}} {compute:>9} {fetches:>7} {waits:>8} {backups:>7} {more:>8} {mb:>9}"
            for name, compute, fetches, waits, backups, more, mb in [_HEADER, *self._rows()]
        ]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        return table("zero3 profile", self._rows(), _HEADER, self._notes())

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                layer.label,
                f"{layer.compute_ms:.1f}ms",
                f"{layer.fetches}",
                f"{layer.fetch_wait_ms:.1f}ms",
                f"{layer.backups}",
                f"{layer.backup_wait_ms:.1f}ms",
                f"{layer.nbytes / 1e6:.1f}",
            )
            for layer in self.layers
        ]

    def _notes(self) -> Iterator[str]:
        share = self.exposed_ms / 1e3 / self.seconds if self.seconds else 0.0
        yield (
            f"{self.seconds:.3f} s, of which computation stood still for transfers "
            f"{self.exposed_ms:.1f} ms ({share:.1%}); received {self.nbytes / 1e6:.1f} MB, at "
            f"{self.bytes_per_second / 1e6:.0f} MB/s"
        )
        if number := sum(layer.exchanges for layer in self.layers):
            took = sum(layer.exchange_ms for layer in self.layers)
            nbytes = sum(t.nbytes for t in self.transfers if t.kind == "exchange")
            yield (
                f"of that {took:.1f} ms for {number} exchanges of parts of sequences, "
                f"{nbytes / 1e6:.1f} MB"
            )
        if self.gates:
            waited = 1e3 * sum(self.gates)
            yield f"{len(self.gates)} gates of towers, where the host waited {waited:.1f} ms"
        for layer, share in self.busiest.items():
            yield (
                f"{layer}: the busiest rank gets {share:.2f} x the mean of this rank's rows of "
                f"tokens; {self.loads[layer]:.2f} x as many come here as this rank sends"
            )
        yield from self.advice

    def draw(self, path: str | PathLike[str], begin: float = 0.0, end: float | None = None) -> None:
        """Draws fetch, compute and backup lanes over time.

        Args:
            path: The picture's file; its suffix says the format.
            begin: Where the picture begins, in seconds from the beginning of the profile.
            end: Where it ends. None: at the end of the profile.

        Raises:
            RuntimeError: matplotlib is not installed.
        """
        if find_spec("matplotlib") is None:
            raise RuntimeError("a picture of a profile needs matplotlib: pip install matplotlib")
        figure = import_module("matplotlib.figure").Figure(figsize=(12, 2.8), layout="constrained")
        _draw(figure.subplots(), self, begin, self.seconds if end is None else end)
        figure.savefig(path, dpi=150)


_COLORS = MappingProxyType(
    {
        "forward": "tab:blue",
        "backward": "tab:orange",
        "fetch": "tab:green",
        "backup": "tab:purple",
        "exchange": "tab:brown",
        "waits": "tab:red",
    }
)
_LANES = ("backup", "compute", "fetch")


def _draw(axes: Any, profile: Profile, begin: float, end: float) -> None:
    numbers = {layer.label: str(number) for number, layer in enumerate(profile.layers)}

    def bar(lane: str, kind: str, first: float, last: float, text: str) -> None:
        if last < begin or first > end:
            return
        place, color = _LANES.index(lane), _COLORS[kind]
        when, high = [(1e3 * first, 1e3 * (last - first))], (place - 0.4, 0.8)
        axes.broken_barh(when, high, facecolor=color, edgecolor="white", linewidth=0.5)
        if last - first > (end - begin) / 60:
            style = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
            axes.text(1e3 * (first + last) / 2, place, text, clip_on=True, **style)

    for span in profile.spans:
        bar("compute", span.phase, span.begin, span.end, numbers[span.layer])
    for transfer in profile.transfers:
        lane = "compute" if transfer.kind == "exchange" else transfer.kind
        bar(lane, transfer.kind, transfer.begin, transfer.end, numbers[transfer.layer])
        if transfer.exposed >= SEEN and lane != "compute":
            bar("compute", "waits", transfer.stopped, transfer.resumed, numbers[transfer.layer])
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_xlim(1e3 * begin, 1e3 * end)
    axes.set_xlabel("ms")
    for kind, color in _COLORS.items():
        axes.broken_barh([], (0, 0), facecolor=color, label=kind)
    over = {"loc": "upper center", "bbox_to_anchor": (0.5, 1.18), "ncols": len(_COLORS)}
    axes.legend(**over, fontsize=8, frameon=False)


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of the intervals."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
