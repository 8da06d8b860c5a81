"""What a user may choose about sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class ShardingPolicy:
    """How a layer is sharded; the same on every rank. Bad values are refused here, with ValueError or TypeError.

    Attributes:
        gradient_reduction: `"mean"` over ranks (as DDP and FSDP do) or `"sum"`.
        reshard_after_forward: release a layer's full parameters after its forward and gather them again for
            backward (ZeRO-3). `False` keeps them until its backward is over: one all-gather a step instead of two,
            for the memory of a whole layer each.
        prefetch_depth: how many layers may be gathered ahead of the one that computes, and how many gradient
            reductions may be on the way (at least one). 0 gathers each layer when it is needed, and waits.
        separate_backup_group: give reductions a communicator of their own, so that on NCCL they do not queue
            behind gathers. Costs one more communicator's buffers.
    """

    gradient_reduction: Literal["mean", "sum"] = "mean"
    reshard_after_forward: bool = True
    prefetch_depth: int = 1
    separate_backup_group: bool = True

    def __post_init__(self) -> None:
        if self.gradient_reduction not in ("mean", "sum"):
            raise ValueError(f"gradient_reduction must be 'mean' or 'sum', found {self.gradient_reduction!r}")
        for name in ("reshard_after_forward", "separate_backup_group"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, found {getattr(self, name)!r}")
        if not isinstance(self.prefetch_depth, int) or isinstance(self.prefetch_depth, bool):
            raise TypeError(f"prefetch_depth must be an integer, found {self.prefetch_depth!r}")
        if self.prefetch_depth < 0:
            raise ValueError(f"prefetch_depth must be 0 or more, found {self.prefetch_depth}")
