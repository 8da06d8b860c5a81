"""What fits: the largest batch, the advice, the policy. And who may not plan."""

from __future__ import annotations

import html
import re
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import zero3
from tests.support.live import lonely
from tests.support.planned import COMMON, PLANS, Case, model_of, peak_on, plan_of
from tests.support.processes import on_ranks
from zero3.planning.limits import largest

pytestmark = PLANS

lines = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**4)), min_size=1, max_size=4)


@given(lines, st.integers(0, 10**7), st.integers(1, 1 << 16))
@settings(max_examples=200, deadline=None)
def test_the_largest_is_found_with_few_tries(parts: list[tuple[int, int]], room: int, first: int) -> None:
    tried: list[int] = []

    def peak(number: int) -> int:
        tried.append(number)
        return max(constant + slope * number for constant, slope in parts)

    found = largest(peak, room, first)
    assert found == 0 or peak(found) <= room
    assert found == 1 << 16 or peak(found + 1) > room
    assert len(tried) <= 40


@pytest.mark.slow
def test_plan_finds_the_largest_batch_that_ranks_can_hold() -> None:
    """And one sequence more does not fit, on ranks either."""
    memory = 6_000_000
    plan = plan_of(Case(optimizer="SGD"), 2, memory=memory)
    assert plan.fits and plan.largest_batch is not None and plan.largest_batch > Case().batch
    for batch, fits in ((plan.largest_batch, True), (plan.largest_batch + 1, False)):
        assert (max(on_ranks(2, peak_on, Case(optimizer="SGD", batch=batch))) <= memory) is fits


def test_plan_without_memory_does_not_say_what_fits() -> None:
    plan = plan_of(Case(), 2)
    assert (plan.fits, plan.largest_batch, plan.largest_sequence, plan.advice, plan.memory) == (None, None, None, (), None)
    assert plan.policy == zero3.ShardingPolicy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "advice"),
    [
        (3_700_000, ("--batch", "2")),  # the same numbers, in more micro-batches
        (1_700_000, ("--batch", "1", "--checkpointing")),
        (1_000_000, ("--batch", "1", "--checkpointing", "--dtype", "bf16", "--ranks", "4")),
        (10_000, ()),
    ],
)  # fmt: skip
def test_plan_advises_what_was_tried_and_fits(memory: int, advice: tuple[str, ...]) -> None:
    plan = plan_of(Case(optimizer="SGD", batch=3), 2, memory=memory)
    assert plan.fits is False and plan.advice == advice
    assert (plan.advised_bytes is None) is (not advice)
    assert plan.advised_bytes is None or plan.advised_bytes <= memory < plan.peak_bytes
    assert f"{plan}".count("does not fit") == 1


@pytest.mark.slow
def test_plan_with_room_gathers_once() -> None:
    """The policy that it proposes fits, and is not proposed where it would not."""
    roomy = plan_of(Case(), 2, memory="1GiB")
    assert roomy.policy == zero3.ShardingPolicy(reshard_after_forward=False)
    kept = plan_of(Case(policy=(("reshard_after_forward", False),)), 2)
    narrow = plan_of(Case(), 2, memory=kept.peak_bytes - 1)
    assert narrow.fits and narrow.policy == zero3.ShardingPolicy() and narrow.peak_bytes < kept.peak_bytes
    assert plan_of(Case(), 2, memory=kept.peak_bytes).policy == roomy.policy


ADAPTERS = Case(lora=4, batch=1, sequence=16)


@pytest.mark.slow
def test_plan_with_room_keeps_frozen_buffers_resident() -> None:
    """`resident_bytes`: all of them, as many as fit, or none where these are not worth it. Ranks hold what the plan says."""
    buffers = plan_of(ADAPTERS, 2).setup.trace().frozen_buffers
    assert plan_of(ADAPTERS, 2, memory="1GiB").policy == zero3.ShardingPolicy(resident_bytes=sum(buffers))
    memory = 1_600_000
    chosen = plan_of(ADAPTERS, 2, memory=memory).policy
    sums = list(accumulate(buffers))
    following = sums[sums.index(chosen.resident_bytes) + 1]
    few, more = (ADAPTERS._replace(policy=(("resident_bytes", nbytes),)) for nbytes in (chosen.resident_bytes, following))
    assert 0 < chosen.resident_bytes < sum(buffers) and plan_of(few, 2).peak_bytes <= memory < plan_of(more, 2).peak_bytes
    assert max(on_ranks(2, peak_on, few)) <= memory
    narrow = plan_of(ADAPTERS, 2, memory=plan_of(ADAPTERS, 2).peak_bytes + buffers[0])
    assert narrow.fits and narrow.policy == zero3.ShardingPolicy()


