"""A plan's peak against what ranks of a real group hold: the bytes of their living tensors, counted at each operation of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import zero3
from tests.support.live import LiveBytes, lonely
from tests.support.planned import CAUSES, FAMILIES, PLANS, Case, model_of, norms, peak_on, plan_of
from tests.support.processes import on_ranks

pytestmark = [pytest.mark.slow, *PLANS]

BF16 = {"param_dtype": torch.bfloat16}
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def on(world_size: int, family: str = "Llama", policy: dict[str, Any] | None = None, **more: Any) -> Any:
    case = Case(family, policy=tuple((policy or {}).items()), **more)
    name = "-".join([family, str(world_size), *map(str, [*(policy or {}).items(), *more.items()])])
    return pytest.param(world_size, case, id=name.replace("torch.", "").replace(" ", ""))


CASES = [
    *(on(1 + number % 3, family) for number, family in enumerate(FAMILIES, 1)),
    on(1, policy=MIXED),
    on(1, checkpointing=True, lora=4),
    on(2, lora=4),
    on(2, policy={"stage": 1}, accumulation=2),
    on(2, policy={"stage": 2}, accumulation=2),
    on(2, policy={"reshard_after_forward": False}, optimizer="SGD"),
    on(2, policy={"prefetch_depth": 0}, optimizer="SGD"),
    on(2, policy={"quantize": zero3.NF4()}, lora=4),
    on(3, policy={"quantize": zero3.Int8()}, lora=4, checkpointing=True, master_dtype=torch.bfloat16),
    on(2, policy={"gather_format": zero3.Int8(), "reduce_format": zero3.Int8()}),
    on(3, policy={"gather_format": zero3.Float8(), "reduce_format": zero3.Int8(stochastic=True), **BF16}, accumulation=2),
    on(3, policy=BF16, checkpointing=True),
    on(3, policy=MIXED, optimizer="SGD", batch=1, sequence=16),
    on(3, policy={"transactional": True, "prefetch_depth": 2}, accumulation=2),
    on(3, policy={"dynamic": True}),
    on(2, policy={"separate_backup_group": True, **MIXED}),
    on(2, policy={"ignored": norms}, accumulation=2),
    on(2, policy={"grad_dtype": torch.float32, **BF16}),
    on(2, policy={"group_adapters": False}, lora=4, checkpointing=True),
    on(2, policy={"resident_bytes": 400_000}, lora=4),
    on(3, policy={"resident_bytes": 100_000, "quantize": zero3.NF4(), **BF16}, lora=4, checkpointing=True),
    on(2, replicas=2),
    on(3, replicas=3, policy=MIXED),
    on(4, replicas=2, policy=MIXED, accumulation=2),
    on(4, master_dtype=torch.bfloat16),
    on(2, policy={"master_dtype": torch.float32}, master_dtype=torch.bfloat16),
    on(1, fused=True, batch=1, sequence=16),
    on(2, fused=True, batch=1, sequence=16),
    on(2, fused=True, optimizer="SGD", lora=4),
    on(2, "Mamba2", batch=1, sequence=16),
    on(2, "Mamba2", checkpointing=True, policy=BF16),
    on(4, "Qwen3Moe", checkpointing=True, policy=BF16),
    on(4, "T5", checkpointing=True, accumulation=3),
    on(4, "NeoX", lora=4, checkpointing=True, policy=BF16),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_plan_is_within_2_percent_of_what_ranks_hold(world_size: int, case: Case) -> None:
    for rank, found in enumerate(on_ranks(world_size, peak_on, case)):
        plan = plan_of(case, world_size, rank=rank)
        assert plan.peak_bytes == pytest.approx(found, rel=0.02), f"rank {rank}: {plan.peak_bytes / found - 1:+.2%}"
        assert sum(plan.by_cause.values()) == plan.peak_bytes and tuple(plan.by_cause) == CAUSES
        assert plan.unknown == (0, 0)


def test_plan_of_two_ranks() -> None:
    """The one case that `make test` has."""
    plan = plan_of(Case(), 2)
    for found in on_ranks(2, peak_on, Case()):
        assert plan.peak_bytes == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("where", ["attribute", "list", "dict"])
def test_plan_counts_tensors_that_modules_hold_beside_their_parameters(where: str) -> None:
    """And computes with them."""

    def built() -> nn.Module:
        model = model_of(Case())
        norm, table = model.model.norm, torch.full((4000, model.config.hidden_size), 1e-6)
        held = {"attribute": table, "list": [table], "dict": {"tables": (table, "beside")}}[where]
        found: Callable[[Any], Tensor] = {"attribute": lambda held: held, "list": itemgetter(0), "dict": lambda h: h["tables"][0]}[where]

        class Norm(type(norm)):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = super().forward(x + found(self.held)[: x.shape[1]])
                return out

        norm.__class__, norm.held = Norm, held
        return model

    with LiveBytes() as live:
        model = zero3.shard(built(), process_group=lonely(2))
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))

        def step() -> None:
            ids = torch.randint(10, (2, 48))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        found = live.peak_of(step)
    plan = zero3.plan(built(), ranks=2, batch=2, sequence=48, device="cpu")
    assert plan.peak_bytes == pytest.approx(found, rel=0.04)  # on one rank without others nothing is written to be sent
    assert plan.by_cause["chunks"] > 4000 * model.config.hidden_size * 4


def _holding_itself(table: Tensor) -> list[Any]:
    held: list[Any] = [table]
    held.append(held)
    return held


@pytest.mark.parametrize(
    ("held", "tables"),
    [
        (lambda table: [table, {"again": table}, (table[1:],), table.t()], 1),
        (lambda table: list(table.split(100)), 1),
        (lambda table: table[:1].expand(4000, -1), 1),
        (lambda table: torch.zeros(1, 1).expand(10**6, 10**3), 0),
        (_holding_itself, 1),
        (lambda table: table.to_sparse(), 0),
        (lambda table: [table.to_sparse()], 0),
        (lambda table: [TwoTensor(table, table)], 1),
    ],
    ids=[
        "several times",
        "in pieces",
        "a part",
        "expanded",
        "in a list that holds itself",
        "sparse",
        "sparse in a list",
        "of another class",
    ],
)
def test_what_modules_hold_takes_the_memory_that_it_takes(held: Callable[[Tensor], Any], tables: int) -> None:
    model, table = model_of(Case()), torch.ones(4000, 8)
    before = zero3.plan(model, ranks=2).by_cause["chunks"]
    model.held = held(table)
    assert zero3.plan(model, ranks=2).by_cause["chunks"] == pytest.approx(before + tables * table.nbytes, abs=512)


def test_plan_of_quantised_experts_at_home() -> None:
    """Chunks are as large as without, but for the tables of NF4 (69 kB) of more layers. Nothing of experts is gathered."""
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    plans = [
        zero3.plan(
            model_of(Case("Qwen3Moe")), ranks=2, sequence=16, device="cpu", lora=lora,
            policy=zero3.ShardingPolicy(quantize=zero3.NF4(), expert_parallel=at_home),
        )
        for at_home in (True, False)
    ]  # fmt: skip
    home, gathered = plans
    blocks = model_of(Case("Qwen3Moe")).config.num_hidden_layers
    assert 0 <= home.by_cause["chunks"] - gathered.by_cause["chunks"] < 70_000 * blocks
    assert home.by_cause["full_buffers"] < gathered.by_cause["full_buffers"]


def test_plan_of_experts_at_home() -> None:
    """Tokens are routed by values, which a plan does not have: about as many go everywhere. All to one rank is the upper end."""
    case = Case("Qwen3Moe", policy=(("expert_parallel", True),))
    for rank, found in enumerate(on_ranks(2, peak_on, case)):
        plan = plan_of(case, 2, rank=rank)
        assert plan.peak_bytes == pytest.approx(found, rel=0.03)
        low, high = plan.unknown
        assert low == 0 < high
        assert "all tokens to one rank's experts" in str(plan)
        roomy, tight = (plan_of(case, 2, rank=rank, memory=plan.peak_bytes + more) for more in (high, high // 2))
        assert roomy.fits and not tight.fits


def test_plan_knows_that_ranks_differ_on_gloo_alone() -> None:
    """There a rank holds those gradients for a moment of which a part belongs to it."""
    case = Case("Qwen3Moe", checkpointing=True, policy=tuple(BF16.items()))
    on_gloo = {plan_of(case, 4, rank=rank).peak_bytes for rank in range(4)}
    assert len(on_gloo) > 1 and max(on_gloo) < 1.05 * min(on_gloo)
    assert len({zero3.plan(model_of(case), ranks=4, sequence=48, rank=rank).peak_bytes for rank in range(4)}) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plan_of_a_mesh_cuts_chunks_over_one_replica(device: str) -> None:
    """To the ranks of a replica it comes to more chunks; and the sums over replicas need no memory but the gradient's own."""
    plain, mesh = (zero3.plan(model_of(Case()), ranks=8, sequence=16, mesh=shape, device=device) for shape in (None, (4, 2)))
    row = zero3.plan(model_of(Case()), ranks=2, sequence=16, device=device)
    assert mesh.by_cause["chunks"] == row.by_cause["chunks"] > 3 * plain.by_cause["chunks"]
    assert "rank 0 of 8 (4 replicas of 2 shards)" in f"{mesh}"
    sums, own = (max(moment.by_cause["gradients"] for moment in plan.moments if moment.phase == "backward") for plan in (mesh, row))
    assert 0.99 * own < sums <= own


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("policy", [zero3.ShardingPolicy(), zero3.ShardingPolicy(**MIXED), zero3.ShardingPolicy(grad_dtype=torch.float64)])
def test_plan_and_report_agree(policy: zero3.ShardingPolicy, replicas: int) -> None:
    """On chunks, on gradients when all have landed, and on the bounds of what is full at once."""
    ranks = 2 * replicas
    plan = zero3.plan(
        model_of(Case()), ranks=ranks, batch=1, sequence=8, policy=policy, device="cpu", optimizer=torch.optim.SGD, mesh=(replicas, 2)
    )
    report = zero3.report(zero3.shard(model_of(Case()), policy=policy, process_group=lonely(2, replicas)))
    stored = sum(report.chunks.values())
    small = 2048  # what released parameters show, and buffers
    at_step = plan.moments[-1].by_cause
    assert stored <= plan.by_cause["chunks"] <= stored + small and stored <= at_step["chunks"] <= stored + small
    reached = 8 * len(list(model_of(Case()).parameters()))  # behind a gradient that has landed: at most 8 bytes for each parameter
    assert report.gradients <= at_step["gradients"] <= report.gradients + reached
    assert (plan.parameters, plan.trainable) == (report.parameters, report.parameters)
    assert 0 < max(moment.by_cause["full_buffers"] for moment in plan.moments) <= report.full_parameters


