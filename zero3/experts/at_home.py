"""The forward of experts whose parameters stay on the ranks that own them.

    forward     counts   there   module(rows)   back
    backward    back again   module   there again

A token goes once to each rank that owns one of its experts, with its weights and the experts'
numbers. The owner calls the module with these experts alone, adds the results of a token up, and
sends one row back. Every rank makes every exchange, whatever its data is.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..casting import cast
from ..comm.errors import NamingFailures
from ..comm.factory import Dealing
from ..comm.log import Entry
from ..core.autograd import checkpoint_around, inside_backward
from ..core.layer_state import LayerState
from .finding import count_of, cuts, inputs_of

__all__: list[str] = []


class Way(IntEnum):
    COUNTS = 0
    THERE = 1
    BACK = 2
    GRADIENTS_THERE = 3
    GRADIENTS_BACK = 4


_DOING = (
    "counting the tokens of",
    "sending tokens to",
    "returning tokens from",
    "sending gradients to",
    "returning gradients from",
)

# One word of 64 bits tells a rank how many rows come, of how many pairs of a token and an expert,
# the lengths of elements of hidden states and weights, and whether their rank needs gradients.
_PAIRS, _LENGTHS, _NEEDS = 26, 54, 62  # from which bit on
_ROWS, _MOST = (1 << _PAIRS) - 1, (1 << _LENGTHS - _PAIRS) - 1
# of hidden states, weights and experts' numbers, those that go each way
_PARTS = (0, 3, 1, 1, 2)

More = tuple[tuple[Any, ...], dict[str, Any]]  # further arguments of experts


class Route(NamedTuple):
    """Where the tokens of one call go."""

    home: Any  # an `AtHome`
    source: Tensor  # [n] which token each row is that this rank sends, rank by rank
    sent: Sequence[int]  # rows, to each rank
    received: Sequence[int]
    words: Sequence[int]  # what this rank has told each rank
    widths: tuple[int, int, int]  # bytes of a row: hidden state, weights, experts' numbers
    pairs: int  # of a row that has come and an expert
    needed: bool  # whether any rank needs gradients
    call: int = -1  # its number since a guard began


@dataclass(slots=True)
class _GuardedCall:
    """One in a guard."""

    route: Route
    index: Tensor  # [T, k]
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class Trip:
    """Something goes from each rank to each other. `again`: for a recomputation. `call`: the number
    of the experts' call, see `Route`.
    """

    layer: Any
    way: Way
    again: bool
    call: int
    home: Any = field(compare=False, repr=False)
    mine: Any = field(default=None, compare=False, repr=False)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"is {_DOING[self.way]} layer {self.layer.label}"

    def perform(self) -> Any:
        return self.home.swap(self.way, *self.mine)

    def take_part(self) -> None:
        """With no tokens, and zeros for those of others."""
        self.home.answer(self.way, self.call, again=self.again)


class AtHome:
    """Calls an experts module whose parameters this rank has a block of."""

    def __init__(
        self,
        module: nn.Module,
        dealing: Dealing,
        casts: tuple[torch.dtype | None, torch.dtype | None],
    ) -> None:
        """`casts`: the dtypes of hidden states and of the result."""
        among, block = dealing.among, dealing.block
        self.experts = count_of(module)
        self.first, self.end = cuts(self.experts, among.world_size)[block : block + 2]
        self._names, self._casts, self._among = inputs_of(module), casts, among
        self._ends: Tensor | None = None  # [G] the ends of blocks, where tokens are
        self._state: Callable[[], LayerState | None] = lambda: None
        self._naming: list[NamingFailures] = []
        self._entries: list[Entry] = []
        # for `step_guard`: what this rank would send if it had to answer without computing. Of each
        # guard, as long as there is its conductor: its calls
        self._guarded: weakref.WeakKeyDictionary[Any, dict[int, _GuardedCall]] = (
            weakref.WeakKeyDictionary()
        )
        self._latest = 0, 0, 0, 0  # H, k, and the lengths of their elements
        self._crowded = False  # in a plan
        self._recorded = False  # whether a backward comes to the call, also if it needs none here
        # the nodes of such calls: their backward may recompute them, after other calls
        self._expected = weakref.WeakSet[Any]()

    def serve(self, state: LayerState) -> None:
        """It is the call of this layer from now on."""
        self._state = weakref.ref(state)
        self._naming = [NamingFailures(self._among, doing, state.subject) for doing in _DOING]
        self._entries = [
            Entry(doing, state.subject, 2 * state.chunks.identity + 1 | (1 + way) << 32)
            for way, doing in enumerate(_DOING)
        ]

    def expect(self, *, crowded: bool) -> None:
        """For plans: from now on tokens use all experts alike, or all ranks' come to this one."""
        self._crowded = crowded

    def expect_backward(self, *, comes: bool) -> None:
        """Before a call: whether backward comes to it on all ranks, also on those among which no
        token needs a gradient.
        """
        self._recorded = comes

    def _layer(self) -> LayerState:
        if (state := self._state()) is None:
            raise RuntimeError("the layer of these experts is gone")
        return state

    def __call__(self, module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, index, weights = (given.pop(name) for name in self._names)
        hidden, more = cast(hidden, self._casts[0]), (args[3:], given)
        state = self._layer()
        if state.pinned:
            made = self._whole(state, module, hidden, index, weights, *args[3:], **given)
            return cast(made, self._casts[1])
        _refuse_tensors(state, more)
        try:
            return cast(self._travel(state, module, (hidden, index, weights), more), self._casts[1])
        finally:
            if not inside_backward():
                state.keep()  # outside of the module's own forward, nobody sees a part of experts

    def _whole(
        self, state: LayerState, module: Callable[..., Any], /, *args: Any, **kw: Any
    ) -> Any:
        """All experts are here."""
        if torch.is_grad_enabled() and not state.pins.resident and state.chunks.trainable():
            raise RuntimeError(
                f"rank {state.communicator.rank}: layer {state.label} (experts, with "
                "expert_parallel=True) was to compute with gradients inside zero3.full_params(), "
                "which holds all experts. Train outside of it."
            )
        return module(*args, **kw)

    def _travel(
        self,
        state: LayerState,
        module: Callable[..., Any],
        inputs: tuple[Tensor, Tensor, Tensor],
        more: More,
    ) -> Tensor:
        hidden, index, weights = inputs
        needs = _is_recomputed() or (
            torch.is_grad_enabled()
            and (
                (bool(self._expected) if inside_backward() else self._recorded)
                or hidden.requires_grad
                or weights.requires_grad
                or bool(state.chunks.trainable())
            )
        )
        route = self._find_route(state, inputs, needs=needs)
        anchor = hidden.new_empty(0, requires_grad=route.needed)
        sent = hidden, weights, index.to(torch.int32)
        rows, weight, number = _There.apply(*sent, anchor, route)  # type: ignore[no-untyped-call]
        if self._recorded and rows.grad_fn is not None and not inside_backward():
            self._expected.add(rows.grad_fn)
        held = (number >= self.first) & (number < self.end)
        # a rank that answers without computing sends zeros: then the micro-batch is dropped anyway
        pairs = held.view(-1).nonzero_static(size=route.pairs, fill_value=0).squeeze(1)
        row = pairs // max(1, number.shape[1])
        if route.pairs:
            own = number.view(-1)[pairs].long() - self.first
            own = own.clamp(0, self.end - self.first - 1).unsqueeze(1)
            weight = weight.reshape(-1).index_select(0, pairs).unsqueeze(1)
            made = self._compute(module, rows.index_select(0, row), own, weight, more)
        else:
            made = rows.index_select(0, row)
        added = _AddUp.apply(made, row, rows)  # type: ignore[no-untyped-call]
        found: Tensor = _Back.apply(added, anchor, route, len(hidden))  # type: ignore[no-untyped-call]
        return found

    def _compute(
        self,
        module: Any,
        rows: Tensor,
        number: Tensor,
        weight: Tensor,
        more: More,
    ) -> Tensor:
        module.num_experts = self.end - self.first
        try:
            made: Tensor = module(rows, number, weight, *more[0], **more[1])
            return made
        finally:
            module.num_experts = self.experts

    def _find_route(
        self, state: LayerState, inputs: tuple[Tensor, Tensor, Tensor], *, needs: bool
    ) -> Route:
        hidden, index, weights = inputs
        lengths = hidden.element_size(), weights.element_size()
        self._latest = hidden.shape[1], index.shape[1], *lengths
        if index.is_meta:  # of a plan
            return self._planned(index, needs=needs)
        if self._ends is None or self._ends.device != index.device:
            ends = cuts(self.experts, self._among.world_size)[1:]
            self._ends = torch.tensor(ends, device=index.device)
        same = lengths[0] << _LENGTHS | lengths[1] << _LENGTHS + 4 | int(needs) << _NEEDS
        with torch.no_grad():
            owner = torch.bucketize(index, self._ends, right=True)  # [T, k]
            tokens, ranks = len(index), len(self._ends)
            goes = torch.zeros(ranks, tokens, dtype=torch.bool, device=index.device)
            goes.t().scatter_(1, owner, True)
            pairs = torch.zeros(ranks, dtype=torch.int64, device=index.device)
            pairs.scatter_add_(0, owner.reshape(-1), torch.ones_like(owner).reshape(-1))
            words = goes.sum(1) + (pairs << _PAIRS) + same
            call = self._number_of_call(state, index)
            sent, came = self._conduct(state, Way.COUNTS, call, words)
            leave, rows = rows_of(sent), rows_of(came)
            source = goes.view(-1).nonzero_static(size=sum(leave)).squeeze(1) % max(1, tokens)
        here = sum(word >> _PAIRS & _MOST for word in came)
        told, widths = [word >> _NEEDS for word in came if word], _widths(*self._latest)
        if (needed := any(told)) and not torch.is_grad_enabled() and not all(told):
            raise _some_recompute(state)
        route = Route(self, source, leave, rows, sent, widths, here, needed, call)
        if call >= 0 and not inside_backward():
            self._calls(state)[call] = _GuardedCall(route, index)
        return route

    def _planned(self, index: Tensor, *, needs: bool) -> Route:
        """The route of tokens that use all experts alike, or of those that all come here."""
        (tokens, used), bounds = index.shape, cuts(self.experts, self._among.world_size)
        sizes = [end - first for first, end in pairwise(bounds)]
        all_choices = math.comb(self.experts, used)
        reach = [1 - math.comb(self.experts - size, used) / all_choices for size in sizes]
        sent, own = [round(tokens * share) for share in reach], self.end - self.first
        here = round(tokens * (1 - math.comb(self.experts - own, used) / all_choices))
        pairs = tokens * used * len(sizes) * own // self.experts
        if self._crowded and own:
            sent = [tokens * (first == self.first) for first in bounds[:-1]]
            here, pairs = tokens, tokens * used * len(sizes)
        source, came = index.new_empty(sum(sent)), [here] * len(sizes)
        return Route(self, source, sent, came, sent, _widths(*self._latest), pairs, needs)

    # -- exchanges

    def travels(self, way: Way, route: Route, *parts: Tensor) -> list[Tensor]:
        """Sends the rows of `parts`, side by side."""
        found: list[Tensor] = self._conduct(self._layer(), way, route.call, route, parts)
        return found

    def _conduct(self, state: LayerState, way: Way, call: int, *mine: Any) -> Any:
        again = way <= Way.BACK and inside_backward()
        return state.conductor.conduct(Trip(state, way, again, call, self, mine))

    def swap(self, way: Way, *mine: Any) -> Any:
        """Makes an exchange. It works on the compute stream."""
        self._layer().log.entries.append(self._entries[way])
        with self._naming[way]:
            return self._count(*mine) if way is Way.COUNTS else self._swap_rows(way, *mine)

    def _count(self, words: Tensor) -> list[list[int]]:
        received = torch.empty_like(words)
        self._among.all_to_all(received, words).wait()
        found: list[list[int]] = torch.stack([words, received]).tolist()  # the host waits
        return found

    def _swap_rows(self, way: Way, route: Route, parts: Sequence[Tensor]) -> list[Tensor]:
        widths = [each.shape[1] * each.element_size() for each in parts]
        flat = [_bytes(each, width) for each, width in zip(parts, widths, strict=True)]
        came = self._swap_bytes(way, route, flat[0] if len(flat) == 1 else torch.cat(flat, 1))
        # what begins inside of a row has to be copied, also out of a single row, where it is
        # contiguous as it is: views in another dtype need an aligned beginning
        return [
            (cut if len(parts) == 1 else cut.clone(memory_format=torch.contiguous_format)).view(
                each.dtype
            )
            if cut.numel()
            else each.new_empty((len(cut), each.shape[1]))
            for cut, each in zip(torch.split(came, widths, 1), parts, strict=True)
        ]

    def _swap_bytes(self, way: Way, route: Route, flat: Tensor) -> Tensor:
        sent, received = route.sent, route.received
        if way in (Way.BACK, Way.GRADIENTS_BACK):
            sent, received = received, sent
        width = flat.shape[1]
        into = flat.new_empty((sum(received), width))
        bounds, places = (
            tuple(rows * width for rows in accumulate(each, initial=0)) for each in (sent, received)
        )
        self._among.all_to_all(into.view(-1), flat.view(-1), bounds, places).wait()
        return into

    # -- for `step_guard`

    def _calls(self, state: LayerState) -> dict[int, _GuardedCall]:
        """The calls since the guard began."""
        return self._guarded.setdefault(state.conductor, {})

    def _number_of_call(self, state: LayerState, index: Tensor) -> int:
        """Of a call in a guard; of a recomputation, it is that of the call with the same tokens:
        the latest, if there are several, and one that was not recomputed, if there is one.
        """
        if not state.gradients.holds:
            return -1
        calls = self._calls(state)
        if not inside_backward():
            return len(calls)
        alike = [call for call in reversed(calls) if torch.equal(calls[call].index, index)]
        found = next((call for call in alike if not calls[call].recomputed), max(calls))
        calls[found].recomputed = True
        return found

    def answer(self, way: Way, call: int, *, again: bool) -> None:
        """Takes part after a failure: sends zeros for as many rows as the others expect."""
        state = self._layer()
        calls = self._calls(state)
        if way is Way.COUNTS:
            told = calls[call].route.words if again else [0] * self._among.world_size
            words = torch.tensor(told, dtype=torch.int64, device=state.device)
            sent, came = self.swap(way, words)
            if not again:
                calls[call] = self._call_without_tokens(sent, came, state.device)
            return
        route, back = calls[call].route, way in (Way.BACK, Way.GRADIENTS_BACK)
        state.log.entries.append(self._entries[way])
        n, widths = sum(route.received if back else route.sent), route.widths[: _PARTS[way]]
        zeros = torch.zeros((n, sum(widths)), dtype=torch.uint8, device=state.device)
        if way is Way.THERE and n:  # to the same experts again, since others recompute
            numbers = calls[call].index.index_select(0, route.source).int()
            zeros[:, -widths[-1] :] = numbers.view(torch.uint8)
        with self._naming[way]:
            self._swap_bytes(way, route, zeros)

    def _call_without_tokens(
        self, sent: list[int], came: list[int], device: torch.device
    ) -> _GuardedCall:
        latest = self._latest
        for word in filter(None, came):  # who computes knows the lengths
            latest = (*latest[:2], word >> _LENGTHS & 15, word >> _LENGTHS + 4 & 15)
        nothing, rows = torch.empty(0, dtype=torch.int64, device=device), rows_of(came)
        route = Route(self, nothing, sent, rows, sent, _widths(*latest), 0, needed=False)
        return _GuardedCall(route, nothing.view(0, 1))


def _widths(hidden: int, used: int, length: int, of_weights: int) -> tuple[int, int, int]:
    return hidden * length, used * of_weights, used * 4


def _refuse_tensors(state: LayerState, more: More) -> None:
    """
    Raises:
        ValueError: Something else than the three inputs of experts is a tensor. It would reach the
            owner's module as the owner has it, and not as the tokens' rank has.
    """
    for name, value in (*enumerate(more[0], 4), *more[1].items()):
        if isinstance(value, Tensor):
            raise ValueError(
                f"rank {state.communicator.rank}: layer {state.label} (experts, with "
                f"expert_parallel=True) was called with a tensor {list(value.shape)} as argument "
                f"{name!r}, expected are (hidden_states, top_k_index, top_k_weights): no other "
                "tensor travels with the tokens. Make it a parameter or a plain number, or gather "
                "these experts"
            )


def _is_recomputed() -> bool:
    """Whether a reentrant checkpoint is around this call, and recomputes it in backward."""
    if torch.is_grad_enabled() or inside_backward():
        return False
    return any(getattr(checkpoint_around(), "needs_input_grad", ()))


def _some_recompute(state: LayerState) -> ValueError:
    return ValueError(
        f"rank {state.communicator.rank}: layer {state.label} (experts, with expert_parallel=True) "
        "is called in a reentrant checkpoint whose inputs need gradients on some ranks alone. "
        "These recompute it in backward, and would wait for the others there. Give the checkpoint "
        "use_reentrant=False, or let its inputs need gradients on every rank (as "
        "enable_input_require_grads() of transformers does)"
    )


def rows_of(words: Sequence[int]) -> list[int]:
    """The numbers of rows that words of an exchange of counts tell."""
    return [word & _ROWS for word in words]


def _bytes(part: Tensor, width: int) -> Tensor:
    """Its rows as bytes: they travel side by side with others', and every backend moves them."""
    if not part.numel():
        return part.new_empty((len(part), width), dtype=torch.uint8)
    return part.contiguous().view(torch.uint8)


def _summed(rows: Tensor, places: Tensor, like: torch.Size) -> Tensor:
    """Adds rows `[n, H]` up at their places of `like`, `[T, H]`, in float32."""
    wide = torch.promote_types(torch.float32, rows.dtype)
    total = torch.zeros(like, dtype=wide, device=rows.device)
    return total.index_add_(0, places, rows.to(total.dtype)).to(rows.dtype)


class _There(torch.autograd.Function):
    """hidden `[T, H]`, weights and experts `[T, k]` -> those of the rows that come, `[n, ..]`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weights: Tensor,
        number: Tensor,
        anchor: Tensor,
        route: Route,
    ) -> tuple[Tensor, ...]:
        """`anchor`: requires a gradient if any rank's tokens do."""
        ctx.route, ctx.shapes = route, (hidden.shape, weights.shape)
        parts = [each.index_select(0, route.source) for each in (hidden, weights, number)]
        rows, weight, numbers = route.home.travels(Way.THERE, route, *parts)
        ctx.mark_non_differentiable(numbers)
        return rows, weight, numbers

    @staticmethod
    def backward(ctx: Any, rows: Tensor, weight: Tensor, _: Any) -> Any:
        route, shapes = ctx.route, ctx.shapes
        both = route.home.travels(Way.GRADIENTS_BACK, route, rows, weight)
        found = (
            _summed(each, route.source, shape) for each, shape in zip(both, shapes, strict=True)
        )
        return *found, None, None, None


class _AddUp(torch.autograd.Function):
    """Results `[P, H]` of pairs -> `[n, H]`, one for each row that has come.

    It saves a tensor on every rank, also on one without rows. Checkpointing recomputes when a saved
    tensor is asked for, and stops when the last one is there: so all ranks recompute between the
    same exchanges, and none sends rows back again.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, row: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(row)
        ctx.of_made = made.dtype
        return _summed(made, row, rows.shape).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (row,) = ctx.saved_tensors
        return gradient.index_select(0, row).to(ctx.of_made), None, None


class _Back(torch.autograd.Function):
    """Rows `[n, H]` -> what the owners of a token's experts have made of it, added up: `[T, H]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, route: Route, tokens: int) -> Tensor:
        ctx.route = route
        (back,) = route.home.travels(Way.BACK, route, rows)
        return _summed(back, route.source, torch.Size((tokens, rows.shape[1])))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        route = ctx.route
        rows = gradient.index_select(0, route.source)
        return route.home.travels(Way.GRADIENTS_THERE, route, rows)[0], None, None, None
