"""Plans with images, against what ranks of a tiny model hold, move and tell each other."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3
from benchmarks.architectures.tiny import tiny_config
from tests.support.live import LiveBytes
from tests.support.planned import FAMILIES, PLANS
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import run_ranks
from tests.towers.test_transformers import of_type, without_pictures
from zero3.__main__ import main

pytestmark = PLANS

BATCH, LENGTH = 2, 60
TOKENS = {"llava": 16, "qwen2_5_vl": 4, "smolvlm": 4, "gemma3": 4}  # of the picture that each row has


def plan_of(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    given = {"batch": BATCH, "sequence": LENGTH, "images": BATCH, "image_size": 56 if "qwen" in kind else None, "device": "cpu"}
    return zero3.plan(of_type(kind)[0], ranks=2, **given | more)


def seen_by(kind: str) -> tuple[Any, Callable[[int, bool], dict[str, Any]]]:
    """A model; and of a seed what a processor makes of chats, with a picture in each row or without."""
    torch.manual_seed(0)
    model, (see, *_), _ = of_type(kind)

    def inputs(seed: int, pictures: bool) -> dict[str, Any]:
        given = see(seed)
        rest = torch.randint(10, 90, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
        for name in {"input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids"} & given.keys():
            filled = rest if name in ("input_ids", "labels") else torch.full_like(rest, int(name == "attention_mask"))
            given[name] = torch.cat([given[name], filled], 1)[:, :LENGTH]
        marks = given["input_ids"] > 90
        assert int(marks.sum()) == BATCH * TOKENS[kind]
        if pictures:
            return given
        given["input_ids"], given["labels"] = rest, rest.clone()
        return {k: v.zero_() if "type_ids" in k else v for k, v in without_pictures(given, model).items()}

    return model, inputs


def peak_with_images(rank: Rank, kind: str) -> int:
    with LiveBytes() as live:
        model, inputs = seen_by(kind)
        zero3.shard(model.train())
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))

        def step() -> None:
            model(**inputs(rank.number, True)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return live.peak_of(step)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOKENS)
def test_plan_with_images_is_within_2_percent_of_what_ranks_hold(kind: str) -> None:
    for rank, found in enumerate(on_ranks(2, peak_with_images, kind)):
        assert plan_of(kind, rank=rank).peak_bytes == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("kind", ["llava", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2_5_vl", "smolvlm", "gemma3"))])
def test_plan_counts_what_towers_move_and_what_ranks_tell_at_gates(kind: str) -> None:
    """One rank has images and the other has none: what that moves more than text on both."""
    plain, inputs = seen_by(kind)
    models = [copy.deepcopy(plain).train() for _ in range(2)]

    def body(group: Any) -> list[tuple[int, int]]:
        model = zero3.shard(models[group.rank], process_group=group)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
        counted = []
        for pictures in (True, False, bool(group.rank)):
            begin = len(group.log)
            model(**inputs(group.rank, pictures)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            made = group.log[begin:]
            moved = sum(each.numel * each.dtype.itemsize // 2 for each in made if each.kind in ("all_gather", "reduce_scatter"))
            counted.append((moved, sum(each.kind == "exchange" for each in made)))
        return counted[1:]

    plan = plan_of(kind)
    for (of_text, exchanges), (with_images, more) in run_ranks(2, body, parts=True):
        assert (exchanges, more) == (plan.towers.text_exchanges, plan.towers.exchanges)
        assert with_images - of_text == pytest.approx(plan.towers.image_bytes, rel=0.01)


def test_plan_without_images_names_towers_and_says_what_is_missing() -> None:
    plan = plan_of("llava", images=0)
    assert plan.towers.names == ("model.vision_tower", "model.multi_modal_projector") and plan.towers.layers == 5
    assert plan.towers.image_bytes is None and "--images" in plan.unplanned
    with_images = plan_of("llava")
    assert with_images.unplanned == "" and with_images.peak_bytes > plan.peak_bytes
    assert with_images.by_cause["optimizer"] > plan.by_cause["optimizer"], "a tower that nobody calls has no state"
    assert "images move" in str(with_images) and "with 2 images of 64 x 64 pixels, 16 tokens each" in str(with_images)


@pytest.mark.slow
def test_advice_leaves_a_sequence_for_each_image_that_needs_one() -> None:
    """At 20 tokens a sequence has room for one image of 16, so that a batch of one can't have two."""
    roomy, tight = (plan_of("llava", sequence=length, memory="500KB") for length in (60, 20))
    assert "--batch" in roomy.advice and not roomy.fits and not tight.fits
    assert "--batch" not in tight.advice and tight.largest_batch == 0


def test_plan_of_a_directory_takes_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config("llava").save_pretrained(tmp_path)
    given = ["--ranks", "2", "--device", "cpu", "--sequence", str(LENGTH), "--batch", str(BATCH)]
    assert main(["plan", str(tmp_path), *given, "--images", "2", "--memory", "1MB", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["towers"] == json.loads(json.dumps(plan_of("llava").towers._asdict()))
    assert told["peak_bytes"] == plan_of("llava").peak_bytes


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"images": -1}, "ValueError: images must be from 0 to 65536, found -1"),
        ({"images": True}, "TypeError: images must be an integer, found True"),
        ({"image_size": 0}, "ValueError: image_size must be from 1 to 65536, found 0"),
        ({"sequence": 16}, "ValueError: sequence=16 is too short for 2 images of 64 x 64 pixels, 16 tokens each"),
        ({"image_size": 63}, "ValueError: images=2: plans know no images of a LlavaForConditionalGeneration at 63 x 63 pixels: ValueError"),
    ],
)
def test_images_that_can_not_be_are_refused(given: dict[str, Any], error: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        plan_of("llava", **given)
    assert f"{raised.type.__name__}: {raised.value}".startswith(error)


def test_a_model_of_text_takes_no_images() -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(ValueError, match=r"plans know no images of a LlamaForCausalLM .*it has no token of images"):
        zero3.plan(AutoModelForCausalLM.from_config(FAMILIES["Llama"]()), ranks=2, images=1)
