"""step_guard(): if a micro-batch fails on any rank, all ranks drop it, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from ..comm.errors import is_transfer_failure
from ..core.chunk_gradient import CallersMistake
from .replay import CollectiveReplay

__all__: list[str] = []


@dataclass
class GuardedStep:
    """How a guarded micro-batch ended. It is the same on every rank.

    Attributes:
        errors: The text of the error by rank, for each rank that failed. Empty if none did.
    """

    errors: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether the micro-batch was dropped."""
        return bool(self.errors)


@contextmanager
def step_guard(
    model: nn.Module, catch: type[Exception] | tuple[type[Exception], ...] = Exception
) -> Iterator[GuardedStep]:
    """Context for one micro-batch: if it fails on any rank, all ranks drop it and go on.

    Every rank enters and leaves it. It contains the forward and the backward of one micro-batch.
    `zero_grad`, clipping and the step stay outside, because a rank that failed would not do what
    the others did, and `no_sync` goes around it.

    Gradients of earlier micro-batches stay on every rank. If `no_sync` has kept them, and the
    dropped micro-batch was to reduce them, call `reduce_gradients` before clipping and the step.
    Buffers (of BatchNorm) and random generators stay as the micro-batch left them, and so do the
    gradients of parameters that are in no layer of `model` (plain and DDP ones, and those of other
    models: give it all that the loss trains, as an `nn.ModuleList`). The exception is caught and
    logged (logger "zero3", WARNING). The context costs one exchange of nine bytes for each rank at
    the end, for which the host waits, and one more gradient shard, as with
    `ShardingPolicy(transactional=True)`.

    A rank that fails makes the rest of the transfers, because the other ranks wait for them. It
    knows them from the latest guarded micro-batch that began with the same transfers. If there is
    none, as in the first micro-batch (and in the second, where a forward exchanges tokens or parts
    of sequences), the rank raises its error, and the other ranks raise at the group's timeout. If a
    transfer itself fails, every rank raises, because the ranks can't communicate any more.

    Args:
        model: Any model that contains zero3 layers, with `stage=3` and without `dynamic`.
        catch: The exceptions that count as a failed micro-batch. Another exception is raised, and
            the other ranks raise at the group's timeout.

    Yields:
        A `GuardedStep`, which is complete when the context is left.

    Raises:
        TypeError: `catch` has anything else than exceptions' classes.
        RuntimeError: An optimizer stepped inside, gradients were read, zeroed or replaced there, a
            penalty over chunks was differentiated, or `no_sync` began inside: on every rank, and
            gradients are what they were. Or a transfer failed.
        ValueError: Nothing in `model` is sharded, or its policy has a `stage` other than 3, or
            `dynamic=True`. Or the loss trains other layers of the same model, too, or the guard is
            inside another one, or `zero3.backward` came a second time in it: on every rank,
            likewise.

    Example::

        for micro_batch in micro_batches:
            with zero3.step_guard(model) as guarded:
                loss_of(model, micro_batch).backward()
            if guarded.failed:
                print("dropped:", guarded.errors)
        optimizer.step()
    """
    kinds = catch if isinstance(catch, tuple) else (catch,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        raise TypeError(f"catch must be exceptions' classes, found {catch!r}")
    replay = CollectiveReplay(model)
    guarded = GuardedStep()
    try:
        failure, mistake = "", None
        try:
            yield guarded
        except catch as error:
            failure = f"{type(error).__name__}: {error}"
            mistake = error if isinstance(error, CallersMistake) else None
            if is_transfer_failure(error) or not replay.knows_the_rest:
                if mistake:
                    raise type(mistake)(f"rank {replay.rank}: {mistake}") from error
                raise
            # Its frames hold activations, and with torch 2.11 a checkpoint's hooks. From Python
            # 3.12 on they and the error hold each other, until a collection of garbage.
            error.__traceback__ = None
            replay.make_the_rest()
        guarded.errors.update(replay.end(failure, mistake))
    except BaseException as error:
        guarded.errors.setdefault(replay.rank, f"{type(error).__name__}: {error}")
        replay.give_up(error)
        raise
