"""Ranks compare what they will do next. If they differ, all raise the same error. If they agree, it
costs one small collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .board import board_for, by_rank
from .communicator import Communicator
from .errors import NamingFailures, Subject
from .log import TransferLog

__all__: list[str] = []

_ABSENT = bytes(16)  # a rank that only listens sends this in place of a digest
# the last byte, but for its last bit, which is set if the rank has an error. No other exchange of
# that length ends so
_AGREES = 0xA4
NOTE_BYTES = 4
IN_GROUP = "process_group: "  # begins a line that is its own subject
_COMPARING = "comparing with the other ranks"
_KINDS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError, OSError)


def meeting(
    communicator: Communicator, error: Exception | None = None
) -> AbstractContextManager[None]:
    """Context for the first collective of ranks that may have been given different groups: see
    `Board.meeting`.
    """
    board = board_for(communicator) if communicator.world_size > 1 else None
    return nullcontext() if board is None else board.meeting(error)


class Meets(Protocol):
    """Ranks that compare, and where the tensors for it are made: a layer, for one."""

    @property
    def communicator(self) -> Communicator: ...

    @property
    def device(self) -> torch.device: ...


class Members(NamedTuple):
    """These alone."""

    communicator: Communicator
    device: torch.device


def agree(
    among: Meets,
    subject: str,
    lines: Sequence[str] | None,
    error: Exception | None = None,
    *,
    note: bytes = bytes(NOTE_BYTES),
    caller: str = "",
) -> list[bytes]:
    """Returns if all ranks pass the same `lines` and no rank passes an `error`; otherwise every
    rank raises the same error.

    A rank that finds a mistake passes it as `error` and does not raise it alone: the other ranks,
    which may see no mistake, would wait for this rank. Each rank sends 16 bytes; the texts follow
    only if these differ.

    Args:
        among: The ranks that compare.
        subject: The name of what is compared, for errors.
        lines: What has to be the same on all ranks. None: this rank only listens, and raises what
            the others raise.
        error: A mistake that this rank has found.
        note: `NOTE_BYTES` bytes that are sent too, and not compared.
        caller: The public function whose first collective this is, for the error if not all ranks
            call it, where `subject` is not its name.

    Returns:
        Every rank's `note`, in rank order.

    Raises:
        ValueError, TypeError, RuntimeError, OSError: The lowest rank's error, or the first line
        that differs, with the ranks.
    """
    communicator = among.communicator
    if communicator.world_size == 1:
        if error is not None:
            raise error
        return [note]
    kind = said = ""
    if error is not None:
        kind = next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), "RuntimeError")
        said = str(error) if isinstance(error, _KINDS) else f"{type(error).__name__}: {error}"
    report = {"subject": subject, "lines": list(lines or ()), "kind": kind, "error": said}
    text = json.dumps(report)
    digest = hashlib.sha256(text.encode()).digest()[: 15 - NOTE_BYTES] + bytes(
        [_AGREES | (error is not None)]
    )
    caller = caller or _function_in(subject)
    with NamingFailures(communicator, _COMPARING, Subject(subject), caller):
        told = communicator.exchange(_ABSENT if lines is None else note + digest, among.device)
        notes, digests = zip(
            *((each[:NOTE_BYTES], each[NOTE_BYTES:]) for each in told), strict=True
        )
        present = [rank for rank, other in enumerate(told) if other != _ABSENT]
        if strange := [rank for rank in present if told[rank][-1] & ~1 != _AGREES]:
            raise RuntimeError(
                f"rank {strange[0]} is at another collective: its message has come here"
            )
        if len({digests[rank] for rank in present}) <= 1 and not any(
            digests[rank][-1] & 1 for rank in present
        ):
            return list(notes)
        texts = exchange_texts(among, text)
    raise _explain({rank: json.loads(texts[rank]) for rank in present})


def _function_in(subject: str) -> str:
    """Public functions agree in their own name, with arguments perhaps. What is compared within
    them, or in a step, is no name.
    """
    return name if (name := subject.partition("(")[0]).isidentifier() else ""


@contextmanager
def agreeing(
    among: Meets, subject: str, caller: str = "", log: TransferLog | None = None
) -> Iterator[list[str]]:
    """Context for work that may fail on one rank: at its end all ranks go on, or all raise the same
    error. See `agree`. `log`: the model's, if the ring is to tell who still works.

    Yields:
        An empty list. Lines that the caller appends have to be the same on all ranks.
    """
    among = Members(among.communicator, among.device)  # as they are at the beginning
    lines: list[str] = []
    error: Exception | None = None
    try:
        yield lines
    except Exception as caught:  # of any kind: the other ranks wait to hear of it
        error = caught
    if log is not None:
        log.keep(caller or subject.rpartition(" ")[2])
    agree(among, subject, lines, error, caller=caller)


@contextmanager
def writing_at_end(among: Meets, caller: str, write: Callable[[], object]) -> Iterator[None]:
    """Context at whose end all ranks `write`, unless one has raised inside.

    Raises:
        RuntimeError: Another rank has raised.
    """
    subject = f"the end of {caller}"
    try:
        yield
    except BaseException as error:
        cause = RuntimeError(
            f"{caller} ended with {type(error).__name__}: {error}. Nothing was written."
        )
        with suppress(RuntimeError):  # of all ranks, and this one has its own
            agree(among, subject, [], cause)
        raise
    agree(among, subject, [])
    write()


def agree_where_nan(among: Meets, subject: str, result: Tensor, error: Exception | None) -> None:
    """Called after a collective to which a rank with a mistake has given NaN. If the result is NaN,
    every rank raises the mistake.

    So the check needs no further collective if there is no mistake. On an accelerator the host
    would have to wait for `result`. There the rank with the mistake raises alone, and the other
    ranks continue with NaN.

    Args:
        among: The ranks that compare.
        subject: The name of what is compared, for errors.
        result: The collective's result. It is all NaN if any rank has an `error`, and may be NaN
            for other reasons too.
        error: A mistake that this rank has found.

    Raises:
        ValueError, TypeError, RuntimeError, OSError: The lowest rank's error.
    """
    if among.communicator.world_size == 1 or among.device.type != "cpu":
        if error is not None:
            raise error
    elif bool(result.isnan().all()):
        agree(among, subject, [], error)


def tell_all(among: Meets, subject: str, text: str, digest: int, caller: str) -> list[str]:
    """Returns every rank's `text`, in rank order. Each rank sends nine bytes if no rank has a text.

    Raises:
        ValueError: The 64-bit `digest` differs between ranks. All ranks raise it.
    """
    communicator, flag = among.communicator, bytes([bool(text)])
    if communicator.world_size == 1:
        return [text]
    with NamingFailures(communicator, _COMPARING, Subject(subject), caller):
        told = communicator.exchange(flag + digest.to_bytes(8, "little"), among.device)
        texts = [""] * communicator.world_size
        if any(each[0] for each in told):
            texts = exchange_texts(among, text)
    digests = [each[1:].hex() for each in told]
    if len(set(digests)) > 1:
        why = {rank: text for rank, text in enumerate(texts) if text}
        raise ValueError(
            f"ranks have made different transfers by {subject}. Their hashes: "
            f"{by_rank(dict(enumerate(digests)))}"
            + (f". Before that ranks have failed: {by_rank(why)}" if why else "")
        )
    return texts


def exchange_texts(among: Meets, text: str) -> list[str]:
    """Every rank's text, of any length, in rank order."""
    communicator, device, payload = among.communicator, among.device, text.encode()
    sizes = [
        int.from_bytes(size, "little")
        for size in communicator.exchange(len(payload).to_bytes(8, "little"), device)
    ]
    padded = communicator.exchange(payload.ljust(max(sizes), b" "), device)
    return [raw[:size].decode() for raw, size in zip(padded, sizes, strict=True)]


