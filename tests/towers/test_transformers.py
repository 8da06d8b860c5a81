"""Vision, audio and omni models of transformers: text on one rank, images or sound on the other, against one process with both."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

import zero3
from benchmarks.architectures.inputs import LENGTH, find_inputs
from benchmarks.architectures.tiny import model_types, tiny_config
from tests.support import tower_table
from tests.support.ranks import run_ranks

Inputs = Callable[[int], dict[str, Any]]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEARS = {
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "encoder_layers": 2, "d_model": 32, "num_mel_bins": 16, "max_source_positions": 16,
}  # fmt: skip


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def words(seed: int, *marks: tuple[int, int]) -> dict[str, Any]:
    """A text, and in it marks: pairs of a word and how often it stands there."""
    ids = torch.randint(10, 90, (2, LENGTH), generator=drawn(seed))
    ids = torch.cat([ids[:, :2], *(torch.full((2, count), word) for word, count in marks), ids[:, 2:]], dim=1)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


def sound(seed: int) -> dict[str, Any]:
    return {"input_features": torch.randn(2, 16, 32, generator=drawn(seed))}


def mllama() -> tuple[nn.Module, list[Inputs], Any]:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "attention_heads": 4, "num_hidden_layers": 2, "num_global_layers": 1, "image_size": 32,
        "patch_size": 16, "vision_output_dim": 64, "max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]],
        "intermediate_layers_indices": [0],
    }  # fmt: skip
    text = SIZES | {
        "num_hidden_layers": 4,
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    model = t.MllamaForConditionalGeneration(t.MllamaConfig(vision_config=vision, text_config=text, image_token_index=127))
    for name, p in model.named_parameters():
        if "gate" in name and p.ndim < 2:
            nn.init.constant_(p, 0.5)  # at zero nothing of a picture comes through

    def picture(seed: int) -> dict[str, Any]:
        ones = lambda *shape: torch.ones(shape, dtype=torch.long)  # noqa: E731
        return words(seed) | {
            "pixel_values": torch.randn(2, 1, 2, 3, 32, 32, generator=drawn(seed)),
            "aspect_ratio_ids": ones(2, 1),
            "aspect_ratio_mask": ones(2, 1, 2),
            "cross_attention_mask": ones(2, LENGTH, 1, 2),
        }

    def attends_across(name: str, module: nn.Module) -> bool:
        beside = name in ("model.vision_model", "model.multi_modal_projector")
        return beside or type(module).__name__ == "MllamaCrossAttentionDecoderLayer"

    return model, [picture], attends_across


def qwen2_audio() -> tuple[nn.Module, list[Inputs], Any]:
    config = t.Qwen2AudioConfig(audio_config=HEARS, text_config=SIZES | {"model_type": "qwen2"}, audio_token_index=127)
    mask = {"feature_attention_mask": torch.ones(2, 32, dtype=torch.long)}
    return t.Qwen2AudioForConditionalGeneration(config), [lambda seed: words(seed, (127, 8)) | sound(seed) | mask], None


def voxtral() -> tuple[nn.Module, list[Inputs], Any]:
    audio = {
        "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2, "num_mel_bins": 16,
        "max_source_positions": 16,
    }  # fmt: skip
    text = SIZES | {"model_type": "llama", "head_dim": 8}
    config = t.VoxtralConfig(audio_config=audio, text_config=text, audio_token_id=127)
    without_mask = lambda seed: {k: v for k, v in words(seed, (127, 4)).items() if k != "attention_mask"} | sound(seed)  # noqa: E731
    return t.VoxtralForConditionalGeneration(config), [without_mask], None


def omni() -> tuple[nn.Module, list[Inputs], Any]:
    vision = {
        "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "depth": 2, "fullatt_block_indexes": [1],
        "patch_size": 14, "window_size": 112,
    }  # fmt: skip
    config = t.Qwen2_5OmniThinkerConfig(
        audio_config=HEARS | {"output_dim": 32, "n_window": 8},
        vision_config=vision,
        text_config=SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        image_token_id=127, audio_token_id=126, video_token_id=125, vision_start_token_id=124, vision_end_token_id=123,
        audio_start_token_id=122, audio_end_token_id=121, position_id_per_seconds=25, seconds_per_chunk=2,
    )  # fmt: skip
    grid, mask = {"image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}, {"feature_attention_mask": torch.ones(2, 32, dtype=torch.long)}

    def picture(seed: int) -> dict[str, Any]:
        return words(seed, (124, 1), (127, 4)) | {"pixel_values": torch.randn(32, 3 * 2 * 14 * 14, generator=drawn(seed))} | grid

    heard = lambda seed: words(seed, (122, 1), (126, 8)) | sound(seed) | mask  # noqa: E731
    return t.Qwen2_5OmniThinkerForConditionalGeneration(config), [picture, heard], None


def of_type(kind: str) -> tuple[nn.Module, list[Inputs], Any]:
    task, name = model_types()[kind]
    model = getattr(t, name)(tiny_config(kind))
    return model, [find_inputs(model, task)], None


def without_pictures(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    known = {"input_ids", "labels", "attention_mask", "use_cache", "token_type_ids", "mm_token_type_ids"}
    return {name: value for name, value in inputs.items() if name in known & set(inspect.signature(model.forward).parameters)}


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return model(**{k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in inputs.items()}).loss


def emu3() -> tuple[nn.Module, list[Inputs], Any]:
    """Its pictures become words, so that the embedding is called once more."""
    return *of_type("emu3")[:2], [
        "model.vqmodel.encoder",
        "model.vqmodel.quantize",
        "model.vqmodel.quant_conv",
        "model.text_model.embed_tokens",
    ]


FAMILIES: dict[str, Callable[[], tuple[nn.Module, list[Inputs], Any]]] = {
    "mllama": mllama, "qwen2_audio": qwen2_audio, "voxtral": voxtral, "qwen2_5_omni_thinker": omni, "emu3": emu3,
    **{kind: (lambda kind=kind: of_type(kind)) for kind in ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm", "t5gemma2")},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_text_on_one_rank_and_images_or_sound_on_the_other_train_as_one_process(family: str) -> None:
    torch.manual_seed(0)
    plain, sees, optional = FAMILIES[family]()
    plain = plain.double().train()
    for module in plain.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def text(seed: int) -> dict[str, Any]:
        return without_pictures(
            words(seed) | {name: torch.zeros(2, LENGTH, dtype=torch.long) for name in ("token_type_ids", "mm_token_type_ids")}, plain
        )

    first, last = sees[0], sees[-1]
    steps: list[tuple[Inputs, Inputs]] = [(text, first), (text, text), (last, text), (first, last)]
    models = [copy.deepcopy(plain) for _ in range(2)]
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}

    def body(group: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        model = zero3.shard(models[group.rank], optional=optional, process_group=group)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), 1e-2, weight_decay=0.1)
        for step, row in enumerate(steps):
            loss_of(model, row[group.rank](10 * step + group.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return {k: v.clone() for k, v in zero3.full_state_dict(model, rank0_only=False).items()}, zero3.report(model).towers

    found = run_ranks(2, body, 60)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2, weight_decay=0.1)
    for step, row in enumerate(steps):
        for rank in range(2):
            (loss_of(plain, row[rank](10 * step + rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for values, towers in found:
        assert towers
        for tower in towers if family != "emu3" else ():  # it has trained. (That of emu3 makes words, which have no gradient.)
            assert any(not torch.equal(values[name], p) for name, p in before.items() if name.startswith(f"{tower}."))
        for name, p in plain.named_parameters():
            torch.testing.assert_close(values[name], p.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["llava", "mllama", "qwen2_audio", "qwen2_5_omni", "t5gemma2"])
def test_towers_chosen_of_transformers_are_those_of_the_page(kind: str) -> None:
    found, told = tower_table.chosen(kind), tower_table.told()[kind]
    assert found in (told, told.replace("`model.", "`")) and told != "nothing"  # an older transformers has some outside of `model`


@pytest.mark.slow
def test_towers_chosen_of_every_class_are_those_of_the_page() -> None:
    told = tower_table.told()
    assert list(told) != [] and set(told) == set(tower_table.kinds())
    found = {kind: tower_table.chosen(kind) for kind in told}
    made = {kind for kind, names in found.items() if tower_table.NO_MODEL not in (names, told[kind])}
    assert len(made) > 100
    assert {kind: found[kind] for kind in made} == {kind: told[kind] for kind in made}
