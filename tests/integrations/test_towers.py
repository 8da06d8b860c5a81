"""Trainers over a model that sees: rows with images and rows without, in one batch or on one rank alone, as under one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from benchmarks.architectures.tiny import tiny_config
from tests.support.processes import Rank, on_ranks
from tests.support.reference import assert_close
from tests.support.trainers import arguments, launched, logged

pytestmark = pytest.mark.slow

MARK, TOKENS = 127, 16  # an image's word, and how often it stands for one image
PLAN = ["t", "i", "t", "t", "i", "t", "i", "i", "t", "i", "t", "t"]  # texts and images, in the order of the rows


def llava() -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(tiny_config("llava"))


def rows(model: Any) -> list[dict[str, Any]]:
    config = model.config
    tokens = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    found = []
    for number, kind in enumerate(PLAN):
        draws = torch.Generator().manual_seed(number)
        ids = torch.randint(10, 90, (6,), generator=draws)
        row: dict[str, Any] = {}
        if kind == "i":
            side = config.vision_config.image_size
            ids = torch.cat([ids[:2], torch.full((tokens,), config.image_token_index), ids[2:]])
            row["pixel_values"] = torch.randn(3, side, side, generator=draws)
        found.append({"input_ids": ids, **row})
    return found


def collate(examples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """As a processor: a batch of texts alone has no `pixel_values`."""
    longest = max(len(each["input_ids"]) for each in examples)
    pad = lambda ids, value: torch.nn.functional.pad(ids, (0, longest - len(ids)), value=value)  # noqa: E731
    ids = torch.stack([pad(each["input_ids"], 0) for each in examples])
    images = [each["pixel_values"] for each in examples if "pixel_values" in each]
    labels = torch.stack([pad(each["input_ids"], -100) for each in examples])
    found = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
    return found | ({"pixel_values": torch.stack(images)} if images else {})


def train(rank: Rank, ours: bool) -> dict[str, Any]:
    from transformers import Trainer

    from zero3.integrations.transformers import Zero3Trainer

    with launched(rank):
        model = llava()
        options = {
            "max_steps": 3, "gradient_accumulation_steps": 2, "remove_unused_columns": False, "train_sampling_strategy": "sequential",
            "per_device_train_batch_size": 2 // rank.world_size, "max_grad_norm": 0.5,
        }  # fmt: skip
        data = {"train_dataset": rows(model), "data_collator": collate}
        trainer = (Zero3Trainer if ours else Trainer)(model=model, args=arguments(rank.scratch, **options), **data)
        trainer.train()
        full = zero3.full_state_dict(model, rank0_only=False) if ours else dict(model.named_parameters())
        values = {name: value.detach().clone() for name, value in full.items()}
        return {"losses": logged(trainer, "loss"), "values": values, "towers": zero3.report(model).towers if ours else ()}


def test_a_trainer_with_images_on_some_ranks_gives_what_one_process_gives() -> None:
    """Each step has two micro-batches of two rows: on two ranks one has a text and the other an image, or both the same."""
    (expected,) = on_ranks(1, train, False, debug="OFF")
    for found in on_ranks(2, train, True):
        assert found["towers"] == ("model.vision_tower", "model.multi_modal_projector")
        assert torch.allclose(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-4)
        assert_close(found["values"], expected["values"], 1e-3, "trained")


# -- TRL, with a processor

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<assistant>{% generation %}{{ message.content[0].text }}<eos>"
    "{% endgeneration %}{% else %}<user>{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def chats_with_images(side: int) -> Any:
    """Each picture has a color of its own."""
    from datasets import Dataset
    from PIL import Image

    from tests.support.chats import said, sums

    rows = zip(PLAN, sums(len(PLAN)), strict=True)
    picture = lambda number: Image.new("RGB", (side, side), (20 * number, 255 - 20 * number, 90))  # noqa: E731
    return Dataset.from_list(
        [
            {"messages": said("user", asked) + said("assistant", answer), "images": [picture(number)] if kind == "i" else []}
            for number, (kind, (asked, answer, _)) in enumerate(rows)
        ]
    )


def sft(rank: Rank, ours: bool) -> dict[str, Any]:
    import trl
    from transformers import CLIPImageProcessor, LlavaProcessor

    from tests.integrations.test_trl import with_mixin
    from tests.support.chats import tokenizer

    with launched(rank):
        words, model = tokenizer(), llava()
        words.add_special_tokens({"additional_special_tokens": ["<image>"]})
        model.config.image_token_index = model.config.image_token_id = words.convert_tokens_to_ids("<image>")
        vision = model.config.vision_config
        side = {"height": vision.image_size, "width": vision.image_size}
        processor = LlavaProcessor(
            CLIPImageProcessor(size=side, crop_size=side), words, patch_size=vision.patch_size, chat_template=TEMPLATE,
            vision_feature_select_strategy="default", num_additional_image_tokens=1,
        )  # fmt: skip
        options = {
            "max_steps": 3, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential", "assistant_only_loss": True,
            "per_device_train_batch_size": 2 // rank.world_size, "max_grad_norm": 0.5, "bf16": False, "max_length": None,
        }  # fmt: skip
        given = {"train_dataset": chats_with_images(vision.image_size), "processing_class": processor}
        trainer = with_mixin(trl.SFTTrainer, ours)(model=model, args=arguments(rank.scratch, trl.SFTConfig, **options), **given)
        trainer.train()
        full = zero3.full_state_dict(model, rank0_only=False) if ours else dict(model.named_parameters())
        values = {name: value.detach().clone() for name, value in full.items()}
        return {"losses": logged(trainer, "loss", "grad_norm"), "values": values, "towers": zero3.report(model).towers if ours else ()}


def test_sft_with_a_processor_and_images_on_some_ranks_gives_what_one_process_gives() -> None:
    pytest.importorskip("trl")
    (expected,) = on_ranks(1, sft, False, debug="OFF")
    for found in on_ranks(2, sft, True):
        assert found["towers"] == ("model.vision_tower", "model.multi_modal_projector")
        assert torch.allclose(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), rtol=1e-4)
        assert_close(found["values"], expected["values"], 1e-3, "trained")
