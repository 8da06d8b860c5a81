"""A whole step of a Llama of 7 or 70 billion parameters on rank 0 of W, on paper: what it allocates, moves, and waits for.

    python -m tests.device.dry_run 70b --ranks 1024 --depth 1

zero3, torch's autograd and torch.distributed run as they would on a GPU; the simulated device drops all kernels and transfers, so
tensors take addresses and no memory. The other ranks are not there. Bytes are the allocator's, which rounds each tensor up to 512.
Activations are not counted: the step whose bytes are read has a batch of no rows.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.device import simulated
from tests.support.inside import chunks_of

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from torch import Tensor, nn  # isort: skip

import zero3  # isort: skip
from benchmarks.gpu.llama import LlamaBlock, Shape  # isort: skip
from tests.support.footprint import Bytes, Formula  # isort: skip
from zero3.comm.board import Board  # isort: skip
from zero3.comm.process_group import GroupCommunicator  # isort: skip

VOCABULARY = 32000
GB = 1e9


class Size(NamedTuple):
    blocks: int
    shape: Shape


SIZES = {
    "tiny": Size(3, Shape(hidden=64, intermediate=128, heads=4, groups=2, sequence=32)),
    "7b": Size(32, Shape(hidden=4096, intermediate=11008, heads=32, groups=32)),
    "70b": Size(80, Shape(hidden=8192, intermediate=28672, heads=64, groups=8)),
}
MIXED = Bytes(stored=4, computed=2, reduced=4, rounded_to=512, trailers_of=16)  # fp32 chunks, computation in bf16, reduction in fp32


class Readout(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.logits = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class Llama(nn.Module):
    """Calls `at("forward of i")` and `at("backward of i")` when block i has begun either."""

    def __init__(self, size: Size, at: Callable[[str], None]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.shape.hidden)
        self.blocks = nn.ModuleList(LlamaBlock(size.shape) for _ in range(size.blocks))
        self.readout = Readout(size.shape.hidden)
        for number, block in enumerate(self.blocks, 1):  # layer 0 is the embedding
            block.norm1.register_forward_pre_hook(lambda *_, number=number: at(f"forward of {number}"))
            block.down.register_forward_hook(lambda _, __, output, number=number: watch(output, lambda: at(f"backward of {number}")))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.readout(x)


def watch(output: Tensor, tell: Callable[[], None]) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: tell())


class Step(NamedTuple):
    """What was measured. Bytes of tensors on the device, without those of before the model was built."""

    points: dict[str, int]
    peak_of_backward: int
    transfers: Counter[str]  # how often
    moved: Counter[str]  # bytes of full buffers
    waits: list[str]  # why the host had to wait
    seconds: float


class DryRun:
    """A sharded model without values, and its optimizer, on rank 0 of `ranks`. To be made inside `alone`."""

    def __init__(self, size: Size, ranks: int, depth: int, offload: str | None = None) -> None:
        self._points: dict[str, int] = {}
        gc.collect()  # what others have left
        self._start = simulated.C.allocated(0)
        with torch.device("meta"):
            model = Llama(size, lambda name: self._points.update({name: self.now}))
        self.layers = [model.embedding, *model.blocks, model.readout]
        self.formula = Formula(
            ranks, depth, sizes=[[p.numel() for p in layer.parameters()] for layer in self.layers], unit=MIXED, embedding=True
        )
        policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, prefetch_depth=depth, offload=offload)
        self.model = zero3.shard(model, self.layers, device="cuda", policy=policy)
        for chunk in chunks_of(self.model):
            chunk.unloaded.clear()  # values never come
        self.optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(self.model), foreach=True)
        self._shape = size.shape

    @property
    def now(self) -> int:
        return int(simulated.C.allocated(0)) - self._start

    def step(self, rows: int, *, may_wait: bool = True) -> Step:
        """Forward, backward, clipping and update of a batch of so many rows. Unless it `may_wait`, a wait of the host is an error."""
        simulated.C.waits()
        torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
        began = time.perf_counter()
        with transfers_counted() as (transfers, moved):
            ids = torch.empty(rows, self._shape.sequence, dtype=torch.long, device="cuda")
            loss = self.model(ids).sum()
            self._points["between"] = self.now
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            peak = int(simulated.C.peak(0)) - self._start
            del loss, ids
            self._points["after backward"] = self.now
            zero3.clip_grad_norm_(self.model, 1.0)
            self.optimizer.step()
            self._points["after the step"] = self.now
            self.optimizer.zero_grad()
            self._points["after zero_grad"] = self.now
        seconds = time.perf_counter() - began
        torch.cuda.set_sync_debug_mode("default")
        return Step(dict(self._points), peak, transfers, moved, simulated.C.waits(), seconds)


@contextmanager
def transfers_counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    transfers, moved = Counter[str](), Counter[str]()

    def counted(name: str, full_of: Callable[..., Tensor], kind: str | None = None) -> Any:
        original = getattr(GroupCommunicator, name)

        def call(self: GroupCommunicator, *args: Any, **kwargs: Any) -> Any:
            transfers[kind or name] += 1
            moved[kind or name] += full_of(*args).nbytes
            return original(self, *args, **kwargs)

        return patch.object(GroupCommunicator, name, call)

    second = lambda _, full, *__: full  # noqa: E731
    with (
        counted("all_gather", lambda full, *_: full),
        counted("reduce_scatter", second),
        counted("reduce_to_mean", second, "reduce_scatter"),
    ):
        yield transfers, moved


class _SameOfAll:
    """What all ranks tell each other, if all say the same: the answer of a rank that is alone."""

    def __init__(self, told: Any, payloads: list[bytes]) -> None:
        self._told, self._payloads = told, payloads

    def ready(self) -> bool:
        return bool(self._told.ready())

    def read(self) -> list[bytes]:
        return self._payloads


@contextmanager
def alone(ranks: int) -> Iterator[None]:
    """This thread is rank 0 of `ranks` on "nccl", and the only one. The device does nothing."""
    exchange_later = GroupCommunicator.exchange_later

    def told(self: GroupCommunicator, payload: bytes, device: torch.device) -> Any:
        return _SameOfAll(exchange_later(self, payload, device), [payload] * ranks)

    with ExitStack() as stack:
        simulated.C.set_dry(True)
        stack.callback(simulated.C.set_dry, False)
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        stack.enter_context(patch.object(GroupCommunicator, "exchange", lambda self, payload, device: [payload] * ranks))
        stack.enter_context(patch.object(GroupCommunicator, "exchange_later", told))
        stack.enter_context(patch.object(Board, "meeting", lambda self, error=None: nullcontext()))  # nobody else will come
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--ranks", type=int, default=64, help="W (%(default)s)")
    parser.add_argument("--depth", type=int, default=1, help="prefetch_depth (%(default)s)")
    options = parser.parse_args()
    with alone(options.ranks):
        began = time.perf_counter()
        run = DryRun(SIZES[options.size], options.ranks, options.depth)
        built = time.perf_counter() - began
        run.step(0)
        empty, steady = run.step(0), run.step(1)
    formula = run.formula
    numel = sum(sum(sizes) for sizes in formula.sizes)
    print(f"{options.size}: {numel / 1e9:.2f} billion parameters, W = {options.ranks}, d = {options.depth}")
    print(f"  built in {built:.1f} s, a step takes {steady.seconds:.1f} s")
    rows = {
        "between steps": empty.points["after zero_grad"],
        "after backward": empty.points["after backward"],
        "in forward, at most": max(found for name, found in empty.points.items() if name.startswith("forward")),
        "in backward, at most": empty.peak_of_backward,
    }
    for name, found in rows.items():
        print(f"  {name}: {found / GB:.3f} GB")
    for name, count in steady.transfers.items():
        print(f"  {name}: {count}, {steady.moved[name] / GB:.3f} GB")
    print(f"  the host waits: {steady.waits or 'never'}")


if __name__ == "__main__":
    main()
