"""step_guard(): a micro-batch that fails on any rank is dropped on all, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from ..comm.errors import is_transfer_failure
from .replay import CollectiveReplay

__all__: list[str] = []


@dataclass
class GuardedStep:
    """How a guarded micro-batch ended; the same on every rank.

    Attributes:
        errors: rank -> what failed there; empty, if nothing did.
    """

    errors: dict[int, str] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether it was dropped."""
        return bool(self.errors)


@contextmanager
def step_guard(model: nn.Module, catch: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[GuardedStep]:
    """If any rank fails inside, all ranks drop what was inside, and go on.

        for micro_batch in micro_batches:
            with zero3.step_guard(model) as guarded:
                loss(model(micro_batch)).backward()
            if guarded.failed:
                dropped += 1                        # on every rank alike; guarded.errors: {rank: what it raised}
        optimizer.step()

    Every rank enters and leaves it. Inside belongs one micro-batch: forward and backward, or `zero3.backward`. What has
    gone into gradients before stays, on every rank; buffers (of BatchNorm) and random generators stay as the micro-batch
    left them. The exception is swallowed and logged ("zero3", WARNING). It costs one exchange of nine bytes a rank at the end,
    for which the host waits, and one more gradient shard, as `ShardingPolicy(transactional=True)` does.

    A rank that fails alone does what the others do as far as it knows it: from earlier micro-batches under a guard, of which
    it takes the last that began alike. Before the first one, or if none began like this one, it raises, and the others do
    when the group's timeout ends. So does everyone whose transfers fail: ranks that can't speak can't agree.

    Args:
        catch: the exceptions that count as a failed micro-batch. Others pass, and then the other ranks wait in vain.

    Raises:
        RuntimeError: an optimizer stepped inside; a failed transfer.
        ValueError: nothing in `model` is sharded, or a policy with another `stage` than 3, or `dynamic`.
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
            replay.make_the_rest()
        guarded.errors.update(replay.end(failure))
    except BaseException as error:
        guarded.errors.setdefault(replay.rank, f"{type(error).__name__}: {error}")
        raise
    finally:
        replay.close(keep=not guarded.failed)
