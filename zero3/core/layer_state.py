"""The state of one layer: its chunks, parameters and gradients, and whether it is fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.communicator import Communicator
from ..comm.errors import Subject
from ..comm.log import TransferLog
from .account import Account
from .autograd import inside_backward, profiler_label
from .chunk import Chunk
from .chunk_gradient import DeferredGradient
from .collectives import Conductor, Fetch, Gather, Wraps, without
from .full_buffer import Lifetime
from .ignored import IgnoredGradient
from .layer_chunks import LayerChunks
from .layer_gradients import LayerGradients
from .parameters import LayerParameters
from .sites import ParameterSites

__all__: list[str] = []


class Presence(Enum):
    RELEASED = "released"  # chunks only
    FETCHING = "fetching"  # the gather is under way, parameters are still hidden
    FETCHED = "fetched"  # parameters shown
    # full buffer filled, parameters hidden: the forward is over, and its backward may begin at once
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What a layer was made to do."""

    device: torch.device  # where it computes
    policy: Any  # by which it was made. Others read it, core does not
    modules: int  # how many it is of
    call: Callable[..., Any]  # calls the layer's module
    conductor: Conductor  # its own
    lifetime: Lifetime  # of the layer's full buffers
    rounding: str  # for errors: what makes that which computes other than the chunks
    # whether a backward through it reads its parameters
    reads_weights: bool = True


class Spans:
    """What a layer does, as contexts that show in torch.profiler's traces."""

    def __init__(self, label: str) -> None:
        self.fetch, self.wait, self.forward, self.backup, self.release = (
            profiler_label(f"zero3::{name} layer {label}")
            for name in ("fetch", "wait", "forward", "backup", "release")
        )


@dataclass(slots=True)
class Pins:
    """What keeps a layer fetched outside of forwards and backwards."""

    number: int = 0
    begins: bool = False  # whether it is fetched to be pinned
    # while pinned: whether parameters are shown in the chunks' dtype and not in the compute dtype
    as_stored: bool = False
    resident: int = 0  # the number of `resident` contexts that the layer is in


