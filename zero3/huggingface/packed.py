"""Weights that a checkpoint holds quantised: by bitsandbytes (NF4), in tiles (float8, DeepSeek), in
MXFP4 (gpt-oss).

Their bytes are stored as they lie.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..access import sharded_in
from ..checkpoint.lazy import Lazy
from ..checkpoint.safetensors_files import SafetensorsFiles
from ..core.layer_state import LayerState
from ..core.layout import Piece
from ..faces.quantised import weight_of
from ..faces.recipes import QuantizedWeight
from ..quantized.formats import MXFP4, NF4, Float8, Format
from ..quantized.sections import SCALES_NUMEL
from .index_maps import IndexMap, SliceReader, Whole
from .key_mapping import Fit

__all__: list[str] = []

_STATE = ".quant_state.bitsandbytes__"
# what bitsandbytes stores beside a weight's codes
_BESIDE = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_INVERSE = "_scale_inv"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_NBYTES = 16  # of MXFP4's 32 codes
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Packed:
    """A stored weight: its codes and scales, and the mean of bitsandbytes' scales (`offset`)."""

    format: Format
    stand_in: Lazy  # stands for the values when files are matched with the model
    sections: Mapping[str, Lazy]
    offset: float = 0.0


def find_packed(files: SafetensorsFiles) -> tuple[dict[str, Lazy], dict[str, Packed]]:
    """Returns the stored tensors, in which a stand-in takes the place of what belongs to a
    quantised weight, and these weights by name. Raises ValueError if a weight has another format,
    or parts of it are missing.
    """
    stored, packed = dict(files.tensors), dict[str, Packed]()
    for key in [key for key in files.tensors if _STATE in key]:
        name, _, kind = key.partition(_STATE)
        packed[name] = _of_bitsandbytes(stored, name, kind, stored.pop(key))
    for key in [key for key in files.tensors if key.endswith(_INVERSE)]:
        name = key.removesuffix(_INVERSE)
        if name in stored and stored[name].dtype == torch.float8_e4m3fn:
            packed[name] = _in_tiles(stored, name, stored.pop(key))
    for key in [
        key for key, each in files.tensors.items() if key.endswith(_BLOCKS) and len(each.shape) == 4
    ]:
        name = key.removesuffix(_BLOCKS)
        packed[name] = _of_gpt_oss(name, stored.pop(key), stored.pop(name + _SCALES, None))
    return stored | {name: each.stand_in for name, each in packed.items()}, packed


def _of_bitsandbytes(stored: dict[str, Lazy], name: str, kind: str, state: Lazy) -> Packed:
    if kind != "nf4":
        raise ValueError(
            f"{state.file}: {name} is quantised by bitsandbytes as {kind}, which zero3 does not "
            "read: nf4 is what it reads"
        )
    try:
        said = json.loads(b"".join(state.pieces()))
        shape, block_size, nested = tuple(said["shape"]), said["blocksize"], "nested_offset" in said
        offset = float(said.get("nested_offset", 0.0))
        size = said.get("nested_blocksize", SCALES_NUMEL)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{state.file}: {state.name} is not what bitsandbytes writes: {type(error).__name__}: "
            f"{error}"
        ) from None
    if size != SCALES_NUMEL:
        raise ValueError(
            f"{state.file}: the scales of {name} are quantised in blocks of {size}, expected "
            f"{SCALES_NUMEL}"
        )
    beside = {part: stored.pop(f"{name}.{part}") for part in _BESIDE if f"{name}.{part}" in stored}
    sections = {
        "codes": stored.get(name),
        "scales": beside.get("absmax"),
        "scale_scales": beside.get("nested_absmax"),
    }
    nf4 = NF4(block_size=block_size, double_quant=nested)
    return _checked(nf4, shape, name, state, sections, offset)


