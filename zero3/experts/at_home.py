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

from ..comm.errors import NamingFailures
from ..comm.factory import Dealing
from ..comm.log import Entry
from ..core.autograd import inside_backward
from ..core.casting import cast
from ..core.layer_state import LayerState
from .finding import cuts, inputs_of

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
# and whether their rank needs gradients.
_PAIRS, _NEEDS = 31, 62  # from which bit on
_ROWS = (1 << _PAIRS) - 1


class Route(NamedTuple):
    """Where the tokens of one call go."""

    home: Any  # an `AtHome`
    source: Tensor  # [n] which token each row is that this rank sends, rank by rank
    sent: Sequence[int]  # rows, to each rank
    received: Sequence[int]
    words: Sequence[int]  # what this rank has told each rank
    pairs: int  # of a row that has come and an expert
    needed: bool  # whether any rank needs gradients


@dataclass(frozen=True, slots=True)
class Trip:
    """Something goes from each rank to each other. `again`: for a recomputation."""

    layer: Any
    way: Way
    again: bool
    home: Any = field(compare=False, repr=False)
    mine: Any = field(default=None, compare=False, repr=False)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"is {_DOING[self.way]} layer {self.layer.label}"

    def perform(self) -> Any:
        return self.home.swap(self.way, *self.mine)

    def take_part(self) -> None:
        """With no tokens, and zeros for those of others."""
        self.home.answer(self.way, again=self.again)


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
        self.experts: int = module.num_experts  # type: ignore[assignment]
        self.first, self.end = cuts(self.experts, among.world_size)[block : block + 2]
        self._names, self._casts, self._among = inputs_of(module), casts, among
        self._ends: Tensor | None = None  # [G] the ends of blocks, where tokens are
        self._state: Callable[[], LayerState | None] = lambda: None
        self._naming: list[NamingFailures] = []
        self._entries: list[Entry] = []
        # for `step_guard`: what this rank would send if it had to answer without computing
        self._widths: dict[Way, tuple[int, ...]] = {}
        self._routes: list[Route] = []
        self._guarded_by: object = None

    def serve(self, state: LayerState) -> None:
        """It is the call of this layer from now on."""
        self._state = weakref.ref(state)
        self._naming = [NamingFailures(self._among, doing, state.subject) for doing in _DOING]
        self._entries = [
            Entry(doing, state.subject, 2 * state.identity + 1 | (1 + way) << 32)
            for way, doing in enumerate(_DOING)
        ]

    def _layer(self) -> LayerState:
        if (state := self._state()) is None:
            raise RuntimeError("the layer of these experts is gone")
        return state

    def __call__(self, module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        hidden, index, weights = (given.pop(name) for name in self._names)
        hidden = cast(hidden, self._casts[0])
        state = self._layer()
        if state.pinned:
            return cast(self._whole(state, module, hidden, index, weights, **given), self._casts[1])
        try:
            return cast(
                self._travel(state, module, (hidden, index, weights), given), self._casts[1]
            )
        finally:
            if not inside_backward():
                state.keep()  # outside of the module's own forward, nobody sees a part of experts

    def _whole(
        self, state: LayerState, module: Callable[..., Any], /, *args: Any, **kw: Any
    ) -> Any:
        """All experts are here."""
        if torch.is_grad_enabled() and not state.resident and state.trainable():
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
        more: dict[str, Any],
    ) -> Tensor:
        hidden, index, weights = inputs
        needs = torch.is_grad_enabled() and (
            hidden.requires_grad or weights.requires_grad or bool(state.trainable())
        )
        route = self._find_route(state, index, needs=needs)
        anchor = hidden.new_empty(0, requires_grad=route.needed)
        sent = hidden, weights, index.to(torch.int32)
        rows, weight, number = _There.apply(*sent, anchor, route)  # type: ignore[no-untyped-call]
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
        more: dict[str, Any],
    ) -> Tensor:
        module.num_experts = self.end - self.first
        try:
            made: Tensor = module(rows, number, weight, **more)
            return made
        finally:
            module.num_experts = self.experts

    def _find_route(self, state: LayerState, index: Tensor, *, needs: bool) -> Route:
        if index.is_meta:  # of a plan
            return self._balanced(index, needs=needs)
        if self._ends is None or self._ends.device != index.device:
            ends = cuts(self.experts, self._among.world_size)[1:]
            self._ends = torch.tensor(ends, device=index.device)
        with torch.no_grad():
            owner = torch.bucketize(index, self._ends, right=True)  # [T, k]
            tokens, ranks = len(index), len(self._ends)
            goes = torch.zeros(ranks, tokens, dtype=torch.bool, device=index.device)
            goes.t().scatter_(1, owner, True)
            pairs = torch.zeros(ranks, dtype=torch.int64, device=index.device)
            pairs.scatter_add_(0, owner.reshape(-1), torch.ones_like(owner).reshape(-1))
            words = goes.sum(1) + (pairs << _PAIRS) + (int(needs) << _NEEDS)
            sent, came = self._conduct(state, Way.COUNTS, words)
            rows = rows_of(came)
            here = sum(word >> _PAIRS & _ROWS for word in came)
            leave = rows_of(sent)
            source = goes.view(-1).nonzero_static(size=sum(leave)).squeeze(1) % max(1, tokens)
        route = Route(self, source, leave, rows, sent, here, any(word >> _NEEDS for word in came))
        if state.gradients.holds and not inside_backward():
            self._hold(state, route._replace(source=index.index_select(0, source).int()))
        return route

    def _balanced(self, index: Tensor, *, needs: bool) -> Route:
        """The route of tokens that use all experts alike."""
        (tokens, used), bounds = index.shape, cuts(self.experts, self._among.world_size)
        sizes = [end - first for first, end in pairwise(bounds)]
        all_choices = math.comb(self.experts, used)
        reach = [1 - math.comb(self.experts - size, used) / all_choices for size in sizes]
        sent, own = [round(tokens * share) for share in reach], self.end - self.first
        here = round(tokens * (1 - math.comb(self.experts - own, used) / all_choices))
        pairs = tokens * used * len(sizes) * own // self.experts
        source = index.new_empty(sum(sent))
        return Route(self, source, sent, [here] * len(sizes), sent, pairs, needs)

    # -- exchanges

    def travels(self, way: Way, route: Route, *parts: Tensor) -> list[Tensor]:
        """Sends the rows of `parts`, side by side."""
        state = self._layer()
        found: list[Tensor] = self._conduct(state, way, route, parts)
        if way is Way.GRADIENTS_BACK and self._routes:
            self._routes.pop()
        return found

    def _conduct(self, state: LayerState, way: Way, *mine: Any) -> Any:
        again = way <= Way.BACK and inside_backward()
        return state.conductor.conduct(Trip(state, way, again, self, mine))

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
        widths = tuple(each.shape[1] * each.element_size() for each in parts)
        self._widths[way] = widths
        flat = [_bytes(each, width) for each, width in zip(parts, widths, strict=True)]
        came = self._swap_bytes(way, route, flat[0] if len(flat) == 1 else torch.cat(flat, 1))
        return [
            cut.contiguous().view(each.dtype).view(-1, each.shape[1])
            if len(cut)
            else each.new_empty((0, each.shape[1]))
            for cut, each in zip(torch.split(came, list(widths), 1), parts, strict=True)
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

    def _hold(self, state: LayerState, route: Route) -> None:
        """Notes a call, with the experts' numbers that it sends in the place of `source`, until its
        backward is over. Each guard has its own.
        """
        if self._guarded_by is not state.conductor:
            self._guarded_by = state.conductor
            self._routes.clear()
        self._routes.append(route)

    def answer(self, way: Way, *, again: bool) -> None:
        """Takes part in an exchange with nothing to give, after a failure: sends zeros for as many
        rows as the others expect.
        """
        state = self._layer()
        if way is Way.COUNTS:
            told = self._routes[-1].words if again else [0] * self._among.world_size
            words = torch.tensor(told, dtype=torch.int64, device=state.device)
            sent, came = self.swap(way, words)
            if not again:
                rows = rows_of(came)
                nothing = torch.empty((0, 1), dtype=torch.int32, device=state.device)
                self._hold(state, Route(self, nothing, sent, rows, sent, 0, needed=False))
            return
        route = self._routes[-1]
        state.log.entries.append(self._entries[way])
        n = sum(route.received if way in (Way.BACK, Way.GRADIENTS_BACK) else route.sent)
        zeros = torch.zeros((n, sum(self._widths[way])), dtype=torch.uint8, device=state.device)
        if way is Way.THERE and n:  # to the same experts again, since others recompute
            zeros[:, -self._widths[way][-1] :] = route.source.view(torch.uint8)
        with self._naming[way]:
            self._swap_bytes(way, route, zeros)
        if way is Way.GRADIENTS_BACK:
            self._routes.pop()


def rows_of(words: Sequence[int]) -> list[int]:
    """The numbers of rows that words of an exchange of counts tell."""
    return [word & _ROWS for word in words]


def _bytes(part: Tensor, width: int) -> Tensor:
    """Its rows as bytes: they travel side by side with others', and every backend moves them."""
    if not part.numel():
        return part.new_empty((len(part), width), dtype=torch.uint8)
    return part.contiguous().view(torch.uint8)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.float32, dtype)


def _summed(rows: Tensor, places: Tensor, like: torch.Size) -> Tensor:
    """Adds rows `[n, H]` up at their places of `like`, `[T, H]`, in float32."""
    total = torch.zeros(like, dtype=_wide(rows.dtype), device=rows.device)
    return total.index_add_(0, places, rows.to(total.dtype)).to(rows.dtype)


class _There(torch.autograd.Function):
    """hidden `[T, H]`, weights `[T, k]`, experts' numbers `[T, k]` -> the same of the rows that
    come, `[n, ..]`.
    """

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
