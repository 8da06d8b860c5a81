"""The tensors in the files of transformers and peft: their names, shapes and dtypes, and the
elements of the model that they hold.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..checkpoint.contents import Contents
from ..checkpoint.full_state import converted
from ..checkpoint.meta_buffers import twin
from ..checkpoint.safetensors_files import INDEX, SINGLE
from .conversions import reverted
from .index_maps import Computed, IndexMap, TracedTensor, Whole, traced

__all__: list[str] = []

_log = logging.getLogger("zero3")
_PREFIXES = ("", "K", "M", "G", "T")
_OF_ADAPTERS = ("adapter_config.json", "adapter_model.*")
_OF_MODELS = (SINGLE, "model-*-of-*.safetensors", INDEX, "pytorch_model*.bin*")
_EMBEDDINGS = ("embed_tokens", "lm_head")  # peft's names for what it saves whole


class Output(NamedTuple):
    """A tensor of a file, and a map to elements of the model's tensors, by their names."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    index_map: IndexMap[str]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def line(self) -> str:
        """The text that ranks compare."""
        sources = ", ".join(self.index_map.sources)
        return f"{self.name}: {tuple(self.shape)}, {self.dtype}, made of {sources}"


def has_adapters(model: nn.Module) -> bool:
    """Whether it is a model of peft's."""
    kept = getattr(model, "peft_config", None)
    return isinstance(kept, dict) and hasattr(model, "get_base_model")


def is_adapted(module: nn.Module) -> bool:
    """Whether it is peft's, around a base that its adapters belong to."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merged_adapters")


def outputs_of_model(
    model: nn.Module, contents: Contents, extra: Iterable[str], dtype: torch.dtype | None
) -> list[Output]:
    """Returns the tensors that `transformers` writes: a tied tensor once, experts one by one,
    matrices fused or transposed as in its files.

    `extra`: the names of modules' extra state.
    """
    kept = _kept_names(model, contents) | {name: name for name in extra}
    own = {
        name: traced(Whole(source, contents.shape(source)), contents.own_dtype(source))
        for name, source in kept.items()
    }
    found: Mapping[str, TracedTensor] = own
    try:
        found = reverted(model, own) or own
    except Exception as reason:  # of any kind: transformers has no way back to its files' names
        _log.warning(
            "%s: transformers' names of files can't be had (%s), so they are the model's own, "
            "which from_pretrained reads too",
            type(model).__name__, reason,
        )  # fmt: skip
    return [
        Output(name, converted(tensor.dtype, dtype), tuple(tensor.shape), tensor.index_map)
        for name, tensor in found.items()
    ]


class _OnMeta(TorchFunctionMode):
    """Inside, `cpu()` leaves a tensor on meta. peft calls it on prompts that it computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.cpu else func(*args, **(kwargs or {}))


def outputs_of_adapter(
    model: Any, adapter: str, contents: Contents, dtype: torch.dtype | None
) -> list[Output]:
    """The tensors that `peft` writes for an adapter. peft itself chooses them and their names."""
    meta = {
        n: torch.empty(contents.shape(ns[0]), dtype=contents.own_dtype(ns[0]), device="meta")
        for ns in contents.names.values()
        for n in ns
    }
    # peft asks the twin's modules for names, and for the tensors of a prompt encoder
    copy: Any = twin(model)
    sources = {id(meta[name]): names[0] for names in contents.names.values() for name in names}
    sources |= {id(parameter): name for name, parameter in copy.named_parameters()}
    encoder = f"prompt_encoder.{adapter}."
    learns_prompts = model.peft_config[adapter].is_prompt_learning
    prompts = [n for n in contents.parameters if learns_prompts and n.startswith(encoder)]
    with _OnMeta():
        chosen = state_of_adapter(copy, adapter, meta)
    outputs = []
    for name, value in chosen.items():
        shape = tuple(value.shape)
        if (source := sources.get(id(value))) is not None:
            index_map: IndexMap[str] = Whole(source, shape)
        elif not prompts:
            raise ValueError(
                f"peft computes {name} of adapter {adapter!r} anew when it saves it, so it can't "
                "be written from chunks"
            )
        # an encoder that only looks values up
        elif prompts == [f"{encoder}embedding.weight"] and contents.shape(prompts[0]) == shape:
            index_map = Whole(prompts[0], shape)
        else:
            index_map = Computed(shape, prompts)
        outputs.append(Output(name, converted(value.dtype, dtype), shape, index_map))
    return outputs


