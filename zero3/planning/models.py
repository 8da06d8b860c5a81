"""The model to plan for, on the meta device: from a directory's config.json alone, or the shapes of
a model at hand.
"""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..access import is_sharded
from ..auto_wrap import embeddings_of
from ..guards.module_overrides import Override
from ..quantized.configured import configured_in
from ..sequences.causal_lm import causal_lm_loss
from ..sequences.tiles import Tiled
from .ledger import share_memory, tensors_in
from .pictures import words_alone

__all__: list[str] = []

Source = nn.Module | str | PathLike[str]
Inputs = Callable[[int, int], dict[str, Any]]


def on_paper(
    source: Source, master_dtype: torch.dtype | None = None, *, sees: bool = False
) -> nn.Module:
    """The model with every tensor on the meta device. A model at hand is copied, and not changed.
    `sees`: of a directory, a class that takes images.

    Raises:
        FileNotFoundError: The directory has no config.json.
        ValueError: The model is sharded already, or transformers makes none from the config.json.
        TypeError: The source is neither a model nor a path, or `master_dtype` no dtype.
        RuntimeError: transformers is not installed.
    """
    if not isinstance(source, nn.Module | str | PathLike):
        raise TypeError(
            f"expected a model, or a directory with its config.json, found {type(source).__name__}"
        )
    if not isinstance(master_dtype, torch.dtype | None) or (
        master_dtype and not master_dtype.is_floating_point
    ):
        raise TypeError(
            f"master_dtype must be a floating torch.dtype or None, found {master_dtype!r}"
        )
    if isinstance(source, nn.Module):
        source = getattr(source, "_orig_mod", source)  # what torch.compile wraps
        if is_sharded(source):
            raise ValueError(
                "this model is sharded already: plan for the model before zero3.shard, or for "
                "its directory"
            )
        model = _without_values(source)
    else:
        model = _from_config(Path(fspath(source)), master_dtype, sees)
    if master_dtype is not None:
        model.to(master_dtype)
    if getattr(model, "config", None) is None:
        raise ValueError(
            f"a {type(model).__name__} has no config: only models of transformers (and of peft "
            "around them) can be planned for"
        )
    return model


def _without_values(model: nn.Module) -> nn.Module:
    """A copy with every tensor on meta; what is tied in the model is tied in the copy."""
    tensors: dict[int, Any] = {}
    beside = tensors_beside(model)
    for tensor in [*model.parameters(), *model.buffers(), *beside]:
        empty = torch.empty_like(tensor, device="meta")
        tensors[id(tensor)] = (
            nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        )
    share_memory([(view, tensors[id(view)]) for view in beside])
    return copy.deepcopy(model, tensors)


