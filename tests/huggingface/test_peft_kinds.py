"""Every kind of adapter that peft has, in a sharded model: it trains as unsharded, and its files are peft's; or its name is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import zero3
from tests.huggingface.test_stream_weights import taken
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.trainers import SIZES

peft = pytest.importorskip("peft")

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning:peft"), pytest.mark.filterwarnings("ignore::FutureWarning:peft")]

WORDS = torch.arange(5)[None]
LINEAR = {"target_modules": ["q_proj", "v_proj"]}
PROMPTS: dict[str, dict[str, Any]] = {
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "P_TUNING, LSTM": {"num_virtual_tokens": 4, "encoder_hidden_size": 16, "encoder_reparameterization_type": "LSTM"},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "PREFIX_TUNING, projected": {"num_virtual_tokens": 4, "prefix_projection": True, "encoder_hidden_size": 16},
    "CARTRIDGE": {"num_virtual_tokens": 4, "num_frozen_tokens": 1},
}
OTHERS: dict[str, dict[str, Any]] = {
    "LORA": LINEAR,
    "LORA, DoRA": LINEAR | {"use_dora": True},
    "LORA, rslora": LINEAR | {"use_rslora": True},
    "LORA, PiSSA": LINEAR | {"init_lora_weights": "pissa"},
    "LORA, with biases": LINEAR | {"lora_bias": True},
    "LORA, embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "LORA, tokens": LINEAR | {"trainable_token_indices": [1, 2]},
    "LORA, a module saved whole": LINEAR | {"modules_to_save": ["lm_head"]},
    "BOFT": LINEAR | {"boft_block_size": 4},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1, "target_modules": "self_attn"},
    "IA3": {"target_modules": ["k_proj", "up_proj"], "feedforward_modules": ["up_proj"]},
    "OFT": LINEAR | {"r": 0, "oft_block_size": 4},
    "POLY": LINEAR | {"r": 2, "n_tasks": 2},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "FOURIERFT": LINEAR | {"n_frequency": 8},
    "VBLORA": LINEAR | {"num_vectors": 8, "vector_length": 16, "topk": 2},
    "MISS": LINEAR | {"r": 8},
    "BONE": LINEAR | {"r": 8},
    "ROAD": LINEAR | {"group_size": 4},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [1, 2]},
    "C3A": LINEAR | {"block_size": 16},
    "WAVEFT": LINEAR | {"n_frequency": 16},
    "SHADOW": {"shadow_dropout": 0.0},
} | dict.fromkeys(
    (
        "BEFT", "LILY", "LOHA", "LOKR", "VERA", "FROD", "PVERA", "GLORA", "HRA", "UNILORA", "RANDLORA", "HIRA", "OSF", "DELORA", "GRALORA",
        "TINYLORA", "PSOFT", "PEANUT", "SUPERTUNING", "DEFT",
    ),
    LINEAR,
)  # fmt: skip
AT_SHARD = {"ADALORA": LINEAR | {"total_step": 10}, "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}}
AT_SAVING = {"SHIRA": LINEAR | {"r": 4}}
NOT_TRIED = {"ADAMSS": "it needs scikit-learn", "XLORA": "it is made of saved adapters"}
# what peft writes of these is computed by an encoder, which nothing gives back
NOT_LOADED = ("P_TUNING", "P_TUNING, LSTM", "PREFIX_TUNING, projected", "CARTRIDGE")
TASKS = {name: {"task_ids": torch.tensor([1])} for name in ("MULTITASK_PROMPT_TUNING", "POLY")}


def built(name: str, options: dict[str, Any]) -> Any:
    """In eval, where nothing is drawn, with adapters that do something."""
    if name.partition(",")[0] not in PEFT_TYPE_TO_CONFIG_MAPPING:
        pytest.skip("this peft does not have it")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2}))
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[name.partition(",")[0]]
    model = peft.get_peft_model(model, kind(task_type="CAUSAL_LM", **options))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())), alpha=0.1)
    return model.eval()


def steps(name: str, model: Any, parameters: Any) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(input_ids=WORDS, labels=WORDS, **TASKS.get(name, {})).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_two(name: str, options: dict[str, Any], body: Callable[[Any], Any]) -> list[Any]:
    models = [built(name, options) for _ in range(2)]
    return run_ranks(2, lambda group: body(zero3.shard(models[group.rank], process_group=group)))


def test_every_kind_of_peft_has_its_place_here() -> None:
    here = {name.partition(",")[0] for name in (*PROMPTS, *OTHERS, *AT_SHARD, *AT_SAVING, *NOT_TRIED)}
    assert {kind.value for kind in peft.PeftType} <= here  # an older peft has fewer


def compare(name: str, options: dict[str, Any], directory: Path) -> None:
    plain = built(name, options)
    expected = steps(name, plain, [parameter for parameter in plain.parameters() if parameter.requires_grad])
    assert expected[0] != expected[1]
    plain.save_pretrained(directory / "peft")

    def body(model: Any) -> list[float]:
        losses = steps(name, model, zero3.get_trainable_chunk(model))
        zero3.save_pretrained(model, directory / "ours")
        if name in NOT_LOADED:
            with pytest.raises(ValueError, match=r"prompt_embeddings was computed by a prompt encoder.*zero3\.save_checkpoint"):
                zero3.load_pretrained(model, directory / "peft")
        else:
            zero3.load_pretrained(model, directory / "peft")
            zero3.save_pretrained(model, directory / "again")
        return losses

    for found in on_two(name, options, body):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-6)
    theirs: dict[str, Tensor] = load_file(directory / "peft" / "adapter_model.safetensors")
    for place in ("ours",) if name in NOT_LOADED else ("ours", "again"):
        ours = load_file(directory / place / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys() and all(ours[key].dtype == theirs[key].dtype for key in theirs)
        for key in theirs:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-7 if place == "ours" else 0, msg=f"{place}: {key}")
        there = peft.PeftConfig.from_pretrained(directory / place).to_dict()
        assert {key: sorted(v) if isinstance(v, set) else v for key, v in there.items()} == {
            key: sorted(v) if isinstance(v, set) else v for key, v in peft.PeftConfig.from_pretrained(directory / "peft").to_dict().items()
        }


@pytest.mark.parametrize("name", PROMPTS)
def test_save_pretrained_writes_prompts_as_peft_does(name: str, tmp_path: Path) -> None:
    compare(name, PROMPTS[name], tmp_path)


@pytest.mark.parametrize("name", PROMPTS)
def test_peft_goes_on_from_prompts_that_save_pretrained_wrote(name: str, tmp_path: Path) -> None:
    """To the bit, for what is read there was never rounded: the prompts before any step."""
    plain = built(name, PROMPTS[name])
    plain.save_pretrained(tmp_path / "peft")
    on_two(name, PROMPTS[name], lambda model: zero3.save_pretrained(model, tmp_path / "ours"))
    theirs, ours = (load_file(tmp_path / place / "adapter_model.safetensors") for place in ("peft", "ours"))
    assert theirs.keys() == ours.keys()
    for key in theirs:  # an LSTM's kernel rounds by where its weights lie
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5 if "LSTM" in name else 0, atol=1e-7 if "LSTM" in name else 0)
    base = plain.get_base_model()
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    with torch.no_grad():
        found = loaded(input_ids=WORDS, labels=WORDS, **TASKS.get(name, {})).loss
        assert torch.allclose(found, built(name, PROMPTS[name])(input_ids=WORDS, labels=WORDS, **TASKS.get(name, {})).loss)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_save_pretrained_writes_adapters_of_every_kind_as_peft_does(name: str, tmp_path: Path) -> None:
    compare(name, OTHERS[name], tmp_path)


@pytest.mark.parametrize("name", AT_SHARD)
def test_shard_refuses_adapters_that_would_train_otherwise(name: str) -> None:
    def body(group: ThreadCommunicator) -> None:
        before = [id(parameter) for parameter in models[group.rank].parameters()]
        with pytest.raises(ValueError, match=f"adapter 'default' is of the kind {name}"):
            zero3.shard(models[group.rank], process_group=group)
        assert [id(parameter) for parameter in models[group.rank].parameters()] == before

    models = [built(name, AT_SHARD[name]) for _ in range(2)]
    run_ranks(2, body)


@pytest.mark.parametrize("name", AT_SAVING)
def test_save_pretrained_names_what_is_no_value_of_the_model(name: str, tmp_path: Path) -> None:
    def body(model: Any) -> None:
        with pytest.raises(ValueError, match=r"q_proj\.shira_indices of adapter 'default'"):
            zero3.save_pretrained(model, tmp_path)

    on_two(name, AT_SAVING[name], body)


# -- merged


def merged(name: str, options: dict[str, Any]) -> dict[str, Tensor] | None:
    """By peft. None: it refuses."""
    try:
        found = built(name, options).merge_and_unload()
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None
    return dict(sorted(found.state_dict().items()))


def state_of_modules(model: Any) -> list[Any]:
    """Which modules there are, and what each of them holds."""
    return [
        (module, {key: (id(v), len(v) if isinstance(v, (dict, list, set)) else 0) for key, v in vars(module).items()})
        for module in model.modules()
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of peft
@pytest.mark.parametrize("name", [*OTHERS, *AT_SAVING])
def test_stream_weights_and_save_merged_are_what_peft_merges_of_every_kind(name: str, tmp_path: Path) -> None:
    """Or one error on all ranks at the call, also on those that would ask for nothing, before anything is gathered or written."""
    options = (OTHERS | AT_SAVING)[name]
    expected = merged(name, options)
    assert expected is None or not any("base_layer" in key for key in expected)
    tolerance = 1e-6 if name == "C3A" else 0  # a Fourier transform rounds by where its numbers lie

    def check(found: dict[str, Tensor]) -> None:
        assert expected is not None and found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=tolerance, atol=tolerance, msg=key)

    def body(model: Any) -> str:
        modules = state_of_modules(model)
        errors = []
        for max_bytes in (None, 3000):
            try:
                check(taken(zero3.stream_weights(model, merge_adapters=True, max_bytes=max_bytes)))
            except (RuntimeError, ValueError) as error:
                errors.append(str(error))
        try:
            zero3.save_merged(model, tmp_path / "ours")
        except (RuntimeError, ValueError) as error:
            errors.append(str(error).replace("save_merged", "stream_weights"))
        assert state_of_modules(model) == modules
        assert len(errors) == (3 if expected is None else 0) and len(set(errors)) <= 1, errors
        return errors[0] if errors else ""

    texts = on_two(name, options, body)
    assert texts[0] == texts[1]
    if expected is None:
        assert texts[0].startswith("rank 0: ") and not (tmp_path / "ours").exists()
    else:
        check(load_file(tmp_path / "ours" / "model.safetensors"))
