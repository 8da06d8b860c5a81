"""Chats about pictures that are drawn here, and a small vision and language model that learns them."""

from __future__ import annotations

from itertools import product
from typing import Any

from datasets import Dataset
from PIL import Image, ImageDraw
from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor

from .chats import made_chats, small_config, small_tokenizer

__all__ = ["drawn_chats", "small_processor", "small_vision_config"]

_SIDE, _PATCH = 32, 8  # pixels
_MARK = "<image>"
_COLORS = ("red", "green", "blue", "yellow", "white", "purple")
_SHAPES = ("circle", "square")


def drawn_chats() -> Dataset:
    """Questions about pictures of one figure each, and one question about Python, without a picture, after every two of them."""
    words = iter(made_chats())
    rows: list[dict[str, Any]] = []
    for number, (color, shape, left, top) in enumerate(product(_COLORS, _SHAPES, range(0, 16, 4), range(0, 16, 4))):
        picture = Image.new("RGB", (_SIDE, _SIDE))
        draw = ImageDraw.Draw(picture)
        (draw.ellipse if shape == "circle" else draw.rectangle)((left, top, left + 15, top + 15), fill=color)
        asked = {"role": "user", "content": "What is in the picture?"}
        rows.append({"messages": [asked, {"role": "assistant", "content": f"A {color} {shape}."}], "images": [picture]})
        if number % 2 and (row := next(words, None)) is not None:
            rows.append({**row, "images": []})
    return Dataset.from_list(rows)


def small_processor(chats: Dataset, vocabulary: int) -> LlavaProcessor:
    """It cuts pictures to squares, and has a tokenizer that is learnt from the chats."""
    tokenizer = small_tokenizer(chats.select_columns("messages"), vocabulary - 1)
    tokenizer.add_special_tokens({"additional_special_tokens": [_MARK]})
    images = CLIPImageProcessor(size={"shortest_edge": _SIDE}, crop_size={"height": _SIDE, "width": _SIDE})
    how = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1, "chat_template": tokenizer.chat_template}
    return LlavaProcessor(images, tokenizer, patch_size=_PATCH, **how)


def small_vision_config(vocabulary: int, mark: int) -> LlavaConfig:
    """Of a model that two CPU processes train in a minute. `mark`: the number of the token that stands for pictures."""
    vision = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    vision |= {"model_type": "clip_vision_model", "image_size": _SIDE, "patch_size": _PATCH}
    return LlavaConfig(vision_config=vision, text_config=small_config(vocabulary), image_token_index=mark)
