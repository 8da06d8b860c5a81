"""What a policy or a kind of model asks for, in training as usual."""

from __future__ import annotations

import torch

import zero3
from tests.device.scenarios.registry import add
from tests.device.training import Adapted, Block, Mixed, Stack, Turning, in_sequence, sharded

for _depth in range(4):
    add(f"prefetch_depth_{_depth}", lambda me, depth=_depth: in_sequence(me, prefetch_depth=depth))
add("shard", sharded)
add("bf16", lambda me: sharded(me, param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
add("bf16_sums", lambda me: sharded(me, param_dtype=torch.bfloat16))
add("grad_dtype", lambda me: sharded(me, param_dtype=torch.bfloat16, grad_dtype=torch.float32))
add("ignored", lambda me: sharded(me, lambda: Stack().to(me.device), ignored=lambda name, info: name.endswith("norm.weight")))
add("sums_not_means", lambda me: sharded(me, gradient_reduction="sum"))
add("checkpoint_reentrant", lambda me: sharded(me, lambda: Stack(lambda: Block(reentrant=True))))
add("checkpoint_not_reentrant", lambda me: sharded(me, lambda: Stack(lambda: Block(reentrant=False))))
add(
    "checkpoint_bf16_depth_2",
    lambda me: sharded(me, lambda: Stack(lambda: Block(reentrant=False)), param_dtype=torch.bfloat16, prefetch_depth=2),
)
for _name, _kind in (("", None), ("_checkpoint_reentrant", True), ("_checkpoint_not_reentrant", False)):
    add(f"experts_at_home{_name}", lambda me, kind=_kind: sharded(me, lambda: Stack(lambda: Mixed(reentrant=kind)), expert_parallel=True))
add(
    "experts_at_home_quantised",
    lambda me: sharded(me, lambda: Stack(lambda: Mixed(trains=False)), expert_parallel=True, quantize=zero3.NF4()),
)
add("experts_at_home_prefetch", lambda me: sharded(me, lambda: Stack(Mixed), expert_parallel=True, prefetch_depth=2))
add("complex_parameters", lambda me: sharded(me, lambda: Stack(Turning)))
add("stage_1", lambda me: sharded(me, stage=1))
add("stage_2", lambda me: sharded(me, stage=2))
add("kept_between_forward_and_backward", lambda me: sharded(me, reshard_after_forward=False))
add("transactional", lambda me: sharded(me, transactional=True))
add("compare_every_transfer", lambda me: sharded(me, compare_every=1))
add("separate_backup_group", lambda me: sharded(me, separate_backup_group=True))
add("lora_on_a_bf16_base", lambda me: sharded(me, lambda: Stack(Adapted)))
for _kind in (zero3.NF4(), zero3.Int8(), zero3.Float8(block=(8, 8)), zero3.MXFP4()):
    add(f"lora_on_a_base_in_{type(_kind).__name__}", lambda me, kind=_kind: sharded(me, lambda: Stack(Adapted), quantize=kind))
add(
    "lora_on_a_quantized_base_with_prefetch",
    lambda me: sharded(me, lambda: Stack(Adapted), quantize=zero3.NF4(), prefetch_depth=2, param_dtype=torch.bfloat16),
)

COMPRESSED = {"gather_format": zero3.Int8(32), "reduce_format": zero3.Int8(32)}
add("compressed", lambda me: sharded(me, **COMPRESSED))
add("compressed_float8", lambda me: sharded(me, gather_format=zero3.Float8(block=(1, 16)), prefetch_depth=2))
add("compressed_stochastic", lambda me: sharded(me, reduce_format=zero3.Int8(stochastic=True)))
add("compressed_bf16", lambda me: sharded(me, param_dtype=torch.bfloat16, **COMPRESSED))
add("compressed_stage_2", lambda me: sharded(me, stage=2, **COMPRESSED))
add("compressed_transactional", lambda me: sharded(me, transactional=True, prefetch_depth=2, **COMPRESSED))
