"""split_sequence(): each rank's part of a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..comm.agreement import Members, agree
from ..conductors.conducted import unconducted
from .attention import finds_positions
from .parts import Parts, active_parts_of, padded

__all__: list[str] = []


def split_sequence(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's part of a batch, for a model whose mesh has `sp`. Every rank of a group gives the
    whole batch, the same.

    `labels` become `shift_labels`, shifted before the cut; and `position_ids` are added, those of
    whole sequences. Parts are those of `torch.tensor_split` along dimension 1. Without `sp`, and
    inside of `resident`, nothing is cut: one script serves both.

    Args:
        model: A sharded model, or any other.
        batch: `input_ids` `[B, S]` or `inputs_embeds` `[B, S, H]`, and what goes with them: each
            tensor `[B, S]`, and beside embeddings `[B, S, ...]`, is cut too. Other values pass. It
            does not change.

    Returns:
        A new dictionary. A sequence of fewer tokens than ranks is filled up to one each,
        with labels of -100 and a mask of 0.

    Raises:
        ValueError: There are neither ids nor embeddings, or ranks of a group have given different
            batches. All ranks of the group raise it.

    Example::

        part = zero3.split_sequence(model, batch)
        loss = zero3.causal_lm_loss(model, reduction="sum", **part)
        zero3.backward(loss, (part["shift_labels"] != -100).sum(), model)

    Source: Jacobs et al., DeepSpeed Ulysses, 2023.
    """
    found = dict(batch)
    ids = (
        found.get("input_ids") if found.get("input_ids") is not None else found.get("inputs_embeds")
    )
    parts = active_parts_of(model)
    error = None
    if not isinstance(ids, Tensor) or ids.dim() < 2:
        error = ValueError(
            "split_sequence: the batch has neither input_ids [B, S] nor inputs_embeds [B, S, H]"
        )
    if parts is not None:
        _compare(parts, found, error)
    if error is not None or not isinstance(ids, Tensor):
        raise error or ValueError
    rows, whole = ids.shape[:2]
    if (labels := found.pop("labels", None)) is not None:
        found["shift_labels"] = functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    positions = found.get("position_ids")
    if positions is None and finds_positions(model) is None:
        positions = torch.arange(whole, device=ids.device)
    if positions is not None and positions.dim() < 3:
        found["position_ids"] = positions.expand(rows, whole)
    if parts is None:
        return found
    if whole < parts.size:
        found = _filled(found, rows, whole, parts.size)
    whole = max(whole, parts.size)
    return {key: _part(value, rows, whole, parts, found) for key, value in found.items()}


def _goes_with(value: Any, rows: int, whole: int, batch: Mapping[str, Any]) -> bool:
    if not isinstance(value, Tensor) or value.shape[:2] != (rows, whole):
        return False
    return value.dim() == 2 or batch.get("inputs_embeds") is not None


def _filled(batch: dict[str, Any], rows: int, whole: int, least: int) -> dict[str, Any]:
    missing = least - whole
    positions = batch["position_ids"]
    packed = bool((positions.diff(dim=1) != 1).any())  # then each sequence sees itself alone
    if batch.get("attention_mask") is None and not packed:
        ids = batch.get("input_ids")
        like = ids if ids is not None else batch["inputs_embeds"]
        batch["attention_mask"] = torch.ones((rows, whole), dtype=torch.int64, device=like.device)
    found = {}
    for key, value in batch.items():
        if not _goes_with(value, rows, whole, batch):
            found[key] = value
        elif key == "position_ids" and not packed:
            more = torch.arange(1, missing + 1, device=value.device)
            found[key] = torch.cat([value, value[:, -1:] + more], 1)
        else:
            found[key] = padded(value, missing, -100 if key == "shift_labels" else 0)
    return found


def _part(value: Any, rows: int, whole: int, parts: Parts, batch: Mapping[str, Any]) -> Any:
    if not _goes_with(value, rows, whole, batch):
        return value
    part = parts.own(value).contiguous()
    part.zero3_cut = True  # type: ignore[attr-defined]  # its place is not seen in it
    return part


def _compare(parts: Parts, batch: Mapping[str, Any], error: Exception | None) -> None:
    """Under `joinable` a rank may have no batch: then the forward finds out."""
    root = parts.root()
    if root is None or unconducted(root.communicator) is not root.communicator:
        if error is not None:
            raise error
        return
    digest = hashlib.sha256()
    for key, value in sorted(batch.items()):
        if isinstance(value, Tensor):
            digest.update(f"{key} {list(value.shape)} {value.dtype}".encode())
            flat = value.detach().cpu().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    what = "the batch given to split_sequence by ranks that share sequences (sp)"
    lines = [f"a batch of {digest.hexdigest()[:16]}"]
    agree(Members(parts.group, root.device), what, lines, error, caller="zero3.split_sequence")
