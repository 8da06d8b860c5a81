"""Runs steps of the real code without values: the model on the meta device, rank 0 of ranks that are not there."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..access import get_trainable_chunk, states_of
from ..auto_wrap import Layers
from ..core.autograd import inside_backward
from ..core.chunk import Chunk
from ..core.gradient_buffer import Sending
from ..core.gradient_reducer import GradientReducer
from ..core.layer_state import LayerState
from ..core.quantized_chunk import QuantizedSites
from ..policy import ShardingPolicy
from ..quantized.codec import Codec
from ..quantized.sections import QuantizedTensor
from ..shard import shard
from .absent import AbsentRanks
from .kernels import DeviceKernels, backward
from .ledger import CAUSES, Ledger, Moment
from .models import loss_of, vocabulary_of
from .work import merged, work_of

__all__: list[str] = []

ALLOCATION = 512  # bytes, to which CUDA's caching allocator rounds each tensor up
OptimizerClass = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Trace:
    """A sharded model without values, and its optimizer, on rank 0 of `ranks`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        ranks: int,
        policy: ShardingPolicy,
        device: str,
        optimizer: OptimizerClass,
        layers: Layers = None,
        loss: Callable[[nn.Module, int, int], Tensor] = loss_of,
    ) -> None:
        self.kernels = DeviceKernels(device)
        self.ledger = Ledger(ALLOCATION if device == "cuda" else 1, vocabulary_of(model))
        self.ranks = AbsentRanks(ranks, pieces=device == "cpu")
        self.ranks.making = partial(self.ledger.because, "transfers")
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        with self._counting(), self.ledger.because("chunks"), _without_advice():
            self.model = shard(model, layers, device="meta", policy=policy, process_group=self.ranks)
            for parameter in self.model.parameters():
                self.ledger.note(parameter)  # what the model was given and keeps, such as parameters that are left alone
            for buffer in self.model.buffers():
                self.ledger.note(buffer)
        gc.collect()  # what construction left
        for state in states_of(self.model):
            self._watch(state)
        chunks = get_trainable_chunk(self.model)
        if not chunks:
            raise ValueError("nothing in this model trains, so there is no step to plan for")
        self.optimizer = optimizer(chunks)
        if device == "cuda":
            self._step_as_on_cuda()
        self._loss = loss
        self._learned = False
        self._times = 1.0  # how often what runs now would run

    def measure(self, batch: int, sequence: int, accumulation: int = 1) -> list[Moment]:
        """The moments of one step after the first. All micro-batches after the second are as the second."""
        micro_batches = min(accumulation, 2)
        with self._counting():
            if not self._learned:  # the order of layers, and the optimizer's state
                self._step(batch, sequence, 1)
                self._learned = True
            self.ledger.moments.clear()
            self.kernels.attention.clear()
            self._step(batch, sequence, micro_batches)
        return list(self.ledger.moments)

    def events(self, batch: int, sequence: int, accumulation: int = 1) -> list[Any]:
        """What a step after the first does, in order: `Work` of compute, and transfers that are issued and awaited."""
        if not self._learned:
            self.measure(batch, sequence)
        found: list[Any] = []

        def ran(func: Any, args: Sequence[Any], result: Any) -> None:
            if (work := work_of(func, args, result)) is not None:
                more = {"nbytes": round(work.nbytes * self._times), "kernels": round(work.kernels * self._times)}
                merged(found, work._replace(**more))

        self.ledger.ran, self.ranks.on_event = ran, found.append
        try:
            with self._counting():
                self._step(batch, sequence, accumulation)
        finally:
            self.ledger.ran, self.ranks.on_event = _ignore, _ignore
        return found

    def _step(self, batch: int, sequence: int, micro_batches: int) -> None:
        self.ledger.begin("", "beginning of forward")
        for _ in range(micro_batches):
            backward(self._loss(self.model, batch, sequence))
            self.kernels.chunks_changed = False
        self.ledger.begin("", "optimizer's step")
        with self.ledger.because("optimizer"):
            self.optimizer.step()
        self.kernels.chunks_changed = True
        self.optimizer.zero_grad()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.ledger)
            stack.enter_context(self.kernels)
            yield

    def _step_as_on_cuda(self) -> None:
        """torch's optimizers step all parameters together there, unless they are told otherwise."""
        for group in self.optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True

    # -- what is for what: methods of the model's own objects are replaced

    def _watch(self, state: LayerState) -> None:
        state.meta_buffers = []
        vars(state)["fetch"] = partial(self._fetch, state, state.fetch)
        gradients = state.gradients
        vars(gradients)["add"] = partial(self._add, gradients.add)
        vars(gradients)["prepare"] = partial(self._prepare, gradients.prepare)
        vars(gradients)["keep"] = partial(self._keep, gradients.keep)
        for chunk in state.chunks:
            chunk.unloaded.clear()  # values never come
            self.ledger.note(chunk.shard, "chunks")
            vars(chunk)["make_room"] = partial(self._make_room, chunk, chunk.make_room)
            vars(chunk)["release"] = partial(self._release, chunk, chunk.release)

        for sharded in state.parameters:
            if isinstance(sharded.sites, QuantizedSites):
                codec = sharded.sites.weight.codec  # a layer's parameters share it
                vars(codec).setdefault("decode", partial(self._decode, codec, codec.decode))

    def _decode(self, codec: Codec, decode: Callable[..., None], quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        """Decodes one slice, which stands for all: each takes the same memory after the one before, and a large model has 10**5 of them."""
        part = out[: codec.slice_numel(quantized.shape)]
        self._times = out.numel() / max(1, part.numel())
        decode(quantized, start, part)
        self._times = 1.0

    def _fetch(self, state: LayerState, fetch: Callable[[], None]) -> None:
        self.ledger.begin(state.label.split("'")[1] if "'" in state.label else "the root", "backward" if inside_backward() else "forward")
        fetch()

    def _make_room(self, chunk: Chunk, make_room: Callable[..., None], *, as_stored: bool = False) -> None:
        with self.ledger.because("full_buffers"):
            make_room(as_stored=as_stored)
            if not chunk.resident:
                self.ledger.note(chunk.full.tensor, "full_buffers")

    def _release(self, chunk: Chunk, release: Callable[[], None]) -> None:
        buffer = chunk.full.tensor
        release()
        if not chunk.resident:
            self.ledger.note(buffer)

    def _add(self, add: Callable[[int, Tensor], None], key: int, gradient: Tensor) -> None:
        self.ledger.note(gradient, "gradients")
        with self.ledger.because("gradients"):
            add(key, gradient)

    def _keep(self, keep: Callable[[], None]) -> None:
        with self.ledger.because("gradients"):
            keep()

    def _prepare(self, prepare: Callable[..., list[tuple[GradientReducer, Sending]]], communicator: Any) -> Any:
        with self.ledger.because("transfers"):
            prepared = prepare(communicator)
        for _, sending in prepared:
            self.ledger.note(sending.landed, "gradients")
        return prepared


def _ignore(*_: object) -> None:
    return None


def peak_of(moments: list[Moment]) -> tuple[int, dict[str, int]]:
    """The most bytes that were alive, and what for."""
    highest = max(moments, key=lambda moment: moment.peak)
    return highest.peak, {cause: highest.by_cause[cause] for cause in CAUSES}


@contextmanager
def _without_advice() -> Iterator[None]:
    """What the log says of a model that is sharded is for those who train it, and plans shard many."""
    log, nothing = logging.getLogger("zero3"), lambda record: False
    log.addFilter(nothing)
    try:
        yield
    finally:
        log.removeFilter(nothing)
