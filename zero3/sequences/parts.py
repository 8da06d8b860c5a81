"""Parts of sequences over the ranks of a group (Ulysses): each rank has all layers' activations for
its part, and attention some heads of the whole.
"""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..comm.errors import NamingFailures
from ..comm.factory import Shared
from ..comm.log import Entry
from ..conductors.conducted import unconducted
from ..core.autograd import (
    backward_task,
    checkpoint_around,
    current_node,
    graph_clock,
    note_in_thread,
    noted_in_thread,
    tensors_in,
)
from ..core.layer_state import LayerState
from ..modules import unwrapped
from .exchange import DOING, Direction, Measured, swap
from .heads import key_heads, query_heads, repeats

__all__: list[str] = []

_FORWARDS = "zero3_forwards"  # the key of a note in the thread, `_Forwards`
_NOTE = struct.Struct("<iiBB6x")  # sixteen bytes: rows, tokens of this part, what it has, who tells
_MASK, _POSITIONS, _MISTAKE = 1, 2, 4
_COMPUTES, _ABSENT = 1, 2


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a forward begins with on this rank."""

    run: Callable[[Measured], Any] = lambda _: None  # what follows, unless it was refused
    rows: int = 0
    part: int = 0
    positions: Tensor | None = None  # [B, part]
    mask: Tensor | None = None  # [B, part]


@dataclass(frozen=True, slots=True)
class Measure:
    """Ranks tell each other at the begin of a forward how long their parts are."""

    layer: LayerState  # the root's own
    parts: Any = field(compare=False, repr=False)
    mine: Any = field(default=None, compare=False, repr=False)  # (Beginning, error)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "compares the lengths of parts of sequences"

    def perform(self) -> Measured:
        found: Measured = self.parts.measure(*self.mine)
        return found

    def take_part(self) -> None:
        """After a failure, or without data. What is recomputed is as long as it was."""
        last: Measured | None = self.parts.present
        sizes = (0, 0) if last is None else (last.batch, last.part)
        self.parts.measure(Beginning(rows=sizes[0], part=sizes[1]), None, _ABSENT)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Forward:
    """One forward of a model, which lives as long as hooks on its outputs do, or longer."""

    parts: weakref.ref[Parts]
    measured: Measured
    within: int  # the backward that recomputes it, or -1
    first: int = field(default_factory=graph_clock)
    last: int | None = None  # of its graph's nodes; None: it is under way
    recomputes: bool = False  # whether one of its attentions is in a checkpoint


class _Forwards(NamedTuple):
    """The forwards of a thread. Attentions are functions, and are told of no model. torch hands a
    thread's note to the threads that run its backwards, and takes back what a node changes in it.
    """

    all: tuple[weakref.ref[_Forward], ...] = ()
    present: weakref.ref[_Forward] | None = None  # what runs now is part of it
    backward: int = -1  # which has put the note

    @staticmethod
    def here() -> _Forwards:
        return noted_in_thread(_FORWARDS) or _Forwards()

    def put(self, present: _Forward | None) -> None:
        kept = None if present is None else weakref.ref(present)
        note_in_thread(_FORWARDS, _Forwards(self.all, kept, backward_task()))

    def find(self) -> _Forward | None:
        """The present one. It is under way, or a node of its graph runs, which needs what is
        recomputed. Nodes that a recomputation has made, and a backward inside of the first one
        runs, are part of a forward that was recomputed with them, or else of what the outer node
        is part of.
        """
        present = self.present() if self.present is not None else None
        is_known = self.backward == backward_task()  # by this node, or outside of backwards
        if is_known or (present is not None and present.last is None):
            return present
        node = current_node()
        number = -1 if node is None else node._sequence_nr()
        alive = (each for reference in self.all if (each := reference()) is not None)
        beside = (each for each in alive if each.within == self.backward)
        around = (each for each in beside if each.first <= number < (each.last or 0))
        found = max(around, key=lambda each: each.first, default=present)  # one may call another
        self.put(found)
        return found


class Parts:
    """The group in which a model's sequences are divided, and the forward that is under way."""

    def __init__(self, shared: Shared, root: LayerState) -> None:
        group = shared.group
        self.group, self.size = group, group.world_size
        self.root = weakref.ref(root)
        # of the latest forward, or of that which is recomputed
        self.present: Measured | None = None
        self.depth = 0  # forwards under way
        self.now: _Forward | None = None  # the latest
        # what a backward may recompute, though the hooks on its outputs are gone: small things
        self._kept: deque[_Forward] = deque(maxlen=256)
        self._members, self._index = shared.members, shared.part
        self.ran: dict[nn.Module, str] = {}  # attentions of this forward
        self.exchanged: set[nn.Module | None] = set()
        self._naming = [NamingFailures(group, doing, root.subject) for doing in DOING]
        self._measuring = NamingFailures(group, "comparing the lengths of", root.subject)
        self._entries = [
            Entry(doing, root.subject, 2 * root.chunks.identity + 1 | (1 + way) << 32)
            for way, doing in enumerate(DOING)
        ]
        self._of_all = True  # whether all ranks of the model make the exchange under way

    # -- one forward

    def layer(self) -> LayerState:
        """The root's own."""
        if (root := self.root()) is None:
            raise RuntimeError("the sharded model whose ranks hold parts of sequences is gone")
        return root

    @property
    def active(self) -> bool:
        """Whether sequences are divided here and now: not where a rank computes for itself."""
        root = self.root()
        return root is not None and not root.pins.resident

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of `[B, S, ...]`."""
        return whole.tensor_split(self.size, 1)[self._index]

    @contextmanager
    def forward(self, measured: Measured) -> Iterator[None]:
        self.present = measured
        self.depth += 1
        self.ran, self.exchanged = {}, set()
        # of a model that calls this one: its teacher, perhaps
        around = _Forwards.here().find()
        self.now = now = _Forward(weakref.ref(self), measured, backward_task())
        alive = (each for each in _Forwards.here().all if each() is not None)
        _Forwards((*alive, weakref.ref(now))).put(now)
        try:
            yield
        finally:
            self.depth -= 1
            now.last = graph_clock()
            _Forwards.here().put(around)

    @property
    def is_recomputed(self) -> bool:
        """Whether what runs now is part of a forward that was over, and is recomputed."""
        return _present() is self

    def settle(self) -> Measured | None:
        """Of the forward that what runs now is part of, as far as that is known."""
        now = _Forwards.here().find()
        if now is not None and now.parts() is self:
            self.present = now.measured
        return self.present

    def come_back(self, output: Any) -> None:
        """Backward may recompute this forward, when others have followed."""
        now = self.now

        def begin(_: Any) -> None:
            if now is not None:
                self._arrive(now)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begin)

    def _arrive(self, now: _Forward) -> None:
        """A backward comes to a forward."""
        if now.recomputes and not any(each() is now for each in _Forwards.here().all):
            raise RuntimeError(
                f"the forward of {self.layer().label}, whose ranks hold parts of sequences (sp), "
                "was made in another thread than its backward, or in a backward: a zero3.attend in "
                "a checkpoint would not be known to be part of it. Call backward in the thread of "
                "the forward"
            )
        self.present = now.measured

    def check_exchanged(self, what: str) -> None:
        """Raises RuntimeError if an attention ran, and did not exchange."""
        missing = [name for module, name in self.ran.items() if module not in self.exchanged]
        if missing or not self.exchanged:
            named = f"attention {missing[0]!r} of this" if missing else "no attention of this"
            raise RuntimeError(
                f"{named} {what} {'computed by itself' if missing else 'has exchanged anything'}: "
                "each rank would attend to its own part of the sequence alone. Begin it by "
                "zero3.attend(attention, query, key, value)"
            )

    # -- what ranks do together

    def measure(self, call: Beginning, error: Exception | None, who: int = _COMPUTES) -> Measured:
        has = _MASK * (call.mask is not None) | _POSITIONS * (call.positions is not None)
        told = self._tell(call, has | _MISTAKE * (error is not None), who)
        if error is not None:
            raise error
        self._check(told)
        return self._complete(told, call)

    def _tell(self, call: Beginning, has: int, who: int) -> list[tuple[int, int, int, int]]:
        root = self.layer()
        inner, everyone = unconducted(root.communicator), root.communicator
        joined = inner is not everyone  # ranks without data take part in what all do
        among = inner if joined else self.group
        with self._measuring:
            told = among.exchange(_NOTE.pack(call.rows, call.part, has, who), root.device)
        notes = [_NOTE.unpack(each) for each in told]
        if not joined:
            return notes
        for first in range(0, len(notes), self.size):  # the ranks of a group are consecutive
            ranks = range(first, first + self.size)
            absent = [rank for rank in ranks if notes[rank][3] == _ABSENT]
            if 0 < len(absent) < self.size:
                raise ValueError(
                    f"rank {absent[0]} has no data left, and others of its group (sp), which hold "
                    f"parts of the same sequences, have: ranks {list(ranks)} have to run out "
                    "together (zero3.joinable)"
                )
        return [notes[rank] for rank in self._members]

    def _check(self, told: list[tuple[int, int, int, int]]) -> None:
        wrong = [rank for rank, note in enumerate(told) if note[2] & _MISTAKE]
        if wrong:
            raise ValueError(
                f"rank {self._members[wrong[0]]} refused its part of the batch: its own error "
                "says why"
            )
        present = [note for note in told if note[3] == _COMPUTES]
        for number, what in ((0, "rows"), (2, "masks and positions")):
            if len({note[number] for note in present}) > 1:
                raise ValueError(
                    f"ranks {list(self._members)} hold parts of the same sequences, and differ in "
                    f"{what}: {[note[number] for note in told]}. Pass the whole batch through "
                    "zero3.split_sequence on each of them"
                )

    def _complete(self, told: list[tuple[int, int, int, int]], call: Beginning) -> Measured:
        lengths, batch = tuple(note[1] for note in told), max(note[0] for note in told)
        has = max(note[2] for note in told)
        found = self._gather(batch, lengths, has, call) if has else {}
        positions, mask = found.get("positions"), found.get("mask")
        packed = None if positions is None or mask is not None else _numbered(positions)
        self.present = Measured(batch, lengths, self._index, positions, mask, packed)
        return self.present

    def _gather(
        self, batch: int, lengths: tuple[int, ...], has: int, call: Beginning
    ) -> dict[str, Tensor]:
        """Positions and masks of whole sequences: integers."""
        root = self.layer()
        names = [name for name, bit in (("positions", _POSITIONS), ("mask", _MASK)) if has & bit]
        longest = max(lengths)
        own = torch.zeros(len(names), batch, longest, dtype=torch.int64, device=root.device)
        for row, name in zip(own, names, strict=True):
            if (values := getattr(call, name)) is not None:
                row[:, : values.shape[1]] = values
        by_rank = zip(self._everyones(own), lengths, strict=True)
        whole = torch.cat([values[:, :, :length] for values, length in by_rank], 2)
        found = dict(zip(names, whole, strict=True))
        return {name: each.bool() if name == "mask" else each for name, each in found.items()}

    def mean(self, value: Tensor) -> Tensor:
        """The mean of all ranks' 0-dim values."""
        return self._everyones(value.reshape(1)).mean()

    def joined(self, part: Tensor) -> Tensor:
        """All ranks' `[B, part, ...]`, as one `[B, S, ...]`."""
        lengths = self.present.lengths if self.present is not None else ()
        longest = max(lengths)
        whole = self._everyones(padded(part, longest - part.shape[1], 0).contiguous())
        return torch.cat([each[:, :n] for each, n in zip(whole, lengths, strict=True)], 1)

    def _everyones(self, own: Tensor) -> Tensor:
        """`[sp, ...]`"""
        full = own.new_empty(self.size, *own.shape)
        with self._measuring:
            self.group.all_gather(full.view(-1), own.reshape(-1)).wait()
        return full

    def swap(self, way: Direction, into: Tensor, flat: Tensor, bounds: Any, places: Any) -> None:
        root, entry = self.layer(), self._entries[way]
        root.log.entries.append(entry if self._of_all else entry._replace(identity=None))
        with self._naming[way]:
            self.group.all_to_all(into, flat, bounds, places).wait()

    @contextmanager
    def among_some(self) -> Iterator[None]:
        """Inside, some ranks of the model have no data, and make no exchange."""
        self._of_all = False
        try:
            yield
        finally:
            self._of_all = True

    # -- attention

    def attend(
        self,
        attention: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        caller: nn.Module | None = None,
    ) -> Tensor:
        """See `zero3.attend`."""
        if caller is None and self.depth and self.now is not None and not self.now.recomputes:
            self.now.recomputes = checkpoint_around() is not None
            self._kept.extend([self.now] * self.now.recomputes)
        measured = self.settle()
        if measured is None or query.shape[2] != measured.part or query.shape[0] != measured.batch:
            raise RuntimeError(
                f"an attention was called with queries {list(query.shape)}, expected [B, H, part, "
                f"D] of {'no' if measured is None else f'{measured.batch} x {measured.part}'} "
                "tokens: it has to be called in a forward of the sharded model, with all tokens "
                "of this rank's part"
            )
        self.exchanged.add(caller)
        count, keys = query.shape[1], key.shape[1]
        queries = query_heads(count, self.size)
        needed = key_heads(queries, keys)
        there = swap(self, measured, Direction.THERE, (queries, needed, needed), query, key, value)
        own, theirs = queries[self._index], needed[self._index]
        if (places := repeats(own, theirs, keys, count)) is not None:
            again = torch.tensor(places, device=key.device)
            there = there[0], there[1].index_select(1, again), there[2].index_select(1, again)
        return swap(self, measured, Direction.BACK, (queries,), attention(*there).contiguous())[0]


