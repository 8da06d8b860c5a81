"""Ranks without data, and ranks that wait for a step, take part in the collectives of the other
ranks.

Each rank works in rounds. A round is a forward, a backward, a step, or a single collective outside
these. At the first collective of a round all ranks meet, and count who is in which round. If all
are in the same round, they go on as usual. If some ranks have no data left, or already wait at a
step, the other ranks announce each of their collectives, and these ranks take part in it:

    has data      meet   say GATHER 0   gather   say GATHER 1   gather   ...   say END
    has none      meet   hear           gather   hear           gather   ...   hear

All ranks take each step together, because each rank has its own chunks to update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from ..comm.communicator import Communicator
from ..conductors.conducted import ConductedCommunicator, Through, unconducted
from ..core.collectives import (
    Activity,
    Agree,
    Collective,
    CompareLogs,
    Gather,
    Look,
    Reduce,
    Round,
    Settle,
    Use,
)
from ..core.layer_state import LayerState
from ..core.runtime import Runtime
from ..optim.token_mean import CountTokens, note, weigh
from ..resilience.replay import EndGuard, tell_end
from ..sequences.exchange import Exchange
from .announcements import Announcements
from .changes import StateChanges
from .headcount import Headcount, Standing

__all__: list[str] = []

_CHANGED = (
    "some ranks have no data left, and the others have changed chunks or gradients outside the "
    "joinable's step(), or have zeroed only some of the gradients. Ranks without data can't "
    "repeat this. Call joinable.step() in place of optimizer.step(), and clip, update and zero "
    "gradients inside the step function."
)
_CAUGHT = (
    "this rank's code has caught an exception of its last forward or backward. The others can't "
    "take back what they did for it, with transactional=True neither, so the joinable's context "
    "is over on all ranks. Let exceptions leave the context, or put each micro-batch into "
    "zero3.step_guard, which drops it on all ranks"
)


@dataclass(slots=True)
class _Context:
    """What torch's `Join` has told this rank, and whether this rank is inside."""

    # tells `Join` before each round that this rank has data; it returns False if `Join` is disabled
    notify: Callable[[], bool] = lambda: False
    divide_by_all: bool = True
    # tells whether this rank is still inside: not None
    inside: Callable[[], object] = lambda: None
    on: bool = False
    # whether an exception of this rank has ended it, and nothing was called since
    over: bool = False


class _Strays:
    """Passes that some rank has missed: then ranks have learned different orders of calls."""

    def __init__(self, runtimes: Sequence[Runtime]) -> None:
        self._runtimes = runtimes
        self._any = False
        self._waited = False  # whether some rank has missed one because it waited for a step

    def note(self, found: Headcount) -> None:
        """The round that comes next."""
        if found.together is not Activity.STEP:
            self._any = self._any or found.others > 0
            self._waited = self._waited or found.waiting > 0
        # the ranks that have waited train on, and have not learned the others' orders
        elif self._waited:
            self.forget_orders()

    def forget_orders(self) -> None:
        for runtime in self._runtimes if self._any or self._waited else ():
            runtime.replays.clear()
            for order in runtime.orders:
                order.forget()
        self._any = self._waited = False


