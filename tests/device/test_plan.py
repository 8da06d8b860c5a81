"""A plan for GPUs against the code for GPUs: peaks of a step on the simulated device, run dry, as its allocator counts them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
CASES = [("tiny", 3, 1, None), slow("7b", 64, 1, None)]
OFFLOADED = [("tiny", 2, 0, "cpu"), ("tiny", 64, 2, "files"), slow("7b", 512, 1, "cpu")]  # a chunk is in real memory


@pytest.mark.slow
@pytest.mark.parametrize(("size", "ranks", "depth", "offload"), CASES + OFFLOADED)
def test_plan_for_cuda_is_what_the_simulated_device_allocates(
    size: str, ranks: int, depth: int, offload: str | None, tmp_path: Path
) -> None:
    """In backward, within 1 %. Streams, NCCL's flat buffers and the allocator's units are the same in both; no kernel runs in either."""
    from tests.device.dry_run import SIZES, DryRun, Llama, alone

    import torch  # isort: skip
    from torch import nn

    import zero3
    from zero3.planning.trace import Trace

    offload = str(tmp_path) if offload == "files" else offload
    with alone(ranks):
        run = DryRun(SIZES[size], ranks, depth, offload)
        run.step(1)
        allocated = run.step(1).peak_of_backward
        del run

    def loss(model: nn.Module, batch: int, sequence: int) -> torch.Tensor:
        return model(torch.empty(batch, sequence, dtype=torch.long, device="meta")).sum()

    with torch.device("meta"):
        model = Llama(SIZES[size], lambda name: None)
    policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, prefetch_depth=depth, offload=offload)
    layers = [model.embedding, *model.blocks, model.readout]
    trace = Trace(model, ranks=ranks, policy=policy, device="cuda", optimizer=torch.optim.AdamW, layers=layers, loss=loss)
    moments = trace.measure(1, SIZES[size].shape.sequence)
    planned = max(moment.peak for moment in moments if moment.phase == "backward")
    assert planned == pytest.approx(allocated, rel=0.01), f"{planned / allocated - 1:+.2%}"
