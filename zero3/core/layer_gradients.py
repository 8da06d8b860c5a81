"""A layer's gradients: one hook a parameter brings them to the flat gradient of its chunk, from where they are backed up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..comm.streams import Lane
from ..policy import ShardingPolicy
from .autograd import accumulates_into, as_plain_tensors
from .chunk import Chunk
from .gradient_reducer import Backup, GradientReducer
from .parameters import ShardedParameter
from .transfer_log import TransferWatch

__all__: list[str] = []


class LayerGradients:
    def __init__(self, communicator: Communicator, policy: ShardingPolicy, subject: Subject, watch: TransferWatch) -> None:
        self._communicator = communicator
        self._policy = policy
        self._watch = watch
        self._naming = NamingFailures(communicator, "reducing the gradients of", subject)
        self._flat: dict[Chunk, GradientReducer] = {}
        self._hooked: dict[int, ShardedParameter] = {}  # by the id of the parameter
        self._way: tuple[Lane, Communicator] | None = None  # of the last reduction
        self._look = partial(_settle, weakref.ref(self))
        self._on_look: Callable[[], None] | None = None
        self.averaged_over = communicator.world_size  # ranks
        self.deferrals = 0  # `no_sync` contexts that it is in

    def add_chunk(self, chunk: Chunk) -> None:
        self._flat[chunk] = GradientReducer(chunk, self._communicator, self._policy, self._naming)

    def replace_chunks(self, chunks: Iterable[Chunk], sharded: Iterable[ShardedParameter]) -> None:
        """The same parameters in other chunks."""
        on_first = next((gradient.on_first for gradient in self._flat.values()), None)
        before = self._flat
        self._flat = {}
        for chunk in chunks:
            if chunk in before:
                self._flat[chunk] = before[chunk]
            else:
                self.add_chunk(chunk)
                self._flat[chunk].on_first = on_first
        for each in sharded:
            self.hook(each)

    def hook(self, sharded: ShardedParameter) -> None:
        """From now on, what autograd accumulates into the parameter goes to its chunk's flat gradient."""
        parameter, key, gradients = sharded.sites.parameter, id(sharded.sites.parameter), weakref.ref(self)
        known = key in self._hooked
        if not sharded.chunk.trains:
            return
        self._hooked[key] = sharded
        if known:
            return

        def take(leaf: Tensor) -> None:  # holds neither the parameter nor us: collectors of garbage do not see into hooks
            with as_plain_tensors():  # it may be released by now
                value, leaf.grad = leaf.grad, None
            if value is not None and (ours := gradients()) is not None:
                ours._take(key, value)

        with as_plain_tensors():
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def _take(self, key: int, value: Tensor) -> None:
        place = self._hooked[key]
        self._flat[place.chunk].add(place.index, value)

    def watch(self, on_first: Callable[[], None], on_look: Callable[[], None]) -> None:
        """`on_first`: a backward brings its first gradient. `on_look`: somebody needs gradients that have stayed whole."""
        self._on_look = on_look
        for gradient in self._flat.values():
            gradient.on_first = on_first

    def settle(self) -> bool:
        """Has gradients reduced that have stayed whole, if it is not `no_sync` that keeps them."""
        if self._policy.shards_gradients or self.deferrals or self._on_look is None:
            return False
        self._on_look()
        return True

    def pending(self) -> bool:
        """Whether gradients have come in, in this backward, that no backup has taken."""
        return any(gradient.pending for gradient in self._flat.values())

    def due(self) -> bool:
        """Whether an earlier backward, under `no_sync`, has left its reduction to one like the present."""
        return not self.deferred and self.owed()

    def expected(self) -> bool:
        """Whether the backward that runs now writes gradients of this layer's parameters."""
        return accumulates_into(sharded.sites.parameter for sharded in self._hooked.values())

    def back_up(self, lane: Lane, communicator: Communicator, *, whole: bool = False) -> list[Backup]:
        """Begins to reduce the gradients of all trainable chunks; keeps them under `no_sync`, and if they stay whole, but for `whole`."""
        trained = [gradient for chunk, gradient in self._flat.items() if chunk.shard.requires_grad]
        if whole or not self.deferred:
            self._way = (lane, communicator)
            self._watch.recorder("reduce")
            self._watch.reduces()
            return [gradient.back_up(lane, communicator) for gradient in trained]
        for gradient in trained:
            gradient.keep(self._look)
        return []

    @property
    def deferred(self) -> bool:
        """Whether reductions wait. On one rank there are none to save, and memory to lose."""
        return (self.deferrals > 0 or not self._policy.shards_gradients) and self._communicator.world_size > 1

    @property
    def reduction(self) -> str:
        """What a backward makes of this layer's gradients: what ranks have to do alike."""
        if not any(chunk.shard.requires_grad for chunk in self._flat):
            return "frozen"
        return "gradients kept (as under no_sync)" if self.deferred else "gradients reduced"

    def note_tokens(self, total: Tensor) -> None:
        """What backwards have left here is now the mean over `total` tokens, 0-dim."""
        for gradient in self._flat.values():
            gradient.note_tokens(total)

    def average_over(self, ranks: int) -> None:
        """From now on gradients are the mean over `ranks` ranks: the others have no data."""
        self.averaged_over = ranks
        for gradient in self._flat.values():
            gradient.averaged_over = ranks

    def use(self, communicator: Communicator) -> None:
        """What gradients ask other ranks by (a loss scaler's inf), from now on."""
        for gradient in self._flat.values():
            gradient.communicator = communicator

    def owed(self) -> bool:
        """Whether an earlier backward, under `no_sync`, has left its reduction to a later one."""
        return any(gradient.owed for gradient in self._flat.values())

    def scale(self, factor: Tensor) -> None:
        """Multiplies all that backwards have left here by `factor`, 0-dim."""
        for gradient in self._flat.values():
            gradient.scale(factor, self._look)

    def drop_pending(self) -> None:
        """What a backward that did not end has brought; with it, what was kept, for the two are one sum (but in a transaction)."""
        for gradient in self._flat.values():
            if gradient.pending and gradient.transacts:
                gradient.roll_back()
            elif gradient.pending:
                gradient.drop()

    def give_up(self) -> None:
        """A backward broke: all gradients are dropped, in a transaction those that it brought."""
        for chunk, gradient in self._flat.items():
            if gradient.transacts:
                gradient.roll_back()
            else:
                _drop(chunk, gradient)

    def drop_sums(self) -> None:
        """What has come in, or was kept, and is not reduced."""
        for gradient in self._flat.values():
            gradient.drop()

    def drop(self) -> None:
        for chunk, gradient in self._flat.items():
            _drop(chunk, gradient)

    def roll_back(self) -> None:
        """What nobody has decided on is forgotten."""
        for gradient in self._flat.values():
            gradient.roll_back()

    def commit(self) -> None:
        """At the end of a backward: its gradients join those of earlier ones, unless a `step_guard` is to decide on that."""
        for gradient in self._flat.values():
            if not gradient.holds:
                gradient.commit()

    def hold(self, change: int) -> None:
        """+1: from now on a `step_guard` decides. -1: no longer."""
        for gradient in self._flat.values():
            gradient.holds += change

    @property
    def undecided(self) -> bool:
        """Whether backwards have brought what nobody has decided on."""
        return any(gradient.undecided for gradient in self._flat.values())

    def take_part(self) -> None:
        """Joins a reduction that the other ranks make, and this one, which has failed, would not."""
        if self._way is None:
            return
        self._watch.reduces()
        backups = [gradient.back_up(*self._way) for chunk, gradient in self._flat.items() if chunk.shard.requires_grad]
        for backup in backups:
            backup.wait()

    def forget_zeroed(self) -> bool:
        """Between backwards: drops kept sums whose gradients were zeroed; whether there were any."""
        zeroed = [gradient for gradient in self._flat.values() if gradient.forget_zeroed()]
        return bool(zeroed)

    def forget_unseen(self) -> None:
        for gradient in self._flat.values():
            if gradient.unseen:
                gradient.drop()

    def follow_requires_grad(self, chunk: Chunk, members: Iterable[ShardedParameter]) -> None:
        """A chunk frozen or unfrozen as a whole takes its parameters along."""
        chunk.trains = chunk.shard.requires_grad
        for sharded in members:
            if sharded.chunk is chunk:
                with as_plain_tensors():
                    sharded.sites.parameter.requires_grad_(chunk.trains)
                self.hook(sharded)


def _drop(chunk: Chunk, gradient: GradientReducer) -> None:
    gradient.drop()
    for part in chunk.parts:
        part.parameter.grad = None


def _settle(gradients: weakref.ref[LayerGradients]) -> bool:
    """Gradients hold no layer: a model that is given up is freed at once."""
    layer = gradients()
    return layer is not None and layer.settle()
