"""Attentions of transformers' models, reached by its registries of attentions and of masks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.autograd import inside_backward
from ..modules import unwrapped
from .exchange import Measured
from .heads import query_heads
from .parts import Beginning, check_labels, parts_of, parts_under_way

__all__: list[str] = []

_OURS = "zero3_"  # before the name of an attention: what is registered
_RECURRENT = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "hybrid")
# what finds positions by itself, and would begin anew in each part
_COUNTS = ("create_position_ids_from_input_ids", "OPTLearnedPositionalEmbedding")


def text_config(model: nn.Module) -> Any:
    """The configuration of a model of transformers'. None: it is none."""
    asked = getattr(getattr(model, "config", None), "get_text_config", None)
    return asked() if callable(asked) else None


def attentions_of(model: nn.Module) -> dict[nn.Module, str]:
    """The attention modules of the text model, and their names."""
    config = text_config(model)
    return {
        unwrapped(module): name
        for name, module in model.named_modules()
        if "attention" in type(unwrapped(module)).__name__.lower()
        and getattr(module, "config", None) is config
        and any(isinstance(unwrapped(child), nn.Linear) for child in module.children())
    }


def check_model(model: nn.Module, ranks: int) -> None:
    """Raises ValueError, and names why, if its sequences can't be divided over so many ranks."""
    config = text_config(model)
    if config is None:
        return
    if (reason := _refusal(model, config)) is not None:
        raise ValueError(
            f"{type(model).__name__} can't divide its sequences over ranks (sp of the mesh): "
            f"{reason}. Take a mesh without sp"
        )
    query_heads(config.num_attention_heads, ranks)


def _refusal(model: nn.Module, config: Any) -> str | None:
    kinds = [str(kind) for kind in getattr(config, "layer_types", None) or ()]
    recurrent = [kind for kind in kinds if any(word in kind for word in _RECURRENT)]
    names = {type(module).__name__ for module in model.modules()}
    recurrent += sorted(name for name in names if "Mamba" in name or "DeltaNet" in name)
    if recurrent:
        return f"{recurrent[0]} goes from token to token, past the cut"
    if any("chunked" in kind for kind in kinds):
        return "its attention is cut into chunks, which are counted from where a part begins"
    if kind := _rotary_of_lengths(config):
        return f'its rotary embedding ("{kind}") depends on the length, and a rank sees its part'
    if kind := finds_positions(model):
        return f"its {kind} makes positions from what a part holds"
    if any("Indexer" in name for name in names):
        return "its attention chooses tokens by an indexer, which sees a part"
    if getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, whose two sequences have other lengths"
    if (
        getattr(config, "alibi", False)
        or getattr(config, "position_embedding_type", None) == "alibi"
    ):
        return "its attention has position biases (alibi), one for each head"
    if not getattr(model, "_supports_attention_backend", False):
        return (
            "its attention does not go through transformers' registry (_supports_attention_backend)"
        )
    for module, name in attentions_of(model).items():
        for own, parameter in module.named_parameters(recurse=False):
            if parameter is not None:
                return f"attention {name!r} has a parameter for each head, {own!r}"
        if any(isinstance(each, nn.Conv1d) for each in module.modules()):
            return f"attention {name!r} mixes neighbouring tokens before it attends (Conv1d)"
        if "relative_attention_bias" in module._modules:
            return f"attention {name!r} has position biases"
    return None


def finds_positions(model: nn.Module) -> str | None:
    """The class in it, if there is one, that finds positions by itself, and not from 0."""
    for kind in {type(module) for module in model.modules()}:
        if any(hasattr(kind, name) or kind.__name__ == name for name in _COUNTS):
            return kind.__name__
    return None


def _rotary_of_lengths(config: Any) -> str | None:
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [found, *(value for value in found.values() if isinstance(value, dict))]
    kinds = [one.get("rope_type", one.get("type")) for one in each]
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


def use_registries(model: nn.Module) -> None:
    """The model's attention and its masks are those of whole sequences from now on."""
    library, config = sys.modules["transformers"], text_config(model)
    attentions, masks = library.AttentionInterface, library.AttentionMaskInterface
    name = str(config._attn_implementation).removeprefix(_OURS)
    attentions.register(f"{_OURS}{name}", _Exchanging(name))
    if (mask := masks().get(name)) is not None:
        masks.register(f"{_OURS}{name}", partial(_mask, mask))
    config._attn_implementation = f"{_OURS}{name}"


