"""Runs steps of the real code without values: the model on the meta device, one rank of ranks that
are not there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..access import get_trainable_chunk, states_of
from ..auto_wrap import Layers
from ..comm.plain_values import name_of
from ..conductors.conducted import Through
from ..core.autograd import as_plain_tensors, inside_backward
from ..core.chunk import Chunk
from ..core.chunk_gradient import reduce_deferred
from ..core.collectives import Collective, Fetch, Gather, Look, Reduce
from ..core.layer_state import LayerState, accounts_of, chunks_of
from ..experts.at_home import AtHome
from ..faces.quantised import weight_of
from ..offload.one_by_one import each_alone, step_of
from ..optim.several import held_by
from ..policy import ShardingPolicy, gradient_dtype
from ..shard import logging_only, shard
from ..towers.gates import Gate
from ..wires.coded import Coded, CodedReduceScatter
from .absent import AbsentRanks, Awaited, Issued, SharingRanks
from .alike import Alike
from .kernels import DeviceKernels, FusedOnMeta, backward, fused_on_meta, with_values
from .ledger import CAUSES, ELSEWHERE, Ledger, Moment, tensors_in
from .models import loss_of, tensors_beside, vocabulary_of
from .work import merged, work_of

__all__: list[str] = []

ALLOCATION = 512  # bytes, to which CUDA's caching allocator rounds each tensor up
# micro-batches that are traced: the first, one that all between it and the last are like, and the
# last
STEADY = 3
OptimizerClass = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _ignore(*_: object) -> None:
    return None


class Trace:
    """A sharded model without values, and its optimizer, on rank `rank` of `ranks`. `replicas`: so
    many of them hold the same chunk. `parts`: so many hold parts of the same sequences.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ranks: int,
        policy: ShardingPolicy,
        device: str,
        optimizer: OptimizerClass,
        rank: int = 0,
        replicas: int = 1,
        parts: int = 1,
        layers: Layers = None,
        alike: Alike | None = None,
        loss: Callable[[nn.Module, int, int], Tensor] = loss_of,
        has_values: bool = False,
        accumulating: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext,
        tell: Callable[[str], object] = _ignore,
    ) -> None:
        """`alike`: what the model's tiles leave out. `has_values`: whether what the model is called
        with has. `accumulating`: around all micro-batches of a step but the last. `tell`: hears of
        each step.
        """
        self.kernels = DeviceKernels(device)
        unit, compute = ALLOCATION if device == "cuda" else 1, with_values if has_values else None
        self.ledger = Ledger(unit, vocabulary_of(model), compute)
        kind = AbsentRanks if parts == 1 else partial(SharingRanks, parts=parts)
        self.ranks = kind(ranks, pieces=device == "cpu", rank=rank, replicas=replicas)
        self.ranks.count_as(
            making=partial(self.ledger.because, "transfers"),
            resting=partial(self.ledger.because, ELSEWHERE),
        )
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.trainable = sum(
            parameter.numel() for parameter in model.parameters() if parameter.requires_grad
        )
        beside = tensors_beside(model)
        with (
            self.ledger,
            self.kernels,
            self.ledger.because("chunks"),
            # what it says of a sharded model is for those who train it: plans shard many
            logging_only(lambda record: False),
        ):
            self.model = shard(
                model, layers, device="meta", policy=policy, process_group=self.ranks
            )
            # what the model was given and keeps, such as parameters that are left alone
            for tensor in (*self.model.parameters(), *self.model.buffers(), *beside):
                self.ledger.note(tensor)
        gc.collect()  # what construction left
        self._alike = alike or Alike()
        states = states_of(self.model)
        self._observer = _Observer(self.ledger, [self._root, *states])
        for state in states:
            self._observer.watch(state)
        self._read_codes(states, device)
        self.optimizer = _made(optimizer, get_trainable_chunk(self.model))
        if device == "cuda" and not self.offloads:
            self._step_as_on_cuda()
        # the most bytes that were alive when a forward of the last measurement had ended
        self.after_forward = 0
        self.model.register_forward_hook(self._after_forward)
        self._loss: Callable[[int, int], Tensor] = lambda batch, sequence: loss(
            self.model, batch, -(-sequence // parts)
        )
        self._accumulating, self._tell = accumulating, tell
        self._peaks: dict[tuple[int, int, int, bool], int] = {}
        self._begins: Callable[[], object] = _ignore  # called at each micro-batch

    def _read_codes(self, states: Sequence[LayerState], device: str) -> None:
        """A GPU takes a kernel, a CPU one slice after another, of which the first will do."""
        weights = (weight_of(each.sites) for state in states for each in state.parameters)
        codecs: dict[int, Any] = {id(e.codec): e.codec for e in weights if e is not None}
        for codec in codecs.values():
            codec.choose_slices(self._alike.first)
        if device != "cuda":
            return
        wires = [chunk.wire for chunk in chunks_of(states)]
        stages = [stage for account in accounts_of(states) for stage in account.flow.stages]
        coded = [e for e in (*wires, *stages) if isinstance(e, Coded | CodedReduceScatter)]
        for user in (*codecs.values(), *(each.rows for each in coded)):
            user.use(FusedOnMeta())

    @property
    def _root(self) -> LayerState:
        root: LayerState = vars(self.model)["_zero3_root"]
        return root

    @property
    def _chunks(self) -> list[tuple[LayerState, Chunk]]:
        return [(state, chunk) for state in states_of(self.model) for chunk in state.chunks]

    @property
    def offloads(self) -> bool:
        """Whether chunks rest elsewhere."""
        return any(chunk.store.rests for _, chunk in self._chunks)

    @property
    def trains_in_layers(self) -> bool:
        return any(
            chunk.shard.requires_grad for state, chunk in self._chunks if state is not self._root
        )

    @property
    def dtypes(self) -> dict[str, str]:
        """Those, or the formats, of what the optimizer updates, of what is frozen, of computation,
        and of the reduction of gradients.
        """
        found: dict[str, list[str]] = {"masters": [], "frozen": [], "compute": [], "reduction": []}
        for state in states_of(self.model):
            for each in state.parameters:
                chunk, weight = each.chunk, weight_of(each.sites)
                trains = chunk.shard.requires_grad
                found["masters" if trains else "frozen"].append(chunk.stored_as)
                found["compute"].append(name_of(weight.dtype if weight else chunk.compute_dtype))
                if trains:
                    sums = gradient_dtype(state.policy, chunk.compute_dtype)
                    kind = state.policy.reduce_format
                    found["reduction"].append(name_of(sums) if kind is None else kind.name)
        return {what: ", ".join(dict.fromkeys(kinds)) for what, kinds in found.items() if kinds}

    @property
    def frozen_buffers(self) -> list[int]:
        """Bytes of frozen full buffers, in the order in which they may stay: the root's first."""
        ordered = sorted(self._chunks, key=lambda each: each[0] is not self._root)
        return [chunk.full_nbytes for _, chunk in ordered if not chunk.shard.requires_grad]

    @property
    def _homes(self) -> list[AtHome]:
        calls = [state.call for state in states_of(self.model)]
        return [call for call in calls if isinstance(call, AtHome)]

    def measure(
        self, batch: int, sequence: int, accumulation: int = 1, *, crowded: bool = False
    ) -> list[Moment]:
        """The moments of one step after the first. All micro-batches after the second are as the
        second. `crowded`: all tokens come to this rank's experts at home.
        """
        micro_batches = min(accumulation, 2)
        for home in self._homes:
            home.expect(crowded=crowded)
        with self.ledger, self.kernels:
            if not self._peaks:  # the order of layers, and the optimizer's state, are learned first
                self._step(batch, sequence, 1)
            self.ledger.begin_anew()
            self.kernels.attention.clear()
            self.after_forward = 0
            self._step(batch, sequence, micro_batches)
        for home in self._homes:
            home.expect(crowded=False)
        most = peak_of(self.ledger.moments)[0]
        self._peaks[batch, sequence, micro_batches, crowded] = most
        return list(self.ledger.moments)

    def peak(self, batch: int, sequence: int, accumulation: int = 1) -> int:
        """The most bytes that are alive in such a step; with experts at home, if all tokens come to
        this rank. Each is made once.
        """
        sizes, crowded = (batch, sequence, min(accumulation, 2)), bool(self._homes)
        if (*sizes, crowded) not in self._peaks:
            self.measure(*sizes, crowded=crowded)
        return self._peaks[*sizes, crowded]

    def events(self, batch: int, sequence: int, accumulation: int = 1) -> list[Any]:
        """What a step after the first does, in order: compute, transfers, waits."""
        return repeated(
            self.micro_batches(batch, sequence, min(accumulation, STEADY)), accumulation
        )

    def micro_batches(self, batch: int, sequence: int, number: int) -> list[list[Any]]:
        """The events of each micro-batch of such a step. The optimizer's are with the last."""
        if not self._peaks:
            self.measure(batch, sequence)
        found: list[list[Any]] = []

        def ran(func: Any, args: Sequence[Any], result: Any) -> None:
            if (work := work_of(func, args, result)) is not None:
                merged(found[-1], work.times(self._alike.times))

        self.ledger.observed_by(ran)
        self.ranks.observed_by(lambda event: found[-1].append(event))
        self._begins = lambda: found.append([])
        try:
            with self.ledger, self.kernels:
                self._step(batch, sequence, number)
        finally:
            self._begins = _ignore
            self.ledger.observed_by(_ignore)
            self.ranks.observed_by(_ignore)
        return found

    def moved(
        self, loss: Callable[[int, int], Tensor], batch: int, sequence: int
    ) -> tuple[int, int]:
        """Bytes that come to this rank in a step with another `loss`, and exchanges at gates."""
        given, before = self._loss, self._observer.exchanges
        self._loss = loss
        try:
            (events,) = self.micro_batches(batch, sequence, 1)
        finally:
            self._loss = given
        nbytes = sum(event.nbytes for event in events if isinstance(event, Issued))
        return nbytes, self._observer.exchanges - before

    def _step(self, batch: int, sequence: int, micro_batches: int) -> None:
        self._tell(f"a step, micro-batches of {batch} x {sequence} tokens")
        self.ledger.begin("", "beginning of forward")
        for left in reversed(range(micro_batches)):
            self._begins()
            with self._accumulating(self.model) if left else nullcontext():
                backward(self._loss(batch, sequence))
            self._observer.stepped = False
        self.ledger.begin("", "optimizer's step")
        with fused_on_meta(), _naming(self.optimizer):
            if self.offloads:
                _step_by_turns(self.optimizer, self.ledger, far=self.ranks.lands_at_once)
            else:
                with self.ledger.because("optimizer"):
                    self.optimizer.step()
        self._observer.stepped = True
        self.optimizer.zero_grad()

    def _step_as_on_cuda(self) -> None:
        """torch's optimizers step all parameters together there, unless they are told otherwise."""
        for group in self.optimizer.param_groups:
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True

    def _after_forward(self, *_: object) -> None:
        self.after_forward = max(self.after_forward, self.ledger.now)

    @property
    def unreached(self) -> list[str]:
        """The layers that no micro-batch has called yet."""
        reached = self._observer.reached
        return [_name_of(state) for state in states_of(self.model) if id(state) not in reached]


class _Observer:
    """Tells the ledger what memory is for."""

    def __init__(self, ledger: Ledger, states: Sequence[LayerState]) -> None:
        self._ledger, self._accounts = ledger, accounts_of(states)
        self.exchanges = 0  # at gates
        self.stepped = False  # whether the optimizer has, since the last micro-batch
        self.reached = {id(states[0])}  # the states of layers that were fetched, and the root's

    def watch(self, state: LayerState) -> None:
        state.meta_buffers.clear()
        state.conducted_by(Through(self.conduct, state.conductor))
        for chunk in state.chunks:
            chunk.unloaded.clear()  # values never come
            self._ledger.note(chunk.shard, ELSEWHERE if chunk.store.rests else "chunks")
        for sharded in state.parameters:
            if sharded.chunk.shard.requires_grad:
                with as_plain_tensors():
                    # the hook is called before autograd's gradient is taken
                    note = partial(self._ledger.note, cause="gradients")
                    sharded.sites.parameter.register_hook(note)  # type: ignore[no-untyped-call]

    def conduct(self, what: Collective, perform: Callable[[], Any]) -> Any:
        self._tell(what)
        if not isinstance(what, Look):
            return perform()
        what.forget(  # the answer that values would give
            (state, chunk)
            for state, chunk in what.staying()
            if not chunk.full.filled or (self.stepped and chunk.shard.requires_grad)
        )
        return None

    def _tell(self, what: Collective) -> None:
        """It begins."""
        for account in self._accounts:
            for tensor in account.held:
                self._ledger.claim(tensor, "gradients")
        self.exchanges += isinstance(what, Gate)
        if isinstance(what, Fetch):
            self.reached.add(id(what.layer))
            phase = "backward" if inside_backward() else "forward"
            self._ledger.begin(_name_of(what.layer), phase)
        elif isinstance(what, Gather):
            for chunk in what.layer.chunks:
                if not chunk.resident:
                    self._ledger.claim(chunk.full.tensor, "full_buffers", is_resized=True)
                for tensor in tensors_in(chunk.gathering.room):
                    self._ledger.claim(tensor, "full_buffers")
        elif isinstance(what, Reduce):
            for _, gradient in what.mine or ():
                for tensor in (gradient.landed, *tensors_in(gradient.pieces)):
                    self._ledger.claim(tensor, "gradients")
                for tensor in tensors_in((gradient.full, gradient.summed, gradient.work)):
                    self._ledger.claim(tensor, "transfers")


def _step_by_turns(optimizer: torch.optim.Optimizer, ledger: Ledger, *, far: bool) -> None:
    """As an optimizer's step after `offload_optimizer`, chunk by chunk: on the host if that is
    `far`, else where layers compute.

    State lies in files when it is made. (In the step that makes it, it may be counted. That one is
    in no plan.)
    """
    reduce_deferred(parameter.grad for parameter in held_by(optimizer))
    with ledger.because(ELSEWHERE if far else "optimizer"):
        each_alone(optimizer, step_of(type(optimizer)))
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                ledger.note(value, ELSEWHERE)


def _made(optimizer: OptimizerClass, chunks: list[nn.Parameter]) -> torch.optim.Optimizer:
    if not chunks:
        raise ValueError("nothing in this model trains, so there is no step to plan for")
    with _naming(optimizer):
        made = optimizer(chunks)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer must make an optimizer from a list of parameters, found "
            f"{type(made).__name__}"
        )
    return made