def test_plan_knows_the_causes_by_their_sizes() -> None:
    """Chunks and moments of the optimizer are a W-th of the model; a step of more ranks holds the same activations and logits."""
    two, eight = (plan_of(Case(), ranks) for ranks in (2, 8))
    numel = two.parameters
    for plan, ranks in ((two, 2), (eight, 8)):
        assert plan.by_cause["chunks"] == pytest.approx(4 * numel / ranks, rel=0.02)
        assert plan.moments[0].by_cause["optimizer"] == pytest.approx(8 * numel / ranks, rel=0.02)
        words = Case().batch * Case().sequence * model_of(Case()).config.vocab_size * 4
        assert max(moment.by_cause["logits"] for moment in plan.moments) >= words
    assert [moment.name for moment in two.moments] == [moment.name for moment in eight.moments]
    before, after = ("forward of lm_head", "backward of model.layers.3")  # of the same operations, whatever is sent meanwhile
    ends = [{moment.name: moment.by_cause["activations"] for moment in plan.moments} for plan in (two, eight)]
    assert ends[0][before] == ends[1][before] and ends[0][after] == ends[1][after]


def test_plan_for_cuda_rounds_and_names_what_it_does_not_know() -> None:
    cpu, cuda = plan_of(Case(), 2), zero3.plan(model_of(Case()), ranks=2, batch=2, sequence=48, optimizer=torch.optim.SGD)
    assert all(nbytes % 512 == 0 for nbytes in cuda.by_cause.values())
    assert 0 < cuda.unknown[0] < cuda.unknown[1]
    flat, sent = (max(moment.by_cause["transfers"] for moment in plan.moments) for plan in (cuda, cpu))
    assert flat > sent > 0, "gloo sends from where gradients are"


