"""What a model of any task is called with, and its loss."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .tiny import WORDS

LENGTH, BATCH = 12, 2
_FIRST, _LAST = 10, 90  # words that mean nothing special to any model

Inputs = dict[str, Any]


class NoInputs(Exception):
    """Nothing is known that this class could be called with."""


def find_inputs(model: nn.Module, task: str) -> Callable[[int], Inputs]:
    """A function from a seed to the arguments of a call that works, tried out on `model`."""
    said = []
    for make in _candidates(model, task):
        for _ in range(4):
            try:
                with torch.no_grad():
                    loss_of(model, make(0))
                return make
            except Exception as error:  # the next kind of input may be right
                said.append(f"{type(error).__name__}: {error}")
                better = _with_as_many_tokens(make, str(error))
                if better is None:
                    break
                make = better
    raise NoInputs("; ".join(dict.fromkeys(text.replace("\n", " ")[:150] for text in said[-3:])))


def loss_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """Its own loss; without one the mean square of the first floating output that has a graph, so that a gradient flows."""
    torch.manual_seed(0)
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    values = output.values() if hasattr(output, "values") else output if isinstance(output, tuple) else [output]
    floating = [value for value in values if isinstance(value, Tensor) and value.is_floating_point() and value.numel()]
    if not floating:
        raise NoInputs(f"{type(output).__name__} holds no floating tensor")
    return sum((value.float().pow(2).mean() for value in floating[:3]), torch.zeros(()))


def _candidates(model: Any, task: str) -> list[Callable[[int], Inputs]]:
    accepted = set(inspect.signature(model.forward).parameters)
    config = model.config
    made: list[Callable[[int], Inputs]] = []
    if "pixel_values" in accepted and "input_ids" in accepted:
        made += [_Words(config, accepted, picture) for picture in (_picture, _sized_picture, _pictures, _patches)]
    if "input_ids" in accepted:
        made.append(_Words(config, accepted, None))
    for name in ("pixel_values", "pixel_values_videos", "input_features", "input_values", "input_ids", "inputs_embeds"):
        if name in accepted and name != "input_ids":
            made += [_Signal(config, accepted, name, shape) for shape in _shapes(config, name)]
    return made


class _Words:
    """Text, with labels where the model takes them; with `picture` also one picture a row, in place of `self.tokens` words."""

    def __init__(self, config: Any, accepted: set[str], picture: Callable[[Any], Inputs] | None, tokens: int = 4) -> None:
        self.config, self.accepted, self.picture, self.tokens = config, accepted, picture, tokens

    def __call__(self, seed: int) -> Inputs:
        draws = torch.Generator().manual_seed(seed)
        ids = torch.randint(_FIRST, _LAST, (BATCH, LENGTH), generator=draws)
        inputs: Inputs = {}
        if self.picture is not None:
            marks = [getattr(self.config, name, None) for name in ("image_token_id", "image_token_index", "image_token")]
            mark = next((number for number in marks if isinstance(number, int)), WORDS - 1)
            ids = torch.cat([ids[:, :2], torch.full((BATCH, self.tokens), mark), ids[:, 2:]], dim=1)
            inputs |= {k: v(draws) if callable(v) else v for k, v in self.picture(self.config).items() if k in self.accepted}
            if "mm_token_type_ids" in self.accepted:
                inputs["mm_token_type_ids"] = (ids == mark).long()
            if "token_type_ids" in self.accepted:
                inputs["token_type_ids"] = torch.zeros_like(ids)
        inputs["input_ids"] = ids
        if "qformer_input_ids" in self.accepted:
            inputs["qformer_input_ids"] = ids.clone()
        if "use_cache" in self.accepted:
            inputs["use_cache"] = False
        if "attention_mask" in self.accepted:
            inputs["attention_mask"] = torch.ones_like(ids)
        codebooks = getattr(getattr(self.config, "decoder", None), "num_codebooks", None)
        if codebooks is not None:
            inputs["decoder_input_ids"] = ids.repeat(codebooks, 1)
        elif "labels" in self.accepted:
            inputs["labels"] = ids.clone()
        elif "decoder_input_ids" in self.accepted:
            inputs["decoder_input_ids"] = ids.clone()
        return inputs


class _Signal:
    """Numbers of one shape, as pictures and sound are; labels are words, classes or left out, whichever the model takes."""

    def __init__(self, config: Any, accepted: set[str], name: str, shape: tuple[int, ...]) -> None:
        self.config, self.accepted, self.name, self.shape = config, accepted, name, shape

    def __call__(self, seed: int) -> Inputs:
        draws = torch.Generator().manual_seed(seed)
        inputs: Inputs = {self.name: torch.randn(BATCH, *self.shape, generator=draws)}
        if "decoder_input_ids" in self.accepted:
            inputs["decoder_input_ids"] = torch.randint(_FIRST, _LAST, (BATCH, LENGTH), generator=draws)
        if self.name == "pixel_values" and "input_ids" in self.accepted:
            inputs["input_ids"] = torch.randint(_FIRST, _LAST, (BATCH, LENGTH), generator=draws)
        return inputs


def _vision(config: Any) -> Any:
    return next(
        (found for name in ("vision_config", "vision", "vision_encoder_config") if (found := getattr(config, name, None)) is not None),
        config,
    )


def _side(config: Any) -> int:
    size = getattr(_vision(config), "image_size", None) or getattr(config, "image_size", None) or 64
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _picture(config: Any) -> Inputs:
    side = _side(config)
    return {"pixel_values": lambda draws: torch.randn(BATCH, 3, side, side, generator=draws)}


def _sized_picture(config: Any) -> Inputs:
    """With its size; for those that take several crops of a picture, two equal ones."""
    side = _side(config)
    size = torch.tensor([[side, side]] * BATCH)
    crops = (
        {"pixel_values": lambda draws: torch.randn(BATCH, 2, 3, side, side, generator=draws)}
        if hasattr(config, "image_grid_pinpoints")
        else {}
    )
    return {**_picture(config), **crops, "image_sizes": size, "target_sizes": size}


def _pictures(config: Any) -> Inputs:
    """A list of one a row."""
    side = _side(config)
    return {"pixel_values": lambda draws: torch.randn(BATCH, 1, 3, side, side, generator=draws)}


def _patches(config: Any) -> Inputs:
    """As the models take pictures that cut them into patches beforehand: 4 x 4 patches a picture."""
    vision = _vision(config)
    patch, frames = getattr(vision, "patch_size", 16), getattr(vision, "temporal_patch_size", 2)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or getattr(vision, "num_channels", 3)
    if not isinstance(patch, int) or not isinstance(frames, int):
        return {}
    numel = channels * frames * patch * patch
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    return {"pixel_values": lambda draws: torch.randn(BATCH * 16, numel, generator=draws), "image_grid_thw": grid}


def _shapes(config: Any, name: str) -> list[tuple[int, ...]]:
    side, mels = _side(config), getattr(config, "num_mel_bins", None) or 16
    channels = getattr(config, "num_channels", None) or 3
    shapes: dict[str, list[tuple[int, ...]]] = {
        "pixel_values": [(channels, side, side), (3, side, side), (8, 3, side, side), (1, 3, side, side)],
        "pixel_values_videos": [(8, 3, side, side), (4, 3, side, side)],
        "input_features": [
            (mels, 128),
            (128, mels),
            (mels, 2 * getattr(config, "max_source_positions", 64)),
            (128, 80),
            (80, 128),
            (64, 160),
        ],
        "input_values": [(4000,), (1, 4000), (1024, getattr(config, "num_mel_bins", 128))],
        "inputs_embeds": [(LENGTH, getattr(config, "hidden_size", 32))],
    }
    return shapes[name]


def _with_as_many_tokens(make: Any, error: str) -> Callable[[int], Inputs] | None:
    """The same with as many picture tokens as the model says that it has features."""
    found = re.search(r"tokens:? *(\d+)[^\d]+features:? *(\d+)", error)
    if found is None or not isinstance(make, _Words) or make.picture is None:
        return None
    tokens, features = map(int, found.groups())
    rows = features // BATCH if features < 300 else features // BATCH // 32  # some count numbers, not rows of 32
    if not tokens or rows in (0, make.tokens) or rows > 300:
        return None
    return _Words(make.config, make.accepted, make.picture, rows)
