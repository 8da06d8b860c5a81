"""A sharded model filled from a Hugging Face safetensors directory: every rank reads the bytes of its own chunks, no others."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..access import states_of
from ..checkpoint.extra_state import set_extra_states
from ..checkpoint.meta_buffers import initialise, put
from ..checkpoint.safetensors_files import STAGE_BYTES, SafetensorsFiles, Stored
from ..comm.agreement import agree
from ..core.layer_state import LayerState
from ..core.layout import Piece
from ..core.parameters import ShardedParameter
from .index_maps import IndexMap
from .key_mapping import Fit, fit
from .left_out import compute, fill
from .reading import SliceReader

__all__: list[str] = []


def load_pretrained(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Fills a sharded model from a Hugging Face directory: `model.safetensors`, or several files with their index.

    Every rank calls it. Each reads the ranges of the files that its own chunks hold, a few MB at a time, so no tensor is ever
    whole anywhere, and every byte is read once in all. Values are converted to the chunks' dtypes. Where transformers transposes or
    interleaves a stored tensor, each rank reads what its slice is spread over, one stored tensor at a time.

    Names are those of the unwrapped model, with or without its `base_model_prefix`; a tied parameter may stand under any of its
    names. What transformers renames, stacks, joins, cuts or rearranges for this model (experts) is followed. A peft model's base is
    filled, and its adapters are left alone. Persistent buffers come from the files. Other buffers on the meta device (rotary
    frequencies) are computed by the model's `_init_weights`, or by `reset_parameters`.

    Args:
        model: Sharded by `shard`, `Zero3Layer` or `Zero3Sequential`; built on the meta device, or with values to replace.
        path: The directory: the same files for every rank.
        strict: Missing and unexpected names are an error. Otherwise they are left alone, and the first forward names parameters
            that have no values.

    Raises:
        ValueError: No safetensors; a corrupt or truncated file; files that differ between ranks; missing or unexpected names,
            other shapes, other kinds of values (all in one error); or a tied parameter that is stored twice with two values. On
            every rank, before anything has changed.
        TypeError: `path` is no path.
        RuntimeError: The call is inside `full_params` or `resident`; or a read failed: then the parameters that it was to fill
            count as unloaded.

    Example::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        zero3.load_pretrained(zero3.shard(model, device=device), directory)

    Source: the safetensors format, https://huggingface.co/docs/safetensors.
    """
    states = states_of(model)
    first = states[0]
    files: SafetensorsFiles | None = None
    found: Fit | None = None
    computed: list[tuple[Tensor, Tensor]] = []
    error: Exception | None = None
    try:
        _check_released(states)
        files = SafetensorsFiles(path)
        found = fit(model, files.tensors, strict)
        _check_repeated(states, files, found)
        computed = compute(model, states, {key: found.names[key][0] for key in found.names if key in found.left_out}, strict)
    except OSError as caught:
        error = ValueError(f"{path} can't be read: {caught}")
    except Exception as caught:  # whatever it is, the others wait to hear of it
        error = caught
    try:
        agree(first.communicator, first.device, "the files that load_pretrained found", files.listing() if files else [], error)
        if files is not None and found is not None:
            _load(model, states, files, found)
            fill(model, states, computed)
    finally:
        if files is not None:
            files.close()


def _check_released(states: list[LayerState]) -> None:
    if pinned := next((state for state in states if state.pinned), None):
        raise RuntimeError(f"load_pretrained inside full_params or resident: layer {pinned.label} is whole there. Call it before or after.")


