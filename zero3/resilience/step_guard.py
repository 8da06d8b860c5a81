"""step_guard(): a micro-batch that fails on any rank is dropped on all, and training goes on.

A rank that fails leaves the others waiting in their next collective. So it goes through the motions: it makes the rest
of the collectives that the others make, as it knows them from earlier micro-batches, computing nothing and giving zeros.
At the end all ranks tell each other who failed. Until then gradients are staged, so dropping them costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..access import reset, states_of
from ..comm.agreement import agree, tell_all
from ..comm.errors import is_transfer_failure
from ..core.runtime import Runtime
from ..core.transfer_log import unwatched
from ..layer import layers_of

__all__: list[str] = []

_Operation = tuple[Any, ...]  # what is done, the number of the layer, what ranks compare

MAX_KNOWN = 8


@dataclass
class GuardedStep:
    """How a guarded micro-batch ended: the same on every rank.

    Attributes:
        errors: Rank to the text of what failed there; empty if nothing did.
    """

    errors: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the micro-batch was dropped."""
        return bool(self.errors)


@contextmanager
def step_guard(model: nn.Module, catch: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[GuardedStep]:
    """Context for one micro-batch: if it fails on any rank, all ranks drop it and go on.

    Every rank enters and leaves it. Inside belong the forward and the backward of one micro-batch. Gradients of earlier
    micro-batches stay, on every rank; buffers (of BatchNorm) and random generators stay as the micro-batch left them. The
    exception is swallowed and logged ("zero3", WARNING). It costs one exchange of nine bytes a rank at the end, for which the host
    waits, and one more gradient shard, as `ShardingPolicy(transactional=True)` does.

    A rank that fails alone makes the rest of the transfers that the others make. It knows them from earlier micro-batches under a
    guard, and takes the last one that began alike. Before the first one, or if none began alike, it raises, and the others raise
    when the group's timeout ends. So does every rank whose transfer fails: ranks that can't speak can't agree.

    Args:
        model: Any model that contains zero3 layers, with `stage=3` and without `dynamic`.
        catch: The exceptions that count as a failed micro-batch. Others pass, and the other ranks wait for the group's timeout.

    Yields:
        A `GuardedStep`, which is complete when the context is left.

    Raises:
        RuntimeError: An optimizer stepped inside, or a transfer failed.
        ValueError: Nothing in `model` is sharded, or its policy has another `stage` than 3, or `dynamic`.

    Example::

        for micro_batch in micro_batches:
            with zero3.step_guard(model) as guarded:
                loss_of(model, micro_batch).backward()
            if guarded.failed:
                print("dropped:", guarded.errors)
        optimizer.step()
    """
    replay = CollectiveReplay(model)
    guarded = GuardedStep()
    try:
        failure = ""
        try:
            yield guarded
        except catch as error:
            failure = f"{type(error).__name__}: {error}"
            if is_transfer_failure(error) or not replay.knows_the_rest:
                raise
            replay.replay_the_rest()
        guarded.errors.update(replay.end(failure))
    except BaseException as error:
        guarded.errors.setdefault(replay.rank, f"{type(error).__name__}: {error}")
        raise
    finally:
        replay.close(keep=not guarded.failed)


@dataclass
class _Script:
    """What all ranks know of guarded micro-batches of one kind. They begin it with the same expectations every time."""

    expectations: list[tuple[Any, ...]]
    known: list[tuple[_Operation, ...]]  # what ranks did in it, the latest first

    def after(self, done: Sequence[_Operation]) -> tuple[_Operation, ...] | None:
        """What comes next in the last one that began like this."""
        return next((known[len(done) :] for known in self.known if known[: len(done)] == tuple(done)), None)


class CollectiveReplay:
    """What this rank does in one guarded micro-batch and, as far as it knows, all ranks do."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._states = states_of(model)
        self.rank = self._states[0].communicator.rank
        if any(state.policy.stage != 3 or state.policy.dynamic for state in self._states):
            raise ValueError(f"rank {self.rank}: zero3.step_guard needs ShardingPolicy(stage=3, dynamic=False): it repeats their transfers")
        self._done: list[_Operation] = []
        self._kind = tuple((s.gradients.deferred, *(chunk.shard.requires_grad for chunk in s.chunks)) for s in self._states)
        self._versions = self._chunk_versions()
        parts: dict[object, _Script] = next((runtime.rehearsed for runtime in self._runtimes()), {})
        self._script = parts.get(self._kind)
        if self._script is not None:
            self._expect(self._script.expectations)
        self._found = self._expectations()
        for number, state in enumerate(self._states):
            state.gradients.hold(1)
            state.watch.recorder = partial(_note, self._done, number)

    def _runtimes(self) -> list[Runtime]:
        return list(dict.fromkeys(layer._runtime for layer in layers_of(self._model) if layer._runtime is not None))

    def _expectations(self) -> list[tuple[Any, ...]]:
        return [order.known for runtime in self._runtimes() for order in runtime.orders]

    def _expect(self, expectations: list[tuple[Any, ...]]) -> None:
        for order, known in zip([order for runtime in self._runtimes() for order in runtime.orders], expectations, strict=False):
            order.expect(known)

    @property
    def knows_the_rest(self) -> bool:
        alone = self._states[0].communicator.world_size == 1
        return alone or (self._script is not None and self._script.after(self._done) is not None)

    def _learn(self) -> None:
        if self._script is not None:
            done, known = tuple(self._done), self._script.known
            known[:] = [done, *(other for other in known if other != done)][:MAX_KNOWN]
        elif runtimes := self._runtimes():
            known_ground = tuple(operation for operation in self._done if operation[0] != "agree")  # as it will be next time
            runtimes[0].rehearsed[self._kind] = _Script(self._expectations(), [known_ground])

    def replay_the_rest(self) -> None:
        following = (self._script.after(self._done) if self._script is not None else None) or ()
        reset(self._model)
        for operation, number, *words in following:
            state = self._states[number]
            if operation == "gather":
                state.start_fetch()
                state.finish_fetch()
                state.release()
            elif operation == "reduce":
                state.gradients.take_part()
            elif operation == "agree":
                agree(state.communicator, state.device, words[0], words[1:])
            else:
                state.communicator.all_reduce(torch.zeros(4, dtype=torch.float64, device=state.device))

    def end(self, failure: str) -> dict[int, str]:
        """Tells the others of this rank's failure, if there is one; what failed, by ranks."""
        first = self._states[0]
        told = tell_all(first.communicator, first.device, "the end of a guarded micro-batch", failure, first.watch.journal.digest)
        errors = {rank: what for rank, what in enumerate(told) if what}
        if self._versions != self._chunk_versions():
            raise RuntimeError(
                f"rank {self.rank}: an optimizer stepped inside zero3.step_guard, before the ranks agreed on the gradients. Put "
                "backwards into the guard; clip and step after it."
            )
        if errors:
            logging.getLogger("zero3").warning("a micro-batch was dropped on all ranks: %s", errors)
            reset(self._model)
            self._expect(self._found)  # a rank that failed has not learned what the others have
        else:
            self._learn()
        return errors

    def close(self, *, keep: bool) -> None:
        for state in self._states:
            state.watch.recorder = unwatched
            if not keep:
                state.gradients.roll_back()
            state.gradients.hold(-1)
            state.gradients.commit()

    def _chunk_versions(self) -> list[int]:
        return [chunk.shard._version for state in self._states for chunk in state.chunks]


def _note(done: list[_Operation], number: int, operation: str, *words: str) -> None:
    done.append((operation, number, *words))