def attend(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Calls `attention(query, key, value)`. In a model whose ranks hold parts of sequences it gets
    some heads of whole sequences in place of all heads of a part.

    For attentions of one's own; those of transformers' models do it by themselves. Elsewhere it is
    a plain call.

    Args:
        attention: Gets `[B, heads / sp, S, D]`, and returns `[B, heads / sp, S, *]`. It makes its
            own mask, of whole sequences.
        query: `[B, heads, part, D]`. The heads have to be divisible by the number of ranks.
        key: `[B, key heads, part, D]`. There may be fewer; ranks then share them.
        value: `[B, key heads, part, *]`.

    Returns:
        `[B, heads, part, *]`.

    Raises:
        ValueError: The query heads are not divisible.
        RuntimeError: It has other tokens than this rank's part of the sequences.

    Example::

        out = zero3.attend(partial(scaled_dot_product_attention, is_causal=True), q, k, v)

    Source: Jacobs et al., DeepSpeed Ulysses, 2023.
    """
    parts = _present()
    if parts is None or not parts.active:
        return attention(query, key, value)
    return parts.attend(attention, query, key, value)


def _present() -> Parts | None:
    """Those of the model that what runs now is part of."""
    now = _Forwards.here().find()
    return None if now is None else now.parts()


def parts_of(module: nn.Module) -> Parts | None:
    """Those of the model that a module belongs to. None: its ranks hold whole sequences."""
    found: Parts | None = vars(unwrapped(module)).get("_zero3_parts")
    return found


def active_parts_of(module: nn.Module) -> Parts | None:
    """As `parts_of`. None also where a rank computes for itself."""
    parts = parts_of(module)
    return parts if parts is not None and parts.active else None


def measures_of(model: nn.Module) -> list[Measure]:
    """What a rank without data takes part in, if others of the model's ranks begin a forward."""
    found = dict.fromkeys(parts for module in model.modules() if (parts := parts_of(module)))
    roots = ((parts.root(), parts) for parts in found)
    return [Measure(root, parts) for root, parts in roots if root is not None]


def parts_under_way() -> Parts | None:
    """Those of the model whose forward is under way."""
    parts = _present()
    return parts if parts is not None and parts.depth and parts.active else None


def _numbered(positions: Tensor) -> Tensor | None:
    """Which sequence each token belongs to, `[B, S]`. None: there is one.

    transformers looks for them in the same way, in whole sequences that have no mask.
    """
    starts = positions.diff(dim=1) != 1
    return functional.pad(starts.cumsum(1), (1, 0)) if bool(starts.any()) else None


def check_whole(tensors: Sequence[Tensor]) -> None:
    """Raises ValueError if a rank computes for itself, and was given a part."""
    if any(hasattr(tensor, "zero3_cut") for tensor in tensors):
        raise ValueError(
            "inside of zero3.resident each rank has whole sequences, and this batch was cut "
            "outside of it: call zero3.split_sequence inside, where it cuts nothing"
        )


def padded(tensor: Tensor, missing: int, value: int) -> Tensor:
    """`[B, S, ...]`, and so many tokens more."""
    return functional.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing), value=value)


def check_reduction(module: nn.Module, reduction: str) -> None:
    """Raises ValueError if the mean is asked for, and ranks hold parts of sequences."""
    if reduction == "mean" and active_parts_of(module) is not None:
        raise ValueError(
            'reduction="mean" in a model whose ranks hold parts of sequences (sp): the mean over a '
            'part is not the mean over the whole. Pass reduction="sum", and give the sum and the '
            "number of tokens to zero3.backward(loss_sum, num_tokens, model)"
        )


def check_labels(model: nn.Module) -> None:
    """Raises ValueError if ranks hold parts of sequences: no rank can shift labels alone."""
    if active_parts_of(model) is not None:
        raise ValueError(
            "labels= in a model whose ranks hold parts of sequences (sp): they would be shifted "
            "across the cut between ranks. Pass the whole batch through zero3.split_sequence, "
            "which makes shift_labels"
        )