class LayerState:
    """Fetches and releases a layer. The runtime decides when.

    presence  | parameters in the modules        | full buffer    | next call
    released  | hidden: metadata yes, values no  | no storage*    | start_fetch
    fetching  | hidden                           | being written  | finish_fetch
    fetched   | shown, views of the full buffer  | all values     | release or keep
    kept      | hidden                           | all values     | release or finish_fetch
                                                   * but for chunks that stay filled from step to
                                                     step: `lifetime`
    """

    def __init__(
        self,
        label: str,
        communicator: Communicator,
        behaviour: Behaviour,
        new_gradients: Callable[[Subject], LayerGradients],
    ) -> None:
        self.subject = Subject(f"layer {label}", label)
        self.communicator = communicator
        self.behaviour, self.device = behaviour, behaviour.device
        self.call = behaviour.call
        self.chunks = LayerChunks(communicator, self.device, self.subject)
        self.parameters = LayerParameters(self.subject, communicator)
        self.gradients = new_gradients(self.subject)
        self.conductor = behaviour.conductor
        self.presence = Presence.RELEASED
        self.lifetime = behaviour.lifetime  # of all chunks; one chunk may ask for more
        self.pins = Pins()
        # (owner, attribute, name) of buffers without values
        self.meta_buffers: list[tuple[nn.Module, str, str]] = []
        # what other rooms keep with the layer, by its class
        self.kept: dict[type, Any] = {}
        self.write_into(self.chunks.log)
        self.rename(label)

    def add_chunk(self, chunk: Chunk, parameters: list[ParameterSites]) -> None:
        """Adds a chunk and its parameters, which are in the order of its slots. They are hidden
        from now on.
        """
        self.chunks.append(chunk)
        self.gradients.add_chunk(chunk)
        for sharded in self.parameters.add(chunk, parameters):
            self.gradients.hook(sharded)
        self.parameters.hide()
        self.parameters.invalidate_saved()

    @property
    def label(self) -> str:
        return self.subject.label

    def rename(self, label: str) -> None:
        self.subject.rename(label)
        self.spans = Spans(label)

    @property
    def policy(self) -> Any:
        return self.behaviour.policy

    @property
    def log(self) -> TransferLog:
        return self.chunks.log

    def write_into(self, log: TransferLog) -> None:
        """All layers of a runtime share it."""
        for each in (self.subject, self.chunks, self.gradients):
            each.write_into(log)

    @property
    def name_among_ranks(self) -> str:
        return f"{self.label}, wrapped as #{self.chunks.identity:06x}"

    # -- fetch and release

    def fetch(self, *, gathers: bool = True) -> None:
        """The layer is to compute. Not `gathers`: it does not need its parameters for that."""
        if self.pins.as_stored:
            raise RuntimeError(
                f"rank {self.communicator.rank}: layer {self.label} was to compute inside "
                "zero3.full_params(), where its parameters are as they are stored, not in "
                f"{self.behaviour.rounding}. Use `with zero3.resident(model):` to compute."
            )
        self.conductor.conduct(Fetch(self, gathers))

    def start_fetch(self) -> None:
        """[fetch 1] Starts to gather the layer, if it is released."""
        if self.presence is not Presence.RELEASED:
            return
        # asked here, so that a fetch runs no function for it
        if self.meta_buffers:
            self._check_loaded()
        for chunk in self.chunks:
            if chunk.unloaded:
                self._check_loaded()
        self.presence = Presence.FETCHING
        for chunk in self.chunks:
            if self.pins.begins:
                chunk.show_whole(as_stored=self.pins.as_stored)
            chunk.make_room()
        if self.chunks:
            with self.spans.fetch:
                self.conductor.conduct(Gather(self))

    def take_part_in_gather(self) -> None:
        """Takes part in a gather that only other ranks need."""
        if any(self.stays(chunk) for chunk in self.chunks):
            # after a forward that no backward has walked, as the others do in their next one
            self.release(Lifetime.PASS)
            for chunk in self.chunks:
                chunk.make_room()
            self.presence = Presence.FETCHING
            self.chunks.gather()
            self.finish_fetch()
            self.release(Lifetime.PASS)
        else:
            self.chunks.take_part_in_gather()

    def finish_fetch(self) -> None:
        """[fetch 4] Waits for the gather, and shows the parameters. Then the current stream may
        compute with them.
        """
        again = self.presence is Presence.FETCHED
        if not again:
            with self.spans.wait:
                for chunk in self.chunks:
                    chunk.finish_fetch()
            # before anything changes: the caller may put the parameter back
            for sharded in self.parameters:
                sites = sharded.sites
                for module, attribute in sites.places:
                    if module.__dict__.get(attribute) is not sites.parameter:
                        self.parameters.check_put_back(sites, module, attribute)
            # set first: after an interrupt in between, release must hide every parameter
            self.presence = Presence.FETCHED
            for chunk in self.chunks:
                if chunk.trains != chunk.shard.requires_grad:
                    chunk.follow_requires_grad()
                    for sharded in self.parameters.follow_requires_grad(chunk):
                        self.gradients.hook(sharded)
        # [S2] since the last fetch
        changed = list(filter(Chunk.changed, self.chunks))
        if changed and inside_backward():
            for part in (part for chunk in changed for part in chunk.parts):
                if isinstance(part.parameter.grad, DeferredGradient):
                    part.parameter.grad.tell_of_change(self.label)
        self.parameters.show(changed, again=again)

    def keep(self) -> None:
        """Hides the parameters as `release` does, but keeps the full buffer, so that a backward
        need not gather the layer again.
        """
        # views of the buffer are in use, so the layer can't keep it
        if any(chunk.full.left for chunk in self.chunks):
            self.release(Lifetime.PASS)
        elif self.presence is Presence.FETCHED and not self.pins.number:
            self.parameters.hide()
            self.presence = Presence.KEPT
            self.parameters.invalidate_saved()

    def communicate_by(self, communicator: Communicator) -> None:
        """From now on the layer, and its gradients (for a loss scaler's inf), use this one."""
        self.communicator = communicator
        self.gradients.among.ask(communicator)

    def conducted_by(self, conductor: Wraps) -> None:
        """From now on, by this one. It wraps the present one."""
        self.conductor = conductor

    def no_longer_by(self, conductor: Wraps) -> None:
        self.conductor = without(conductor, self.conductor)

    def choose_residents(self, room: int) -> int:
        """Chooses the frozen chunks whose full buffers stay from step to step, in `room` bytes.
        Returns the room that is left.
        """
        for chunk in self.chunks:
            room -= chunk.stay_within(room)
        return room

    def stays(self, chunk: Chunk) -> bool:
        """Whether the chunk's full buffer stays filled from step to step, and is gathered again
        only after a change.
        """
        return max(self.lifetime, chunk.lifetime) >= Lifetime.STEPS

    def release(self, over: Lifetime = Lifetime.STEPS) -> None:
        """Releases the layer, but for full buffers that are to stay longer than `over`."""
        if self.pins.number or (
            self.presence is Presence.RELEASED
            and not (over >= Lifetime.STEPS and any(chunk.full.filled for chunk in self.chunks))
        ):
            return
        with self.spans.release:
            if self.presence is Presence.FETCHED:
                self.parameters.hide()
            for chunk in self.chunks:
                stays = chunk.full.filled and max(self.lifetime, chunk.lifetime) > over
                if not stays or chunk.full.left:
                    chunk.release()
            self.presence = Presence.RELEASED
            self.parameters.invalidate_saved()

    def let_escape(self, tensors: Iterable[Tensor]) -> None:
        """Keeps the memory of those `tensors` that are views of parameters. A parameter itself is
        hidden wherever it is.
        """
        for tensor in tensors:
            # `isinstance` would run a function of torch's for each
            if not issubclass(type(tensor), nn.Parameter):
                for chunk in self.chunks:
                    chunk.full.let_escape(tensor)

    def check_unwritten(self) -> None:
        """Raises if a parameter was changed in place since it was shown, because a release would
        lose the change.
        """
        if self.presence is not Presence.FETCHED or self.pins.number:
            return
        for sharded, version in zip(self.parameters, self.parameters.versions, strict=True):
            if sharded.sites.parameter._version != version and not sharded.chunk.resident:
                sharded.chunk.full.forget()
                raise RuntimeError(
                    f"rank {self.communicator.rank}: while layer {self.label} computed, parameter "
                    f"{sharded.sites.name!r} was changed in place, which the ranks' chunks can't "
                    "follow. Change it between steps, inside `with zero3.full_params(module, "
                    "writeback=True):`, or make it a buffer."
                )

    def settle(self) -> None:
        """The host waits until no device reads the layer's chunks where they rest."""
        for chunk in self.chunks:
            if chunk.store.rests:
                chunk.store.settle(chunk, None, before_backward=False)

    def reset(self, *, broken: bool = True) -> None:
        """Drops all that was under way. It waits for transfers first, because they write into the
        buffers.
        """
        for account in self.gradients.accounts.values():
            if account.pending:
                account.abandon()
        if self.presence is Presence.FETCHING:
            for chunk in self.chunks:
                chunk.abandon_fetch()
        self.release(Lifetime.PASS)
        if broken:
            if self.lifetime >= Lifetime.STEPS:
                self.release()
            if self.presence is Presence.RELEASED:
                self.parameters.hide_put_back()

    # -- outside of forward and backward

    @property
    def pinned(self) -> bool:
        return self.pins.number > 0

    def pin(self, *, as_stored: bool) -> None:
        """Fetches the layer until it is unpinned, and lists its parameters: see `pinning.pin`."""
        pins = self.pins
        pins.as_stored, pins.begins = as_stored, True
        try:
            self.start_fetch()
            self.finish_fetch()
            self.settle()
        except BaseException:
            pins.as_stored = False
            raise
        finally:
            pins.begins = False
        pins.number += 1
        if pins.number == 1:
            self.chunks.unlist()

    def unpin(self) -> None:
        self.pins.number -= 1
        if not self.pins.number:
            self.chunks.list_in()
            for chunk in self.chunks:
                chunk.full.leave()
            self.release()
            self.pins.as_stored = False
        # so that it stays short, however often this is done between two forwards
        self.log.history.fold()

    def keep_whole(self) -> None:
        """Hides a fetched layer. From now on its full buffers stay filled from step to step."""
        self.lifetime = Lifetime.STEPS
        self.keep()

    def release_whole(self) -> None:
        """Ends what `keep_whole` began."""
        self.lifetime = self.behaviour.lifetime
        self.release()

    @contextmanager
    def resident_by(self, call: Callable[..., Any]) -> Iterator[None]:
        """Context in which the layer, which is pinned, is resident. `call` calls its module."""
        before, self.call = self.call, call
        self.pins.resident += 1
        try:
            yield
        finally:
            self.pins.resident -= 1
            self.call = before

    def replace_chunks(self, chunks: list[Chunk]) -> None:
        """Puts the parameters of a released layer into other chunks. A backward through older
        graphs is an error.
        """
        self.chunks.unlist()
        self.parameters.move_into(chunks)
        self.chunks[:] = chunks
        self.gradients.replace_chunks(chunks, self.parameters)
        self.chunks.list_in()

    def _check_loaded(self) -> None:
        self.meta_buffers = [
            b
            for b in self.meta_buffers
            if (held := b[0]._buffers.get(b[1])) is not None and held.is_meta
        ]
        if self.meta_buffers or any(chunk.unloaded for chunk in self.chunks):
            missing = [
                f"parameter {each.sites.name}"
                for each in self.parameters
                if each.index in each.chunk.unloaded
            ]
            missing += [f"buffer {name}" for _, _, name in self.meta_buffers]
            raise RuntimeError(
                f"rank {self.communicator.rank}: layer {self.label} has no values yet for: "
                f"{', '.join(missing)}. They were on the meta device when it was wrapped. Load "
                "them (zero3.load_pretrained, zero3.load_full_state_dict) or draw them "
                "(zero3.materialize); give a buffer that no checkpoint holds to its module."
            )


