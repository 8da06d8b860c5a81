"""An exception on one rank ends a run on all ranks, and every rank's error says whose it was."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from ..comm.board import board_for
from ..comm.factory import communicator_for

__all__: list[str] = []

_KINDS = (ValueError, TypeError, RuntimeError, OSError)


@contextmanager
def ends_together(device: torch.device) -> Iterator[None]:
    """Every rank enters it. A rank that raises inside leaves a note first; the others find it when
    the transfers with it fail.

    That is when it has left the group, or at the group's timeout. It costs one small collective at
    the beginning.

    Raises:
        Exception: With the rank before the message, of the same type where that is ValueError,
            TypeError, RuntimeError or OSError.
    """
    communicator = communicator_for(None, device)
    if communicator.world_size == 1:
        yield
        return
    run = communicator.exchange(os.urandom(8), device)[0].hex()
    rank, board = communicator.rank, board_for(communicator)
    try:
        yield
    except Exception as error:
        everyone = range(communicator.world_size if board is not None else 0)
        others = [
            text
            for other in everyone
            if other != rank and board is not None and (text := board.posted(f"{run}/{other}"))
        ]
        said = str(error) if type(error) in _KINDS else f"{type(error).__name__}: {error}"
        # what ranks have agreed upon names one already
        said = said if re.match(r"ranks? \d", said) else f"rank {rank}: {said}"
        with suppress(RuntimeError):  # the process that keeps the notes may be gone
            if board is not None:
                board.post(f"{run}/{rank}", said)
        kind = type(error) if type(error) in _KINDS else RuntimeError
        raise kind(
            "\n".join([*(f"{text} (which ended this run)" for text in others), said])
        ) from error
