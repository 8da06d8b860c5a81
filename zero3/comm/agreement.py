"""Ranks compare what they are about to do, and all raise the same error if they differ. One small collective when they agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .communicator import Communicator
from .errors import NamingFailures, Subject

__all__: list[str] = []

_ABSENT = bytes(16)  # in place of a digest: a rank that has nothing to say
NOTE_BYTES = 4
_KINDS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError, OSError)


def agree(
    communicator: Communicator,
    device: torch.device,
    subject: str,
    lines: Sequence[str],
    error: Exception | None = None,
    *,
    absent: bool = False,
    note: bytes = bytes(NOTE_BYTES),
) -> list[bytes]:
    """Returns if every rank passes the same `lines` and no rank an `error`; otherwise every rank raises the same.

    A rank that has found a mistake by itself passes it as `error` instead of raising at once: the others, which may
    see nothing wrong, would wait for it. 16 bytes a rank are exchanged; the texts only if those differ. `absent`: this
    rank only listens, for it is not about to do anything; it raises what the others raise.

    `note`: `NOTE_BYTES` that travel along and are not compared. Returns every rank's, in rank order.

    Raises:
        ValueError, TypeError, RuntimeError, OSError: the first rank's error, or the first line that differs and the ranks.
    """
    if communicator.world_size == 1:
        if error is not None:
            raise error
        return [note]
    kind = next((kind.__name__ for kind in _KINDS if isinstance(error, kind)), "RuntimeError") if error is not None else ""
    said = str(error) if isinstance(error, _KINDS) else f"{type(error).__name__}: {error}"
    text = json.dumps({"subject": subject, "lines": list(lines), "kind": kind, "error": said if error is not None else ""})
    digest = hashlib.sha256(text.encode()).digest()[: 15 - NOTE_BYTES] + bytes([error is not None])
    with NamingFailures(communicator, "comparing with the other ranks", Subject(subject)):
        told = communicator.exchange(_ABSENT if absent else note + digest, device)
        notes, digests = zip(*((each[:NOTE_BYTES], each[NOTE_BYTES:]) for each in told), strict=True)
        present = [rank for rank, other in enumerate(told) if other != _ABSENT]
        if len({digests[rank] for rank in present}) <= 1 and not any(digests[rank][-1] for rank in present):
            return list(notes)
        texts = exchange_texts(communicator, device, text)
    raise _explain({rank: json.loads(texts[rank]) for rank in present})


def agree_where_nan(communicator: Communicator, device: torch.device, subject: str, result: Tensor, error: Exception | None) -> None:
    """Ends a collective in which a rank that has found a mistake took part all the same, giving NaN: every rank raises the mistake.

    So a mistake costs no collective where there is none. On an accelerator the host would have to wait for `result`: there the
    rank raises alone, and the others go on with NaN.

    Args:
        result: of the collective, all NaN if any rank has an `error`; it may be NaN for other reasons too.
        error: what this rank has found.

    Raises:
        ValueError, TypeError, RuntimeError, OSError: the first rank's error.
    """
    if communicator.world_size == 1 or device.type != "cpu":
        if error is not None:
            raise error
    elif bool(result.isnan().all()):
        agree(communicator, device, subject, [], error)


def tell_all(communicator: Communicator, device: torch.device, subject: str, text: str, digest: int) -> list[str]:
    """Every rank's `text`, in rank order. Nine bytes a rank, if nobody has any.

    Raises:
        ValueError: on every rank, if their `digest`s, of 64 bits, differ.
    """
    if communicator.world_size == 1:
        return [text]
    with NamingFailures(communicator, "comparing with the other ranks", Subject(subject)):
        told = communicator.exchange(bytes([bool(text)]) + digest.to_bytes(8, "little"), device)
        texts = exchange_texts(communicator, device, text) if any(flag[0] for flag in told) else [""] * communicator.world_size
    digests = [flag[1:].hex() for flag in told]
    if len(set(digests)) > 1:
        raise ValueError(f"ranks have made different transfers by {subject}. Their hashes: {_by_rank(dict(enumerate(digests)))}")
    return texts


def exchange_texts(communicator: Communicator, device: torch.device, text: str) -> list[str]:
    """Every rank's text, of any length, in rank order."""
    payload = text.encode()
    sizes = [int.from_bytes(size, "little") for size in communicator.exchange(len(payload).to_bytes(8, "little"), device)]
    padded = communicator.exchange(payload.ljust(max(sizes), b" "), device)
    return [raw[:size].decode() for raw, size in zip(padded, sizes, strict=True)]


def _explain(reports: dict[int, dict[str, object]]) -> Exception:
    """`reports`: by rank."""
    for rank, report in reports.items():
        if report["kind"]:
            kind = next(kind for kind in _KINDS if kind.__name__ == report["kind"])
            return kind(f"rank {rank}: {report['error']}")
    subjects = {rank: report["subject"] for rank, report in reports.items()}
    if len(set(map(str, subjects.values()))) > 1:
        return ValueError(
            f"ranks are not at the same point: {_by_rank(subjects)}. All ranks must build and call the same layers in the same order."
        )
    subject = next(iter(subjects.values()))
    columns = {rank: [str(line) for line in report["lines"]] for rank, report in reports.items()}  # type: ignore[attr-defined]
    for number in range(max(map(len, columns.values()))):
        row = {rank: column[number] if number < len(column) else "nothing" for rank, column in columns.items()}
        if len(set(row.values())) > 1:
            return ValueError(
                f"ranks differ in {subject}: {_by_rank(row)}. All ranks must have the same model and policy, and call the same "
                "layers in the same order."
            )
    return ValueError(f"ranks differ in {subject}")


def _by_rank(values: Mapping[int, object]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, value in values.items():
        groups.setdefault(str(value), []).append(rank)
    return "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {value}" for value, ranks in groups.items())