def _load(model: nn.Module, states: list[LayerState], files: SafetensorsFiles, found: Fit) -> None:
    """From here on values change. If a read fails, what was to be filled counts as unloaded everywhere: half-filled is worse."""
    first = states[0]
    error: Exception | None = None
    values: dict[int, Tensor] = {}
    extra: dict[str, Tensor] = {}
    computed: list[tuple[str, Tensor]] = []
    reader = SliceReader(files)
    try:
        for state in states:
            state.release()  # what is still fetched, after a forward, is about to be old
            _fill_chunks(state, reader, found)
        values = _new_values(states, reader, found)
        for name, stored in found.extra.items():
            extra[name] = torch.empty(stored.shape, dtype=stored.dtype)
            files.read(stored, 0, extra[name].view(-1))
        computed = initialise(model, states)
    except Exception as caught:
        error = RuntimeError(f"reading {files.directory} failed: {caught}. What it was to fill is unloaded now: load again.")
    try:
        agree(first.communicator, first.device, "what load_pretrained filled", [name for name, _ in computed], error)
    except (RuntimeError, ValueError):
        for state in states:
            for sharded in state.parameters:
                if id(sharded.sites.parameter) in found.maps:
                    sharded.chunk.unloaded.add(sharded.index)
        raise
    for value in [*values.values(), *(value for _, value in computed)]:
        if value.numel():
            first.communicator.broadcast(value)
    for key, value in values.items():
        put(model, found.tensors[key], value)
    set_extra_states(found.owner, extra, first.communicator, first.device, "load_pretrained")
    if found.used is not None:
        found.owner._weight_conversions = found.used  # type: ignore[assignment]  # as from_pretrained does, for who saves it


def _fill_chunks(state: LayerState, reader: SliceReader, found: Fit) -> None:
    for sharded, piece in _pieces(state):
        if (index_map := found.maps.get(id(sharded.sites.parameter))) is not None:
            reader.read(index_map, piece.start, sharded.chunk.shard.data[piece.offset : piece.offset + piece.stop - piece.start])
    for sharded in state.parameters:
        if id(sharded.sites.parameter) in found.maps:
            sharded.chunk.unloaded.discard(sharded.index)
            torch.autograd.graph.increment_version(sharded.chunk.shard)  # graphs built before are stale


def _pieces(state: LayerState) -> Iterator[tuple[ShardedParameter, Piece]]:
    """The layer's parameters of which this rank's chunks hold something, and what."""
    for chunk in state.chunks:
        pieces = {piece.slot.name: piece for piece in chunk.layout.pieces(state.communicator.rank)}
        for sharded in state.parameters:
            if sharded.chunk is chunk and sharded.sites.name in pieces:
                yield sharded, pieces[sharded.sites.name]


def _new_values(states: list[LayerState], reader: SliceReader, found: Fit) -> dict[int, Tensor]:
    """What no layer owns (buffers, mostly), read by rank 0 for all."""
    first = states[0]
    owned = {id(sharded.sites.parameter) for state in states for sharded in state.parameters}
    values = {}
    for key, index_map in found.maps.items():
        if key not in owned:
            like = found.tensors[key]
            values[key] = torch.empty(like.shape, dtype=like.dtype, device=first.device)
            if first.communicator.rank == 0:
                reader.read(index_map, 0, values[key].view(-1))
    return values


def _check_repeated(states: list[LayerState], files: SafetensorsFiles, found: Fit) -> None:
    """A tied parameter that is stored under several of its names: fine if they agree. Each rank compares what it holds."""
    if not found.again:
        return
    one, other = SliceReader(files), SliceReader(files)
    for state in states:
        for sharded, piece in _pieces(state):
            key = id(sharded.sites.parameter)
            for again in found.again.get(key, []):
                for start in range(piece.start, piece.stop, STAGE_BYTES // 8):
                    first, second = torch.empty(2, min(STAGE_BYTES // 8, piece.stop - start), dtype=sharded.chunk.shard.dtype)
                    one.read(found.maps[key], start, first)
                    other.read(again, start, second)
                    if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
                        raise ValueError(
                            f"{' and '.join(found.names[key])} are one parameter in this model, but {files.directory} has two values "
                            f"for it, as {_name(found.maps[key])} and as {_name(again)}. "
                            "Untie them (config.tie_word_embeddings=False), or remove one."
                        )


def _name(index_map: IndexMap[Stored]) -> str:
    return index_map.sources[0].name
