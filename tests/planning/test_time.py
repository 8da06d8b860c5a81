"""The time of a step: bounds that hold for any cluster, what more bandwidth, depth and fewer gathers do, and a benchmark's steps."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import zero3
from tests.support.planned import PLANS, Case, model_of
from zero3 import Cluster
from zero3.planning.absent import Awaited, Issued
from zero3.planning.cluster import cluster_of, replay
from zero3.planning.setup import Setup
from zero3.planning.trace import STEADY, repeated
from zero3.planning.work import Work, work_of

pytestmark = [pytest.mark.slow, *PLANS]

MACHINE = Cluster(flops=1e12, memory_bandwidth=1e11, link=1e9, ranks_per_node=1)


@cache
def step(ranks: int = 4, mesh: tuple[int, int] | None = None, lora: int | None = None, accumulation: int = 1, **policy: Any) -> list[Any]:
    """A step's events."""
    setup = Setup(
        source=model_of(Case()), ranks=ranks, batch=2, sequence=64, policy=zero3.ShardingPolicy(**policy), checkpointing=False,
        optimizer=torch.optim.SGD, accumulation=accumulation, lora=lora, device="cuda", mesh=mesh,
    )  # fmt: skip
    return setup.trace().events(2, 64, accumulation)


def received(events: list[Any], lane: str) -> int:
    """The bytes of a lane's transfers."""
    return sum(event.nbytes for event in events if isinstance(event, Issued) and event.lane == lane)


def alone(events: list[Any], cluster: Cluster, ranks: int) -> tuple[float, float]:
    """The seconds of all computation, and of all transfers."""
    computing = sum(cluster.computing(event) for event in events if isinstance(event, Work))
    return computing, sum(cluster.moving(event.nbytes, ranks) for event in events if isinstance(event, Issued))


rates = st.floats(1e6, 1e13)


@given(rates, rates, rates)
@settings(max_examples=50, deadline=None)
def test_a_step_takes_no_less_than_either_and_no_more_than_both(flops: float, memory: float, link: float) -> None:
    cluster = Cluster(flops=flops, memory_bandwidth=memory, link=link, ranks_per_node=1)
    computing, moving = alone(step(), cluster, 4)
    assert max(computing, moving) * (1 - 1e-9) <= replay(step(), cluster, 4) <= (computing + moving) * (1 + 1e-9)


@given(rates, st.floats(1.0, 100.0))
@settings(max_examples=50, deadline=None)
def test_a_faster_link_makes_no_step_slower(link: float, times: float) -> None:
    slow, fast = (replay(step(), replace(MACHINE, link=each), 4) for each in (link, times * link))
    assert fast <= slow * (1 + 1e-9)


def test_the_events_of_a_step_are_those_of_its_policy() -> None:
    """Two gathers of a layer, or one; each transfer is awaited once, after it was issued."""
    layers = {policy: [e for e in step(reshard_after_forward=policy) if isinstance(e, Issued)] for policy in (True, False)}
    fetches = {policy: sum(e.lane == "fetch" for e in issued) for policy, issued in layers.items()}
    backups = {policy: sum(e.lane == "backup" for e in issued) for policy, issued in layers.items()}
    assert backups[True] == backups[False] and fetches[False] == backups[False] < fetches[True]
    seen: set[int] = set()
    for event in step():
        if isinstance(event, Awaited):
            assert event.number in seen
            seen.remove(event.number)
        elif isinstance(event, Issued):
            seen.add(event.number)
    assert not seen


def test_accumulation_repeats_what_a_steady_micro_batch_does() -> None:
    """What is traced does not grow with it, and what comes out is as if all were traced. Seconds grow evenly from some number on."""
    for policy in ({}, {"stage": 2, "separate_backup_group": True}):
        made = planned(3, **policy)
        traced = made.trace()
        parts = traced.micro_batches(2, 64, STEADY)
        whole = [event for part in traced.micro_batches(2, 64, 6) for event in part]
        assert numbered(repeated(parts, 6)) == numbered(whole)
        assert numbered(traced.events(2, 64, 6)) == numbered(whole) and len(parts) == STEADY
        few, many, most = (made.but(accumulation=each).seconds(traced, MACHINE) or 0 for each in (12, 30, 1 << 16))
        one_queue = not policy.get("separate_backup_group")
        assert many == pytest.approx(replay(repeated(parts, 30), MACHINE, 4, one_queue=one_queue), rel=1e-3)
        assert most == pytest.approx(many + (many - few) / 18 * ((1 << 16) - 30), rel=1e-3)


