"""load_pretrained(): fills a sharded model from a Hugging Face directory. Every rank reads only the
bytes of its own chunks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing

import torch
from torch import Tensor, nn

from ..access import sharded_in, states_of, used
from ..checkpoint.contents import check_released
from ..checkpoint.extra_state import set_extra_states
from ..checkpoint.file_operations import directory_of
from ..checkpoint.lazy import STAGE_BYTES
from ..checkpoint.meta_buffers import filling, put
from ..checkpoint.safetensors_files import SafetensorsFiles
from ..comm.agreement import agreeing
from ..comm.communicator import is_first
from ..core.layer_state import LayerState
from ..core.layout import Piece
from ..core.parameters import ShardedParameter
from ..faces.quantised import weight_of
from .adapters import FILE, fit_adapter, places_of_adapters
from .index_maps import SliceReader
from .key_mapping import Fit, fit
from .left_out import compute, fill
from .packed import find_packed, match_packed
from .quantizing import fill_quantized

__all__: list[str] = []


def load_pretrained(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Fills a sharded model from a Hugging Face directory: `model.safetensors`, or several files
    with their index.

    Every rank calls it. Each rank reads the ranges of the files that belong to its own chunks, a
    few MB at a time. So no rank holds a whole tensor, and the ranks together read every byte once.
    Values are converted to the chunks' dtypes. If transformers transposes or interleaves a stored
    tensor, a rank reads the part of that tensor over which its slice is spread.

    Names are those of the unwrapped model, with or without its `base_model_prefix`. A tied
    parameter may have any of its names. The conversions that transformers has for this model
    (renaming, stacking, joining, cutting, rearranging, as for experts) are made too, if they only
    move elements. In a peft model the base is filled, and the adapters are left alone. If `path`
    holds adapters and no model, as peft's `save_pretrained` writes them, the adapters are filled
    instead. Persistent buffers are read from the files. Other buffers on the meta device (rotary
    frequencies) are computed by `_init_weights` or `reset_parameters`.

    Args:
        model: Sharded by `shard`, `Zero3Layer` or `Zero3Sequential`; built on the meta device, or
            with values to replace.
        path: The directory, with the same files for every rank. The files of adapters are in it, or
            in directories of their names.
        strict: Missing and unexpected names are an error; of adapters they always are. Otherwise
            they are left alone, and the first forward names parameters that have no values.

    Raises:
        ValueError: There are no safetensors; a file is corrupt or truncated; files differ between
            ranks; names are missing or unexpected, or shapes or kinds of values differ (one error
            names all of these); or a tied parameter is stored twice with different values. Every
            rank raises it, before anything has changed.
        TypeError: `path` is no path.
        RuntimeError: The call is inside `full_params` or `resident`; or a read failed, and the
            parameters that it should have filled count as unloaded.

    Example::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        zero3.load_pretrained(zero3.shard(model, device=device), directory)

    Source: the safetensors format, https://huggingface.co/docs/safetensors.
    """
    states = used(model, "load_pretrained")
    first = states[0]
    with ExitStack() as opened:
        what = "the files that load_pretrained found"
        with agreeing(first, what, "load_pretrained") as lines:
            check_released(states, "load_pretrained")
            try:
                sources = list(_sources(model, path, strict, opened))
                for files, found in sources:
                    _check_repeated(states, files, found)
            except OSError as error:
                raise ValueError(f"{path} can't be read: {error}") from error
            left_out = {key: f.names[key][0] for _, f in sources for key in f.left_out}
            computed = compute(model, states, left_out, strict)
            lines += [line for files, _ in sources for line in files.listing]
        for files, found in sources:
            _load(model, states, files, found)
        fill(model, states, computed)


def _sources(
    model: nn.Module, path: str | os.PathLike[str], strict: bool, opened: ExitStack
) -> Iterator[tuple[SafetensorsFiles, Fit]]:
    """Yields the files of the model, or those of each of its adapters, with what they fit."""
    directory = directory_of(path)
    for adapter, place in (places := places_of_adapters(model, directory)).items():
        files = opened.enter_context(closing(SafetensorsFiles(place, [FILE])))
        yield files, fit_adapter(model, adapter, place, files.tensors)
    if not places:
        files = opened.enter_context(closing(SafetensorsFiles(directory)))
        tensors, packed = find_packed(files)
        found = fit(model, tensors, strict)
        found.packed.update(match_packed(states_of(model), found, packed))
        yield files, found


