"""Options that are integers take those of numpy too, as configurations and arithmetic bring them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3
from tests.support.models import WIDTH, linear, mlp, rows

numpy = pytest.importorskip("numpy")


def sharded() -> torch.nn.Module:
    return zero3.shard(mlp(), layers=[torch.nn.Sequential])


def one_group(n: Any) -> Any:
    (group,) = zero3.param_groups(sharded(), lambda name, info: {"align": n})
    return group["align"]


def one_save(n: Any, path: Path) -> Any:
    model = sharded()
    for step in range(3):
        zero3.save_checkpoint(path / str(step), model, keep_last=n)
    return len(list(path.iterdir()))


def one_extra(n: Any, path: Path) -> Any:
    zero3.save_checkpoint(path, sharded(), extra={"step": n})
    return zero3.load_checkpoint(path, sharded())


def one_plan(n: Any) -> Any:
    transformers = pytest.importorskip("transformers", "5.4")  # older ones can't be planned
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return zero3.plan(model, ranks=n, mesh=(1, n), batch=n, sequence=16, rank=n - 1, memory=n * 1_000_000).peak_bytes


def one_offload(n: Any) -> Any:
    with zero3.offload_activations(min_bytes=n):
        return mlp()(rows(1)).shape[1]


TAKES: dict[str, Callable[[Any, Path], Any]] = {
    "ShardingPolicy": lambda n, path: repr(zero3.ShardingPolicy(stage=n, prefetch_depth=n, compare_every=n, resident_bytes=n)),
    "NF4": lambda n, path: repr(zero3.NF4(block_size=32 * n)),
    "Int8": lambda n, path: repr(zero3.Int8(block_size=n, seed=n)),
    "Float8": lambda n, path: repr(zero3.Float8(block=(n, n))),
    "align": lambda n, path: one_group(n),
    "keep_last": one_save,
    "plan": lambda n, path: one_plan(n),
    "offload_activations": lambda n, path: one_offload(n),
    "tile": lambda n, path: zero3.tile(linear(), n)(torch.ones(1, WIDTH)).shape[0],
    "stream_weights": lambda n, path: len(list(zero3.stream_weights(sharded(), max_bytes=n))),
    "BatchFinder": lambda n, path: next(zero3.BatchFinder(sharded(), n).micro_batches(rows(3))).rows,
    "shard": lambda n, path: zero3.is_sharded(zero3.shard(mlp(), layers=[torch.nn.Sequential], world_size=n - 1, rank=n - 2)),
    "extra": one_extra,
}


@pytest.mark.parametrize("what", TAKES)
def test_an_option_takes_integers_of_numpy(what: str, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    assert repr(TAKES[what](numpy.int64(2), tmp_path / "a")) == repr(TAKES[what](2, tmp_path / "b"))


@pytest.mark.parametrize("value", [True, 2.0, "2", None, numpy.float64(2), numpy.bool_(True)], ids=repr)
def test_what_is_no_integer_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="prefetch_depth must be an integer"):
        zero3.ShardingPolicy(prefetch_depth=value)


def test_a_time_of_numpy_is_no_integer_of_extra(tmp_path: Path) -> None:
    """numpy counts it among integers."""
    with pytest.raises(TypeError, match=r"^extra is a datetime\.timedelta: checkpoints"):
        zero3.save_checkpoint(tmp_path, sharded(), extra=numpy.timedelta64(5, "s"))
