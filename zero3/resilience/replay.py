"""If a micro-batch fails on one rank, that rank still makes the rest of its collectives, and then
all ranks drop the micro-batch.

Without this, the other ranks would wait in their next collective for the failed rank. The failed
rank knows the collectives from earlier micro-batches. It repeats them without computing, with zeros
as gradients. At the end all ranks tell each other who failed. Gradients are staged until then, so
nothing has to be undone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from ..access import inside_a_layer, left_out, only_a_part, reset, used_together
from ..comm.agreement import Members, tell_all
from ..conductors.conducted import Other, unconducted
from ..core.chunk_gradient import WrongCallError
from ..core.collectives import (
    Activity,
    Agree,
    Collective,
    CompareLogs,
    Conductor,
    Gather,
    Look,
    Round,
)
from ..core.layer_state import LayerState, accounts_of, chunks_of
from ..core.schedule import ForwardOrder
from ..layer import layers_of, runtimes_in
from ..towers.entering import refuse_towers

__all__: list[str] = []

MAX_KNOWN = 8  # sequences of collectives that are remembered


@dataclass(frozen=True)
class Trouble:
    """Why a guarded micro-batch is dropped, as its rank tells the others."""

    what: str
    # of the caller's mistake, which every rank raises: "ValueError" or "RuntimeError"
    mistake: str = ""


@dataclass(frozen=True)
class EndGuard:
    """Ranks tell each other at the end of a `step_guard` who has failed."""

    layer: LayerState  # the model's first
    end: Callable[[], dict[int, str]] | None = field(default=None, compare=False)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "ends a step_guard"

    def perform(self) -> Any:
        return self.end() if self.end is not None else None

    take_part = perform


class Recording:
    """Notes each collective, and gives it to the inner conductor. It does not tell that one of a
    forward that an exception has left, because the guard may make the rest.
    """

    def __init__(
        self,
        inner: Conductor,
        done: list[Collective],
        under_way: dict[Round, tuple[Conductor, BaseException | None]],
    ) -> None:
        """`under_way`: the ends that are still to come, of forwards and backwards that have begun;
        and what has been raised in them.
        """
        self.inner = self._first = inner
        self._done, self._under_way = done, under_way

    @property
    def complete(self) -> bool:
        """Whether all collectives were noted. If `Join` has ended meanwhile, they were not."""
        return self.inner is self._first

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        if isinstance(what, CompareLogs):  # ranks compare them at the end of the guard
            return False
        if isinstance(what, Round):
            return self._mark(what)
        if what.moves and not isinstance(what, Other | EndGuard):
            self._done.append(_without_own(what))
        return self.inner.conduct(what, absent=absent)

    def _mark(self, what: Round) -> None:
        if what.error is not None:
            self._under_way[what] = self.inner, what.error
            return
        if what.begins:  # the caller has caught, inside the guard, what an earlier one has raised
            leave(self._under_way, only_raised=True)
        elif self._under_way.pop(what, None) is None:  # it has begun before the guard
            self.inner.conduct(what)
            return
        self._done.append(what)
        self.inner.conduct(what)
        if what.begins:
            self._under_way[replace(what, begins=False)] = self.inner, None


def leave(
    under_way: dict[Round, tuple[Conductor, BaseException | None]],
    error: BaseException | None = None,
    *,
    only_raised: bool = False,
) -> None:
    """Tells the inner conductors that these forwards and backwards are over: they have raised, if
    nothing else then `error`.
    """
    for end, (inner, raised) in list(under_way.items()):
        if raised is not None or not only_raised:
            del under_way[end]
            inner.conduct(replace(end, error=error or raised))


def _without_own(what: Any) -> Collective:
    """Without what this rank gives, whose memory is not to be kept."""
    found: Collective = replace(what, mine=None) if hasattr(what, "mine") else what
    return found


@dataclass
class _Script:
    """The collectives of earlier guarded micro-batches of one kind. It is the same on all ranks."""

    # the known orders with which each of these micro-batches begins
    expectations: list[tuple[Any, ...]]
    known: list[tuple[Collective, ...]]  # sequences of collectives, the latest first

    def after(self, done: Sequence[Collective]) -> tuple[Collective, ...] | None:
        """The rest of the latest sequence that begins with `done`. None if there is none."""
        return next(
            (known[len(done) :] for known in self.known if known[: len(done)] == tuple(done)), None
        )


class CollectiveReplay:
    """Records this rank's collectives in one guarded micro-batch, and can repeat the rest of them
    after a failure.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._states = used_together(model, "step_guard")
        self.rank = self._states[0].communicator.rank
        why = "it repeats the transfers of a micro-batch"
        rank = f"rank {self.rank}: "  # no rank compares yet
        refuse_where_nothing_repeats(model, self._states, "step_guard", why, rank)
        if any(state.gradients.holds for state in self._states):
            raise WrongCallError(
                "zero3.step_guard inside another one: give each micro-batch one guard"
            )
        self._outside = _gradients(left_out(self._states))
        self._done: list[Collective] = []
        self._under_way: dict[Round, tuple[Conductor, BaseException | None]] = {}
        self._held: list[tuple[LayerState, Recording]] = []
        self._kind = _kind_of(self._states)
        self._versions = self._chunk_versions()
        scripts: dict[object, _Script] = next(
            (runtime.replays for runtime in runtimes_in(self._model)), {}
        )
        self._script = scripts.get(self._kind)
        if self._script is not None:
            self._expect(self._script.expectations)
        self._found = self._expectations()
        for backward in {state.gradients.backward() for state in self._states} - {None}:
            backward.forget_zeroed()  # what was zeroed before the guard is no mistake
        try:
            for state in self._states:
                recording = Recording(state.conductor, self._done, self._under_way)
                self._held.append((state, recording))
                state.gradients.begin_guard()
                state.conducted_by(recording)
        except BaseException:
            self.close(keep=False)
            raise

    def _orders(self) -> Iterator[ForwardOrder[Any]]:
        return (order for runtime in runtimes_in(self._model) for order in runtime.orders)

    def _expectations(self) -> list[tuple[Any, ...]]:
        return [order.known for order in self._orders()]

    def _expect(self, expectations: list[tuple[Any, ...]]) -> None:
        for order, known in zip(self._orders(), expectations, strict=False):
            order.expect(known)

    @property
    def _records(self) -> bool:
        return all(recording.complete for _, recording in self._held)

    @property
    def knows_the_rest(self) -> bool:
        alone = self._states[0].communicator.world_size == 1
        return alone or (
            self._records
            and self._script is not None
            and self._script.after(self._done) is not None
        )

    def _learn(self) -> None:
        if not self._records:
            return
        if self._script is not None:
            done, known = tuple(self._done), self._script.known
            known[:] = [done, *(other for other in known if other != done)][:MAX_KNOWN]
        elif runtimes := runtimes_in(self._model):
            # without the comparisons: the next micro-batch calls layers in a known order, so it
            # needs none. But it gathers ahead, so that exchanges come later among its gathers
            known_ground = tuple(what for what in self._done if not isinstance(what, Agree))
            expectations = self._expectations()
            stays = (
                self._found == expectations
                or not self._states[0].policy.prefetch_depth
                or not _exchanges_between_gathers(known_ground)
            )
            known = [known_ground] if stays else []
            runtimes[0].replays[self._kind] = _Script(expectations, known)

    def make_the_rest(self) -> None:
        """Makes the remaining collectives of this micro-batch, together with the other ranks."""
        following = (self._script.after(self._done) if self._script is not None else None) or ()
        with ExitStack() as going_on:
            for runtime in runtimes_in(self._model):
                going_on.enter_context(runtime.backward.reductions.going_on())
                runtime.reset(broken=False)
        for state in self._states:
            state.gradients.end_backward()  # what lands from now on is taken back too
        for what in following:
            # it knows what is compared
            absent = not isinstance(what, Agree)
            what.layer.conductor.conduct(what, absent=absent)

    def end(self, failure: str, mistake: RuntimeError | None) -> dict[int, str]:
        """Ends the micro-batch: tells the other ranks this rank's `failure` ("": none). Returns
        rank -> failure.

        Raises:
            RuntimeError, ValueError: a rank has done what does not belong into the guard; on every
                rank.
        """
        mistake = mistake or self._mistake()
        trouble = Trouble(failure) if failure else None
        if mistake is not None:
            kind = ValueError if isinstance(mistake, ValueError) else RuntimeError
            trouble = Trouble(str(mistake), kind.__name__)
        first = self._states[0]
        errors: dict[int, str] = first.conductor.conduct(
            EndGuard(first, partial(self._end, first, trouble))
        )
        if errors:
            logging.getLogger("zero3").warning("a micro-batch was dropped on all ranks: %s", errors)
        return errors

    def _end(self, first: LayerState, trouble: Trouble | None) -> dict[int, str]:
        try:
            told = tell_end(first, trouble)
        except torch.OutOfMemoryError as error:  # for the nine bytes: nothing is sent yet
            reset(self._model)
            told = tell_end(first, trouble or Trouble(f"{type(error).__name__}: {error}"))
        errors = {rank: each.what for rank, each in enumerate(told) if each is not None}
        if errors:
            reset(self._model)
            # the failed rank has not learned the orders that the others have learned
            self._expect(self._found)
        else:
            self._learn()
        for rank, each in enumerate(told):
            if each is not None and each.mistake:
                kind = ValueError if each.mistake == "ValueError" else RuntimeError
                raise kind(f"rank {rank}: {each.what}")
        self.close(keep=not errors)  # here ranks without data do it too
        return errors

    def _mistake(self) -> RuntimeError | None:
        """What this rank has done inside the guard that the other ranks may not have done, or what
        the guard could not have taken back.
        """
        for place, (gradient, version) in _gradients(left_out(self._states)).items():
            before, old = self._outside.get(place, (None, 0))
            if gradient is not before or version != old:
                return WrongCallError(only_a_part("zero3.step_guard", place[0]))
        if self._versions != self._chunk_versions():
            return RuntimeError(
                "an optimizer stepped inside zero3.step_guard, or something else wrote into "
                "chunks there. Put backwards into the guard; clip and step after it."
            )
        if any(account.disturbed for account in accounts_of(self._states)):
            return RuntimeError(
                "gradients were zeroed or replaced inside zero3.step_guard, which ranks that "
                "fail would not do. The micro-batch is dropped, and gradients are what they were "
                "before it. Put zero_grad before the guard, or after the step."
            )
        return None

    def close(self, *, keep: bool) -> None:
        held, self._held = self._held, []
        for state, recording in held:
            state.no_longer_by(recording)
        for state, _ in held:
            state.gradients.end_guard(keep=keep)

    def give_up(self, error: BaseException) -> None:
        """The guard raises: under `Join` the other ranks hear of it."""
        try:
            leave(self._under_way, error)
        finally:
            self.close(keep=False)

    def _chunk_versions(self) -> list[int]:
        return [chunk.shard._version for chunk in chunks_of(self._states)]


