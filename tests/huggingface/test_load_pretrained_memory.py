"""load_pretrained: how much host memory a rank needs. (A file of its own, for transformers has no part in it.)"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zero3
from tests.support.processes import Rank, on_ranks

WIDTH, DEPTH = 1024, 12
MEGABYTE = 2**20


def resident_bytes(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(which)).split()[1]) * 1024


def load_large(rank: Rank, directory: str) -> tuple[int, int]:
    """How much more memory the process held at most, and how much of it is chunks."""
    fill(f"{directory}/small", 4)  # what torch imports late, and gloo's buffers, are no part of it
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident_bytes("VmRSS")
    model = fill(directory, WIDTH)
    return resident_bytes("VmHWM") - before, sum(chunk.nbytes for chunk in model.parameters())


def fill(directory: str, width: int) -> nn.Module:
    with torch.device("meta"):
        layers = [nn.Linear(width, width) for _ in range(DEPTH)]
    model = zero3.Zero3Sequential([zero3.Zero3Layer(layer) for layer in layers])
    zero3.load_pretrained(model, directory)
    return model


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's account of a process's memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_stays_under_the_chunks_and_one_layer(dtype: torch.dtype, tmp_path: Path) -> None:
    """48 MB of parameters; also where the file's dtype is another."""
    (tmp_path / "small").mkdir()
    for width, directory in ((WIDTH, tmp_path), (4, tmp_path / "small")):
        save_file(nn.Sequential(*(nn.Linear(width, width) for _ in range(DEPTH))).to(dtype).state_dict(), directory / "model.safetensors")
    layer = (WIDTH * WIDTH + WIDTH) * 4
    for grown, chunks in on_ranks(2, load_large, str(tmp_path), fresh=True):
        assert chunks == pytest.approx(DEPTH * layer / 2, rel=0.01)
        assert grown < chunks + layer + 2 * MEGABYTE, (grown / MEGABYTE, chunks / MEGABYTE)
