"""What is planned: every choice of a plan in one object, checked; and the trace of it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..build.selecting import formats_of
from ..comm.plain_values import integer
from ..layer import states_in
from ..modules import find_parameters
from ..policy import ShardingPolicy
from ..quantized.configured import configured_in
from ..quantized.formats import NF4
from ..shard import logging_only
from ..towers.entering import towers_of
from .alike import Alike
from .cluster import Cluster, replay
from .models import chunked_loss_of, loss_of, on_paper, prepare, tile_blocks
from .pictures import Pictures
from .trace import STEADY, OptimizerClass, Trace, repeated

__all__: list[str] = []

DEVICES = ("cpu", "cuda")
# The largest numbers, so that a plan comes to an end.
MOST = MappingProxyType(
    {
        "ranks": 1 << 16,
        "batch": 1 << 16,
        "sequence": 1 << 23,
        "accumulation": 1 << 16,
        "sequence_parallel": 1 << 16,
    }
)

_REPLAYED = 8  # micro-batches; each one more takes as long as the last of them

# What no tensor tells, on a GPU: the least and the most, in bytes. Estimates, which docs/plan.md
# explains. The first two were seen on one GPU.
_CONTEXT = (300 * 2**20, 900 * 2**20)  # CUDA's context and the kernels that it loads
WORKSPACES = (16 * 2**20, 64 * 2**20)  # of cuBLAS, the most on Hopper: two, kept for good
_NCCL = (100 * 2**20, 600 * 2**20)  # buffers of a communicator
_FRAGMENTED = (0.0, 0.06)  # of the tensors' bytes, in the caching allocator


class Telling:
    """Shows the last thing that it was told, with the seconds since the first. Without a terminal
    nobody sees it. A plan takes many steps, and what the log says of each it says once.
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._began: float | None = None

    def __call__(self, doing: str) -> None:
        if sys.stderr.isatty():
            self._began = self._began or time.monotonic()
            self._write(f"zero3 plan, {time.monotonic() - self._began:.0f} s: {doing}"[:110])

    @contextmanager
    def until_over(self) -> Iterator[None]:
        """Context, after which the line is empty again. Inside, the log does not repeat itself."""
        try:
            with logging_only(self._is_new):
                yield
        finally:
            if self._began is not None:
                self._write("")
            self._began = None

    def _is_new(self, record: logging.LogRecord) -> bool:
        known = len(self._logged)
        self._logged.add(record.getMessage())
        return len(self._logged) > known

    def _write(self, line: str) -> None:
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