def tensors_beside(model: nn.Module) -> list[Tensor]:
    """The tensors that modules hold beside parameters and buffers, in lists and dicts too.
    Quantised ones are left out, and of other classes what their attributes hold is counted.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held = (tensor for module in model.modules() for tensor in tensors_in(vars(module)))
    plain = (t for t in held if type(t) in (Tensor, nn.Parameter) and not t.is_quantized)
    return [each for each in plain if id(each) not in own]


def _from_config(directory: Path, dtype: torch.dtype | None, sees: bool) -> nn.Module:
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"{directory} has no config.json: expected a directory of a Hugging Face model, with "
            "or without weights. Plans download nothing"
        )
    if find_spec("transformers") is None:
        raise RuntimeError("a plan from config.json needs transformers: pip install transformers")
    transformers = import_module("transformers")
    try:
        # None asks at the terminal whether to run the code of a directory
        own = {"trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(directory, **own)
        kind = (
            transformers.AutoModelForSeq2SeqLM
            if config.is_encoder_decoder
            else transformers.AutoModelForImageTextToText
            if type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            and (sees or type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
            else transformers.AutoModelForCausalLM
        )
        with torch.device("meta"):
            model: nn.Module = kind.from_config(
                config, **own, **({} if dtype is None else {"dtype": dtype})
            )
    except Exception as error:  # a file may say anything, and what it says wrongly raises anything
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise ValueError(
            f"transformers {transformers.__version__} makes no language model from "
            f"{directory / 'config.json'}. Correct the file, or give zero3.plan a model of "
            f"transformers. It says: {said}"
        ) from error
    if getattr(config, "quantization_config", None) is not None and configured_in(config) is None:
        raise ValueError(
            f"{directory / 'config.json'} asks for a quantization_config that zero3 has no format "
            "for: take it out to plan for weights that are not quantised"
        )
    return model


def prepare(
    model: nn.Module, *, lora: Any, checkpointing: bool, dtype: torch.dtype | None = None
) -> nn.Module:
    """As it would be given to `shard`: it trains, has adapters of `dtype`, and checkpoints."""
    model.train()
    if lora is not None:
        model = _with_adapters(model, lora).to(dtype)
    if checkpointing:
        # today's name, and that of before transformers 5.23
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(
            (method for name in names if callable(method := getattr(model, name, None))), None
        )
        if enable is None:
            raise ValueError(
                f"{type(model).__name__} has no {names[1]}: it can't be planned for with "
                "checkpointing"
            )
        enable({"use_reentrant": False})
    return model


def _with_adapters(model: nn.Module, lora: Any) -> nn.Module:
    """`lora`: a configuration of peft's; or the rank of adapters where peft puts them by default,
    or in all linear maps if it has none.
    """
    if find_spec("peft") is None:
        raise RuntimeError("a plan with adapters needs peft: pip install peft")
    peft = import_module("peft")
    if not isinstance(lora, int | peft.PeftConfig):
        raise TypeError(
            f"lora must be a rank, a configuration of peft's or None, found {type(lora).__name__}"
        )
    if isinstance(model, peft.PeftModel):
        raise ValueError("this model has adapters already: plan for it without lora=")
    if isinstance(lora, int):
        known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        lora = peft.LoraConfig(
            r=lora,
            target_modules=None if vars(model)["config"].model_type in known else "all-linear",
        )
    with torch.device("meta"):
        adapted: nn.Module = peft.get_peft_model(model, lora)
    return adapted


def unplanned(model: nn.Module, layers: list[str], *, images: bool) -> str:
    """In words, what a micro-batch leaves out of a model that takes more than text. `layers`: those
    that it has not reached. `images`: it has some.
    """
    config = getattr(model, "config", None)
    kinds = {"audio_config": "sound"} | ({} if images else {"vision_config": "images"})
    without = " and ".join(
        kind for name, kind in kinds.items() if getattr(config, name, None) is not None
    )
    if not without and not layers:
        return ""
    of = f" of {len(layers)} layers ({layers[0]} to {layers[-1]})" if layers else ""
    return (
        f"without {without or 'what more it takes than text'}: the parameters{of} are "
        "counted, their activations and the optimizer's state of them are not"
        + (" (images= and --images plan with images)" if "images" in without else "")
    )


def vocabulary_of(model: nn.Module) -> int:
    """The last dimension of the model's logits. 0: not known."""
    weight = getattr(embeddings_of(model, "output"), "weight", None)
    return int(weight.shape[0]) if isinstance(weight, Tensor) else 0


def chunked_loss_of(
    model: nn.Module, batch: int, sequence: int, inputs: Inputs = words_alone
) -> Tensor:
    """The same without logits."""
    given = inputs(batch, sequence)
    labels = _labels(given["input_ids"])
    with _on_paper_alone():
        return causal_lm_loss(model, reduction="sum", shift_labels=labels, **given)


def tile_blocks(model: nn.Module, length: int, join: Callable[..., Tensor]) -> None:
    """Each block's inner maps compute so many tokens at a time. `join`: of `Tiled`.

    Raises:
        ValueError: They have none of the names that are known.
    """
    known = ("mlp", "feed_forward", "ffn")
    found = [each for name, each in model.named_modules() if name.rpartition(".")[2] in known]
    if not found:
        raise ValueError(
            f"tile={length}: no module of {type(model).__name__} is named mlp, feed_forward or ffn"
        )
    for module in found:
        Override(module, "forward", Tiled(length, join))


def loss_of(model: nn.Module, batch: int, sequence: int, inputs: Inputs = words_alone) -> Tensor:
    """The loss of one micro-batch, as a trainer computes it. `inputs`: what it is called with."""
    given = inputs(batch, sequence)
    with _on_paper_alone():
        made = model(labels=_labels(given["input_ids"]), use_cache=False, **given)
    if not isinstance(loss := getattr(made, "loss", None), Tensor):
        raise ValueError(
            f"a {type(model).__name__} that is called with labels= has to return an object with a "
            f"loss, found {type(made).__name__}{' without one' * hasattr(made, 'loss')}"
        )
    return loss


@contextmanager
def _on_paper_alone() -> Iterator[None]:
    """
    Raises:
        RuntimeError: The model's class computes something that needs values.
    """
    try:
        yield
    except RuntimeError as error:
        if "unknown device type for autocast" not in str(error):
            raise
        raise RuntimeError(
            "a plan of this model needs transformers 5.4 or later: rotary embeddings of older "
            "ones can't be computed without values. Install it: pip install --upgrade "
            "transformers"
        ) from error


def _labels(ids: Tensor) -> Tensor:
    return ids if ids.is_meta else torch.empty_like(ids, device="meta")
