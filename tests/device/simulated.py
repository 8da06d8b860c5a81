"""The simulated device in the empty CUDA slot of torch's CPU build. Import this before torch.

    from tests.device import simulated
    simulated.schedule("demand", seed=1)
    ... torch.randn(3, device="cuda") ...

ZERO3_DEVICE: the slot that the device takes, "cuda" (default) or "privateuseone", which torch keeps for other makers' devices. There
the device is named "simulated".
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from tests.device.build import build

assert "torch" not in sys.modules, "import tests.device.simulated before torch: torch asks once whether there is CUDA"
STUCK = "no stream can go on"  # in the errors of a device whose queued work all waits for what no host will issue
COUNT = 4  # devices
TYPE = os.environ.get("ZERO3_DEVICE", "cuda")
_path = build()
ctypes.CDLL(str(_path), mode=ctypes.RTLD_GLOBAL)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

_spec = importlib.util.spec_from_file_location("_simulated", _path)
assert _spec is not None and _spec.loader is not None
C: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(C)
C.start(COUNT, TYPE)
if TYPE != "cuda":
    TYPE = "simulated"
    torch.utils.rename_privateuse1_backend(TYPE)
C.bind_nccl()
assert C.is_asked(), "torch asked for CUDA before the simulated device was there"

POLICIES = {"random": 0, "compute": 1, "lanes": 2, "low": 3, "high": 4, "demand": 5}
MEMORY = {"off": 0, "strict": 1, "exact": 2}


def schedule(policy: str = "random", seed: int = 0, *, progress: float = 0.0, eager: bool = False, memory: str = "strict") -> None:
    """How the device works from now on.

    Args:
        policy: Whose turn it is. "random"; "compute", "lanes": default streams first or last; "low", "high": by the streams' numbers;
            "demand": only what the waiting host depends on.
        seed: For what is left to chance.
        progress: The chance that an operation lets the device execute up to eight tasks though no host waits.
        eager: Every operation is waited for: execution in order.
        memory: When memory that was given back is spoilt. "strict": in its stream at once. "exact": when it is handed out again, as
            on a GPU. "off": never.
    """
    C.schedule(POLICIES[policy], seed, progress, eager, MEMORY[memory])


def recover() -> None:
    """Empties all streams, after a run that broke."""
    C.clear()
    C.set_room(0)
    C.set_hosts(0)


def left_behind() -> list[int]:
    """Bytes that each device holds once all that earlier tests left has come to its end: queued work that no host waits for, graphs
    that autograd's threads let go of last, circles. For what stays after ten seconds nobody waits.
    """
    for _ in range(100):
        gc.collect()
        for device in range(COUNT):
            torch._C._accelerator_synchronizeDevice(device)
        if not any(left := [C.allocated(device) for device in range(COUNT)]):
            break
        time.sleep(0.1)
    return left


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch._C._accelerator_getDeviceIndex() if index is None else index


class _Stream:
    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> torch.Stream:
        return torch.Stream(device=torch.device(TYPE, _index(device)), priority=priority)


class _Event:
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        return torch.Event(device=torch.device(TYPE, _index(None)), enable_timing=enable_timing)


@contextlib.contextmanager
def _on_stream(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    device = stream.device.index
    stream_before, device_before = C.get_stream(device), _index(None)
    C.set_device(device)
    C.set_stream(device, stream.stream_id)
    try:
        yield
    finally:
        C.set_stream(device, stream_before)
        C.set_device(device_before)


def _functions() -> dict[str, Callable[..., Any]]:
    """What torch.cuda, or the module of another device, offers."""
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: COUNT,
        "current_device": lambda: _index(None),
        "set_device": lambda device: C.set_device(_index(device)),
        "_exchange_device": lambda index: torch._C._accelerator_exchangeDevice(index),
        "_maybe_exchange_device": lambda index: torch._C._accelerator_maybeExchangeDevice(index),
        "Stream": _Stream,
        "Event": _Event,
        "stream": _on_stream,
        "current_stream": lambda device=None: torch._C._accelerator_getStream(_index(device)),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=_index(device), device_type=_type_number()),
        "synchronize": lambda device=None: torch._C._accelerator_synchronizeDevice(_index(device)),
        "_sleep": lambda cycles: C.sleep(int(cycles / 2000)),
        "memory_allocated": lambda device=None: C.allocated(_index(device)),
        "max_memory_allocated": lambda device=None: C.peak(_index(device)),
        "reset_peak_memory_stats": lambda device=None: C.reset_peak(_index(device)),
        "set_sync_debug_mode": lambda mode: C.set_sync_mode({"default": 0, "warn": 1, "error": 2}.get(mode, mode)),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }


def _type_number() -> int:
    return torch.Stream(device=torch.device(TYPE, 0)).device_type


def _install() -> None:
    if TYPE == "cuda":
        for name, function in _functions().items():
            setattr(torch.cuda, name, function)
    else:
        torch._register_device_module(TYPE, type("module", (), {name: staticmethod(f) for name, f in _functions().items()}))
    torch.accelerator.empty_cache = _functions()["empty_cache"]
    real_resize = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != TYPE:
            return real_resize(self, size)
        C.resize_storage(self, size)
        return self

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]


def _install_nccl() -> None:
    """What torch itself does if it is built with NCCL."""
    module: Any = dist.distributed_c10d
    if TYPE == "cuda":
        module._NCCL_AVAILABLE = True
        module.default_pg_nccl_timeout = timedelta(minutes=10)
        module.ProcessGroupNCCL = dist.ProcessGroupNCCL = C.ProcessGroupNCCL
        torch.cuda.nccl.version = lambda: (2, 0, 0)  # errors of torch.distributed's tell it
        return

    def make(options: Any, _: Any) -> Any:
        own = C.ProcessGroupNCCL.Options()
        own._timeout = options.timeout
        return C.ProcessGroupNCCL(options.store, options.group_rank, options.group_size, own)

    dist.Backend.register_backend("simulated", make, extended_api=True, devices=[TYPE])


def _install_gloo() -> None:
    """gloo takes tensors of the device and copies them through host memory, as torch does if it is built with CUDA."""

    def staged(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [a for a in tree_leaves(arguments) if isinstance(a, torch.Tensor) and a.device.type == TYPE]
            if not tensors or "gloo" not in dist.get_backend(options.get("group")):
                return collective(*arguments, **options)
            host = {id(tensor): tensor.cpu() for tensor in tensors}
            work = collective(*tree_map(lambda a: host.get(id(a), a), arguments), **options)
            if work is not None:
                work.wait()
            for tensor in tensors:
                tensor.copy_(host[id(tensor)])
            return work

        return call

    for name in ("all_reduce", "all_gather_single", "all_gather_into_tensor", "broadcast", "scatter"):
        if hasattr(dist, name):
            setattr(dist, name, staged(getattr(dist, name)))


_install()
_install_nccl()
_install_gloo()
