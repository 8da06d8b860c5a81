"""The lanes of a step: a picture, and a Chrome trace that Perfetto opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.common.report import new_figure, save
from tests.device.clock import Span, Step

LANES = ("host", "compute", "side", "gather", "reduce", "other")
COLORS = {"host": "#999999", "compute": "#4477aa", "side": "#66ccee", "gather": "#228833", "reduce": "#ee6677", "other": "#ccbb44"}


def trace_events(step: Step, title: str) -> dict[str, Any]:
    """In the format of Chrome's traces: a process for the step, a thread for each lane, microseconds."""
    names = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    names += [{"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": lane}} for number, lane in enumerate(LANES)]
    spans = [
        {
            "ph": "X", "pid": 0, "tid": LANES.index(span.lane), "name": span.name, "ts": 1e6 * span.begin,
            "dur": 1e6 * (span.end - span.begin), "args": {"stream": span.stream},
        }
        for span in step.spans
    ]  # fmt: skip
    return {"traceEvents": [*names, *spans], "displayTimeUnit": "ms"}


def _busy(spans: list[Span], lane: str) -> list[tuple[float, float]]:
    """(begin, length), where gaps under 20 us are closed: a picture does not show them."""
    found: list[list[float]] = []
    for begin, end in sorted((span.begin, span.end) for span in spans if span.lane == lane):
        if found and begin - found[-1][1] < 20e-6:
            found[-1][1] = max(found[-1][1], end)
        else:
            found.append([begin, end])
    return [(1e3 * begin, 1e3 * (end - begin)) for begin, end in found]


def draw(steps: dict[str, Step], title: str, path: Path) -> None:
    """A row of lanes for each system, on one axis of time."""
    made = new_figure(14, 1.1 + 1.3 * len(steps))
    if made is None:
        return
    figure, axes = made
    labels, row = [], 0
    for name, step in steps.items():
        for lane in LANES:
            if busy := [each for each in _busy(step.spans, lane) if each[0] + each[1] > 0]:  # the host may be a step ahead
                axes.broken_barh(busy, (-row - 0.4, 0.8), facecolors=COLORS[lane])
                labels.append((-row, f"{name}: {lane}"))
                row += 1
        axes.axvline(1e3 * step.seconds, color="black", linewidth=0.8, linestyle=":")
        row += 0.5
    axes.set_yticks([at for at, _ in labels], [label for _, label in labels])
    axes.set_xlim(0, 1.01e3 * max(step.seconds for step in steps.values()))
    axes.set_xlabel("ms")
    axes.set_title(title)
    save(figure, path)
