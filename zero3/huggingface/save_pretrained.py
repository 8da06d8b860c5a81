"""save_pretrained(): writes a sharded model as a Hugging Face directory. Every rank writes its own
ranges of the files.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..access import states_of, used_together
from ..checkpoint import file_operations
from ..checkpoint.contents import Contents
from ..checkpoint.extra_state import extra_states_of
from ..checkpoint.full_state import check_dtype
from ..checkpoint.lazy import STAGE_BYTES, bytes_of, resolved
from ..checkpoint.safetensors_writing import header_of, write_text
from ..comm.agreement import agreeing
from ..comm.plain_values import name_of, unreadable
from ..modules import named
from ..names import innermost
from ..optim.state_memory import land_steps
from .adapters import FILE
from .outputs import (
    Output,
    bytes_in,
    check_unmixed,
    has_adapters,
    index_of,
    outputs_of_adapter,
    outputs_of_model,
    shards_of,
    sources_of,
)
from .weights import WeightWalk

__all__: list[str] = []

_log = logging.getLogger("zero3")
_AT_ONCE = 1 << 20  # elements that are put together
_METADATA = (("format", "pt"),)
_BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json",
    "processor_config.json",
)  # fmt: skip


def save_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a directory that `from_pretrained` reads: safetensors, their index and `config.json`;
    or a peft model's adapters.

    Every rank calls it. Each rank writes the bytes of its own chunks at their place in the files, a
    few MB at a time, and no rank holds a whole tensor. Names, ties and experts are as
    `transformers` writes them. Only layers whose files have a tensor transposed are gathered, one
    at a time. Tokenizer files are copied from the directory that the model was loaded
    from. Files get their names when they are complete, and the index gets its name last.

    Args:
        model: Any model that contains zero3 layers. If it has a `config`, that is written too.
        path: A directory of a file system that all ranks see. Parents are created. Files of the
            same names are replaced.
        max_shard_size: The largest size of one file, in bytes or as in "5GB". A larger tensor has a
            file of its own. Adapters are one file.
        dtype: A floating dtype of 16 bits or more; floating tensors are converted to it. None: as
            they are stored.

    Raises:
        ValueError: Nothing in `model` is sharded, `max_shard_size` is no size, ranks save different
            things, or `path` holds adapters and `model` is a whole model, or the other way round.
            (Adapters may stand beside the model that they belong to.) Or a whole model has
            quantised parameters. Every rank raises it.
        TypeError: `path` is no path, or `dtype` is no dtype. Every rank raises it.
        RuntimeError: Parameters have no values, or the call is inside `full_params` or `resident`.
        OSError: A rank could not write. Every rank raises the same error.

    Example::

        zero3.save_pretrained(model, directory, dtype=torch.bfloat16)

    Source: the safetensors format, https://huggingface.co/docs/safetensors.
    """
    first = used_together(model, "save_pretrained")[0]
    with agreeing(first, "save_pretrained") as lines:
        check_dtype(dtype)
        land_steps(states_of(model))
        directory = file_operations.directory_of(path)
        exports = list(_exports(model, directory, bytes_in(max_shard_size), dtype))
        lines += [line for export in exports for line in export.lines]
    for export in exports:
        export.write()


def _exports(
    model: nn.Module, directory: Path, max_bytes: int, dtype: torch.dtype | None
) -> Iterator[Export]:
    contents = Contents(model, "save_pretrained")
    extra = _extra_tensors(model, contents)
    owner: Any = innermost(model)
    if not has_adapters(owner):
        contents.others.update(extra)
        check_unmixed(directory, None)
        if quantized := [
            name for name, sharded in contents.parameters.items() if sharded.chunk.read_only
        ]:
            raise ValueError(
                f"save_pretrained of a quantised model would write codes for {named(quantized)}: "
                "use zero3.save_merged"
            )
        outputs = outputs_of_model(owner, contents, extra, dtype)
        walk = WeightWalk(contents, _rearranged(outputs))
        yield Export(owner, directory, shards_of(outputs, max_bytes), walk)
        return
    for adapter, config in owner.peft_config.items():
        outputs = outputs_of_adapter(owner, adapter, contents, dtype)
        place = directory if adapter == "default" else directory / adapter
        check_unmixed(place, str(getattr(config, "base_model_name_or_path", None) or ""))
        walk = WeightWalk(contents, _rearranged(outputs), encoder=(owner, adapter))
        yield Export(owner, place, {FILE: outputs}, walk, adapter)