def planned(accumulation: int, **policy: Any) -> Setup:
    return Setup(
        source=model_of(Case()), ranks=4, batch=2, sequence=64, policy=zero3.ShardingPolicy(**policy), checkpointing=False,
        optimizer=torch.optim.SGD, accumulation=accumulation, lora=None, device="cuda",
    )  # fmt: skip


def numbered(events: list[Any]) -> list[Any]:
    """Transfers counted from the first one on."""
    first = min(event.number for event in events if isinstance(event, Issued))
    return [replace(event, number=event.number - first) if isinstance(event, Issued | Awaited) else event for event in events]


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cpu"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (16, 64), (64, 16), (1, 8)])
def test_causal_attention_counts_what_it_computes(kernel: str, rows: int, columns: int) -> None:
    """Forward and backward, as pairs are counted one by one; without a mask all of them."""
    pairs = {False: rows * columns, True: int(torch.ones(rows, columns).tril().sum())}
    counted: dict[bool, list[int]] = {}
    for causal in (False, True):
        query, key, value = (torch.empty(2, 3, length, 8, device="meta", requires_grad=True) for length in (rows, columns, columns))
        with Counting() as counting:
            if kernel == "flash":
                made = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]
            elif kernel == "efficient":
                made = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal)[0]
            else:
                made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)[0]
            made.sum().backward()
        counted[causal] = counting.flops
        assert counted[causal] == [2 * products * 6 * pairs[causal] * 8 for products in (2, 5)]


def test_attention_with_grouped_heads_and_with_wider_keys_than_values() -> None:
    """And what another library calls attention is none of torch's."""
    aten = torch.ops.aten
    query, key, value = (torch.empty(2, heads, 16, 8, device="meta") for heads in (6, 2, 2))
    found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False)
    work = work_of(aten._scaled_dot_product_flash_attention.default, [query, key, value, 0.0, False], found)
    assert work is not None and work.flops == 2 * (2 * 6 * 16 * 16) * (8 + 8)
    query, key, value = (torch.empty(2, 3, 16, size, device="meta", requires_grad=True) for size in (12, 12, 4))
    with Counting() as counting:
        aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0].sum().backward()
    assert counting.flops == [2 * (2 * 3 * 16 * 16) * sizes for sizes in (12 + 4, 3 * 12 + 2 * 4)]
    with torch.library._scoped_library("mine", "FRAGMENT") as library:
        library.define("ring_attention(Tensor q) -> Tensor")
        library.impl("ring_attention", torch.clone, "Meta")
        work = work_of(torch.ops.mine.ring_attention.default, [query], query.clone())
        assert work is not None and work.flops == 0