@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "math (float32 and grouped heads)")], ids=["bf16", "fp32"]
)
def test_plan_tells_the_kernel_of_attention(dtype: torch.dtype, kernel: str) -> None:
    """In fp32 no fused kernel of CUDA's takes grouped heads, and the scores of all tokens are saved."""
    config = FAMILIES["Llama"]()
    plan = zero3.plan(model_of(Case(master_dtype=dtype)), ranks=2, sequence=64)
    assert plan.attention == {kernel: config.num_hidden_layers}


def test_plan_leaves_the_model_alone() -> None:
    model = model_of(Case())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.eval()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    zero3.plan(model, ranks=2, sequence=16, lora=4, checkpointing=True)
    assert torch.rand(1).equal(expected)
    assert not model.training and not zero3.is_sharded(model)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items()) and len(before) == len(model.state_dict())


def test_plan_keeps_to_itself_what_the_log_says_of_a_model_that_is_sharded(caplog: pytest.LogCaptureFixture) -> None:
    """Here: enable_input_require_grads, which transformers calls with checkpointing."""
    zero3.plan(model_of(Case()), ranks=2, sequence=32, device="cpu", lora=4, checkpointing=True)
    assert not caplog.records
    logging.getLogger("zero3").warning("heard")
    assert caplog.messages == ["heard"]


