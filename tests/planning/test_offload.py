"""Plans for `offload=`: what memory holds of chunks that rest elsewhere, and what rests there, against ranks of a real group."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.planned import CAUSES, PLANS, Case, model_of, peak_and_files_on, plan_of
from tests.support.processes import on_ranks
from zero3.planning.absent import AbsentRanks
from zero3.planning.watching import _held_by

pytestmark = PLANS

MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def on(world_size: int, policy: dict[str, Any] | None = None, *, fast: bool = False, **more: Any) -> Any:
    name = "-".join([str(world_size), *map(str, [*(policy or {}).items(), *more.items()])]).replace("torch.", "").replace(" ", "")
    return pytest.param(
        world_size, Case(policy=tuple((policy or {}).items()), **more), id=name, marks=() if fast else pytest.mark.slow
    )  # fmt: skip


CASES = [
    on(1, optimizer="SGD"),
    on(1, MIXED),
    on(1, batch=1, sequence=8),
    on(2, fast=True),
    on(2, MIXED, accumulation=2),
    on(2, {"quantize": zero3.NF4()}, lora=4),
    on(2, {"stage": 1}, accumulation=2),
    on(2, {"stage": 2}, accumulation=2),
    on(2, {"grad_dtype": torch.float32, "param_dtype": torch.bfloat16}),
    on(2, {"reduce_format": zero3.Int8()}),
    on(3, checkpointing=True, family="Qwen2Moe"),
    on(3, {"transactional": True}, accumulation=2),
    on(2, {"resident_bytes": 400_000}, lora=4),
    on(4, MIXED, replicas=2),
]


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_plan_with_files_is_within_2_percent_of_what_ranks_hold(world_size: int, case: Case, tmp_path: Path) -> None:
    case = case._replace(policy=(*case.policy, ("offload", str(tmp_path))))
    for rank, (found, files) in enumerate(on_ranks(world_size, peak_and_files_on, case)):
        plan = plan_of(case, world_size, rank=rank)
        assert plan.peak_bytes == pytest.approx(found, rel=0.02), f"rank {rank}: {plan.peak_bytes / found - 1:+.2%}"
        assert plan.offloaded_bytes == pytest.approx(files, rel=0.02), f"rank {rank}: {plan.offloaded_bytes / files - 1:+.2%}"
        assert sum(plan.by_cause.values()) == plan.peak_bytes and tuple(plan.by_cause) == CAUSES
    assert not list(tmp_path.iterdir())


def test_plan_and_report_agree_on_what_is_offloaded() -> None:
    """And no directory is needed on the machine that plans."""
    policy = zero3.ShardingPolicy(offload="/nowhere/at/all", **MIXED)
    report = zero3.report(zero3.shard(model_of(Case()), device="meta", policy=policy, process_group=AbsentRanks(2, pieces=True)))
    plan = zero3.plan(model_of(Case()), ranks=2, sequence=8, policy=policy, device="cpu", optimizer=torch.optim.SGD)
    assert report.rests == ("files",)
    assert plan.offloaded_bytes == sum(report.chunks.values()) + report.gradients
    assert plan.by_cause["chunks"] <= 2048, "what released parameters show, and buffers"
    assert "rests in files in /nowhere/at/all" in f"{plan}" and plan.as_dict()["offloaded_bytes"] == plan.offloaded_bytes


def test_later_chunks_of_a_plan_are_on_paper_too() -> None:
    policy = zero3.ShardingPolicy(offload="/nowhere/at/all")
    model = nn.Sequential(zero3.Zero3Layer(nn.Linear(4, 6), device="meta", policy=policy, process_group=AbsentRanks(2, pieces=True)))
    assert len(zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 2})) == 2
    assert zero3.report(model).rests == ("files",)


def test_the_hosts_memory_is_other_memory_for_a_gpu_alone() -> None:
    policy = zero3.ShardingPolicy(offload="cpu")
    on_cpu, plain = (
        zero3.plan(model_of(Case()), ranks=2, sequence=8, policy=each, device="cpu") for each in (policy, zero3.ShardingPolicy())
    )
    assert (on_cpu.by_cause, on_cpu.offloaded_bytes) == (plain.by_cause, 0)
    on_gpu = zero3.plan(model_of(Case()), ranks=2, sequence=8, policy=policy)
    assert on_gpu.by_cause["optimizer"] == 0 and on_gpu.offloaded_bytes > 4 * 4 * on_gpu.parameters // 2
    assert "rests in host memory" in f"{on_gpu}"


def test_a_step_is_made_chunk_by_chunk(tmp_path: Path) -> None:
    """Temporary memory of the optimizer's is that of one chunk, and its state is no memory at all."""
    plans = [
        zero3.plan(model_of(Case()), ranks=1, sequence=8, policy=policy, device="cpu", optimizer=partial(torch.optim.AdamW, foreach=True))
        for policy in (zero3.ShardingPolicy(), zero3.ShardingPolicy(offload=str(tmp_path)))
    ]
    together, by_turns = (plan.moments[-1].by_cause["optimizer"] for plan in plans)
    assert together > 2 * 4 * plans[0].parameters, "state, and what the step makes"
    assert 0 < by_turns < 4 * plans[0].parameters


