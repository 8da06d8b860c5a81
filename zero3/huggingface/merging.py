"""save_merged(): a model's values with its adapters merged into them, as Hugging Face files. One
layer at a time is whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..access import states_of
from ..checkpoint.contents import Contents
from ..checkpoint.full_state import not_a_dtype
from ..checkpoint.safetensors_files import SafetensorsFiles, Stored
from ..comm.agreement import agreeing
from ..core.layer_state import LayerState
from ..core.parameters import parameters_of, plain_modules
from ..faces.quantised import weight_of
from ..names import innermost
from ..optim.state_memory import land_steps
from ..pinning import pin
from .index_maps import IndexMap
from .key_mapping import fit, without_adapters
from .outputs import Output, bytes_in, check_unmixed, outputs_of_model, shards_of
from .packed import find_packed
from .reading import SliceReader
from .save_pretrained import Export, write_values

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
    first = states_of(model)[0]
    with ExitStack() as opened:
        with agreeing(first.communicator, first.device, "save_merged") as lines:
            if (wrong := not_a_dtype(dtype)) is not None:
                raise wrong
            land_steps(states_of(model))
            check_unmixed(Path(path), None)
            contents = Contents(model, "save_merged", as_values=True)
            owner, mergers = _named_without_adapters(contents, innermost(model))
            originals = _Originals(model, base, opened) if base is not None else None
            outputs = outputs_of_model(owner, contents, (), dtype)
            shards = shards_of(outputs, bytes_in(max_shard_size))
            export = Export(owner, contents, Path(path), shards, None)
            layers = _MergedLayers(contents, mergers, originals)
            lines += export.lines
            lines += originals.lines if originals is not None else []
        export.write(layers.fill)


def _named_without_adapters(contents: Contents, model: Any) -> tuple[nn.Module, list[Any]]:
    """Gives tensors the names that they have in the model without adapters. Returns that model, and
    the modules whose adapters are merged.
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
    return owner, [module for module in plain_modules(owner) if _merges(module)]


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