class Towers(NamedTuple):
    """What not every rank calls.

    Attributes:
        names: Those of the towers.
        layers: How many layers they have.
        text_exchanges: What ranks tell each other at gates, in a micro-batch of text on all ranks:
            so often, in 16 bytes. No byte of a tower moves.
        exchanges: The same where a rank has the plan's images. None without `images`.
        image_bytes: The bytes that then come to each rank more than with text on all, gathered
            layers and gradients. None without `images`.
    """

    names: tuple[str, ...]
    layers: int
    text_exchanges: int
    exchanges: int | None
    image_bytes: int | None


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
    mesh: tuple[int, int] | None = None  # replicas, and the ranks of each, which share the model
    rank: int = 0
    # of adapters; None: as peft makes them. The source has its own already
    master_dtype: torch.dtype | None = None
    sequence_parallel: int = 1  # the ranks that hold parts of the same sequences
    chunked_head: bool = False
    tile: int | None = None
    pictures: Pictures | None = None
    tell: Telling = field(default_factory=Telling, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            number = self._integer(name)
            if not 1 <= number <= most:
                raise ValueError(
                    f"{name} must be {'1 or more' if number < 1 else f'{most} or less'}, found "
                    f"{number}"
                )
        for name in ("checkpointing", "chunked_head"):
            if not isinstance(chosen := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, found {chosen!r}")
        if self.tile is not None and self._integer("tile") < 1:
            raise ValueError(f"tile must be 1 or more, or None, found {self.tile}")
        if not callable(self.optimizer):
            raise TypeError(
                "optimizer must be such as torch.optim.AdamW, found "
                f"{type(self.optimizer).__name__}"
            )
        self._integer("rank")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"rank must be one of the {self.ranks} ranks, 0 to {self.ranks - 1}, found "
                f"{self.rank}"
            )
        _check_mesh(self.mesh, self.ranks)
        if self.shards % self.sequence_parallel:
            raise ValueError(
                f"sequence_parallel={self.sequence_parallel} does not divide the {self.shards} "
                "ranks that share the model"
            )
        if not isinstance(self.policy, ShardingPolicy):
            raise TypeError(
                f"policy must be a zero3.ShardingPolicy, found {type(self.policy).__name__}"
            )
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, found {self.device!r}")
        if integer(self.lora) is not None:
            self._integer("lora")
        if isinstance(self.lora, bool | float | str) or (
            isinstance(self.lora, int) and not 1 <= self.lora <= 1 << 16
        ):
            raise ValueError(
                f"lora must be a rank from 1 to {1 << 16}, a configuration of peft's or None, "
                f"found {self.lora!r}"
            )

    def holds(self, batch: int) -> bool:
        """Whether so many sequences are long enough for the pictures."""
        return self.pictures is None or self.pictures.length(batch) <= self.sequence

    def _integer(self, name: str) -> int:
        """Makes the field an int, if it is an integer of any library."""
        number = integer(getattr(self, name))
        if number is None:
            raise TypeError(f"{name} must be an integer, found {getattr(self, name)!r}")
        object.__setattr__(self, name, number)
        return number

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Those of a step, as a trace takes them."""
        return self.batch, self.sequence, self.accumulation

    @property
    def replicas(self) -> int:
        """How many ranks hold the same chunk."""
        return 1 if self.mesh is None else self.mesh[0]

    @property
    def shards(self) -> int:
        """How many ranks share the model."""
        return self.ranks // self.replicas

    @property
    def may_quantize(self) -> bool:
        """Whether frozen weights could be stored in fewer bits, and are not."""
        if (
            self.policy.quantize is not None
            or configured_in(getattr(self.source, "config", None)) is not None
        ):
            return False
        model = self.source if self.lora is None else on_paper(self.source).requires_grad_(False)
        everything = find_parameters(model, lambda module: False)
        return bool(formats_of(everything, ShardingPolicy(quantize=NF4()), "", model))

    def trace(self) -> Trace:
        """Builds the model on the meta device, and shards it."""
        checkpoints = ", checkpointing" if self.checkpointing else ""
        adapters = "" if self.lora is None else ", adapters"
        self.tell(f"{self.ranks} ranks{checkpoints}{adapters}, {self.policy!r}")
        model = on_paper(self.source)
        model = prepare(
            model, lora=self.lora, checkpointing=self.checkpointing, dtype=self.master_dtype
        )
        alike = Alike()
        if self.tile is not None:
            tile_blocks(model, self.tile, alike.join)
        return Trace(
            model, ranks=self.ranks, policy=self.policy, device=self.device,
            optimizer=self.optimizer, rank=self.rank,
            replicas=self.replicas, parts=self.sequence_parallel, alike=alike,
            loss=self._loss(), has_values=self.pictures is not None, tell=self.tell,
        )  # fmt: skip

    def _loss(self, *, text: bool = False) -> Callable[[nn.Module, int, int], Tensor]:
        """Of a micro-batch. `text`: without pictures."""
        made = chunked_loss_of if self.chunked_head or self.sequence_parallel > 1 else loss_of
        seen = None if text else self.pictures
        return made if seen is None else partial(made, inputs=seen.with_words)

    def towers(self, trace: Trace) -> Towers | None:
        """Those of the model, and what they move. None: it has none."""
        names = towers_of(trace.model)
        if not names:
            return None
        layers = sum(len(states_in(trace.model.get_submodule(name))) for name in names)
        sizes = self.batch, self.sequence
        text_bytes, of_text = trace.moved(partial(self._loss(text=True), trace.model), *sizes)
        if self.pictures is None:
            return Towers(names, layers, of_text, None, None)
        nbytes, exchanges = trace.moved(partial(self._loss(), trace.model), *sizes)
        return Towers(names, layers, of_text, exchanges, nbytes - text_bytes)

    def seconds(self, trace: Trace, cluster: Cluster) -> float | None:
        """The time of a step of `trace` on `cluster`. None: chunks rest elsewhere, and how fast
        they come and go is not known.
        """
        if trace.offloads:
            return None
        parts = trace.micro_batches(self.batch, self.sequence, min(self.accumulation, STEADY))

        one_queue = not self.policy.separate_backup_group

        def seconds(accumulation: int) -> float:
            events = repeated(parts, accumulation)
            return replay(events, cluster, self.ranks, replicas=self.replicas, one_queue=one_queue)

        few = min(self.accumulation, _REPLAYED)
        more = self.accumulation - few
        return seconds(few) + (more * (seconds(few) - seconds(few - 1)) if more else 0.0)

    def unknown(self, peak: int) -> tuple[int, int]:
        """The least and the most bytes that come on top of a peak of tensors."""
        if self.device == "cpu":
            return 0, 0
        low, high = (
            _CONTEXT[end]
            + WORKSPACES[end]
            + (_NCCL[end] if self.ranks > 1 else 0)
            + int(_FRAGMENTED[end] * peak)
            for end in (0, 1)
        )
        return low, high

    def room(self, memory: int) -> int:
        """The highest peak that fits into `memory`."""
        if self.device == "cpu":
            return memory
        return int((memory - self.unknown(0)[1]) / (1 + _FRAGMENTED[1]))

    def but(self, **changes: Any) -> Setup:
        """The same with other choices."""
        return replace(self, **changes)

    def with_policy(self, **changes: Any) -> Setup:
        """The same with other fields of its policy."""
        return self.but(policy=replace(self.policy, **changes))


def _check_mesh(mesh: Any, ranks: int) -> None:
    if mesh is None:
        return
    if not isinstance(mesh, tuple) or len(mesh) != 2 or None in map(integer, mesh):
        raise TypeError(f"mesh must be (replicas, ranks of each) or None, found {mesh!r}")
    if min(mesh) < 1 or mesh[0] * mesh[1] != ranks:
        raise ValueError(
            f"mesh must have as many ranks as there are, {ranks}, found {mesh[0]} replicas of "
            f"{mesh[1]}"
        )
