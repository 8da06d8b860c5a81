"""What the benchmark needs of a GPU, and what stands for it in a smoke test on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zero3.comm.streams import Clock, clock_for


class Gpu:
    name, backend = "cuda", "nccl"

    def __init__(self) -> None:
        self.clock: Clock = clock_for(torch.device(self.name))

    def total_memory(self) -> int:
        return torch.cuda.get_device_properties(0).total_memory

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def restart_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peaks(self) -> dict[str, int]:
        return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def outside(self) -> int:
        """Bytes of the card that torch's allocator has not reserved, and that are not free: CUDA's context, kernels, libraries."""
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    def link(self, bytes_per_second: float) -> Callable[[int], None]:
        """One link that carries one transfer at a time: the current stream goes on when the link has carried its bytes.

        The delay is a kernel that counts clock cycles on one multiprocessor: it takes time, and nothing from the computation.
        """
        stream, cycles = torch.cuda.Stream(), self._cycles_per_second()

        def carry(nbytes: int) -> None:
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(max(1, int(nbytes / bytes_per_second * cycles)))
            current.wait_stream(stream)

        return carry

    def _cycles_per_second(self) -> float:
        cycles = 200_000_000
        for _ in range(2):  # the first time the clock may still be low
            begin = self.clock.now()
            torch.cuda._sleep(cycles)
            end = self.clock.now()
            seconds = self.clock.seconds(begin, end)
        return cycles / seconds


class Cpu(Gpu):
    """The same paths without a GPU. What it measures means nothing."""

    name, backend = "cpu", "gloo"

    def total_memory(self) -> int:
        return 0

    def synchronize(self) -> None: ...

    def restart_peaks(self) -> None: ...

    def peaks(self) -> dict[str, int]:
        return {"allocated": 0, "reserved": 0}

    def empty_cache(self) -> None: ...

    def outside(self) -> int:
        return 0

    def link(self, bytes_per_second: float) -> Callable[[int], None]:
        return lambda nbytes: time.sleep(nbytes / bytes_per_second)


def device(smoke: bool) -> Gpu:
    return Cpu() if smoke else Gpu()


def join_alone(of: Gpu) -> None:
    """A group of this process only, on the device's own backend."""
    options: dict[str, Any] = {"device_id": torch.device("cuda", 0)} if of.name == "cuda" else {}
    dist.init_process_group(of.backend, store=dist.HashStore(), rank=0, world_size=1, **options)