class Counting(TorchDispatchMode):
    """The floating-point operations that are counted for each kernel which has any."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        work = work_of(func, args, result)
        self.flops += [work.flops] if work is not None and work.flops else []
        return result


def test_what_only_looks_at_memory_is_no_work() -> None:
    value = torch.empty(4, 4, device="meta")
    for func, args in ((torch.ops.aten._unsafe_view.default, (value, [16])), (torch.ops.aten.view.default, (value, [16]))):
        assert work_of(func, args, func(*args)) is None
    assert work_of(torch.ops.aten.neg.default, (value,), value) is not None


def test_adapters_are_cheaper_than_full_training() -> None:
    """They have no gradients of the weights beneath. `master_dtype` is theirs too; without it they are float32, as peft makes them."""
    config = LlamaConfig(
        hidden_size=3072, num_hidden_layers=2, num_attention_heads=24, num_key_value_heads=8, intermediate_size=8192, vocab_size=32000
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    machine = Cluster(flops=312e12, memory_bandwidth=2.04e12, link=25e9)
    arguments: dict[str, Any] = {"ranks": 1, "batch": 2, "sequence": 4096, "checkpointing": True, "cluster": machine}
    lora = LoraConfig(r=16, target_modules="all-linear")
    full = zero3.plan(model, **arguments)
    adapted, theirs = (zero3.plan(model, lora=lora, master_dtype=dtype, **arguments) for dtype in (torch.bfloat16, None))
    assert full.seconds and adapted.seconds and theirs.seconds and adapted.seconds < full.seconds
    assert adapted.seconds < theirs.seconds and adapted.by_cause["optimizer"] < theirs.by_cause["optimizer"]


def test_what_stays_is_not_fetched_again() -> None:
    """At stage 2 after a step alone; frozen parameters that are resident never. Adapters go on being fetched."""
    once = received(step(stage=2), "fetch")
    assert once == received(step(stage=2, accumulation=2), "fetch") == received(step(reshard_after_forward=False), "fetch")
    adapters, everything = (received(step(lora=4, resident_bytes=nbytes), "fetch") for nbytes in (1 << 30, 0))
    some = received(step(lora=4, resident_bytes=400_000), "fetch")
    assert 0 < adapters < everything / 16 and adapters < some < everything


def test_a_mesh_gathers_inside_a_replica_and_sums_over_replicas_once() -> None:
    """As many sums as reductions, each awaited after it was issued; and less over slow links between nodes than without replicas."""
    plain, mesh = step(4), step(4, (2, 2))
    row = step(2)
    assert [received(mesh, lane) for lane in ("fetch", "backup")] == [received(row, lane) for lane in ("fetch", "backup")]
    assert received(mesh, "replicas") == received(row, "backup") and not received(plain, "replicas")
    issued = [e.number for e in mesh if isinstance(e, Issued)]
    assert issued == sorted(issued) == sorted(e.number for e in mesh if isinstance(e, Awaited))
    nodes = replace(MACHINE, link=1e7, ranks_per_node=2, node_link=1e12)
    assert replay(mesh, nodes, 4, replicas=2) < replay(plain, nodes, 4)


def test_sums_over_replicas_cross_nodes_where_these_are_in_several() -> None:
    """Ranks that are `apart` by a node's size are each in a node of their own, and have its links to themselves."""
    nodes = Cluster(flops=1, memory_bandwidth=1, link=1e9, latency=1e-9, ranks_per_node=8, node_link=1e12)
    assert nodes.moving(10**9, 2, apart=8) == pytest.approx(1 / 0.85, rel=0.01)
    assert nodes.moving(10**9, 2, apart=4) == nodes.moving(10**9, 2), "both in one node"


def test_fetching_ahead_hides_transfers_and_one_rank_has_none() -> None:
    """With a link that takes as long as computation, prefetch_depth=1 is faster than 0."""
    computing, moving = alone(step(), MACHINE, 4)
    even = replace(MACHINE, link=MACHINE.link * moving / computing)
    assert replay(step(prefetch_depth=1), even, 4) < replay(step(prefetch_depth=0), even, 4)
    assert replay(step(1), MACHINE, 1) == pytest.approx(alone(step(1), MACHINE, 1)[0])


def test_plan_tells_seconds_and_compares_policies() -> None:
    policies = [zero3.ShardingPolicy(prefetch_depth=0), zero3.ShardingPolicy(), zero3.ShardingPolicy(reshard_after_forward=False)]
    slow = replace(MACHINE, link=1e8)  # what moves counts
    plan = zero3.plan(model_of(Case()), ranks=4, batch=2, sequence=64, cluster=slow)
    ranked = plan.compare(policies)
    assert [found.policy for found in ranked] == policies[::-1]
    assert [found.seconds for found in ranked] == sorted(found.seconds or 0 for found in ranked)
    assert plan.seconds in [found.seconds for found in ranked]
    assert "an estimate to compare settings by" in f"{plan}" and "replicas" not in f"{plan}"
    mesh = zero3.plan(model_of(Case()), ranks=4, mesh=(2, 2), batch=2, sequence=64, cluster=slow)
    assert "an estimate to compare settings by; with replicas mostly too long" in f"{mesh}"
    by_bytes = zero3.plan(model_of(Case()), ranks=4, batch=2, sequence=64).compare(policies)
    assert [found.policy for found in by_bytes] == policies and {found.seconds for found in by_bytes} == {None}
    assert by_bytes[1].peak_bytes == plan.peak_bytes and "tokens a second" in f"{plan}"