def refuse_where_nothing_repeats(
    model: nn.Module, states: list[LayerState], caller: str, why: str, rank: str = ""
) -> None:
    """Raises ValueError if the transfers of a micro-batch can't be repeated. `why`: the `caller`
    has to. `rank`: this one, for errors that ranks do not tell each other.
    """
    if not layers_of(model):  # what such a part transfers is its layer's
        raise inside_a_layer(model, states, caller)
    if any(state.policy.stage != 3 or state.policy.dynamic for state in states):
        raise ValueError(
            f"{rank}zero3.{caller} needs ShardingPolicy(stage=3, dynamic=False): {why}"
        )
    refuse_towers(model, f"zero3.{caller}", why)


def _kind_of(states: Sequence[LayerState]) -> tuple[object, ...]:
    """Guarded micro-batches of one kind make the same collectives."""
    return tuple(
        (s.gradients.fate, *(chunk.shard.requires_grad for chunk in s.chunks)) for s in states
    )


def _exchanges_between_gathers(done: Sequence[Collective]) -> bool:
    """Whether a forward transfers anything else than chunks: where the order of layers is known,
    gathers are made ahead of that.
    """
    forward = False
    for what in done:
        if isinstance(what, Round):
            forward = what.begins and what.activity is Activity.FORWARD
        elif forward and not isinstance(what, Gather | Look):
            return True
    return False


def knows_transfers(model: nn.Module, states: Sequence[LayerState]) -> bool:
    """Whether a rank that fails in a guarded micro-batch could make the rest of its transfers."""
    kind = _kind_of(states)
    scripts = [runtime.replays[kind] for runtime in runtimes_in(model) if kind in runtime.replays]
    return any(script.known for script in scripts) or states[0].communicator.world_size == 1


def _gradients(states: list[LayerState]) -> dict[tuple[LayerState, int], tuple[Any, int]]:
    """The gradients of these layers' chunks, and their versions."""
    return {
        (state, number): (grad, 0 if grad is None else grad._version)
        for state in states
        for number, grad in enumerate(
            part.parameter.grad for chunk in state.chunks for part in chunk.parts
        )
    }


def tell_end(first: LayerState, trouble: Trouble | None) -> list[Trouble | None]:
    """The end of a guarded micro-batch: what every rank tells the others, in rank order."""
    told = tell_all(
        Members(unconducted(first.communicator), first.device),
        "the end of a guarded micro-batch",
        "" if trouble is None else json.dumps(asdict(trouble)),
        first.log.digest,
        "step_guard",
    )
    return [Trouble(**json.loads(text)) if text else None for text in told]
