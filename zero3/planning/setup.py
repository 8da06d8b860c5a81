"""What is planned: every choice of a plan in one object, checked; and the trace of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from ..policy import ShardingPolicy
from .cluster import Cluster, replay
from .models import on_paper, prepare
from .trace import OptimizerClass, Trace

__all__: list[str] = []

DEVICES = ("cpu", "cuda")

# The fields of a policy that a trace follows. Another one that is set is refused by name.
FOLLOWED = frozenset(
    {
        "param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs", "stage", "dynamic", "gradient_reduction", "ignored",
        "reshard_after_forward", "prefetch_depth", "separate_backup_group", "transactional", "compare_every", "grad_dtype", "quantize",
        "gather_format", "reduce_format",
    }
)  # fmt: skip

# What no tensor tells, on a GPU: the least and the most, in bytes. Estimates, which docs/plan.md explains; we have not measured them.
_CONTEXT = (300 * 2**20, 700 * 2**20)  # CUDA's context and the kernels that it loads
_NCCL = (100 * 2**20, 600 * 2**20)  # buffers of a communicator
_FRAGMENTED = (0.0, 0.06)  # of the tensors' bytes, in the caching allocator


@dataclass(frozen=True, slots=True)
class Setup:
    """A model and how it is trained. Values are checked when it is made."""

    source: nn.Module  # on the meta device; each trace takes a copy
    ranks: int
    batch: int
    sequence: int
    policy: ShardingPolicy
    checkpointing: bool
    optimizer: OptimizerClass
    accumulation: int
    lora: Any
    device: str

    def __post_init__(self) -> None:
        for name in ("ranks", "batch", "sequence", "accumulation"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name} must be an integer, found {number!r}")
            if number < 1:
                raise ValueError(f"{name} must be 1 or more, found {number}")
        if not isinstance(self.policy, ShardingPolicy):
            raise TypeError(f"policy must be a zero3.ShardingPolicy, found {type(self.policy).__name__}")
        unknown = [f.name for f in fields(self.policy) if f.name not in FOLLOWED and getattr(self.policy, f.name) != f.default]
        if unknown:
            raise NotImplementedError(f"plans do not know {', '.join(f'ShardingPolicy({name}=...)' for name in unknown)} yet")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, found {self.device!r}")
        if isinstance(self.lora, bool | float | str) or (isinstance(self.lora, int) and self.lora < 1):
            raise ValueError(f"lora must be a rank of 1 or more, a configuration of peft's or None, found {self.lora!r}")

    def trace(self) -> Trace:
        """Builds the model on the meta device, and shards it."""
        model = prepare(on_paper(self.source), lora=self.lora, checkpointing=self.checkpointing)
        return Trace(model, ranks=self.ranks, policy=self.policy, device=self.device, optimizer=self.optimizer)

    def seconds(self, trace: Trace, cluster: Cluster) -> float:
        """The time of a step of `trace` on `cluster`."""
        events = trace.events(self.batch, self.sequence, self.accumulation)
        return replay(events, cluster, self.ranks, one_queue=not self.policy.separate_backup_group)

    def unknown(self, peak: int) -> tuple[int, int]:
        """The least and the most bytes that come on top of a peak of tensors."""
        if self.device == "cpu":
            return 0, 0
        low, high = (_CONTEXT[end] + (_NCCL[end] if self.ranks > 1 else 0) + int(_FRAGMENTED[end] * peak) for end in (0, 1))
        return low, high

    def room(self, memory: int) -> int:
        """The highest peak that fits into `memory`."""
        return int((memory - self.unknown(0)[1]) / (1 + _FRAGMENTED[1])) if self.device == "cuda" else memory

    def but(self, **changes: Any) -> Setup:
        """The same with other choices."""
        return replace(self, **changes)