def _load(model: nn.Module, states: list[LayerState], files: SafetensorsFiles, found: Fit) -> None:
    first, reader = states[0], SliceReader()
    mapped = [sharded for key, sharded in sharded_in(states).items() if key in found.maps]
    with filling(model, states, files.directory, mapped, "load_pretrained"):
        _fill_layers(states, reader, found)
        values = _new_values(states, reader, found)
        extra = {name: stored.tensor() for name, stored in found.extra.items()}
    for key, value in values.items():
        if value.numel():
            first.communicator.broadcast(value)
        put(model, found.tensors[key], value)
    set_extra_states(found.owner, extra, first, "load_pretrained")
    if found.used is not None:
        # from_pretrained notes this too, and save_pretrained reads it
        found.owner._weight_conversions = found.used  # type: ignore[assignment]


def _fill_layers(states: list[LayerState], reader: SliceReader, found: Fit) -> None:
    values = {key: index_map for key, index_map in found.maps.items() if key not in found.packed}
    error: Exception | None = None
    for state in states:
        state.release()  # a full buffer that a forward has left would hold old values
        try:
            if error is None:
                _fill_chunks(state, reader, found)
        # this rank goes on, because the others need it where they quantise
        except Exception as caught:
            error = caught
        error = fill_quantized(state, reader, values, error)
    if error is not None:
        raise error


def _fill_chunks(state: LayerState, reader: SliceReader, found: Fit) -> None:
    for chunk in state.chunks:
        chunk.adopt_values()  # the next gather would put a part's other memory over what is read
    for sharded, piece in _pieces(state):
        if (weight := weight_of(sharded.sites)) is not None:
            if (packed := found.packed.get(id(sharded.sites.parameter))) is not None:
                packed.fill(reader, weight, piece, sharded.chunk.shard.data[piece.place])
            continue
        if (index_map := found.maps.get(id(sharded.sites.parameter))) is not None:
            reader.read(index_map, piece.start, sharded.chunk.shard.data[piece.place])
    for sharded in state.parameters:
        if id(sharded.sites.parameter) in found.maps:
            sharded.chunk.unloaded.discard(sharded.index)
            # graphs built before are stale
            torch.autograd.graph.increment_version(sharded.chunk.shard)


def _pieces(state: LayerState) -> Iterator[tuple[ShardedParameter, Piece]]:
    """Yields the layer's parameters that this rank's chunks hold pieces of, each with its piece."""
    for chunk in state.chunks:
        pieces = {piece.slot.name: piece for piece in chunk.pieces}
        for sharded in state.parameters:
            if sharded.chunk is chunk and sharded.sites.name in pieces:
                yield sharded, pieces[sharded.sites.name]


def _new_values(states: list[LayerState], reader: SliceReader, found: Fit) -> dict[int, Tensor]:
    """Returns the tensors that no layer owns: buffers, mostly. Rank 0 reads their values."""
    first = states[0]
    owned, values = sharded_in(states), {}
    for key, index_map in found.maps.items():
        if key not in owned:
            like = found.tensors[key]
            values[key] = torch.empty(like.shape, dtype=like.dtype, device=first.device)
            if is_first(first.communicator):
                reader.read(index_map, 0, values[key].view(-1))
    return values


def _check_repeated(states: list[LayerState], files: SafetensorsFiles, found: Fit) -> None:
    """Whether a tied parameter has one value under all its names. Each rank compares its pieces."""
    if not found.again:
        return
    one, other = SliceReader(), SliceReader()
    for sharded, piece in (each for state in states for each in _pieces(state)):
        key, dtype = id(sharded.sites.parameter), sharded.chunk.shard.dtype
        for again in found.again.get(key, []):
            for start in range(piece.start, piece.stop, STAGE_BYTES // 8):
                count = min(STAGE_BYTES // 8, piece.stop - start)
                first, second = torch.empty(2, count, dtype=dtype)
                one.read(found.maps[key], start, first)
                other.read(again, start, second)
                if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
                    raise ValueError(
                        f"{' and '.join(found.names[key])} are one parameter in this model, "
                        f"but {files.directory} has two values for it, as "
                        f"{found.maps[key].sources[0].name} and as {again.sources[0].name}. Untie "
                        "them (config.tie_word_embeddings=False), or remove one."
                    )