class _MergedLayers:
    """The values of a model with its adapters merged, layer by layer."""

    def __init__(
        self, contents: Contents, mergers: list[Any], originals: _Originals | None
    ) -> None:
        self._contents, self._mergers, self._originals = contents, mergers, originals
        self._owners = {
            id(sharded.sites.parameter): state
            for state in contents.states
            for sharded in state.parameters
        }
        for module in self._mergers:
            if module.merged_adapters:
                raise ValueError(
                    "adapters are merged into the model already (merge_adapter): take that back "
                    "first (unmerge_adapter)"
                )
        # layers that have adapters of others: the root's own layer, mostly
        self._lenders: list[LayerState] = []
        for module in self._mergers:
            owners = {self._owners[id(p)] for p in _targets(module) if id(p) in self._owners}
            others = {
                self._owners[id(p)] for p in _all_parameters(module) if id(p) in self._owners
            } - owners
            self._lenders += [
                state for state in contents.states if state in others and state not in self._lenders
            ]

    def fill(self, export: Export) -> None:
        """Every rank writes its share of each tensor, while the layers that hold it are whole."""
        error: Exception | None = None
        places = {
            output.name: (file, place)
            for file in export.shards
            for output, place in export.places(file)
        }
        groups: dict[tuple[int, ...], list[Output]] = {}
        for shard in export.shards.values():
            for output in shard:
                groups.setdefault(self._layers_of(output), []).append(output)
        states = self._contents.states
        with _pinned(self._lenders):
            for group, outputs in groups.items():
                with _pinned([states[number] for number in group]):
                    try:
                        if error is None:
                            self._write_group(export, outputs, places)
                    # this rank goes on, because the others need it to gather
                    except Exception as caught:
                        error = caught
        if error is not None:
            raise error

    def _layers_of(self, output: Output) -> tuple[int, ...]:
        """The numbers of the layers that have the tensor's values."""
        sources = [
            self._contents.parameters[name]
            for name in output.index_map.sources
            if name in self._contents.parameters
        ]
        return tuple(
            sorted(
                {
                    self._contents.states.index(self._owners[id(sharded.sites.parameter)])
                    for sharded in sources
                }
            )
        )

    @torch.no_grad()
    def _write_group(
        self, export: Export, outputs: list[Output], places: Mapping[str, tuple[str, int]]
    ) -> None:
        sources = {source for output in outputs for source in output.index_map.sources}
        parameters = {
            name: self._contents.parameters[name].sites.parameter
            for name in sources
            if name in self._contents.parameters
        }
        with self._merged(list(parameters.values())):
            values = {name: parameter.data.reshape(-1) for name, parameter in parameters.items()}
            values |= {
                name: tensor.detach().reshape(-1)
                for name, tensor in self._contents.others.items()
                if name in sources
            }
            for output in outputs:
                file, place = places[output.name]
                with export.opened(file) as opened:
                    self._write_share(opened, place, output, values)

    def _write_share(
        self, opened: Any, place: int, output: Output, values: Mapping[str, Tensor]
    ) -> None:
        rank, ranks = self._contents.number, self._contents.world_size
        low, high = output.numel * rank // ranks, output.numel * (rank + 1) // ranks
        # ranks may have other values: rank 0's count
        if all(source in self._contents.others for source in output.index_map.sources):
            low, high = (0, output.numel) if rank == 0 else (0, 0)
        size = output.dtype.itemsize
        if output.index_map.is_by_ranges:
            for extent in output.index_map.extents(low, high) if low < high else ():
                write_values(
                    opened,
                    place + extent.start * size,
                    values[extent.source][extent.at : extent.at + extent.length],
                    output.dtype,
                )
            return
        for start in range(low, high, _AT_ONCE):
            numbers, at = output.index_map.locate(torch.arange(start, min(start + _AT_ONCE, high)))
            made = torch.empty(len(at), dtype=self._contents.dtype(output.index_map.sources[0]))
            for number, source in enumerate(output.index_map.sources):
                mine = numbers == number
                made[mine] = values[source][at[mine].to(values[source].device)].cpu()
            write_values(opened, place + start * size, made, output.dtype)

    @contextmanager
    def _merged(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context in which the parameters, which are shown, hold merged values in memory of their
        own.
        """
        ids = {id(parameter) for parameter in parameters}
        mergers = [
            module
            for module in self._mergers
            if any(id(parameter) in ids for parameter in _targets(module))
        ]
        changed = {id(p): p for module in mergers for p in _targets(module)}
        changed |= {
            id(p): p for p in parameters if self._originals is not None and self._is_quantized(p)
        }
        before = [(parameter, parameter.data) for parameter in changed.values()]
        try:
            for parameter, values in before:
                parameter.data = values.clone()
                if self._originals is not None and self._is_quantized(parameter):
                    self._originals.read(parameter, parameter.data)
            for module in mergers:
                type(module).merge(module)
                module.merged_adapters.clear()
            yield
        finally:
            for parameter, values in before:
                parameter.data = values

    def _is_quantized(self, parameter: nn.Parameter) -> bool:
        found = next(
            (s for s in self._owners[id(parameter)].parameters if s.sites.parameter is parameter),
            None,
        )
        return found is not None and weight_of(found.sites) is not None


@contextmanager
def _pinned(layers: list[LayerState]) -> Iterator[None]:
    pinned: list[LayerState] = []
    try:
        for state in layers:
            pin(state)
            pinned.append(state)
        yield
    finally:
        for state in pinned:
            state.unpin()


def _merges(module: object) -> bool:
    return all(hasattr(module, name) for name in ("merge", "get_base_layer", "merged_adapters"))


def _targets(module: Any) -> list[nn.Parameter]:
    """The parameters that the module's adapters are merged into."""
    return [
        parameter
        for _, parameter in parameters_of(module.get_base_layer())
        if parameter is not None
    ]


def _all_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [
        parameter
        for inner in plain_modules(module)
        for _, parameter in parameters_of(inner)
        if parameter is not None
    ]
