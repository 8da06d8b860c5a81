"""save_merged(): a model's values with its adapters merged into them, as Hugging Face files. One
layer at a time is whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..access import states_of, used
from ..checkpoint.contents import Contents
from ..checkpoint.full_state import not_a_dtype
from ..checkpoint.safetensors_files import SafetensorsFiles, Stored
from ..comm.agreement import agreeing
from ..core.parameters import plain_modules
from ..names import innermost
from ..optim.state_memory import land_steps
from .index_maps import IndexMap
from .key_mapping import fit, without_adapters
from .outputs import bytes_in, check_unmixed, outputs_of_model, shards_of
from .packed import find_packed
from .reading import SliceReader
from .save_pretrained import Export, write_values
from .weights import WeightWalk

__all__: list[str] = []

_AT_ONCE = 1 << 20  # elements


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
        ValueError: Nothing in `model` is sharded, `path` holds adapters, `base` does not fit the
            model or is quantised itself, or an adapter is of a kind that peft can't merge. Every
            rank raises it, before anything is written.
        TypeError: `path` is no path, or `dtype` is no dtype. Every rank raises it.
        RuntimeError: Parameters have no values, or the call is inside `full_params` or `resident`.
        OSError: A rank could not read or write. Every rank raises the same error.

    Example::

        zero3.save_merged(model, f"{directory}/merged", dtype=torch.bfloat16)
    """
    first = used(model, "save_merged")[0]
    with ExitStack() as opened:
        with agreeing(first.communicator, first.device, "save_merged") as lines:
            if (wrong := not_a_dtype(dtype)) is not None:
                raise wrong
            land_steps(states_of(model))
            check_unmixed(Path(path), None)
            contents = Contents(model, "save_merged", as_values=True)
            owner, adapted = named_without_adapters(contents, innermost(model))
            originals = _Originals(model, base, opened) if base is not None else None
            outputs = outputs_of_model(owner, contents, (), dtype)
            shards = shards_of(outputs, bytes_in(max_shard_size))
            export = Export(owner, contents, Path(path), shards, None)
            read = originals.read if originals is not None else None
            walk = WeightWalk(contents, outputs, adapted, read)
            lines += export.lines
            lines += originals.lines if originals is not None else []
        export.write(partial(_fill, walk))


def named_without_adapters(contents: Contents, model: Any) -> tuple[nn.Module, list[nn.Module]]:
    """Gives tensors the names that they have in the model without adapters. Returns that model, and
    the modules that may have adapters.
    """
    added = getattr(getattr(model, "base_model", None), "prefix", None)
    if not isinstance(added, str) or not hasattr(model, "peft_config"):
        return model, []
    every = {name: name for names in contents.names.values() for name in names}
    contents.rename(
        {
            name: ours
            for theirs, name in without_adapters(every, added).items()
            if (ours := _chosen(theirs, model))
        }
    )
    owner = model.get_base_model()
    return owner, list(plain_modules(owner))


def _chosen(name: str, model: Any) -> str | None:
    """The name without peft's parts. None: adapters put another module in the place of this one
    (`modules_to_save`).
    """
    if ".original_module." in name:
        return None
    before, _, after = name.partition(".modules_to_save.")
    adapter, _, rest = after.partition(".")
    return name if not after else f"{before}.{rest}" if adapter in model.active_adapters else None


class _Originals:
    """The weights in `base`, of parameters that are quantised here."""

    def __init__(self, model: nn.Module, base: str | os.PathLike[str], opened: ExitStack) -> None:
        files = opened.enter_context(closing(SafetensorsFiles(base)))
        if find_packed(files)[1]:
            raise ValueError(
                f"{base} holds quantised weights: save_merged merges into those that were not "
                "quantised yet, or base=None"
            )
        self._maps: Mapping[int, IndexMap[Stored]] = fit(model, files.tensors, strict=True).maps
        self._reader = SliceReader(files)
        self.lines = files.listing

    def read(self, parameter: nn.Parameter, target: Tensor) -> None:
        self._reader.read(self._maps[id(parameter)], 0, target.view(-1))


def _fill(walk: WeightWalk, export: Export) -> None:
    """Every rank writes its share of each tensor."""
    error: Exception | None = None
    contents = export.contents
    places = {
        output.name: (file, place)
        for file in export.shards
        for output, place in export.places(file)
    }
    for output, fill, _ in walk.tensors():
        file, place = places[output.name]
        low, high = contents.share(output.numel)
        # ranks may have other values: rank 0's count
        if all(source in contents.others for source in output.index_map.sources):
            low, high = 0, output.numel if contents.is_first else 0
        try:
            with export.opened(file) if error is None and low < high else nullcontext() as opened:
                for start in range(low, high, _AT_ONCE) if opened is not None else ():
                    numel = min(_AT_ONCE, high - start)
                    values = torch.empty(numel, dtype=output.dtype, device=contents.device)
                    fill(values, start)
                    where = place + start * output.dtype.itemsize
                    write_values(opened, where, values, output.dtype)
        # this rank goes on, because the others need it to gather
        except Exception as caught:
            error = caught
    if error is not None:
        raise error
