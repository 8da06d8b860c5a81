"""What is in a Trainer's checkpoint-N, and whether it is whole.

checkpoint-N/
  model.safetensors, config.json, ...   the weights, once, as `save_pretrained` writes them; of a
                                        peft model its adapters
  zero3/                                `save_checkpoint`: the optimizer's state, the schedule, and
                                        hashes of these files; of a peft model, and of one with
                                        masters (`master_dtype`), also what it trains
  trainer_state.json, rng_state_0.pth   the Trainer's own; its state comes last
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch
from torch import nn

from ..access import states_of
from ..checkpoint import manifest
from ..checkpoint.load import load_checkpoint
from ..checkpoint.manifest import Manifest
from ..checkpoint.safetensors_writing import BLOCK_BYTES, Written
from ..checkpoint.save import save_checkpoint
from ..comm.agreement import exchange_texts
from ..comm.communicator import Communicator
from ..comm.factory import communicator_for
from ..comm.plain_values import decode
from ..core.layer_state import LayerState, chunks_of
from ..huggingface.load_pretrained import load_pretrained
from ..huggingface.outputs import has_adapters
from .alike import all_ranks

__all__: list[str] = []

STATE = "trainer_state.json"
_OURS = "zero3"


def _has_masters(model: nn.Module) -> bool:
    """Whether what trains is kept in another dtype than the files of `save_pretrained` have."""
    chunks = chunks_of(states_of(model))
    return any(c.shard.requires_grad and c.own_dtype != c.shard.dtype for c in chunks)


def save(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any
) -> None:
    """Adds `zero3/` to a checkpoint whose weights are written. Every rank calls it."""
    first = states_of(model)[0]
    trained = has_adapters(model) or _has_masters(model)
    extra = {
        "schedule": schedule.state_dict() if schedule is not None else None,
        "ranks": first.communicator.world_size,
        "holds_what_trains": trained,
    }
    extra["weights"] = _hashes(checkpoint, first)
    save_checkpoint(
        checkpoint / _OURS, model, optimizer, extra=extra, weights=trained, frozen=False
    )


def load_weights(checkpoint: Path, model: nn.Module) -> None:
    """The weights of a checkpoint; of a peft model what it trains."""
    ours = checkpoint / _OURS
    holds = ours.is_dir() and _extra(manifest.read(ours))["holds_what_trains"]
    if not (holds and has_adapters(model)):  # of a peft model adapters, saved with save_only_model
        load_pretrained(model, checkpoint)
    if holds:
        load_checkpoint(ours, model)


def _extra(ours: Manifest) -> dict[str, Any]:
    """What `save` has noted. It holds no tensors but the schedule's."""
    with manifest.reading(ours):
        extra: dict[str, Any] = decode(ours.content["extra"], lambda number: torch.empty(0))
        return extra


def load_rest(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any
) -> None:
    """The optimizer's state and the schedule."""
    extra = load_checkpoint(checkpoint / _OURS, model, optimizer, weights=False)
    if schedule is not None and extra["schedule"] is not None:
        schedule.load_state_dict(extra["schedule"])


def step_of(checkpoint: str | os.PathLike[str]) -> object:
    return json.loads((Path(checkpoint) / STATE).read_text())["global_step"]


def check(checkpoint: Path, device: torch.device) -> None:
    """Raises a ValueError on every rank if the checkpoint is not whole. Each rank reads its share
    of the files.

    What is cut off, changed or missing is named.
    """
    with all_ranks(device, "whether the checkpoint is whole"):
        try:
            _check(checkpoint, communicator_for(None, device))
        except (OSError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{checkpoint} can't be read: {what}") from error


def _check(checkpoint: Path, communicator: Communicator) -> None:
    if not checkpoint.is_dir():
        raise ValueError(f"{checkpoint} is no directory")
    if not (checkpoint / _OURS).is_dir():
        raise ValueError(
            f"{checkpoint} holds no optimizer state of zero3 ({_OURS}/): it was cut off, saved "
            "with save_only_model=True, or by another trainer. To begin anew from its weights, "
            "load them (zero3.load_pretrained) and train without resume_from_checkpoint"
        )
    try:
        json.loads((checkpoint / STATE).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{checkpoint / STATE} is missing or corrupt, so the checkpoint was cut off: {error}"
        ) from None
    ours = manifest.read(checkpoint / _OURS)
    extra = _extra(ours)
    with manifest.reading(ours):
        files = {
            name: Written(nbytes, blocks) for name, (nbytes, blocks) in extra["weights"].items()
        }
    for name, written in files.items():
        size = (checkpoint / name).stat().st_size if (checkpoint / name).is_file() else None
        if size != written.nbytes:
            raise ValueError(
                f"{checkpoint / name} has {size} bytes, {written.nbytes} were saved: it was cut "
                "off or replaced"
            )
    theirs = Manifest(checkpoint, {"data": "."}, files)
    for each in (ours, theirs):
        manifest.verify(each, sorted(each.files), communicator.rank, communicator.world_size)
    ranks = extra["ranks"]
    each_rank = [f"rng_state_{number}.pth" for number in range(ranks)]
    random_states = each_rank if ranks > 1 else ["rng_state.pth"]
    scaler = [path.name for path in checkpoint.glob("scaler.pt")]
    for name in [*random_states, *scaler][communicator.rank :: communicator.world_size]:
        _check_sums(checkpoint / name)


def _check_sums(path: Path) -> None:
    """Of a file that `torch.save` wrote: a zip with a sum for each of its parts."""
    try:
        with ZipFile(path) as file:
            broken = file.testzip()
    except (OSError, BadZipFile) as error:
        raise ValueError(
            f"{path} is missing or corrupt, so the checkpoint was cut off: {error}"
        ) from None
    if broken is not None:
        raise ValueError(f"{path} was changed: {broken} in it has another sum")


def _hashes(checkpoint: Path, first: LayerState) -> dict[str, Any]:
    """Of the weights' files: name -> bytes, and the hashes of its blocks. Each rank hashes its
    share.
    """
    found_here = {
        path.relative_to(checkpoint): path.stat().st_size
        for path in sorted(checkpoint.rglob("*.safetensors*"))
    }
    sizes = {name.as_posix(): size for name, size in found_here.items() if name.parts[0] != _OURS}
    blocks = [
        (name, number) for name, size in sizes.items() for number in range(-(-size // BLOCK_BYTES))
    ]
    mine = {}
    for name, number in blocks[first.communicator.rank :: first.communicator.world_size]:
        with (checkpoint / name).open("rb") as file:
            file.seek(number * BLOCK_BYTES)
            mine[f"{name}/{number}"] = sha256(file.read(BLOCK_BYTES)).hexdigest()
    found: dict[str, str] = {}
    for text in exchange_texts(first, json.dumps(mine)):
        found |= json.loads(text)
    return {
        name: [size, [found[f"{name}/{number}"] for other, number in blocks if other == name]]
        for name, size in sizes.items()
    }