@contextmanager
def _naming(optimizer: object) -> Iterator[None]:
    """What an optimizer raises says that it was the optimizer."""
    try:
        yield
    except Exception as error:  # of any kind: it may be anybody's
        made = optimizer.func if isinstance(optimizer, partial) else optimizer
        name = getattr(made, "__name__", type(made).__name__)
        raise ValueError(
            f"no step of {name} can be planned for: with flat parameters that have no values it "
            f"raised {type(error).__name__}: {error}. Plan with one whose state takes as many "
            "bytes; AdamW's takes twice the parameters'"
        ) from error


def _name_of(state: LayerState) -> str:
    return state.label.split("'")[1] if "'" in state.label else "the root"


def repeated(parts: list[list[Any]], accumulation: int) -> list[Any]:
    """The events of so many micro-batches, from those of the first ones, up to `STEADY`: what is in
    the middle comes again and again.
    """
    if accumulation <= len(parts):
        return [event for part in parts for event in part]
    first, steady, last = parts
    count = sum(isinstance(event, Issued) for event in steady)

    def later(event: Any, times: int) -> Any:
        if not isinstance(event, Issued | Awaited):
            return event
        return replace(event, number=event.number + times * count)

    found = list(first)
    for times in range(accumulation - 2):
        found += [later(event, times) for event in steady]
    return found + [later(event, accumulation - STEADY) for event in last]


def peak_of(moments: list[Moment]) -> tuple[int, dict[str, int]]:
    """The most bytes that were alive, and what for."""
    highest = max(moments, key=lambda moment: moment.peak)
    return highest.peak, {cause: highest.by_cause[cause] for cause in CAUSES}