class _Exchanging:
    """What is registered: of the module that calls it depends whether anything is exchanged."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kw: Any
    ) -> Any:
        # what is registered now; else the eager one of the model's own file
        run = sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS.get(self._name)
        run = run or sys.modules[type(module).__module__].eager_attention_forward
        parts = parts_of(module)
        if parts is None or not parts.active:
            return run(self._shown(module), query, key, value, attention_mask, **kw)
        if not parts.depth and not inside_backward():
            raise RuntimeError(
                f"an attention of {type(module).__name__} was called outside of a forward of the "
                "sharded model, whose ranks hold parts of sequences (sp): call the model"
            )
        measured = parts.settle()
        if measured is not None and kw.get("position_ids") is not None:
            kw["position_ids"] = measured.positions

        def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            shown = self._shown(module, num_key_value_groups=q.shape[1] // k.shape[1])
            found: Tensor = run(shown, q, k, v, attention_mask, **kw)[0]
            return found.transpose(1, 2)

        back = parts.attend(whole, query, key, value, module)
        return back.transpose(1, 2).contiguous(), None

    def _shown(self, module: Any, **own: Any) -> Any:
        """An attention module, whose configuration names its attention as before; some look for
        that. `own`: what holds on this rank alone.
        """
        if hasattr(module, "config"):
            own["config"] = _With(module.config, _attn_implementation=self._name)
        return _With(module, **own)


class _With:
    """An object with some attributes that it does not have."""

    def __init__(self, given: object, **own: Any) -> None:
        self._given = given
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)


def _mask(inner: Callable[..., Any], /, **kw: Any) -> Any:
    """What is registered for masks: in a forward with parts, they are those of whole sequences."""
    parts = parts_under_way()
    if parts is None or (measured := parts.present) is None:
        return inner(**kw)
    library: Any = sys.modules["transformers.masking_utils"]
    kw |= {"q_length": measured.whole, "kv_length": measured.whole}
    if (counted := kw.get("cache_position")) is not None:  # an older transformers' `q_length`
        kw["cache_position"] = torch.arange(measured.whole, device=counted.device)
    kw["attention_mask"] = measured.mask
    if measured.packed is not None:
        packed = library.packed_sequence_mask_function(measured.packed)
        kw["mask_function"] = library.and_masks(kw["mask_function"], packed)
        kw["allow_is_causal_skip"] = False
    return inner(**kw)


def read_of_transformers(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Beginning:
    """Of a forward that takes `input_ids` or `inputs_embeds`.

    Raises:
        ValueError: It has neither, or asks for what can't be had with parts of sequences.
    """
    given = kwargs | _named(forward, args)
    _check_call(module, given)
    named = (given.get(name) for name in ("input_ids", "inputs_embeds"))
    if (ids := next((each for each in named if each is not None), None)) is None:
        raise ValueError(f"{type(module).__name__} was called without input_ids")
    rows, part = ids.shape[:2]
    if (positions := given.get("position_ids")) is not None:
        positions = positions.expand(rows, -1)
    if not given.get("fused_lm_head"):  # of TRL, whose forward makes the loss
        given.pop("shift_labels", None)

    def run(measured: Measured) -> Any:
        start = sum(measured.lengths[: measured.index])
        whole = {
            "position_ids": torch.arange(start, start + part, device=ids.device).expand(rows, -1)
            if positions is None
            else positions,
            # of ones: the model looks for packed sequences, in its part alone, if there is none
            "attention_mask": torch.ones((rows, part), dtype=torch.int64, device=ids.device),
            "use_cache": False,
        }
        return forward(**given | whole)

    return Beginning(run, rows, part, positions, given.get("attention_mask"))


def _named(forward: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Positional arguments by name. Raises ValueError if they have none, as in wrappers."""
    found = inspect.signature(forward).parameters.values()
    names = [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(args) > len(names):
        raise ValueError("a model whose ranks hold parts of sequences (sp) takes its batch by name")
    return dict(zip(names, args, strict=False))


def _check_call(module: nn.Module, given: dict[str, Any]) -> None:
    """Raises ValueError if a call asks for what can't be had with parts of sequences."""
    if given.get("labels") is not None:
        check_labels(module)
    if given.get("use_cache"):
        raise ValueError(
            "use_cache=True in a model whose ranks hold parts of sequences (sp): a cache would "
            "hold a part. Generate inside of zero3.resident(model)"
        )
    for name in ("position_ids", "attention_mask"):
        value = given.get(name)
        if value is not None and (not isinstance(value, Tensor) or value.dim() != 2):
            found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{name} {found} in a model whose ranks hold parts of sequences (sp): expected [B, "
                "part], as zero3.split_sequence makes it"
            )