@pytest.mark.slow
def test_plan_advises_a_policy_that_spends_less() -> None:
    """Before anything that costs computation; and that is then the plan's policy."""
    spends = (("reshard_after_forward", False), ("stage", 2), ("resident_bytes", 5))
    plan = plan_of(Case(optimizer="SGD", batch=1, sequence=16, policy=spends), 2, memory=1_700_000)
    assert plan.advice == ("--stage", "3", "--no-keep", "--resident", "0") and plan.policy == zero3.ShardingPolicy()


@pytest.mark.slow
def test_plan_advises_fewer_replicas_before_more_ranks() -> None:
    case = Case(optimizer="SGD", batch=1, sequence=16, checkpointing=True, replicas=2, policy=(("param_dtype", torch.bfloat16),))
    whole, cut = plan_of(case, 4), plan_of(case._replace(replicas=1), 4)
    plan = plan_of(case, 4, memory=cut.peak_bytes)
    assert plan.advice == ("--mesh", "1x4") and plan.advised_bytes == cut.peak_bytes < whole.peak_bytes == plan.peak_bytes


@pytest.mark.slow
def test_plan_advises_quantize_for_what_is_frozen() -> None:
    """Where computation in bf16 and checkpoints do not do it."""
    config = LlamaConfig(**{**COMMON, "hidden_size": 256}, intermediate_size=688, num_key_value_heads=4, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    arguments: dict[str, Any] = {"ranks": 2, "batch": 1, "sequence": 16, "lora": 4, "device": "cpu"}
    plan = zero3.plan(model, memory=4_000_000, **arguments)
    assert plan.advice == ("--checkpointing", "--dtype", "bf16", "--quantize", "nf4")
    policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16)
    without = zero3.plan(model, policy=policy, checkpointing=True, **arguments)
    assert plan.advised_bytes is not None and plan.advised_bytes <= 4_000_000 < without.peak_bytes
    assert plan.policy == replace(policy, quantize=zero3.NF4())
    assert zero3.plan(model, policy=plan.policy, checkpointing=True, **arguments).peak_bytes == plan.advised_bytes


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def sharded() -> nn.Module:
    return zero3.shard(model_of(Case()), process_group=lonely(2))


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"ranks": 10**9}, ValueError, "ranks must be 65536 or less, found 1000000000"),  # an answer of each is held
        ({"sequence": 10**15}, ValueError, "sequence must be 8388608 or less"),
        ({"ranks": 0}, ValueError, "ranks must be 1 or more, found 0"),
        ({"ranks": 2.0}, TypeError, "ranks must be an integer"),
        ({"ranks": (2, 4)}, TypeError, "ranks must be an integer"),
        ({"batch": 0}, ValueError, "batch"),
        ({"sequence": True}, TypeError, "sequence"),
        ({"device": "tpu"}, ValueError, "cpu, cuda"),
        ({"memory": "24 apples"}, ValueError, "memory must be bytes such as 24GiB, .*found '24 apples'"),
        ({"memory": "9" * 400}, ValueError, "memory must be bytes such as 24GiB"),
        ({"memory": [24]}, TypeError, "memory must be bytes"),
        ({"lora": 0}, ValueError, "lora"),
        ({"lora": 10**20}, ValueError, "lora must be a rank from 1 to 65536"),
        ({"lora": {"r": 4}}, TypeError, "lora must be a rank, .* found dict"),
        ({"checkpointing": "no"}, TypeError, "checkpointing must be True or False, found 'no'"),
        ({"optimizer": "AdamW"}, TypeError, r"optimizer must be such as torch\.optim\.AdamW, found str"),
        ({"optimizer": len}, TypeError, "optimizer must make an optimizer from a list of parameters, found int"),
        ({"master_dtype": "bf16"}, TypeError, r"master_dtype must be a floating torch\.dtype or None, found 'bf16'"),
        ({"policy": {"stage": 2}}, TypeError, "ShardingPolicy"),
        ({"mesh": (2, 4)}, ValueError, "as many ranks as there are, 2, found 2 replicas of 4"),
        ({"mesh": (0, 2)}, ValueError, "0 replicas"),
        ({"mesh": "2x1"}, TypeError, "mesh must be"),
        ({"mesh": (True, 2)}, TypeError, "mesh must be"),
        ({"rank": 2}, ValueError, "0 to 1, found 2"),
        ({"rank": "0"}, TypeError, "rank must be an integer"),
        ({"chunked_head": "no"}, TypeError, "chunked_head must be True or False, found 'no'"),
        ({"tile": 0}, ValueError, "tile must be 1 or more, or None, found 0"),
        ({"tile": True}, TypeError, "tile must be an integer, found True"),
        ({"image_size": 224}, ValueError, "image_size=224 is of pictures, and there are none"),
        (
            {"optimizer": torch.optim.LBFGS},
            ValueError,
            r"no step of LBFGS can be planned for: .* raised TypeError: LBFGS\.step\(\) missing",
        ),
        ({"optimizer": torch.optim.Muon}, ValueError, "no step of Muon can be planned for: .* only supports 2D parameters"),
        ({"optimizer": torch.optim.Adafactor}, ValueError, "no step of Adafactor can be planned for"),
    ],
)
def test_plan_refuses_by_name(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        zero3.plan(model_of(Case()), **{"ranks": 2, **arguments})


@pytest.mark.filterwarnings("ignore:.*script_method")  # torch.compile imports it
def test_plans_are_the_same_wherever_they_are_made() -> None:
    """Where gradients are off, of a model that was compiled, and of one that keeps tensors beside its parameters."""
    peak = zero3.plan(model_of(Case()), ranks=2).peak_bytes
    with torch.no_grad():
        assert zero3.plan(model_of(Case()), ranks=2).peak_bytes == peak
    with torch.inference_mode():
        assert zero3.plan(model_of(Case()), ranks=2).peak_bytes == peak
    assert zero3.plan(torch.compile(model_of(Case())), ranks=2).peak_bytes == peak
    model = model_of(Case())
    model.seen = model.lm_head.weight.sum()
    assert zero3.plan(model, ranks=2).peak_bytes == peak + 512 and not model.seen.is_meta


def test_plan_names_a_model_that_returns_no_loss() -> None:
    model = model_of(Case())
    model.forward = lambda input_ids, **_: model.lm_head(model.model.embed_tokens(input_ids))
    with pytest.raises(ValueError, match="LlamaForCausalLM that is called with labels= has to return an object with a loss, found Tensor"):
        zero3.plan(model, ranks=2)


def test_plan_refuses_models_by_name() -> None:
    with pytest.raises(ValueError, match="sharded already"):
        zero3.plan(sharded(), ranks=2)
    with pytest.raises(ValueError, match="Plain has no config"):
        zero3.plan(Plain(), ranks=2)
    with pytest.raises(ValueError, match="nothing in this model trains"):
        zero3.plan(model_of(Case()).requires_grad_(False), ranks=2)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        zero3.plan("nowhere", ranks=2)
    with pytest.raises(TypeError, match=r"expected a model, or a directory .*, found LlamaConfig"):
        zero3.plan(model_of(Case()).config, ranks=2)
    with pytest.raises(ValueError, match="has adapters already"):
        zero3.plan(peft.get_peft_model(model_of(Case()), peft.LoraConfig(r=2)), ranks=2, lora=2)
    with pytest.raises(TypeError, match="policies must be several"):
        zero3.plan(model_of(Case()), ranks=2, sequence=8).compare(zero3.ShardingPolicy())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{ broken", "not a valid JSON file"),
        ("null", "TypeError"),
        ('{"model_type": "unheard-of"}', "unheard-of"),
        ('{"model_type": "vit"}', "Unrecognized configuration class"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "llama", "dtype": "float99"}', "float99"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 4}}', "quantization_config"),
        ('{"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}', "custom code"),
        ('{"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "code.Model"}}', "custom code"),
    ],
    ids=lambda text: text[:40],
)
def test_a_config_that_makes_no_model_is_one_short_line(config: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And code beside it is not run, nor is anybody asked whether to."""
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "code.py").write_text("raise SystemExit('was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at the terminal"))
    with pytest.raises(ValueError, match=rf"config\.json.*{says}") as caught:
        zero3.plan(tmp_path, ranks=2)
    assert len(f"{caught.value}") < 600 + len(f"{tmp_path}") and "\n" not in f"{caught.value}"


def test_a_layer_computes_on_meta_for_plans_alone() -> None:
    with pytest.raises(ValueError, match="can't compute on the meta device"):
        zero3.shard(model_of(Case()), device="meta")


@pytest.mark.parametrize(
    ("policy", "dtypes"),
    [
        ((), {"masters": "float32", "compute": "float32", "reduction": "float32"}),
        (
            (("param_dtype", torch.bfloat16), ("reduce_format", zero3.Int8())),
            {"masters": "float32", "compute": "bfloat16", "reduction": zero3.Int8().name},
        ),
    ],
    ids=["as they are", "mixed"],
)
def test_plan_says_the_dtypes_of_masters_compute_and_reduction(policy: tuple[tuple[str, Any], ...], dtypes: dict[str, str]) -> None:
    plan = plan_of(Case("T5", batch=1, sequence=4, policy=policy), 2)
    assert plan.dtypes == plan.as_dict()["dtypes"] == dtypes
    (row,) = [line.split(None, 1)[1] for line in str(plan).splitlines() if line.startswith("  dtypes ")]
    assert row == "; ".join(f"{what} {kind}" for what, kind in dtypes.items())


def test_plan_says_what_is_frozen_and_in_which_dtype_adapters_compute() -> None:
    plan = zero3.plan(
        model_of(Case()), ranks=2, batch=1, sequence=8, device="cpu", lora=2, policy=zero3.ShardingPolicy(quantize=zero3.NF4())
    )
    assert plan.dtypes["masters"] == "float32" and zero3.NF4().name in plan.dtypes["frozen"] and plan.dtypes["compute"] == "float32"


def test_a_plan_tells_a_terminal_what_it_is_at(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("T5", batch=1, sequence=4)
    plan_of(case, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    plan = plan_of(case, 2)
    lines = capsys.readouterr().err.split("\r\033[K")
    assert any("2 ranks, ShardingPolicy()" in line for line in lines) and any("micro-batches of 1 x 4 tokens" in line for line in lines)
    assert lines[-1] == "", "the line is empty again"
    plan.compare([zero3.ShardingPolicy(prefetch_depth=2)])
    assert "ShardingPolicy(prefetch_depth=2)" in capsys.readouterr().err


def test_a_plan_in_a_notebook_has_the_rows_of_its_table() -> None:
    plan = plan_of(Case("T5", batch=1, sequence=4), 2, memory="24 gb")
    cells = re.findall(r"<(?:td|caption)[^>]*>([^<]*)<", plan._repr_html_())
    assert "".join(str(plan).split()) == "".join(html.unescape("".join(cells)).split())


@pytest.mark.slow
def test_plan_says_how_memory_was_meant() -> None:
    case = Case("T5", batch=1, sequence=4)
    for memory, nbytes, meaning in (
        ("80GB", int(79.1 * 2**30), "what a card of 80 GB offers"),
        ("81GB", 81 * 10**9, "GB are 10^9 bytes"),
        ("80GiB", 80 * 2**30, ""),
    ):
        plan = plan_of(case, 1, memory=memory)
        assert plan.memory == nbytes and plan.memory_meant == plan.as_dict()["memory_meant"] == meaning
        assert (f"({meaning})" in str(plan)) is bool(meaning)


def test_plan_advises_quantize_for_what_quantize_selects() -> None:
    """Frozen experts are it, whatever else trains; another frozen parameter of three dimensions is not."""
    experts, grouped = model_of(Case("Qwen3Moe")), model_of(Case())
    for name, parameter in experts.named_parameters():
        parameter.requires_grad = ".experts." not in name
    grouped.groups = nn.Parameter(torch.ones(2, 8, 8), requires_grad=False)
    arguments: dict[str, Any] = {"ranks": 1, "batch": 1, "sequence": 16, "device": "cpu"}
    assert zero3.plan(experts, **arguments).setup.may_quantize and not zero3.plan(grouped, **arguments).setup.may_quantize


@pytest.mark.parametrize("chunked", [False, True])
def test_rotary_embeddings_that_need_values_are_told(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: object, **__: object) -> None:
        raise RuntimeError("unknown device type for autocast in get_autocast_dispatch_key_from_device_type")  # as with transformers 5.1

    model = model_of(Case("Llama"))
    monkeypatch.setattr(type(model.model.rotary_emb), "forward", forward)
    with pytest.raises(RuntimeError, match=r"needs transformers 5\.4 or later.*pip install"):
        zero3.plan(model, ranks=2, device="cpu", chunked_head=chunked)
