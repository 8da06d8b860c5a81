"""Pictures in a micro-batch that is planned. They, and the tokens that stand for them, have values:
models ask where a picture stands in a text, and of how many patches it is.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..comm.plain_values import integer
from ..core.autograd import tensors_in
from .kernels import DeviceKernels, with_values
from .ledger import Ledger

__all__: list[str] = []

_MOST = 1 << 16
_SIDE = 1024  # of a picture for models that take any size, in pixels
Inputs = dict[str, Any]


def words_alone(batch: int, sequence: int) -> Inputs:
    """What a model is called with, without pictures and labels."""
    return {"input_ids": torch.zeros(batch, sequence, dtype=torch.long, device="meta")}


@dataclass(frozen=True, slots=True)
class Pictures:
    """So many square pictures in each micro-batch. A row's own come one after another."""

    count: int
    side: int
    form: int  # which of `_forms` the model takes
    tokens: int  # that stand for one of them
    mark: int  # the token
    model: nn.Module  # on the meta device
    accepted: frozenset[str]  # the names that its forward takes

    @property
    def told(self) -> str:
        """In words."""
        many = f"{self.count} image{'s' * (self.count > 1)} of {self.side} x {self.side} pixels"
        return f"{many}, {self.tokens} tokens each"

    def length(self, batch: int) -> int:
        """The tokens that a row has at least. Between two pictures stands one of text."""
        return -(-self.count // batch) * (self.tokens + 1)

    def with_words(self, batch: int, sequence: int) -> Inputs:
        """As `words_alone`, with the pictures in it, which take a part of the sequences."""
        ids = torch.zeros(batch, max(sequence, self.length(batch)), dtype=torch.long)
        for number in range(self.count):
            row, place = divmod(number, -(-self.count // batch))
            start = place * (self.tokens + 1)
            ids[row, start : start + self.tokens] = self.mark
        kinds = (ids == self.mark).long()
        types = {"token_type_ids", "mm_token_type_ids"} & self.accepted
        forms = _forms(self.model, self.count, self.side, batch)
        pictures = next(islice(forms, self.form, None))
        return {"input_ids": ids} | pictures | dict.fromkeys(types, kinds)


def _check(count: int, side: int | None) -> None:
    for name, number, least in (("images", count, 0), ("image_size", side, 1)):
        if number is None:
            continue
        if integer(number) is None:
            raise TypeError(f"{name} must be an integer, found {number!r}")
        if not least <= number <= _MOST:
            raise ValueError(f"{name} must be from {least} to {_MOST}, found {number}")
    if side is not None and not count:
        raise ValueError(f"image_size={side} is of pictures, and there are none: pass images=")


def pictures_for(model: nn.Module, count: int, side: int | None) -> Pictures | None:
    """Tries how the model takes pictures, and how many tokens each becomes. None: there are none.

    Raises:
        TypeError: A number is none.
        ValueError: A number is out of range; or the model takes no pictures, or in no form that is
            known.
    """
    _check(count, side)
    if not count:
        return None
    if callable(base := getattr(model, "get_base_model", None)):  # of peft
        model = base()
    config: Any = model.config
    named = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    mark = next((number for number in named if isinstance(number, int)), -1)
    features: Any = getattr(model, "get_image_features", None)
    said = ""
    side = side or _side(config)
    accepted = frozenset(inspect.signature(model.forward).parameters)
    with Ledger(1, 0, with_values), DeviceKernels("cpu"), torch.no_grad():
        forms = () if mark < 0 or features is None else _forms(model, count, side, 1)
        for form, pictures in enumerate(forms):
            try:
                found = features(**pictures)
            except Exception as error:  # the next form may be right
                said = said or f"{type(error).__name__}: {error}"
                continue
            rows = tensors_in(getattr(found, "pooler_output", found))
            tokens = sum(each.numel() // each.shape[-1] for each in rows) // count
            return Pictures(count, side, form, tokens, mark, model, accepted)
    raise ValueError(
        f"images={count}: plans know no images of a {type(model).__name__} at {side} x {side} "
        f"pixels: {said[:200] or 'it has no token of images'}"
    )


def _vision(config: Any) -> Any:
    return getattr(config, "vision_config", None) or config


def _side(config: Any) -> int:
    size = getattr(_vision(config), "image_size", None) or _SIDE
    return int(size if isinstance(size, int) else max(size))


def _forms(model: nn.Module, count: int, side: int, rows: int) -> Iterator[Inputs]:
    """How models of transformers take pictures: cut into patches; whole; with their sizes; in
    crops, with their sizes; so many for each of the `rows`.
    """
    config: Any = model.config
    vision = _vision(config)
    patch = getattr(vision, "patch_size", 16)
    if hasattr(vision, "temporal_patch_size"):
        merged = patch * getattr(vision, "spatial_merge_size", 1)
        across = max(1, side // merged) * merged // patch
        numel = 3 * vision.temporal_patch_size * patch * patch
        grid = torch.tensor([[1, across, across]] * count)
        yield {"pixel_values": torch.ones(count * across**2, numel), "image_grid_thw": grid}
    whole = torch.ones(count, 3, side, side)
    yield {"pixel_values": whole}
    sizes = torch.tensor([[side, side]] * count)
    yield {"pixel_values": whole, "image_sizes": sizes}
    home = vars(sys.modules[type(model).__module__])
    if (ask := home.get("image_size_to_num_patches")) is not None:
        of = _side(config)
        crops = ask([side, side], config.image_grid_pinpoints, of)
        yield {"pixel_values": torch.ones(count, crops, 3, of, of), "image_sizes": sizes}
    each = -(-count // rows)
    there = torch.arange(rows * each).view(rows, each, 1, 1, 1) < count  # what is all zeros is none
    yield {"pixel_values": there * torch.ones(rows, each, 3, side, side)}
