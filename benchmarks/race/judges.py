"""Judges that nobody here wrote: torch's own trackers, on the CPU, without the simulated device.

    python -m benchmarks.race.judges memory 8b 8 1x2048 full       # FSDPMemTracker: FSDP2's peak, by cause
    python -m benchmarks.race.judges computation 8b 1 1x2048 full  # RuntimeEstimator: the roofline of a step's operators

FSDP2 runs under FakeTensorMode with torch's `fake` process group. What is printed is JSON, in bytes or in seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.race.models import loss_of, model_of
from zero3.planning.cluster import PRODUCT, STREAM, Cluster, cluster_of


def _forward_and_backward(model: nn.Module, rows: int, sequence: int) -> None:
    ids = torch.zeros(rows, sequence, dtype=torch.long)
    logits = model(ids)
    loss = loss_of(logits, ids)
    del logits
    loss.backward()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int, sequence: int) -> None:
    _forward_and_backward(model, rows, sequence)
    optimizer.step()
    optimizer.zero_grad()


def memory(name: str, ranks: int, rows: int, sequence: int, checkpointing: str) -> dict[str, Any]:
    """The peak of the second step of FSDP2, as torch's tracker has it, in bytes, by torch's words for causes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    with FakeTensorMode():
        model = model_of(name, sequence, checkpointing, "cpu")
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in (model.embedding, *model.blocks, model.readout):
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        _step(model, optimizer, rows, sequence)
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            _step(model, optimizer, rows, sequence)
        found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(cause, "value", cause)): nbytes for cause, nbytes in found.items()}


def computation(name: str, ranks: int, rows: int, sequence: int, checkpointing: str) -> dict[str, Any]:
    """The seconds of forward and backward on one rank, all in bf16, by torch's roofline with the constants of `zero3.plan`.

    torch takes each question for a tensor's device (`prim.device`) for an operator that reads all of it: these are left out.
    """
    cluster: Cluster = cluster_of("h100", 50e9)
    # torch takes 0.75 of what it calls a device's TFLOP/s, and counts two operations as one
    rates: dict[str, Any] = {
        "get_device_tflops": lambda dtype: cluster.flops * PRODUCT / 0.75 / 2e12,
        "get_gpu_dram_gbps": lambda: cluster.memory_bandwidth * STREAM / 1e9,
    }
    estimator, asked = RuntimeEstimator(), 0.0
    estimate = RuntimeEstimator._roofline_estimate

    def told(function: Any, args: Any, kwargs: Any) -> Any:
        nonlocal asked
        result, milliseconds = estimate(function, args, kwargs)
        asked += milliseconds / 1e3 if function is torch.ops.prim.device.default else 0.0
        return result, milliseconds

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "is_available", lambda: True))
        stack.enter_context(patch.object(RuntimeEstimator, "_roofline_estimate", told))
        for function, rate in rates.items():
            stack.enter_context(patch(f"torch.utils._runtime_estimation.{function}", rate))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(FakeTensorMode())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.bfloat16)
        model = model_of(name, sequence, checkpointing, "cpu")
        stack.enter_context(estimator("operator-level-cost-model"))
        _forward_and_backward(model, rows, sequence)
    return {"seconds": estimator.total_runtime / 1e3 - asked, "asked for a device": asked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("judge", choices=["memory", "computation"])
    parser.add_argument("model")
    parser.add_argument("ranks", type=int)
    parser.add_argument("batch")
    parser.add_argument("checkpointing")
    options = parser.parse_args()
    rows, sequence = map(int, options.batch.split("x"))
    judge = {"memory": memory, "computation": computation}[options.judge]
    print(json.dumps(judge(options.model, options.ranks, rows, sequence, options.checkpointing)))


if __name__ == "__main__":
    main()