def chunks_of(states: Iterable[LayerState]) -> list[Chunk]:
    return [chunk for state in states for chunk in state.chunks]


def parts_of(states: Iterable[LayerState]) -> list[nn.Parameter]:
    """What optimizers may hold of the layers: chunks or their parts, frozen ones too."""
    return [part.parameter for chunk in chunks_of(states) for part in chunk.parts]


def ignored_of(states: Iterable[LayerState]) -> list[IgnoredGradient]:
    """The gradients of all parameters of the layers that are left alone."""
    return [each for state in states for each in state.gradients.ignored]


def accounts_of(states: Iterable[LayerState]) -> list[Account]:
    """The accounts of all chunks of the layers."""
    return [account for state in states for account in state.gradients.accounts.values()]


def check_process(states: Iterable[LayerState]) -> None:
    """
    Raises:
        RuntimeError: This is a forked child, and chunks of these layers rest in memory that is its
            parent's.
    """
    resting = (chunk for chunk in chunks_of(states) if chunk.store.rests)
    if (chunk := next(resting, None)) is not None:  # all were made in one process
        chunk.store.check_process()


class RestingLayers(list[LayerState]):
    """A model's layers whose chunks rest elsewhere. Their stores hear of forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: list[Any] = []  # for stores: see `Store.settle`

    def watch(self, state: LayerState) -> None:
        if any(chunk.store.rests for chunk in state.chunks):
            self.append(state)

    def settle(self, *, before_backward: bool = False) -> None:
        for state in self:
            for chunk in state.chunks:
                chunk.store.settle(chunk, self._recent, before_backward=before_backward)

    def go_on(self) -> None:
        for state in self:
            for chunk in state.chunks:
                chunk.store.go_on()