class JoinCoordinator:
    """Conducts a model's collectives inside `Join`, on one rank."""

    def __init__(
        self,
        states: Sequence[LayerState],
        runtimes: Sequence[Runtime],
        control: Communicator,
        step: Callable[[], Any],
        more: Sequence[Collective] = (),
    ) -> None:
        """`more`: of these models alone, what a rank without data can take part in."""
        self._states = list(states)
        listed = [*_listed(runtimes), *more]
        self._announcements = Announcements(listed, control, states[0].device)
        self._runtimes = tuple(runtimes)
        self._joined: dict[LayerState, Through] = {}
        self._control = control
        self._step = step
        self._context = _Context()
        self._scope: Activity | None = None  # the forward or backward that this rank runs
        self._open: set[LayerState] = set()  # the first layers of the models that are in it
        self._round: Activity | None = None  # the round that this rank has met the others for
        # whether this round's collectives are announced, because some ranks only follow
        self._announces = False
        self._follows = False  # whether this rank takes part in an announced collective now
        self._strays = _Strays(runtimes)
        self._tokens: Tensor | None = None  # the tokens of the next backward
        self._changes = StateChanges(states)

    def begin(self, notify: Callable[[], bool], *, divide_by_all: bool) -> None:
        """Enters the context. `notify` tells `Join` before each round that this rank has data; it
        returns False if `Join` is disabled.
        """
        self._context = _Context(notify, divide_by_all, on=True)
        self._announces, self._scope, self._round = False, None, None
        self._changes.forget()
        for state in self._states:
            joined = self._join(state)
            state.communicate_by(ConductedCommunicator(unconducted(state.communicator), joined))

    def enter(self, inside: Callable[[], object]) -> None:
        """`inside` tells whether this rank is still inside the context: not None."""
        self._context.inside = inside

    def leave(self) -> None:
        """Leaves the context on all ranks. What some have kept since the last step, all keep."""
        if self._context.on:
            self._keep_alike()
        self.end()

    def end(self) -> None:
        """Leaves the context: the model is again as it was before `begin`."""
        self._context.on, self._scope, self._round = False, None, None
        self._changes.let_go(keep=False)
        self._strays.forget_orders()
        joined, self._joined = self._joined, {}
        for state in self._states:
            if state in joined:
                state.no_longer_by(joined[state])
            state.communicate_by(unconducted(state.communicator))
            state.gradients.average_over(self._control.world_size)

    def _join(self, state: LayerState) -> Through:
        self._joined[state] = joined = Through(self.conduct, state.conductor)
        state.conducted_by(joined)
        return joined

    # -- on a rank with data

    def conduct(self, what: Collective, perform: Callable[[], Any]) -> Any:
        """Announces it, if ranks have no data, and performs it."""
        # they run no forward, and transfers are compared at the beginning of forwards
        if isinstance(what, CompareLogs):
            return False
        if isinstance(what, Round):
            if what.begins:
                self._enter(what)
            else:
                self._leave(what)
        if not what.moves or not self._context.on or self._follows:
            return perform()
        if self._round is Activity.STEP:
            if self._announces:  # all make it, unless one of them has raised
                self._exchange(Announcements.IN_STEP)
            return perform()
        if isinstance(what, Exchange):  # with ranks that have data
            with what.parts.among_some():
                return perform()
        alone = self._round is None and self._scope is None
        if self._round is None:
            self._meet(Activity.OTHER if self._scope is None else self._scope)
        if self._announces:
            self._announce(what)
        try:
            result = perform()
        except Exception:
            self._abort()
            raise
        if alone:
            self._finish()
        return result

    def _announce(self, what: Collective) -> None:
        number = self._announcements.number(what)
        if number is None:
            self._give_up(
                "it called a function whose collectives ranks without data can't join. Clip, "
                "unscale and update inside the step function; save, load and read whole "
                "parameters after the context"
            )
        self._exchange(number)

    def _enter(self, what: Round) -> None:
        kind = what.activity
        self._check_not_over()
        if not self._context.on or self._round is Activity.STEP:
            return
        # no forward begins inside a backward, so that one raised
        if self._scope is Activity.BACKWARD and kind is Activity.FORWARD:
            self._give_up(_CAUGHT)
        if self._scope is None:
            self._scope = kind
            self._open.clear()
        if self._scope is kind:
            self._open.add(what.layer)

    def _leave(self, what: Round) -> None:
        if self._scope is not what.activity or self._round is Activity.STEP:
            return
        self._open.discard(what.layer)
        if self._open and what.error is None:  # one backward may train several models
            return
        self._scope = None
        if self._round is not None and what.error is None:
            self._finish()
        elif self._round is not None and self._abort():
            self._context.over = True
            for state in self._states:
                self._join(state)  # to see whether this rank goes on

    def _check_not_over(self) -> None:
        if self._context.over:
            self._context.over = False
            self.end()
            if self._context.inside() is not None:
                raise self._refusal(_CAUGHT)

    def step(self) -> Any:
        """Waits until all ranks with data have called this, takes part in their collectives
        meanwhile, and steps with them.
        """
        self._check_not_over()
        if not self._context.on or self._round is Activity.STEP:
            return self._step()
        self._close_what_is_open()
        if self._scope is Activity.BACKWARD:
            self._give_up(_CAUGHT)
        self._meet(Activity.STEP)
        return self._take_step()

    def _close_what_is_open(self) -> None:
        """Such as weights that this rank has not streamed to the end. The next collective may be
        one of `Join`'s own, of which no conductor hears.
        """
        self._states[0].conductor.conduct(Use(self._states[0], "joinable"))

    def _meet(self, kind: Activity) -> None:
        while True:
            if not self._context.notify():
                self.end()
                return
            together = self._count(kind)
            if together is kind:
                break
            self._shadow(together)
        self._round = kind

    def _finish(self) -> None:
        announces, self._round, self._announces = self._announces, None, False
        self._changes.take(only_if=announces)
        if announces:
            self._exchange(Announcements.END)

    # -- on a rank without data, or one that waits

    def follow(self) -> None:
        """Takes part in one round of the ranks with data."""
        together = self._count(None)
        if together is Activity.STEP:
            self._take_step()
        else:
            self._shadow(together)

    def _shadow(self, together: Activity) -> None:
        error: Exception | None = None
        while True:
            try:
                what = self._exchange(Announcements.ABORT if error is not None else None)
            except RuntimeError:
                if error is not None:
                    raise error from None
                raise
            if what is None:
                self._announces = False
                for runtime in self._runtimes:
                    runtime.backward.reductions.drain()
                for state in self._states if together is Activity.BACKWARD else ():
                    state.gradients.end_backward()
                if together is Activity.BACKWARD and self._tokens is not None:
                    note(self._states, self._tokens)
                    self._tokens = None
                self._changes.take(only_if=True)
                return
            self._follows = True
            if isinstance(what, CountTokens | EndGuard):  # which pass no conductor here
                self._states[0].log.keep(str(what))
            try:
                if isinstance(what, CountTokens):
                    self._tokens = weigh(self._states, 0, 0).total
                    # also now: a backward that moves nothing is no round
                    note(self._states, self._tokens)
                elif isinstance(what, EndGuard):
                    self._changes.let_go(keep=not any(tell_end(self._states[0], None)))
                else:
                    what.layer.conductor.conduct(what, absent=True)
            except Exception as caught:  # the other ranks hear of it at their next announcement
                error = caught
            finally:
                self._follows = False

    # -- on all ranks

    def _take_step(self) -> Any:
        self._round = Activity.STEP
        try:
            result = self._step()
            self._close_what_is_open()
        except Exception:
            self._abort()
            raise
        finally:
            self._round = None
        self._finish()
        return result

    def _count(self, kind: Activity | None) -> Activity:
        """Meets the other ranks, and returns the round that comes next. A step comes last: ranks at
        a step wait for the others.
        """
        guarded = self._states[0].gradients.holds > 0
        gradients, owed = self._changes.gradients()
        changed = kind is not None and self._changes.changed()
        mine = Standing(kind, gradients, owed, changed, guarded)
        try:
            counts = self._announcements.count(mine.numbers())
        except RuntimeError:
            self.end()
            raise
        found = Headcount.of(counts, self._control.world_size)
        self._announces = found.others > 0
        if found.apart:
            self._fail(
                f"ranks have come apart: {found.apart}. All that have data must call the model in "
                "the same order."
            )
        # ranks hold different numbers of parts if chunks are divided
        comparable = not self._changes.divided
        if self._announces and (found.changed or (comparable and not found.even)):
            self._fail(_CHANGED)
        if kind is not found.together:
            self._changes.follow(found.gradients, found.owed)
            if found.guarded:
                self._changes.hold()
        if found.together is Activity.STEP and found.owed:
            self._keep_alike()
        self._strays.note(found)
        # the others have no data
        among = self._control.world_size if self._context.divide_by_all else found.number
        for state in self._states:
            state.gradients.average_over(among)
        return found.together

    def _fail(self, text: str) -> NoReturn:
        """Raises on all ranks: each of them has found the same mistake."""
        self.end()
        raise RuntimeError(text)

    def _exchange(self, number: int | None) -> Collective | None:
        """Announces it, or listens (None). See `Announcements`."""
        try:
            return self._announcements.exchange(number)
        except RuntimeError:
            self.end()
            raise

    def _keep_alike(self) -> None:
        for runtime in self._runtimes:
            runtime.backward.forget_zeroed()
        try:
            told = self._announcements.tell(self._changes.kept())
        except RuntimeError:
            self.end()
            raise
        self._changes.keep(told)

    def _abort(self) -> bool:
        """This rank is about to raise. The other ranks raise at their next announcement. Returns
        whether any listened.
        """
        announces, self._announces = self._announces and self._context.on, False
        self._round = self._scope = None
        if announces:
            try:
                self._exchange(Announcements.ABORT)
            except RuntimeError:
                return True
        return announces

    def _give_up(self, reason: str) -> None:
        if self._abort():
            raise self._refusal(reason)

    def _refusal(self, reason: str) -> RuntimeError:
        return RuntimeError(
            f"rank {self._control.rank}: some ranks have no data left, and {reason}."
        )


def _listed(runtimes: Sequence[Runtime]) -> list[Collective]:
    """What a rank without data can take part in: in a gather with its chunks, in a reduction with
    zeros, in a comparison as a listener.
    """
    layers = [
        (state, runtime.backward.reductions) for runtime in runtimes for state in runtime.layers
    ]
    firsts = [(runtime.layers[0], runtime) for runtime in runtimes]
    first, runtime = firsts[0]
    return [
        *(Gather(state) for state, _ in layers),
        *(
            Reduce(state, in_replica, each)
            for in_replica in (False, True)
            for state, each in layers
        ),
        *(Settle(state, each.backward.reductions) for state, each in firsts),
        Agree(first, "", (), runtime.communicator),
        *(Look(state, each.layers, each.communicator) for state, each in firsts),
        CountTokens(first),
        EndGuard(first),
    ]