def _explain(reports: dict[int, dict[str, object]]) -> Exception:
    """The error that all ranks raise. `reports`: rank -> its report."""
    for rank, report in reports.items():
        if report["kind"]:
            kind = next(kind for kind in _KINDS if kind.__name__ == report["kind"])
            return kind(f"rank {rank}: {report['error']}")
    subjects = {rank: report["subject"] for rank, report in reports.items()}
    if len(set(map(str, subjects.values()))) > 1:
        return ValueError(
            f"ranks are not at the same point: {by_rank(subjects)}. All ranks must build and call "
            "the same layers in the same order."
        )
    subject = next(iter(subjects.values()))
    columns = {rank: [str(line) for line in report["lines"]] for rank, report in reports.items()}  # type: ignore[attr-defined]
    for number in range(max(map(len, columns.values()))):
        row = {
            rank: column[number] if number < len(column) else "nothing"
            for rank, column in columns.items()
        }
        if len(set(row.values())) > 1:
            if all(text.startswith(IN_GROUP) for text in row.values()):
                subject = IN_GROUP.removesuffix(": ")
                row = {rank: text.removeprefix(IN_GROUP) for rank, text in row.items()}
            return ValueError(
                f"ranks differ in {subject}: {by_rank(row)}. All ranks must have the same model, "
                "process group (or mesh) and policy, and call the same layers in the same order."
            )
    return ValueError(f"ranks differ in {subject}")