def test_a_cluster_is_checked() -> None:
    with pytest.raises(ValueError, match="flops must be a number above 0, found 0"):
        Cluster(flops=0, memory_bandwidth=1, link=1)
    with pytest.raises(ValueError, match="link must be a number above 0, found nan"):
        replace(MACHINE, link=math.nan)
    with pytest.raises(ValueError, match="reached is a share, at most 1, found 75"):
        replace(MACHINE, reached=75)
    with pytest.raises(ValueError, match="straight must be True or False, found 1"):
        replace(MACHINE, straight=1)
    with pytest.raises(ValueError, match="link must be"):
        replace(MACHINE, link="400Gbit")
    with pytest.raises(ValueError, match="h100"):
        cluster_of("abacus", 1e9)
    with pytest.raises(TypeError, match=r"zero3\.Cluster"):
        zero3.plan(model_of(Case()), ranks=2, cluster="h100")  # type: ignore[arg-type]


def test_collectives_cross_nodes_once() -> None:
    """Between nodes each byte enters a node over one of its links; inside, and on few ranks, the node's own links count."""
    nodes = Cluster(flops=1, memory_bandwidth=1, link=1e9, latency=1e-9, ranks_per_node=8, node_link=1e12)
    inside, across = nodes.moving(10**9, 8), nodes.moving(10**9, 16)
    assert across > 10 * inside and nodes.moving(10**9, 1) == 0.0
    assert across == pytest.approx(1 / 8 * 8 / 15 / 0.85, rel=0.01)  # 8 of 15 slices come from the other node, over eight links
    straight = replace(nodes, straight=True).moving(10**9, 16)  # eight times over, as each of eight ranks takes its own
    assert straight == pytest.approx(8 * across, rel=0.01) and replace(nodes, straight=True).moving(10**9, 8) == inside
    assert replace(nodes, spread=0.05).slowest(64) > replace(nodes, spread=0.05).slowest(2) > nodes.slowest(64) == 1.0


@pytest.mark.slow
def test_the_fabric_benchmarks_steps_are_told_within_8_percent() -> None:
    """Those of the rates that were not used for fitting too. The null hypothesis misses most by more."""
    from benchmarks.plan import fabric

    step, steps = fabric.events(), fabric.measured()
    assert sorted(each.gbits for each in steps) == [0.5, 1, 2, 3, 5, 10]
    host_cost = fabric.fit(step, steps)
    errors = {each.gbits: abs(fabric.predicted(step, each, host_cost) / each.seconds - 1) for each in steps}
    assert max(errors.values()) < 0.08
    nulls = {each.gbits: abs(fabric.null(step, each) / each.seconds - 1) for each in steps}
    assert sum(errors[gbits] < nulls[gbits] for gbits in errors) >= 4


@pytest.mark.slow
def test_policies_and_meshes_are_ranked_as_the_fabric_benchmark_measured_them() -> None:
    """All pairs whose measured steps differ by more than 8 %. With two ranks at an end and one micro-batch also times, within 10 %."""
    from benchmarks.plan import fabric, ranking

    host_cost = fabric.fit(fabric.events(), fabric.measured())
    runs = ranking.measured()
    assert [(run.gbits, run.at_an_end, run.micro_batches) for run in runs] == [
        (0.1, 1, 1),
        (1.0, 2, 1),
        (1.0, 2, 4),
        (0.25, 2, 1),
        (0.25, 2, 4),
    ]
    assert sum(len(ranking.pairs(run.systems)) for run in runs) == 19
    for run in runs:
        told = {system: ranking.predicted(run, system, host_cost) for system in run.systems}
        for fast, slow in ranking.pairs(run.systems):
            assert told[fast] < told[slow], f"{fast}, {slow} at {run}"
        if run.at_an_end > 1 and run.micro_batches == 1:
            assert told == pytest.approx(run.systems, rel=0.1)