def test_plan_logs_once_that_masters_are_in_16_bits(caplog: pytest.LogCaptureFixture) -> None:
    """Other policies are planned by steps of their own, each of which is the first of an optimizer."""
    found = zero3.plan(model_of(Case()).bfloat16(), ranks=2, batch=1, sequence=8)
    found.compare([zero3.ShardingPolicy(stage=2), zero3.ShardingPolicy()])
    assert len([text for text in caplog.messages if "smaller than half of the last bit" in text]) == 1
    zero3.plan(model_of(Case()).bfloat16(), ranks=2, batch=1, sequence=8)
    assert len(caplog.messages) == 2, "another plan says it again"


def test_plan_of_a_model_of_peft_is_that_of_lora() -> None:
    import peft

    model = peft.get_peft_model(model_of(Case()), peft.LoraConfig(r=4))
    by_hand = zero3.plan(model, ranks=2, sequence=32, device="cpu")
    assert by_hand.by_cause == zero3.plan(model_of(Case()), ranks=2, sequence=32, device="cpu", lora=4).by_cause
    assert by_hand.trainable < by_hand.parameters / 16


@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_plan_of_a_fused_optimizer_has_no_temporaries(optimizer: str) -> None:
    """On GPUs the others step all parameters together by default. And torch's own check is as it was."""
    with torch.device("meta"):
        model = model_of(Case())
    arguments: dict[str, Any] = {"ranks": 1, "batch": 1, "sequence": 4}
    kind = getattr(torch.optim, optimizer)
    together, fused = (zero3.plan(model, optimizer=made, **arguments) for made in (kind, partial(kind, fused=True)))
    step = [moment for moment in fused.moments if moment.phase == "optimizer's step"][-1]
    assert fused.peak_bytes <= together.peak_bytes and step.peak <= 1.02 * (step.by_cause["chunks"] * 2 + step.by_cause["optimizer"])
    weight = nn.Parameter(torch.ones(2, device="meta"))
    weight.grad = torch.ones(2, device="meta")
    with pytest.raises(RuntimeError, match="fused=True"):
        kind([weight], lr=0.1, fused=True).step()


def vision() -> nn.Module:
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    tower = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 16,
        "patch_size": 8,
    }
    config = Gemma3Config(text_config={**text, "intermediate_size": 128, "vocab_size": 300}, vision_config=tower, mm_tokens_per_image=4)
    with torch.device("meta"):
        return Gemma3ForConditionalGeneration(config)


def test_plan_says_that_it_has_no_images() -> None:
    """In the table, in the attribute, in JSON; with adapters too. A model of text says nothing."""
    for more in ({}, {"lora": LoraConfig(r=4, target_modules=["q_proj"])}):
        plan = zero3.plan(vision(), ranks=1, sequence=16, device="cpu", **more)
        assert plan.unplanned.startswith("without images: the parameters of 5 layers (") and "vision_tower" in plan.unplanned
        assert plan.unplanned in str(plan) and plan.as_dict()["unplanned"] == plan.unplanned
    plain = plan_of(Case(), 1)
    assert plain.unplanned == "" and "not planned" not in str(plain)
