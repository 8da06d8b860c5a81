"""What a user may choose about sharding."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

__all__: list[str] = []


@dataclass(frozen=True, slots=True, repr=False)
class ShardingPolicy:
    """How a layer is sharded; the same on every rank. Bad values are refused here, with ValueError or TypeError.

    Mixed precision: chunks keep the dtype that the model was wrapped in (the master copy, which the optimizer updates and
    checkpoints hold); a chunk is cast before it travels, so `param_dtype=torch.bfloat16` halves the bytes of every gather.

    Attributes:
        param_dtype: floating parameters, trainable and frozen, are gathered and computed with in it; None: as they are.
        reduce_dtype: of gradients while they are added up within a backward and over ranks, and of what `chunk.grad`
            accumulates where that is narrower. None: `param_dtype`, or else the chunk's.
        output_dtype: what floating tensors of the outputs are cast to. Under `shard` the root alone does it.
        cast_forward_inputs: floating tensors among the arguments are cast to `param_dtype`, if that is given.
        stage: what is divided by the number of ranks, beside the optimizer's state (ZeRO's stages). 3: parameters and
            gradients too. 2: parameters stay whole from step to step, and are gathered once after they have changed; a
            forward begins with a look whether they have (one byte a layer is reduced, and the host waits for it). 1: as 2,
            and gradients stay whole: backwards add them up, and they are reduced when clipping or the optimizer first looks
            at one, on every rank. Without 3, memory buys communication; at 1 most for accumulation.
        dynamic: ranks may leave out layers that others call (layer drop, early exit, experts that are layers). Every rank
            then takes part in every layer's transfers, called or not, in the order in which layers stand in the model, and
            adds zeros to gradients; a layer that is called twice, or out of that order, and an exception in one rank's
            forward, are errors on all ranks at the end of the forward, where 16 bytes a rank are compared. Every rank that
            trains has to call at least one layer: backward begins there.
        gradient_reduction: `"mean"` over ranks (as DDP and FSDP do) or `"sum"`.
        reshard_after_forward: release a layer's full parameters after its forward and gather them again for
            backward (ZeRO-3). `False` keeps them until its backward is over: one all-gather a step instead of two,
            for the memory of a whole layer each.
        prefetch_depth: how many layers may be gathered ahead of the one that computes, and how many gradient
            reductions may be on the way (at least one). 0 gathers each layer when it is needed, and waits.
        transactional: an exception in a backward takes back what that backward brought, and leaves the gradients of earlier
            micro-batches (otherwise they are dropped with it). Gradients join the chunk's at the end of each backward, so
            micro-batches after the first hold one more gradient shard. See `step_guard` for failures of one rank alone.
        compare_every: ranks compare a rolling hash of their transfers when so many have been made, at the next forward; 0 never. 1 is
            for debugging: before every gather. Under `step_guard` it travels with each micro-batch's end instead.
        separate_backup_group: give reductions a communicator of their own, so that on NCCL they do not queue
            behind gathers. Costs one more communicator's buffers.
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
    separate_backup_group: bool = True
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
        """Only what was chosen: the rest is as in the documentation."""
        chosen = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"ShardingPolicy({', '.join(chosen)})"