CLUSTER = zero3.Cluster(flops=1e12, memory_bandwidth=1e11, link=1e9)


@pytest.mark.slow
def test_the_time_of_offload_is_not_told() -> None:
    """Nor do such policies come before others because they have none."""
    plan = zero3.plan(model_of(Case()), ranks=2, sequence=8, policy=zero3.ShardingPolicy(offload="cpu"), cluster=CLUSTER)
    assert plan.seconds is None and "not known" in f"{plan}"
    found = plan.compare([plan.policy, zero3.ShardingPolicy()])
    assert [each.policy.offload for each in found] == [None, "cpu"] and found[0].seconds is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "more", "advice"),
    [
        (None, {}, ("--offload", "cpu")),
        ((2, 2), {}, ("--mesh", "1x4", "--offload", "cpu")),
        (None, {"gather_format": zero3.Int8()}, ("--offload", "cpu")),
    ],
    ids=["", "mesh", "gather_format"],
)
def test_plan_advises_offload_before_more_gpus(mesh: tuple[int, int] | None, more: dict[str, Any], advice: tuple[str, ...]) -> None:
    """Where fewer replicas alone do not do it."""
    policy = zero3.ShardingPolicy(**MIXED, **more)
    arguments: dict[str, Any] = {"ranks": 4 if mesh else 2, "sequence": 16, "policy": policy, "checkpointing": True}
    unknown = zero3.plan(model_of(Case()), mesh=mesh, **arguments).unknown[1]
    away = zero3.plan(model_of(Case()), **{**arguments, "policy": replace(policy, offload="cpu")})
    plan = zero3.plan(model_of(Case()), mesh=mesh, memory=int(1.01 * away.peak_bytes) + unknown, **arguments)
    assert plan.fits is False and plan.advice == advice
    assert plan.policy == replace(policy, offload="cpu") and plan.advised_bytes == away.peak_bytes


@pytest.mark.slow
def test_plan_with_room_does_without_offload(tmp_path: Path) -> None:
    """And where a rank can't hold its chunks, the policy stays."""
    policy = zero3.ShardingPolicy(offload=str(tmp_path))
    arguments: dict[str, Any] = {"ranks": 2, "sequence": 16, "device": "cpu"}
    needed, inside = (zero3.plan(model_of(Case()), policy=each, **arguments).peak_bytes for each in (policy, zero3.ShardingPolicy()))
    assert zero3.plan(model_of(Case()), policy=policy, memory="1GiB", **arguments).policy == zero3.ShardingPolicy(
        reshard_after_forward=False
    )
    narrow = zero3.plan(model_of(Case()), policy=policy, memory=inside - 1, **arguments)
    assert needed < inside and narrow.fits and narrow.policy.offload == str(tmp_path)


def test_watch_counts_what_rests_in_files_as_no_memory(tmp_path: Path) -> None:
    def held(offload: str | None) -> int:
        blocks = [nn.Linear(8, 8), nn.Linear(8, 8)]
        model = nn.Sequential(*(zero3.Zero3Layer(block, policy=zero3.ShardingPolicy(offload=offload)) for block in blocks))
        return _held_by(model, torch.device("cpu"))

    assert (held(None), held(str(tmp_path))) == (2 * 4 * 72, 0)
