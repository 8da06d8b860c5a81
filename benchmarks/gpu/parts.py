"""The measurements, each the body of a fresh process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zero3
from benchmarks.common.alone import rank_zero_of
from benchmarks.common.report import median
from benchmarks.common.systems import NO_COMMUNICATION, SYSTEMS, Training
from benchmarks.gpu.device import Gpu, device, join_alone
from benchmarks.gpu.llama import Shape, stack

PLAIN = "plain torch"


def build(system: str, modules: list[nn.Module], of: Gpu) -> Training:
    return SYSTEMS[NO_COMMUNICATION if system == PLAIN else system](modules, "adamw", device=of.name)


def one_step(training: Training, x: torch.Tensor) -> None:
    training.backward(training.model(x).float().square().mean())
    training.update()


def steps_of(training: Training, x: torch.Tensor, steps: int, of: Gpu) -> tuple[list[float], list[float]]:
    """Seconds of each step on the device, and on the host until everything was handed to it."""
    on_device, on_host = [], []
    for _ in range(steps):
        of.synchronize()
        first, begin = of.clock.now(), time.perf_counter()
        one_step(training, x)
        on_host.append(time.perf_counter() - begin)
        on_device.append(of.clock.seconds(first, of.clock.now()))
    return on_device, on_host


def alone_on_the_card(system: str, shape: Shape, depth: int, steps: int, smoke: bool) -> dict[str, Any]:
    """(a) One rank: time and memory against plain torch. Then the same steps under torch's profiler: is the device ever idle?"""
    of = device(smoke)
    join_alone(of)
    training = build(system, stack(shape, depth, of.name), of)
    x = torch.randn(shape.batch, shape.sequence, shape.hidden, device=of.name, dtype=torch.bfloat16)
    steps_of(training, x, 3, of)
    of.restart_peaks()
    on_device, on_host = steps_of(training, x, steps, of)
    found = {"device": on_device, "host": on_host, **of.peaks(), "kernels": kernels(training, x, of)}
    dist.destroy_process_group()
    return found


def kernels(training: Training, x: torch.Tensor, of: Gpu) -> list[tuple[int, float, float]]:
    """(stream, begin, end) in ms of everything that one step runs on the device."""
    if of.name == "cpu":
        one_step(training, x)
        return [(0, 0.0, 1.0), (0, 1.5, 2.0)]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        one_step(training, x)
        of.synchronize()
    every = seen.profiler.kineto_results.events()
    events = [e for e in every if e.device_type() == torch.autograd.DeviceType.CUDA and not e.is_user_annotation()]
    start = min(event.start_ns() for event in events)
    return sorted((e.device_resource_id(), (e.start_ns() - start) / 1e6, (e.start_ns() - start + e.duration_ns()) / 1e6) for e in events)


def idle(intervals: list[tuple[int, float, float]]) -> float:
    """The share of a step in which nothing at all ran on the device."""
    reached = gaps = 0.0
    for begin, end in sorted((begin, end) for _, begin, end in intervals):
        gaps, reached = gaps + max(0.0, begin - reached), max(reached, end)
    return gaps / reached


def over_a_link(system: str, shape: Shape, depth: int, steps: int, ranks: int, speed: float, smoke: bool, picture: str) -> dict[str, Any]:
    """(c) Rank 0 of `ranks`, transfers replaced by delays on one link of `speed` bytes a second; 0: they take no time."""
    of = device(smoke)
    carried = [0]
    with rank_zero_of(ranks) as transfers:
        training = build(system, stack(shape, depth, of.name), of)
        x = torch.randn(shape.batch, shape.sequence, shape.hidden, device=of.name, dtype=torch.bfloat16)
        link = of.link(speed) if speed else lambda nbytes: None

        def carry(nbytes: int) -> None:
            carried[0] += nbytes
            link(nbytes)

        steps_of(training, x, 2, of)  # ranks compare what they do, once
        transfers.replace(carry)
        steps_of(training, x, 2, of)
        carried[0] = 0
        of.restart_peaks()
        on_device, on_host = steps_of(training, x, steps, of)
        nbytes, peaks = carried[0] / steps, of.peaks()
        if picture and system == "zero3":
            with zero3.profile(training.model) as found:
                one_step(training, x)
                of.synchronize()
            Path(picture).parent.mkdir(parents=True, exist_ok=True)
            found.draw(picture)
    return {"seconds": median(on_device), "host": median(on_host), "nbytes": nbytes, **peaks}
