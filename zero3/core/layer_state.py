"""A layer without its module: chunks, parameters, gradients, and whether they are fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..comm.streams import Lanes
from ..policy import ShardingPolicy
from .casting import Casting
from .chunk import Chunk, registered
from .coordination import Action, Gate, OpenGate
from .flat import not_a_number
from .layer_gradients import LayerGradients
from .parameters import ParameterSites, ShardedParameter, mark, remember_order, restore_order, show_all
from .transfer_log import TransferWatch

__all__: list[str] = []


class Presence(Enum):
    RELEASED = "released"  # chunks only
    FETCHING = "fetching"  # full buffer filling, parameters still hidden
    FETCHED = "fetched"  # parameters shown
    KEPT = "kept"  # full buffer filled, parameters hidden again: the forward is over, a backward may come at once


class LayerState:
    """Moves a layer between released and fetched. Knows neither what comes next nor why: the runtime does.

    presence  | parameters in the modules        | full buffer    | next
    released  | hidden: metadata yes, values no  | no storage     | start_fetch
    fetching  | hidden                           | being written  | finish_fetch
    fetched   | shown, views of the full buffer  | all values     | keep (then as fetching, but written), release
    """

    def __init__(self, label: str, communicator: Communicator, device: torch.device, policy: ShardingPolicy) -> None:
        self.subject = Subject(f"layer {label}")
        self.watch = TransferWatch(communicator, device, policy, self.subject)
        self.identity = 0  # a random number, the same on all ranks: labels are not, if ranks wrap equal modules in other orders
        self.communicator = communicator
        self.device = device
        self.policy = policy
        self.casting = Casting(policy)
        self.chunks: list[Chunk] = []
        self.parameters: list[ShardedParameter] = []
        self.presence = Presence.RELEASED
        self._lanes: Lanes | None = None
        self.registry: dict[str, nn.Parameter | None] = {}  # where the module tree finds the chunks
        self.meta_buffers: list[tuple[nn.Module, str, str]] = []  # owner, attribute, name: to be filled before use
        self._gathering = NamingFailures(communicator, "gathering", self.subject)
        self._pins = 0
        self._as_stored = False  # while pinned: parameters are shown in the chunks' dtypes, although they compute in another
        self.resident = 0  # contexts in which ranks go their own ways
        self.gradients = LayerGradients(communicator, policy, self.subject, self.watch)
        self.unfinished: Callable[[], None] | None = None  # waits for a checkpoint of the model that is still being written
        self.gate: Gate = OpenGate()
        self._versions: list[int] = []  # of the parameters, as graphs know them

    def add_chunk(self, chunk: Chunk, parameters: list[ParameterSites]) -> None:
        """Takes over the parameters of `parameters` (in the order of the slots); they are hidden from now on."""
        self.chunks.append(chunk)
        mark(chunk.shard, self)
        self.gradients.add_chunk(chunk)
        empty = not_a_number(chunk.compute_dtype, chunk.shard.device)
        remember_order(parameters)
        for index, sites in enumerate(parameters):
            stand_in = empty.expand(sites.parameter.shape)
            if sites.parameter.is_meta:
                sites.replace(nn.Parameter(stand_in, sites.parameter.requires_grad))
            self.parameters.append(ShardedParameter(sites, chunk, index, stand_in))
            self.gradients.hook(self.parameters[-1])
        self._hide()
        self._invalidate_saved()

    @property
    def label(self) -> str:
        return self.subject.name.removeprefix("layer ")

    @label.setter
    def label(self, label: str) -> None:
        self.subject.name = f"layer {label}"

    @property
    def name_among_ranks(self) -> str:
        return f"{self.label}, wrapped as #{self.identity:06x}"

    @property
    def lanes(self) -> Lanes:
        """The runtime gives all its layers the same; a layer that is read before any forward makes its own."""
        self._lanes = self._lanes or self.communicator.lanes(self.device)
        return self._lanes

    @lanes.setter
    def lanes(self, lanes: Lanes) -> None:
        self._lanes = lanes

    def trainable(self) -> list[nn.Parameter]:
        """What an optimizer takes: the trainable chunks, or the parts that stand in for them."""
        return [part.parameter for chunk in self.chunks for part in chunk.parts if part.parameter.requires_grad]

    def full_nbytes(self) -> int:
        """Bytes of the layer's full buffers while it is fetched."""
        return sum(chunk.layout.padded_numel * chunk.compute_dtype.itemsize for chunk in self.chunks)

    # -- fetch and release

    def fetch(self) -> None:
        if self._as_stored:
            raise RuntimeError(
                f"rank {self.communicator.rank}: layer {self.label} was to compute inside zero3.full_params(), where its parameters are "
                f"as they are stored, not in param_dtype={self.policy.param_dtype}. Use `with zero3.resident(model):` to compute."
            )
        self.start_fetch()
        self.finish_fetch()

    def start_fetch(self) -> None:
        if self.presence is not Presence.RELEASED:
            return
        self._check_loaded()
        self.presence = Presence.FETCHING
        for chunk in self.chunks if self._as_stored else ():
            chunk.show_as_stored()
        with self.gate.passing(Action.GATHER, self), self._gathering:
            self.watch.gathers(self.identity, bool(self.chunks))
            for chunk in self.chunks:
                chunk.start_fetch(self.lanes.fetch)

    def finish_fetch(self) -> None:
        """After this, compute on the current stream may use the parameters."""
        if self.presence in (Presence.FETCHING, Presence.KEPT):
            with self._gathering:
                for chunk in self.chunks:
                    chunk.finish_fetch()
            self.presence = Presence.FETCHED  # first: an interrupt between two parameters must find all to hide
            for chunk in self.chunks:
                if chunk.trains != chunk.shard.requires_grad:
                    self.gradients.follow_requires_grad(chunk, self.parameters)
            show_all(self.parameters, self._versions)
        for chunk in self.chunks:
            if chunk.changed():  # then what older graphs saved is stale: torch's own version check has to see it
                increment_version([b.sites.parameter for b in self.parameters if b.chunk is chunk])
        self._versions = [sharded.sites.parameter._version for sharded in self.parameters]

    def keep(self) -> None:
        """Nobody finds the parameters, as if the layer were released, but a backward need not gather it again."""
        if any(chunk.lent for chunk in self.chunks):  # views of them are about: they are left to whoever has them
            self.release()
        elif self.presence is Presence.FETCHED and not self._pins:
            self._hide()
            self.presence = Presence.KEPT
            self._invalidate_saved()

    def release_or_keep(self) -> None:
        """Where layers are released as a matter of course: those that the policy keeps whole are only hidden."""
        if self.policy.shards_parameters or self.presence is Presence.FETCHING:
            self.release()
        else:
            self.keep()

    def is_stale(self) -> Tensor:
        """Whether a layer that was kept has to be gathered anew, on this rank, 0-dim."""
        if self.presence is not Presence.KEPT:
            return torch.ones((), dtype=torch.bool, device=self.device)
        return torch.stack([chunk.is_stale() for chunk in self.chunks if not chunk.resident]).any()

    def release(self) -> None:
        if self._pins or self.presence is Presence.RELEASED:
            return
        if self.presence is Presence.FETCHED:
            self._hide()
        for chunk in self.chunks:
            chunk.release()
        self.presence = Presence.RELEASED
        self._invalidate_saved()

    def let_escape(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that are views of parameters keep the memory they look at. (A parameter itself is hidden wherever it is.)"""
        for tensor in tensors:
            if not isinstance(tensor, nn.Parameter):
                for chunk in self.chunks:
                    chunk.let_escape(tensor)

    def check_unwritten(self) -> None:
        """Raises if a parameter was changed in place since it was shown: with the full buffer, the change would be lost."""
        for sharded, version in zip(self.parameters, self._versions, strict=True):
            if sharded.sites.parameter._version != version and not self._pins and not sharded.chunk.resident:
                raise RuntimeError(
                    f"rank {self.communicator.rank}: while layer {self.label} computed, parameter {sharded.sites.name!r} was changed "
                    "in place, which the ranks' chunks can't follow. Change it between steps, inside "
                    "`with zero3.full_params(module, writeback=True):`, or make it a buffer."
                )

    def _hide(self) -> None:
        self._versions = [sharded.sites.parameter._version for sharded in self.parameters]
        for sharded in self.parameters:
            sharded.sites.hide(sharded.value if sharded.chunk.resident else sharded.stand_in)

    def _invalidate_saved(self) -> None:
        """A graph that comes to a hidden parameter must raise torch's error, not read what it finds."""
        increment_version([sharded.sites.parameter for sharded in self.parameters if sharded.chunk.guarded])

    def reset(self, *, broken: bool = True) -> None:
        """Whatever was under way is dropped. Transfers are waited for first (their buffers must not be written later)."""
        self.gradients.drop_pending()
        if self.presence is Presence.FETCHING:
            for chunk in self.chunks:
                chunk.abandon_fetch()
        self.release() if broken else self.release_or_keep()

    # -- access outside a forward

    def pin(self, *, to_compute: bool = False) -> None:
        """Fetched until unpinned: parameters stand in the modules, and the chunks do not.

        `to_compute`: as in a forward; otherwise in the dtypes they are stored in.
        """
        self.release()  # a layer kept for a backward may be older than the last optimizer step
        stored = not to_compute and any(chunk.casts for chunk in self.chunks)
        if self._pins and stored != self._as_stored:
            raise RuntimeError(
                f"rank {self.communicator.rank}: zero3.full_params shows layer {self.label} as it is stored, zero3.resident in "
                f"param_dtype={self.policy.param_dtype}: leave one before you enter the other"
            )
        self._as_stored = stored
        try:
            self.start_fetch()
            self.finish_fetch()
        except BaseException:
            self._as_stored = False
            raise
        self._pins += 1
        if self._pins == 1:
            for name in self.chunk_names():
                self.registry.pop(name)
            restore_order([sharded.sites for sharded in self.parameters])

    def pin_unloaded(self) -> None:
        """As `pin`, for a loader: chunks that have no values yet count as loaded, for it is about to fill them."""
        for chunk in self.chunks:
            chunk.unloaded.clear()
        meta_buffers, self.meta_buffers = self.meta_buffers, []
        self.pin()
        self.meta_buffers = meta_buffers

    def unpin(self) -> None:
        self._pins -= 1
        if not self._pins:
            self.registry.update(self.chunk_names())
            for chunk in self.chunks:
                chunk.lend()
            self.release()
            self._as_stored = False

    @property
    def pinned(self) -> bool:
        return self._pins > 0

    def chunk_names(self) -> dict[str, nn.Parameter | None]:
        """The names under which chunks, or their parts, are parameters."""
        return registered(self.chunks)

    def replace_chunks(self, chunks: list[Chunk]) -> None:
        """The same parameters in other chunks, while released; graphs made before are stale."""
        places = {slot.name: (chunk, index) for chunk in chunks for index, slot in enumerate(chunk.layout.slots)}
        moved = [ShardedParameter(sharded.sites, *places[sharded.sites.name], sharded.stand_in) for sharded in self.parameters]
        self.parameters = sorted(moved, key=lambda sharded: (chunks.index(sharded.chunk), sharded.index))
        self.chunks = chunks
        self._versions = [sharded.sites.parameter._version for sharded in self.parameters]
        self.gradients.replace_chunks(chunks, self.parameters)

    def write_back(self) -> None:
        """Rank 0's values of the fetched parameters become everybody's."""
        for sharded in self.parameters:
            if sharded.sites.parameter.data_ptr() != sharded.value.data_ptr():  # given other data: that is what was meant
                sharded.value.copy_(sharded.sites.parameter.data)
        for chunk in self.chunks:
            chunk.scatter()

    def _check_loaded(self) -> None:
        if self.meta_buffers:
            self.meta_buffers = [b for b in self.meta_buffers if (held := b[0]._buffers.get(b[1])) is not None and held.is_meta]
        if self.meta_buffers or any(chunk.unloaded for chunk in self.chunks):
            missing = [f"parameter {sharded.sites.name}" for sharded in self.parameters if sharded.index in sharded.chunk.unloaded]
            missing += [f"buffer {name}" for _, _, name in self.meta_buffers]
            raise RuntimeError(
                f"rank {self.communicator.rank}: layer {self.label} has no values yet for: {', '.join(missing)}. They were on the meta "
                "device when it was wrapped. Load them (zero3.load_pretrained, zero3.load_full_state_dict); give a buffer that no "
                "checkpoint holds to its module."
            )