def state_of_adapter(
    model: Any, adapter: str, state_dict: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns what `peft` writes for an adapter. It takes a prompt from the model itself, and all
    else from `state_dict`.
    """
    peft = importlib.import_module("peft")
    embeddings = _saves_embeddings(model, model.peft_config[adapter])
    options = {"adapter_name": adapter, "save_embedding_layers": embeddings}
    with torch.no_grad():
        return peft.get_peft_model_state_dict(model, state_dict=dict(state_dict), **options)  # type: ignore[no-any-return]


def sources_of(outputs: Iterable[Output]) -> list[str]:
    """The names of the model's tensors that they hold elements of."""
    return sorted({source for output in outputs for source in output.index_map.sources})


def shards_of(outputs: Iterable[Output], max_bytes: int) -> dict[str, list[Output]]:
    """Divides tensors into files, in order. One larger than `max_bytes` is alone in its file."""
    shards: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if shards[-1] and size + output.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.nbytes
    # wide dtypes come first, so that every tensor is aligned
    ordered = [sorted(shard, key=lambda output: -output.dtype.itemsize) for shard in shards]
    if len(ordered) == 1:
        return {SINGLE: ordered[0]}
    return {
        f"model-{number:05}-of-{len(ordered):05}.safetensors": shard
        for number, shard in enumerate(ordered, 1)
    }


def check_unmixed(directory: Path, base: str | None) -> None:
    """`base`: where the model of the adapters that are to be written comes from. None: a whole
    model is to be written. Raises ValueError if adapters are in the directory, and a whole model is
    to be written, or the other way round. Who loads it would get the older of the two, or both
    together.
    """
    if base and Path(base).resolve() == directory.resolve():  # adapters beside their own model
        return
    patterns = _OF_ADAPTERS if base is None else _OF_MODELS
    found = sorted(path.name for pattern in patterns for path in directory.glob(pattern))
    if found:
        both = "a whole model", "adapters"
        what, other = both if base is None else reversed(both)
        raise ValueError(
            f"{directory} holds {other} ({', '.join(found[:4])}), and save_pretrained was to "
            f"write {what}: who loads the directory would get the one for the other, or both. "
            "Name another directory, or remove these files. Nothing was written"
        )


def bytes_in(size: int | str) -> int:
    """`"5GB"` -> 5000000000. Raises ValueError if `size` is no size."""
    text = str(size).strip().upper()
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)B|([KMG])IB)?", text)
    unit = 1000 ** _PREFIXES.index(match[2] or "") if match is not None else 0
    if match is not None and match[3]:
        unit = 1024 ** _PREFIXES.index(match[3])
    if match is None or not 1 <= float(match[1]) * unit < 2**60:
        raise ValueError(
            f"max_shard_size must be a number of bytes, or a size such as '5GB', found {size!r}"
        )
    return int(float(match[1]) * unit)


def index_of(shards: Mapping[str, list[Output]]) -> str:
    """Returns the index: JSON that tells the file of each tensor."""
    total = sum(output.nbytes for shard in shards.values() for output in shard)
    places = sorted((output.name, file) for file, shard in shards.items() for output in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(places)}
    return json.dumps(index, indent=2) + "\n"


def _kept_names(model: nn.Module, contents: Contents) -> dict[str, str]:
    """Maps the name that transformers writes to the first, which may differ for a tied tensor."""
    tied = getattr(model, "all_tied_weights_keys", None)
    tied = set(tied) if isinstance(tied, dict) else set()
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {}
    for names in contents.names.values():
        name = next((name for name in names if name not in tied), names[0])
        if name not in ignored:
            kept[name] = names[0]
    return kept


def _saves_embeddings(model: Any, config: Any) -> bool:
    """Whether peft saves embeddings: they are adapted, or have more words than the base's."""
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, list | tuple | set) and any(name in targets for name in _EMBEDDINGS):
        tokens = getattr(config, "trainable_token_indices", None)
        return tokens is None and config.peft_type != "TRAINABLE_TOKENS"
    base = Path(str(getattr(config, "base_model_name_or_path", None) or "")) / "config.json"
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    return base.is_file() and json.loads(base.read_text()).get("vocab_size", words) != words