def _rearranged(outputs: Iterable[Output]) -> list[Output]:
    return [output for output in outputs if not output.index_map.is_by_ranges]


def _extra_tensors(model: nn.Module, contents: Contents) -> dict[str, Tensor]:
    """Returns the extra state of modules that is a tensor, because the files hold nothing else."""
    found = extra_states_of(model)
    tensors = {name: value for name, value in found.items() if unreadable(value) is None}
    if contents.is_first and len(tensors) < len(found):
        left_out = ", ".join(name for name in found if name not in tensors)
        _log.warning(
            "save_pretrained: safetensors files hold tensors only, so this extra state of "
            "modules is not in them: %s",
            left_out,
        )
    return tensors


class Export:
    """The files of one directory, and how ranks write them: slices from where they lie, without a
    gather, so that no rank needs room for a layer; and a share of each tensor that `walk` brings,
    whose elements are rearranged, or merged.
    """

    def __init__(
        self,
        model: nn.Module,
        directory: Path,
        shards: dict[str, list[Output]],
        walk: WeightWalk,
        adapter: str | None = None,
    ) -> None:
        self._model, self._adapter = model, adapter
        self._contents, self._walk = walk.contents, walk
        self._directory = Path(os.path.abspath(directory))
        self._shards = shards
        self._token = ""
        self._headers = {
            file: header_of({output.name: output for output in shard}, dict(_METADATA))
            for file, shard in shards.items()
        }
        self._places: dict[str, tuple[str, int]] = {}  # of each tensor: the file, where it begins
        for file, shard in shards.items():
            place = len(self._headers[file])
            for output in shard:
                self._places[output.name] = file, place
                place += output.nbytes
        self._contents.check_loaded(sources_of(chain(*shards.values())), "save_pretrained")

    @property
    def lines(self) -> list[str]:
        """The texts that ranks compare."""
        outputs = ((file, each) for file, shard in self._shards.items() for each in shard)
        return [f"{self._directory / file}: {output.line}" for file, output in outputs]

    def write(self) -> None:
        """All ranks call it."""
        contents = self._contents
        self._token = contents.communicator.exchange(os.urandom(8), contents.device)[0].hex()
        try:
            steps = ("files", self._begin), ("values", self._fill), ("end", self._finish)
            for what, work in steps:
                subject = f"the {what} of save_pretrained"
                with agreeing(contents, subject):
                    # rank 0 makes the files and gives them their names
                    if contents.is_first or what == "values":
                        work()
        except Exception:
            if contents.is_first:
                for file in self._shards:
                    self._temporary(file).unlink(missing_ok=True)
            raise

    def _temporary(self, file: str) -> Path:
        return self._directory / f"{file}.{self._token}"

    @contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        """Context for writes into a file, which are on the disk at its end."""
        with file_operations.reopen(self._temporary(file)) as opened:
            yield opened
            file_operations.sync(opened)

    def _begin(self) -> None:
        file_operations.make_directory(self._directory)
        for file, shard in self._shards.items():
            header = self._headers[file]
            with file_operations.writing(self._temporary(file)) as opened:
                file_operations.resize(opened, len(header) + sum(o.nbytes for o in shard))
                file_operations.write_at(opened, 0, memoryview(header))

    def _fill(self) -> None:
        """After an error this rank goes on, because the others need it to gather."""
        error: Exception | None = None
        try:
            self._write_slices()
        except Exception as caught:
            error = caught
        for output, fill_in, _ in self._walk.tensors():
            try:
                if error is None:
                    self._write_share(output, fill_in)
            except Exception as caught:
                error = caught
        if error is not None:
            raise error

    def _write_slices(self) -> None:
        walked = {output.name for output in self._walk.outputs}
        held = _held(self._contents)
        for file, shard in self._shards.items():
            if not (outputs := [output for output in shard if output.name not in walked]):
                continue
            with self._opened(file) as opened:
                for output in outputs:
                    for start, values in _slices(output, held):
                        self._write(opened, output, start, values)

    def _write_share(self, output: Output, fill_in: Callable[[Tensor, int], None]) -> None:
        contents = self._contents
        low, high = contents.share(output.numel)
        # ranks may have other values: rank 0's count
        if all(source in contents.others for source in output.index_map.sources):
            low, high = 0, output.numel if contents.is_first else 0
        file, _ = self._places[output.name]
        with self._opened(file) if low < high else nullcontext() as opened:
            for start in range(low, high, _AT_ONCE):
                numel = min(_AT_ONCE, high - start)
                values = torch.empty(numel, dtype=output.dtype, device=contents.device)
                fill_in(values, start)
                self._write(opened, output, start, values)

    def _write(self, file: Any, output: Output, start: int, values: Tensor) -> None:
        """Writes elements of a tensor, from number `start` on: from their memory if it can, and
        otherwise through a copy of a few MB.
        """
        where = self._places[output.name][1] + start * output.dtype.itemsize
        values = resolved(values)
        if values.device.type == "cpu" and values.dtype == output.dtype:
            file_operations.write_at(file, where, bytes_of(values))
            return
        for piece in torch.split(values, STAGE_BYTES // values.dtype.itemsize):
            staged = piece.to(output.dtype).cpu()
            file_operations.write_at(file, where, bytes_of(staged))
            where += staged.nbytes

    def _finish(self) -> None:
        """Names the files, and writes the index and the configuration. Rank 0 calls it."""
        directory = self._directory
        stem = next(iter(self._shards)).partition(".")[0].partition("-")[0]
        index = f"{stem}.safetensors.index.json"
        for file in self._shards:
            file_operations.replace(self._temporary(file), directory / file)
        if len(self._shards) > 1:
            write_text(directory / index, index_of(self._shards), self._token)
        kept = {*self._shards, index} if len(self._shards) > 1 else set(self._shards)
        for name in file_operations.names_in(directory):  # of an earlier save into it
            numbered = name.startswith(f"{stem}-") and name.endswith(".safetensors")
            if name not in kept and (numbered or name in (index, f"{stem}.safetensors")):
                file_operations.remove(directory / name)
        self._write_configs()
        file_operations.sync_directory(directory)

    def _write_configs(self) -> None:
        model: Any = self._model
        if self._adapter is not None:
            config = copy.deepcopy(model.peft_config[self._adapter])
            config.inference_mode = True
            config.save_pretrained(str(self._directory))
            return
        if not hasattr(getattr(model, "config", None), "save_pretrained"):
            return
        config = copy.deepcopy(model.config)
        vars(config).pop("quantization_config", None)  # the files hold values
        config.architectures = [type(model).__name__]
        dtypes = (output.dtype for shard in self._shards.values() for output in shard)
        if floating := [dtype for dtype in dtypes if dtype.is_floating_point]:
            config.dtype = name_of(floating[0])
        config.save_pretrained(str(self._directory))
        source = Path(str(getattr(model.config, "_name_or_path", "") or ""))
        elsewhere = source.is_dir() and source.resolve() != self._directory.resolve()
        beside = list(_BESIDE) if elsewhere else []
        if callable(can_generate := getattr(model, "can_generate", None)) and can_generate():
            generation = model.generation_config
            if (
                getattr(generation, "_from_model_config", False)
                and (source / "generation_config.json").is_file()
            ):
                beside += ["generation_config.json"] if beside else []
            else:
                generation.save_pretrained(str(self._directory))
        for name in beside:
            if (source / name).is_file():
                file_operations.copy(source / name, self._directory / name)


def _held(contents: Contents) -> dict[str, list[tuple[int, Tensor]]]:
    """This rank's slices of each tensor: the first element's place, and flattened values."""
    held: dict[str, list[tuple[int, Tensor]]] = {}
    for chunk in contents.chunks():
        chunk.adopt_values()
        for span in contents.spans(chunk) if contents.writes else ():
            held.setdefault(span.name, []).append((span.start, span.of(chunk.shard.data)))
    if contents.is_first:
        held |= {
            name: [(0, tensor.detach().reshape(-1))] for name, tensor in contents.others.items()
        }
    return held


def _slices(
    output: Output, held: dict[str, list[tuple[int, Tensor]]]
) -> Iterator[tuple[int, Tensor]]:
    """What this rank holds of a file's tensor: the first element's place in that, and values."""
    for extent in output.index_map.extents(0, output.numel):
        for start, values in held.get(extent.source, []):
            low = max(start, extent.at)
            high = min(start + values.numel(), extent.at + extent.length)
            if low < high:
                yield extent.start + low - extent.at, values[low - start : high - start]
