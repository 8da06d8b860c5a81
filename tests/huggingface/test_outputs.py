"""The sizes of files that are written, as people give them, and which tensors go into which."""

from __future__ import annotations

import pytest
import torch

from zero3.huggingface.outputs import Output, bytes_in, shards_of

SIZES = {
    "7": 7,
    "7b": 7,
    "1.5 KB": 1500,
    "2MB": 2 * 10**6,
    "5GB": 5 * 10**9,
    "1TB": 10**12,
    "1KiB": 1024,
    "1MiB": 1024**2,
    "3GiB": 3 * 1024**3,
}


@pytest.mark.parametrize("size", SIZES)
def test_max_shard_size_in_units(size: str) -> None:
    assert bytes_in(size) == SIZES[size]


def test_max_shard_size_is_filled_to_the_last_byte() -> None:
    outputs = [Output(str(size), torch.int8, (size,), None) for size in (3, 5, 4, 4, 1, 9, 8)]  # type: ignore[arg-type]
    shards = shards_of(outputs, 8)
    assert [[output.numel for output in shard] for shard in shards.values()] == [[3, 5], [4, 4], [1], [9], [8]]
    assert list(shards)[1] == "model-00002-of-00005.safetensors"
