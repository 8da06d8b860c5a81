"""PyTorch's recipe "Shard Optimizer States with ZeroRedundancyOptimizer", with its own optimizer, with ours, and fully sharded.

    python examples/zero_redundancy_optimizer.py --help

Linear layers in a row, Adam, one step, in two processes on the CPU. What is printed is what rank 0's live tensors
take, in MB and in multiples of the model, and the sum of all parameters after the step: the same for all, since where
the state is kept does not change what is computed. To save memory in a DDP model of your own, change one line:

    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero3

MOMENTS = ["the model", "the model, wrapped", "before step()", "after step()", "most in step()", "most of all"]


class LiveBytes(TorchDispatchMode):
    """Inside, sees every tensor that is made, and knows how many bytes of their storages are left."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        alive = ((address, reference()) for address, reference in self._storages.items())
        sizes = {address: storage.nbytes() for address, storage in alive if storage is not None}
        self._storages = {address: self._storages[address] for address in sizes}
        return sum(sizes.values())


def plain(model: nn.Sequential) -> tuple[nn.Module, Callable[[], torch.optim.Optimizer]]:
    ddp = DistributedDataParallel(model)
    return ddp, lambda: torch.optim.Adam(ddp.parameters(), lr=0.01)


def torchs(model: nn.Sequential) -> tuple[nn.Module, Callable[[], torch.optim.Optimizer]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(model)
    return ddp, lambda: ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)


def ours(model: nn.Sequential) -> tuple[nn.Module, Callable[[], torch.optim.Optimizer]]:
    ddp = DistributedDataParallel(model)
    return ddp, lambda: zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)


def sharded(model: nn.Sequential) -> tuple[nn.Module, Callable[[], torch.optim.Optimizer]]:
    whole = zero3.Zero3Sequential([zero3.Zero3Layer(layer) for layer in model])
    return whole, lambda: torch.optim.Adam(whole.get_trainable_chunk(), lr=0.01)


SYSTEMS = {
    "DDP and Adam": plain,
    "DDP and torch's ZeroRedundancyOptimizer": torchs,
    "DDP and zero3.ZeroRedundancyOptimizer": ours,
    "zero3.Zero3Sequential and Adam": sharded,
}


def one_rank(rank: int, rendezvous: str, system: str, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.ranks)
    torch.manual_seed(0)
    with LiveBytes() as live:
        local = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
        measured = [live.now()]
        size = measured[0]
        model, make_optimizer = SYSTEMS[system](local)
        del local
        dist.barrier()  # DDP's first broadcast has let go of its copies
        measured.append(live.now())
        optimizer = make_optimizer()
        nn.functional.mse_loss(model(torch.randn(args.batch, args.width)), torch.randn(args.batch, args.width)).backward()
        measured.append(live.now())
        before, live.most = live.most, 0
        optimizer.step()
        measured += [live.now(), live.most, max(before, live.most)]
        with zero3.full_params(model) if isinstance(model, zero3.Zero3Sequential) else torch.no_grad():
            total = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    if rank == 0:
        results.put({"model": size, "bytes": dict(zip(MOMENTS, measured, strict=True)), "sum": total})
    dist.barrier()
    dist.destroy_process_group()


def table(reports: dict[str, Any]) -> str:
    rows = [f"| MB on rank 0 (x the model) | {' | '.join(MOMENTS)} | sum of all parameters |", "|---" * (len(MOMENTS) + 2) + "|"]
    for system, report in reports.items():
        cells = [f"{taken / 2**20:.1f} ({taken / report['model']:.2f})" for taken in report["bytes"].values()]
        rows.append(f"| {system} | {' | '.join(cells)} | {report['sum']:.6f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2000, help="of each layer, in and out")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM", help="; ".join(SYSTEMS))
    parser.add_argument("--output", type=Path, help="a JSON file for what was measured")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reports = {}
    for system in args.systems:
        results = mp.get_context("fork").SimpleQueue()
        with tempfile.TemporaryDirectory() as directory:
            mp.start_processes(one_rank, (f"{directory}/rendezvous", system, args, results), nprocs=args.ranks, start_method="fork")
        reports[system] = results.get()
    print(table(reports))
    if args.output:
        args.output.write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