def _in_tiles(stored: dict[str, Lazy], name: str, scales: Lazy) -> Packed:
    shape, tiles = stored[name].shape, scales.shape
    sizes = [
        next((size for size in (128, 64, 256, 32) if -(-n // size) == count), 0)
        for n, count in zip(shape, tiles, strict=False)
    ]
    if len(shape) != 2 or len(tiles) != 2 or not all(sizes):
        raise ValueError(
            f"{scales.file}: {scales.name} has {tuple(tiles)}, which are no tiles of {name} "
            f"{tuple(shape)}"
        )
    parts = {"codes": stored[name], "scales": scales}
    return _checked(Float8(block=(sizes[0], sizes[1])), shape, name, scales, parts)


def _of_gpt_oss(name: str, blocks: Lazy, scales: Lazy | None) -> Packed:
    """`[experts, columns, blocks in a column, 16]`: columns lie one after another."""
    experts, columns, count, nbytes = blocks.shape
    if nbytes != _BLOCK_NBYTES:
        raise ValueError(
            f"{blocks.file}: {blocks.name} has blocks of {nbytes} bytes, MXFP4 has {_BLOCK_NBYTES}"
        )
    shape = (experts, count * 2 * _BLOCK_NBYTES, columns)
    parts = {"codes": blocks, "scales": scales}
    return _checked(MXFP4(transposed=True), shape, name, blocks, parts)


def _checked(
    kind: Format,
    shape: tuple[int, ...],
    name: str,
    at: Lazy,
    parts: Mapping[str, Lazy | None],
    offset: float = 0.0,
) -> Packed:
    sections: dict[str, Lazy] = {}
    for section in kind.sections(shape):
        part = parts.get(section.name)
        if part is None and section.name != "offset":
            raise ValueError(
                f"{at.file}: {name} is quantised as {kind.name}, and its {section.name} are missing"
            )
        if part is not None:
            if part.numel != section.numel or part.dtype != section.dtype:
                found = f"{part.numel} of {part.dtype}"
                raise ValueError(
                    f"{at.file}: {part.name} has {found}, {kind.name} has {section.numel} of "
                    f"{section.dtype} there"
                )
            sections[section.name] = part
    return Packed(kind, replace(at, name=name, dtype=torch.bfloat16, shape=shape), sections, offset)


def _raw(codes: Lazy) -> Lazy:
    """Codes, of one byte each, as bytes."""
    read, dtype = codes.read, codes.dtype
    return replace(codes, dtype=torch.uint8, read=lambda n, into: read(n, into.view(dtype)))


def match_packed(
    states: Iterable[LayerState], found: Fit, packed: Mapping[str, Packed]
) -> dict[int, PackedReader]:
    """Returns the readers of the parameters that the checkpoint holds quantised, by id. Raises
    ValueError if a parameter is not quantised here, or in another format, or it is put together
    from weights as no format allows.
    """
    by_stand_in = {id(each.stand_in): each for each in packed.values()}
    sharded = sharded_in(states)
    readers, problems = dict[int, PackedReader](), list[str]()
    for key, index_map in found.maps.items():
        parts = [
            by_stand_in[id(source)] for source in index_map.sources if id(source) in by_stand_in
        ]
        if not parts:
            continue
        kind, name = parts[0].format, found.names[key][0]
        weight = weight_of(sharded[key].sites) if key in sharded else None
        here = "not quantised" if weight is None else weight.format.name
        alike = len(parts) == len(index_map.sources) and all(p.format == kind for p in parts)
        if here != kind.name or not alike:
            problems.append(f"{name} is stored as {kind.name}, and here it is {here}")
            continue
        reader = PackedReader(index_map, parts)
        if (problem := reader.problem()) is not None:
            problems.append(f"{name} {problem}")
        readers[key] = reader
    if problems:
        raise ValueError(
            f"the checkpoint does not fit this {type(found.owner).__name__}; nothing was loaded. "
            f"{'; '.join(problems[:6])}. Pass ShardingPolicy(quantize=...) with the format that "
            "is stored, and give frozen base weights only"
        )
    return readers


class PackedReader:
    """Reads sections of a quantised parameter from those of the weights that it is made of."""

    def __init__(self, index_map: IndexMap[Lazy], parts: list[Packed]) -> None:
        self._map, self._parts = index_map, parts
        codes = [_raw(part.sections["codes"]) for part in parts]
        # where the codes lie, as bytes: of a weight as it is stored, those of 4 bits too
        whole = Whole(codes[0], (codes[0].numel,))
        self._raw = whole if isinstance(index_map, Whole) else index_map.of(codes)

    def problem(self) -> str | None:
        """In words, why blocks would be cut; or None."""
        if isinstance(self._map, Whole):
            return None
        if not isinstance(self._parts[0].format, Float8):
            return "is put together from several weights, whose blocks lie in another order then"
        try:
            self._tiles()
        except ValueError as error:
            return str(error)
        return None

    def fill(
        self, reader: SliceReader, weight: QuantizedWeight, piece: Piece, kept: Tensor
    ) -> None:
        """Writes the bytes of `piece` into `kept`."""
        sizes = {section.name: section.dtype.itemsize for section in weight.rows.sections}

        def read(name: str, byte: int, target: Tensor) -> None:
            if name == "codes":
                reader.read(self._raw, byte, target)
                return
            size = sizes[name]
            begin, end = byte // size, -(-(byte + len(target)) // size)
            raw = self._scales(name, begin, end).contiguous().view(torch.uint8)
            target.copy_(raw[byte - begin * size :][: len(target)])

        weight.rows.fill(piece.start, kept, read)

    def _scales(self, name: str, begin: int, end: int) -> Tensor:
        if name == "offset":
            return torch.tensor([self._parts[0].offset], dtype=torch.float32)
        if isinstance(self._map, Whole):
            stored = self._parts[0].sections[name]
            out = torch.empty(end - begin, dtype=stored.dtype)
            stored.read(begin, out)
            return out
        numbers, places = (each[begin:end] for each in self._tiles())
        out = torch.empty(end - begin, dtype=torch.float32)
        for number in sorted(set(numbers.tolist())):
            stored, mine = self._parts[number].sections["scales"], numbers == number
            out[mine] = stored.tensor().float().view(-1)[places[mine]]
        return out

    def _tiles(self) -> tuple[Tensor, Tensor]:
        """For each tile of the parameter its weight, and its number among that weight's tiles."""
        kind: Any = self._parts[0].format
        height, width = kind.block
        rows, columns = self._map.shape[-2:]
        matrices = self._map.numel // max(1, rows * columns)
        first_rows, found = torch.arange(matrices)[:, None, None] * rows, []
        # the first and the last element of each tile lie in the same tile there
        for corner in (0, 1):
            at_rows = (torch.arange(0, rows, height) + corner * (height - 1)).clamp(max=rows - 1)
            at_columns = torch.arange(0, columns, width) + corner * (width - 1)
            at_columns = at_columns.clamp(max=columns - 1)
            flat = (first_rows + at_rows[:, None]) * columns + at_columns
            numbers, at = self._map.locate(flat.reshape(-1))
            tiles = torch.empty_like(at)
            for number, part in enumerate(self._parts):
                wide, mine = part.stand_in.shape[1], numbers == number
                row, column = at[mine] // wide, at[mine] % wide
                if not corner and ((row % height).any() or (column % width).any()):
                    raise ValueError("is put together from several weights, and cuts their tiles")
                tiles[mine] = row // height * -(-wide // width) + column // width
            found.append((numbers, tiles))
        (numbers, tiles), last = found
        if not (torch.equal(numbers, last[0]) and torch.equal(tiles, last[1])):
            raise ValueError("is put together from several weights, and cuts their tiles")
        return numbers, tiles
