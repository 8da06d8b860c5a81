"""Chooses the subtrees of a model that are optional: towers, which some ranks call and others do
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ..auto_wrap import called_in, embeddings_of
from ..modules import is_callable, own_module_name

__all__: list[str] = []

_One = nn.Module | type[nn.Module] | str
Optional = _One | Iterable[_One] | Callable[[str, nn.Module], bool] | None


def choose_towers(model: nn.Module, optional: Optional) -> dict[str, nn.Module]:
    """The towers of a model by name, in the model's order. A tower inside a tower belongs to the
    outer one. A list of modules stands for its elements.

    Raises:
        ValueError: A value of `optional` matches nothing, the model itself, or a module of another
            model.
        TypeError: `optional` is of another type.
    """
    named = {name: module for name, module in model.named_modules() if name}
    if optional is None:
        chosen = {id(module) for module in _beside_the_language_model(model)}
    elif callable(optional) and not isinstance(optional, (nn.Module, type)):
        chosen = {id(module) for name, module in named.items() if optional(name, module)}
        if not chosen:
            raise _matches_nothing(model, optional)
    else:
        items = [optional] if isinstance(optional, (nn.Module, type, str)) else optional
        if not isinstance(items, Iterable):
            raise _wrong_type(items)
        chosen = {id(module) for item in items for module in _matched(model, named, item)}
    chosen = {
        id(each)
        for module in named.values()
        if id(module) in chosen
        for each in ([module] if is_callable(module) else called_in(module))
    }
    inside = {
        id(inner)
        for module in named.values()
        if id(module) in chosen
        for inner in module.modules()
        if inner is not module
    }
    return {
        own_module_name(name): module
        for name, module in named.items()
        if id(module) in chosen and id(module) not in inside
    }


def _matched(model: nn.Module, named: dict[str, nn.Module], item: Any) -> list[nn.Module]:
    if isinstance(item, str):
        found = [m for name, m in named.items() if item in (name, own_module_name(name))]
        itself = item == ""
    elif isinstance(item, nn.Module):
        found, itself = [m for m in named.values() if m is item], item is model
    elif isinstance(item, type):
        found = [m for m in named.values() if isinstance(m, item)]
        itself = isinstance(model, item)
    else:
        raise _wrong_type(item)
    if itself:
        raise ValueError(
            f"optional={_word(item)} matches the model itself, a {type(model).__name__}: what is "
            "optional is a part of it"
        )
    if not found:
        raise _matches_nothing(model, item)
    return found


def _word(item: Any) -> str:
    return f"a {type(item).__name__}" if isinstance(item, nn.Module) else repr(item)


def _matches_nothing(model: nn.Module, item: Any) -> ValueError:
    return ValueError(
        f"optional={_word(item)} matches no submodule of this {type(model).__name__}. Its children "
        f"are: {', '.join(name for name, _ in model.named_children()) or 'none'}"
    )


def _wrong_type(item: Any) -> TypeError:
    return TypeError(
        "optional must be a module of the model, its name, its class, several of these, or a "
        f"predicate (name, module) -> bool; found {item!r} of type {type(item).__name__}"
    )


# -- the automatic choice


def _beside_the_language_model(model: nn.Module) -> list[nn.Module]:
    """Of a model of transformers with sub-configurations: what stands beside the way to its
    language model, but for embeddings.
    """
    base = getattr(model, "get_base_model", None) if hasattr(model, "peft_config") else None
    model = model if base is None else base()
    config: Any = getattr(model, "config", None)
    kinds = {
        type(each)
        for name in getattr(type(config), "sub_configs", {})
        if (each := getattr(config, name, None)) is not None
    }
    if not kinds or not callable(ask := getattr(config, "get_text_config", None)):
        return []
    text = ask(decoder=True)
    kinds -= {type(text)}
    if text is config:
        return list(_outermost(model, kinds))
    language = next(iter(_outermost(model, {type(text)})), None)
    if language is None or not kinds:
        return []
    embedding, head = embeddings_of(model, "input"), embeddings_of(model, "output")
    found: list[nn.Module] = []
    for around in model.modules():
        if around is language or not any(inner is language for inner in around.modules()):
            continue
        for child in around.children():
            inside = list(child.modules())
            if language in inside or not any(True for _ in child.parameters()):
                continue
            own = getattr(child, "config", config)
            if own is not config and config.is_encoder_decoder and "text_config" in own.sub_configs:
                found += _beside_the_language_model(child)  # the decoder's encoder reads words, too
            elif child is not embedding and head not in inside:
                found.append(child)
    return found


def _outermost(module: nn.Module, kinds: set[type]) -> Iterator[nn.Module]:
    for child in module.children():
        if type(getattr(child, "config", None)) in kinds:
            yield child
        else:
            yield from _outermost(child, kinds)
