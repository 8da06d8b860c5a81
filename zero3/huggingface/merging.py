"""save_merged(): a model's values with its adapters merged into them, as Hugging Face files. One
layer at a time is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import torch
from torch import Tensor, nn

from ..access import states_of, used_together
from ..checkpoint import file_operations
from ..checkpoint.contents import Contents
from ..checkpoint.full_state import check_dtype
from ..checkpoint.safetensors_files import SafetensorsFiles
from ..comm.agreement import agreeing
from ..modules import plain_modules
from ..names import innermost
from ..optim.state_memory import land_steps
from .index_maps import SliceReader
from .key_mapping import fit, without_adapters
from .outputs import (
    bytes_in,
    check_unmixed,
    has_adapters,
    is_adapted,
    outputs_of_model,
    shards_of,
)
from .packed import find_packed
from .save_pretrained import Export
from .weights import WeightWalk

__all__: list[str] = []


def save_merged(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a model with its active adapters merged into its weights, as a Hugging Face directory
    that `from_pretrained` reads.

    Every rank calls it. One layer at a time is gathered, and peft itself merges into copies of its
    weights. Each rank writes its share of the result. The model stays as it is. Of a model without
    adapters it writes the values, dequantised.

    Args:
        model: Any model that contains zero3 layers. Its base may be quantised.
        path: A directory of a file system that all ranks see. Parents are created. Files of the
            same names are replaced.
        base: A Hugging Face directory with the weights that were quantised. Adapters are merged
            into these. None: they are merged into the values that the quantised weights stand for,
            which the adapters were trained on.
        max_shard_size: The largest size of one file, in bytes or as in "5GB". A larger tensor has a
            file of its own.
        dtype: A floating dtype of 16 bits or more, to which floating tensors are converted after
            they are merged. None: as they are.

    Raises:
        ValueError: Nothing in `model` is sharded, it is a part of a model with adapters and holds
            some, `path` holds adapters, `base` does not fit the model or is quantised itself, or an
            adapter is of a kind that peft can't merge (a RuntimeError, if it is one of peft's).
            Every rank raises it, before anything is written.
        TypeError: `path` is no path, or `dtype` is no dtype. Every rank raises it.
        RuntimeError: Parameters have no values, or the call is inside `full_params` or `resident`.
        OSError: A rank could not read or write. Every rank raises the same error.

    Example::

        zero3.save_merged(model, f"{directory}/merged", dtype=torch.bfloat16)
    """
    first = used_together(model, "save_merged")[0]
    with ExitStack() as opened:
        with agreeing(first, "save_merged") as lines:
            check_dtype(dtype)
            land_steps(states_of(model))
            directory = file_operations.directory_of(path)
            check_unmixed(directory, None)
            contents = Contents(model, "save_merged", as_values=True)
            owner, adapted = named_without_adapters(contents, innermost(model))
            read, files = (None, []) if base is None else _originals(model, base, opened)
            outputs = outputs_of_model(owner, contents, (), dtype)
            shards = shards_of(outputs, bytes_in(max_shard_size))
            walk = WeightWalk(contents, outputs, adapted, read)
            export = Export(owner, directory, shards, walk)
            lines += export.lines + files
        export.write()


def named_without_adapters(contents: Contents, model: Any) -> tuple[nn.Module, list[nn.Module]]:
    """Gives tensors the names that they have in the model without adapters. Returns that model, and
    the modules that may have adapters. Raises ValueError if they are of a kind that has no merge,
    or `model` is only a part of peft's.
    """
    if not has_adapters(model):
        refuse_part_with_adapters(model)
        return model, []
    modules = list(plain_modules(model))
    if not (hasattr(model.base_model, "merge_adapter") and any(map(is_adapted, modules))):
        kinds = ", ".join(sorted({str(c.peft_type.value) for c in model.peft_config.values()}))
        raise ValueError(
            f"adapters of the kind {kinds} can't be merged: no weight of the base stands for them. "
            "Save them beside it (zero3.save_pretrained), or stream them (adapters_only=True)"
        )
    every = {name: name for names in contents.names.values() for name in names}
    left = without_adapters(model, every).items()
    contents.rename({name: own for theirs, name in left if (own := _chosen(theirs, model))})
    return model.get_base_model(), modules


def refuse_part_with_adapters(model: nn.Module) -> None:
    """Nothing would merge its adapters: their weights would come beside the base's, as they are."""
    if any(map(is_adapted, plain_modules(model))):
        raise ValueError(
            f"this {type(model).__name__} holds adapters, and is not the model of peft's around "
            "them: pass the whole one, as peft.get_peft_model returned it (adapters that "
            "add_adapter has put into a model have no merge here)"
        )


def _chosen(name: str, model: Any) -> str | None:
    """The name without peft's parts. None: adapters put another module in the place of this one
    (`modules_to_save`).
    """
    if ".original_module." in name:
        return None
    before, _, after = name.partition(".modules_to_save.")
    adapter, _, rest = after.partition(".")
    return name if not after else f"{before}.{rest}" if adapter in model.active_adapters else None


def _originals(
    model: nn.Module, base: str | os.PathLike[str], opened: ExitStack
) -> tuple[Callable[[nn.Parameter, Tensor], None], list[str]]:
    """What reads the weights in `base` of parameters that are quantised here, and a line for each
    file.
    """
    files = opened.enter_context(closing(SafetensorsFiles(base)))
    if find_packed(files)[1]:
        raise ValueError(
            f"{base} holds quantised weights: save_merged merges into those that were not "
            "quantised yet, or base=None"
        )
    maps, reader = fit(model, files.tensors, strict=True).maps, SliceReader()

    def read(parameter: nn.Parameter, target: Tensor) -> None:
        reader.read(maps[id(parameter)], 0, target.view(-1))

    return read, files.listing
