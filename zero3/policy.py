"""What a user may choose about sharding."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

__all__: list[str] = []


@dataclass(frozen=True, slots=True, repr=False)
class ShardingPolicy:
    """Every choice about sharding. It is the same on every rank.

    A bad value is refused when the policy is made. Chunks keep the dtype that the model was wrapped in: this is the master copy,
    which the optimizer updates and checkpoints hold. A chunk is cast before it travels, so `param_dtype=torch.bfloat16` halves
    the bytes of every gather.

    Attributes:
        param_dtype: The dtype in which floating parameters, trainable and frozen, are gathered and computed with. None: as stored.
        reduce_dtype: The dtype in which gradients are added up within a backward and over ranks. Micro-batches add up in it too
            where `chunk.grad` is narrower. None: `param_dtype` or, without it, the chunk's dtype.
        output_dtype: The dtype that floating tensors of the outputs are cast to. Under `shard` the root alone casts. None: no cast.
        cast_forward_inputs: Floating tensors among the arguments are cast to `param_dtype`, if there is one.
        stage: How much is divided by the number of ranks beside the optimizer's state (ZeRO's stages). 3: parameters and
            gradients. 2: gradients; parameters stay whole, and are gathered once after they have changed, for which each forward
            compares one byte a layer between ranks, and the host waits. 1: neither; backwards add whole gradients up, which are
            reduced on every rank when clipping or the optimizer first looks at one. Stages 1 and 2 pay memory for communication.
        dynamic: Ranks may leave out layers that others call (layer drop, early exit, layers that are experts). Every rank then
            takes part in every layer's transfers, in the order in which layers stand in the model, and adds zeros to gradients
            of layers that it did not call. A layer may be called once in a forward, and in that order. Every rank that trains
            calls at least one layer. Ranks compare 16 bytes at the end of each forward.
        gradient_reduction: `"mean"` over ranks, as DDP and FSDP reduce, or `"sum"`.
        reshard_after_forward: Release a layer's full parameters after its forward, and gather them again for its backward.
            False keeps them until then: one gather in a step instead of two, for the memory of a whole layer each.
        prefetch_depth: How many layers may be gathered ahead of the one that computes, and how many gradient reductions may be
            under way (one at least). 0 gathers each layer when it is needed, and waits for it.
        separate_backup_group: Reductions have a communicator of their own, so that on NCCL they do not queue behind gathers. It
            costs one more communicator's buffers, and NCCL's authors warn that two communicators at work at once may deadlock.
        transactional: A backward that raises takes back its own gradients, and leaves those of earlier micro-batches. Otherwise
            all are dropped. Micro-batches after the first hold one more gradient shard. For a failure of one rank alone see
            `step_guard`.
        compare_every: After so many transfers ranks compare a rolling hash of them, at the next forward. 0: never. 1: before
            every gather, to find where ranks part. Under `step_guard` the hash travels with the end of each micro-batch instead.

    Raises:
        ValueError: A value that is not one of those named above, or options that exclude each other.
        TypeError: A value of another type.

    Example::

        policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        layers = [zero3.Zero3Layer(block, policy=policy) for block in blocks]
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    stage: Literal[1, 2, 3] = 3
    dynamic: bool = False
    gradient_reduction: Literal["mean", "sum"] = "mean"
    reshard_after_forward: bool = True
    prefetch_depth: int = 1
    separate_backup_group: bool = False
    transactional: bool = False
    compare_every: int = 1000

    def __post_init__(self) -> None:
        if repr(self.stage) not in ("1", "2", "3"):  # neither True nor 2.0
            raise ValueError(f"stage must be 1, 2 or 3, found {self.stage!r}")
        if self.gradient_reduction not in ("mean", "sum"):
            raise ValueError(f"gradient_reduction must be 'mean' or 'sum', found {self.gradient_reduction!r}")
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype or None, found {dtype!r}")
            if dtype is not None and (not dtype.is_floating_point or dtype.itemsize < 2):
                raise ValueError(f"{name} must be a floating dtype of 16 bits or more, found {dtype}")
        for name in ("dynamic", "cast_forward_inputs", "reshard_after_forward", "separate_backup_group", "transactional"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, found {getattr(self, name)!r}")
        if self.transactional and self.stage == 1:
            raise ValueError("transactional=True needs stage 2 or 3: with stage=1 gradients are reduced after backward")
        for name in ("prefetch_depth", "compare_every"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name} must be an integer, found {number!r}")
            if number < 0:
                raise ValueError(f"{name} must be 0 or more, found {number}")

    def __repr__(self) -> str:
        """Names only the fields that differ from their defaults."""
        chosen = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"ShardingPolicy({', '.join(chosen)})"
