"""A layer's gradients: one hook a parameter brings them to the flat gradient of its chunk, from where they are backed up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from torch import Tensor

from .autograd import accumulates_into, as_plain_tensors
from .binding import Bound
from .chunk import Chunk
from .collectives import Communicator
from .failures import NamingFailures, Subject
from .gradient import Backup, FlatGradient
from .policy import ShardingPolicy
from .streams import Lane

__all__: list[str] = []


class LayerGradients:
    def __init__(self, communicator: Communicator, policy: ShardingPolicy, subject: Subject) -> None:
        self._communicator = communicator
        self._policy = policy
        self._subject = subject
        self._naming = NamingFailures(communicator, "reducing the gradients of", subject)
        self._flat: dict[Chunk, FlatGradient] = {}
        self._hooked: dict[int, Bound] = {}  # by the id of the parameter
        self._way: tuple[Lane, Communicator] | None = None  # of the last reduction
        self.recorder: Callable[..., None] = lambda *operation: None  # told of every reduction
        self.deferrals = 0  # `no_sync` contexts that it is in

    def add_chunk(self, chunk: Chunk) -> None:
        self._flat[chunk] = FlatGradient(chunk, self._communicator, self._policy, self._naming)

    def hook(self, bound: Bound) -> None:
        """From now on, what autograd accumulates into the parameter goes to its chunk's flat gradient."""
        parameter, key, gradients = bound.binding.parameter, id(bound.binding.parameter), weakref.ref(self)
        known = key in self._hooked
        if not parameter.requires_grad:
            return
        self._hooked[key] = bound
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

    def watch(self, on_first: Callable[[], None]) -> None:
        for gradient in self._flat.values():
            gradient.on_first = on_first

    def pending(self) -> bool:
        """Whether gradients have come in, in this backward, that no backup has taken."""
        return any(gradient.pending for gradient in self._flat.values())

    def due(self) -> bool:
        """Whether an earlier backward, under `no_sync`, has left its reduction to one like the present."""
        return not self.deferred and any(gradient.owed for gradient in self._flat.values())

    def expected(self) -> bool:
        """Whether the backward that runs now writes gradients of this layer's parameters."""
        return accumulates_into(bound.binding.parameter for bound in self._hooked.values())

    def back_up(self, lane: Lane, communicator: Communicator) -> list[Backup]:
        """Begins to reduce the gradients of all trainable chunks; under `no_sync`, keeps them."""
        trained = [gradient for chunk, gradient in self._flat.items() if chunk.shard.requires_grad]
        if not self.deferred:
            self._way = (lane, communicator)
            self.recorder("reduce")
            self._note()
            return [gradient.back_up(lane, communicator) for gradient in trained]
        for gradient in trained:
            gradient.keep()
        return []

    @property
    def deferred(self) -> bool:
        """Whether reductions wait. On one rank there are none to save, and memory to lose."""
        return self.deferrals > 0 and self._communicator.world_size > 1

    def note_tokens(self, total: Tensor) -> None:
        """What backwards have left here is now the mean over `total` tokens, 0-dim."""
        for gradient in self._flat.values():
            gradient.note_tokens(total)

    def scale(self, factor: Tensor) -> None:
        """Multiplies all that backwards have left here by `factor`, 0-dim."""
        for gradient in self._flat.values():
            gradient.scale(factor)

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
                continue
            gradient.drop()
            for part in chunk.parts:
                part.parameter.grad = None

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

    def _note(self) -> None:
        if self._subject.journal is not None:
            self._subject.journal.note("reducing", self._subject.name.removeprefix("layer "), self._communicator.channel)

    def take_part(self) -> None:
        """Joins a reduction that the other ranks make, and this one, which has failed, would not."""
        if self._way is None:
            return
        self._note()
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

    def follow_requires_grad(self, chunk: Chunk, members: Iterable[Bound]) -> None:
        """A chunk frozen or unfrozen as a whole takes its parameters along."""
        chunk.trains = chunk.shard.requires_grad
        for bound in members:
            if bound.chunk is chunk:
                with as_plain_tensors():
                    bound.binding.parameter.requires_grad_(chunk.trains)
                self.hook(bound)
