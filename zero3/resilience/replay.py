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
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..access import reset, states_of
from ..comm.agreement import agree, tell_all
from ..conductors.gated import ungated
from ..core.comparison import drop_stale
from ..core.coordination import Action, Activity, Gate
from ..core.layer_state import LayerState, accounts_of
from ..core.runtime import Runtime
from ..layer import runtimes_in

__all__: list[str] = []

_Operation = tuple[Any, ...]  # (operation, number of the layer, texts that ranks compare)

BEGIN, END = "begin", "end"  # of a forward or a backward, where ranks meet under `Join`
MAX_KNOWN = 8  # sequences of collectives that are remembered


@dataclass(frozen=True)
class Trouble:
    """Why a guarded micro-batch is dropped, as its rank tells the others."""

    what: str
    is_mistake: bool = False  # the caller's, which every rank raises


class _Phase:
    """A forward or a backward. The inner gate's context is not left by an exception, because the
    guard may make the rest inside of it.
    """

    def __init__(self, gate: _RecordingGate, activity: Activity) -> None:
        self._gate, self.activity = gate, activity
        self.context = gate.inner.doing(activity)
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        # the caller has caught it inside the guard
        for phase in [phase for phase in self._gate.phases if phase.error is not None]:
            phase.leave(phase.error)
        self._gate.done.append((BEGIN, 0, self.activity.name))
        self.context.__enter__()
        self._gate.phases.append(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.error = error
        if error is None:
            self.leave(None)

    def leave(self, error: BaseException | None) -> None:
        self._gate.phases.remove(self)
        if error is None:
            self._gate.done.append((END, 0, self.activity.name))
        self.context.__exit__(None if error is None else type(error), error, None)


class _RecordingGate:
    """A gate that notes every collective, and passes it on to the inner gate."""

    compares_at_end = True

    def __init__(
        self, inner: Gate, numbers: dict[object, int], done: list[_Operation], phases: list[_Phase]
    ) -> None:
        self.inner = inner
        self._numbers = numbers
        self.done = done
        self.phases = phases  # those that are entered and not left

    def doing(self, activity: Activity) -> AbstractContextManager[Any]:
        return _Phase(self, activity)

    def gather(self, layer: Any) -> AbstractContextManager[Any]:
        if layer.chunks:
            self._note("gather", layer)
        return self.inner.gather(layer)

    def reduce(self, layer: Any) -> AbstractContextManager[Any]:
        self._note("reduce", layer)
        return self.inner.reduce(layer)

    def compare(self, layer: Any, place: str, names: list[str]) -> AbstractContextManager[Any]:
        self._note("agree", layer, place, *names)
        return self.inner.compare(layer, place, names)

    def passing(self, action: Action, layer: Any = None) -> AbstractContextManager[Any]:
        if action in (Action.TOKENS, Action.LOOK, Action.SETTLE):
            self._note(action.name, layer)
        return self.inner.passing(action, layer)

    def _note(self, operation: str, layer: object, *words: str) -> None:
        self.done.append((operation, self._numbers[layer], *words))


@dataclass
class _Script:
    """The collectives of earlier guarded micro-batches of one kind. It is the same on all ranks."""

    # the known orders with which each of these micro-batches begins
    expectations: list[tuple[Any, ...]]
    known: list[tuple[_Operation, ...]]  # sequences of collectives, the latest first

    def after(self, done: Sequence[_Operation]) -> tuple[_Operation, ...] | None:
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
        self._states = states_of(model)
        self.rank = self._states[0].communicator.rank
        if any(state.policy.stage != 3 or state.policy.dynamic for state in self._states):
            raise ValueError(
                f"rank {self.rank}: zero3.step_guard needs ShardingPolicy(stage=3, "
                "dynamic=False): it repeats their transfers"
            )
        if any(state.gradients.holds for state in self._states):
            raise ValueError(
                f"rank {self.rank}: zero3.step_guard inside another one: give each micro-batch "
                "one guard"
            )
        self._done: list[_Operation] = []
        self._phases: list[_Phase] = []
        self._held: list[LayerState] = []
        self._kind = tuple(
            (
                s.gradients.deferred,
                s.gradients.fate,
                *(chunk.shard.requires_grad for chunk in s.chunks),
            )
            for s in self._states
        )
        self._versions = self._chunk_versions()
        scripts: dict[object, _Script] = next(
            (runtime.replays for runtime in runtimes_in(self._model)), {}
        )
        self._script = scripts.get(self._kind)
        if self._script is not None:
            self._expect(self._script.expectations)
        self._found = self._expectations()
        numbers: dict[object, int] = {state: number for number, state in enumerate(self._states)}
        for backward in {state.gradients.backward() for state in self._states} - {None}:
            backward.forget_zeroed()  # what was zeroed before the guard is no mistake
        try:
            for state in self._states:
                self._held.append(state)
                state.gradients.begin_guard()
                state.gate = _RecordingGate(state.gate, numbers, self._done, self._phases)
        except BaseException:
            self.close(keep=False)
            raise

    def _expectations(self) -> list[tuple[Any, ...]]:
        return [order.known for runtime in runtimes_in(self._model) for order in runtime.orders]

    def _expect(self, expectations: list[tuple[Any, ...]]) -> None:
        for order, known in zip(
            [order for runtime in runtimes_in(self._model) for order in runtime.orders],
            expectations,
            strict=False,
        ):
            order.expect(known)

    @property
    def _records(self) -> bool:
        """Whether all collectives were noted. If `Join` has ended inside the guard, they were
        not.
        """
        return all(isinstance(state.gate, _RecordingGate) for state in self._states)

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
            # needs none
            known_ground = tuple(operation for operation in self._done if operation[0] != "agree")
            runtimes[0].replays[self._kind] = _Script(self._expectations(), [known_ground])

    def make_the_rest(self) -> None:
        """Makes the remaining collectives of this micro-batch, together with the other ranks."""
        following = (self._script.after(self._done) if self._script is not None else None) or ()
        runtimes = {
            state: runtime for runtime in runtimes_in(self._model) for state in runtime.layers
        }
        with ExitStack() as going_on:
            for runtime in dict.fromkeys(runtimes.values()):
                going_on.enter_context(runtime.backward.going_on())
                runtime.reset(broken=False)
        for state in self._states:
            state.gradients.end_backward()  # what lands from now on is taken back too
        for operation, number, *words in following:
            self._repeat(operation, self._states[number], runtimes[self._states[number]], words)

    def _repeat(
        self, operation: str, state: LayerState, runtime: Runtime, words: list[str]
    ) -> None:
        if operation == BEGIN:
            state.gate.doing(Activity[words[0]]).__enter__()
        elif operation == END:
            next(
                phase for phase in reversed(self._phases) if phase.activity.name == words[0]
            ).leave(None)
        elif operation == "gather":
            state.start_fetch()
            state.finish_fetch()
            state.release_or_keep()
        elif operation == "reduce":
            runtime.backward.reduce(state)
        elif operation == "agree":
            with state.gate.compare(state, words[0], words[1:]):
                agree(ungated(state.communicator), state.device, words[0], words[1:])
        elif operation == Action.LOOK.name:
            drop_stale(ungated(state.communicator), runtime.layers)
        elif operation == Action.SETTLE.name:
            with state.gate.passing(Action.SETTLE, state):
                runtime.backward.drain_backups()
        else:
            with state.gate.passing(Action.TOKENS, state):
                ungated(state.communicator).all_reduce(
                    torch.zeros(4, dtype=torch.float64, device=state.device)
                )

    def end(self, failure: str, mistake: RuntimeError | None) -> dict[int, str]:
        """Ends the micro-batch: tells the other ranks this rank's `failure` ("": none). Returns
        rank -> failure.

        Raises:
            RuntimeError: a rank has done what does not belong into the guard; on every rank.
        """
        mistake = mistake or self._mistake()
        trouble = Trouble(failure) if failure else None
        if mistake is not None:
            trouble = Trouble(str(mistake), is_mistake=True)
        first = self._states[0]
        with first.gate.passing(Action.GUARD, first):
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
                if each is not None and each.is_mistake:
                    raise RuntimeError(f"rank {rank}: {each.what}")
            self.close(keep=not errors)  # here ranks without data do it too
        if errors:
            logging.getLogger("zero3").warning("a micro-batch was dropped on all ranks: %s", errors)
        return errors

    def _mistake(self) -> RuntimeError | None:
        """What this rank has done inside the guard that the other ranks may not have done."""
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
        for state in held:
            state.gate = (
                state.gate.inner if isinstance(state.gate, _RecordingGate) else state.behaviour.gate
            )
        for state in held:
            state.gradients.end_guard(keep=keep)

    def give_up(self, error: BaseException) -> None:
        """The guard raises: under `Join` the other ranks hear of it."""
        try:
            for phase in list(self._phases):
                phase.leave(error)
        finally:
            self.close(keep=False)

    def _chunk_versions(self) -> list[int]:
        return [chunk.shard._version for state in self._states for chunk in state.chunks]


def tell_end(first: LayerState, trouble: Trouble | None) -> list[Trouble | None]:
    """The end of a guarded micro-batch: what every rank tells the others, in rank order."""
    told = tell_all(
        ungated(first.communicator),
        first.device,
        "the end of a guarded micro-batch",
        "" if trouble is None else json.dumps(asdict(trouble)),
        first.log.digest,
        "step_guard",
    )
    return [Trouble(**json.loads(text)) if text else None for text in told]
