"""`Plan.watch`: a run that leaves its plan says so once, with both numbers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import zero3
from tests.support.processes import Rank, on_ranks
from zero3.planning.watching import LOADED, LOADED_ON_DEVICE, Heap, Watch

PLANNED = 10**10
HELD = 4 * (8 * 8 + 8)  # bytes of a model of one layer


@dataclass
class Told:
    """A counter that tells what the test says. Other tensors of the process take `others`."""

    keeps_peak: bool = True
    others: int = 12345
    found: int = 0
    asked: list[str] = field(default_factory=list)

    def now(self) -> int:
        return HELD + self.others

    def peak(self) -> int:
        self.asked.append("peak")
        return self.found + self.others

    def forget_peak(self) -> None:
        self.asked.append("forget")


def model_of_one_layer() -> nn.Module:
    return zero3.shard(nn.Sequential(nn.Linear(8, 8)), layers=nn.Linear)


def steps(model: nn.Module, count: int) -> list[str]:
    """What so many forwards say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(count):
            model(torch.zeros(1, 8))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("keeps_peak", [True, False])
def test_watch_says_once_what_a_run_takes_more(keeps_peak: bool) -> None:
    counter = Told(keeps_peak, found=int(1.03 * PLANNED))
    model = model_of_one_layer()
    Watch(model, PLANNED, PLANNED, 1, counter)
    assert steps(model, 1) == [], "a plan is of the steps after the first"
    (said,) = steps(model, 20)
    assert "rank 0: this run has left its plan" in said and "9.59 GiB" in said and "9.31 GiB were planned (+3%)" in said
    assert len(counter.asked) < 5, "then it looks no more"


@pytest.mark.parametrize("keeps_peak", [True, False])
def test_watch_says_nothing_within_2_percent(keeps_peak: bool) -> None:
    model = model_of_one_layer()
    counter = Told(keeps_peak, found=int(1.019 * PLANNED))
    Watch(model, PLANNED, PLANNED, 1, counter)
    assert steps(model, 20) == []
    counter.found = int(0.981 * PLANNED)
    assert steps(model, 20) == []


def test_watch_says_after_some_steps_what_a_run_takes_less() -> None:
    model = model_of_one_layer()
    Watch(model, PLANNED, PLANNED, 1, Told(found=PLANNED // 2))
    assert steps(model, 8) == [] and "(-50%)" in steps(model, 1)[0] and steps(model, 20) == []


def test_watch_counts_what_modules_hold_beside_their_parameters() -> None:
    """As the plan does."""
    model, table = model_of_one_layer(), torch.empty(2**26, dtype=torch.uint8)
    model.held = {"tables": [table]}
    planned = 2 * table.nbytes
    Watch(model, planned, planned, 1, Told(others=12345 + table.nbytes, found=planned - table.nbytes))
    assert steps(model, 20) == []


def test_watch_counts_the_memory_of_views_once() -> None:
    """They, and sparse tensors, are no memory of their own."""
    model, table = model_of_one_layer(), torch.empty(2**26, dtype=torch.uint8)
    model.held = [table, table[1:], *table.split(2**20), torch.zeros(1, 1).expand(10**6, 10**3), torch.ones(3).to_sparse()]
    planned = 2 * table.nbytes
    Watch(model, planned, planned, 1, Told(others=12345 + table.nbytes, found=planned - table.nbytes))
    assert steps(model, 20) == []


def test_watch_looks_at_peaks_of_steps_of_training_alone() -> None:
    """Rarely, as no peak is lost; after the first step, whose loading may have taken more; not at each micro-batch, not in eval."""
    model, counter = model_of_one_layer(), Told(found=PLANNED)
    Watch(model, PLANNED, 0, 2, counter)
    model.eval()
    steps(model, 5)
    model.train()
    with torch.no_grad():
        steps(model, 5)
    steps(model, 2)
    assert counter.asked == []
    steps(model, 2)
    assert counter.asked == ["forget"]
    steps(model, 28)
    assert counter.asked == ["forget", "peak", "peak", "peak"], "before steps 2, 4 and 8, counted from 0"


@pytest.mark.parametrize("keeps_peak", [True, False])
def test_watch_allows_for_what_a_first_step_loads(keeps_peak: bool) -> None:
    """Python and libraries on hosts; on GPUs the workspaces of CUDA's."""
    model, counter = model_of_one_layer(), Told(keeps_peak, found=1020 + (LOADED_ON_DEVICE if keeps_peak else LOADED))
    Watch(model, 1000, 1000, 1, counter)
    assert steps(model, 20) == []
    counter.found += 1
    assert len(steps(model, 20)) == 1


def test_watch_counts_what_the_c_library_has_given_out() -> None:
    counter = Heap()
    before = counter.now()
    tensor = torch.empty(2**22, dtype=torch.uint8)
    assert counter.now() - before == pytest.approx(tensor.nbytes, rel=0.05)
    del tensor
    assert counter.now() - before < 2**20


def run(rank: Rank, planned: int, batch: int, memory: str | None = None, width: int = 128, directory: str | None = None) -> list[str]:
    """What is said of a run with micro-batches of `batch` and the plan's policy, whose plan has `planned`."""
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=2, num_attention_heads=4, vocab_size=2048, intermediate_size=344, tie_word_embeddings=False
    )
    model = AutoModelForCausalLM.from_config(config)
    model.train()
    given = zero3.ShardingPolicy(offload=directory)
    plan = zero3.plan(
        model, ranks=rank.world_size, batch=planned, sequence=256, device="cpu", rank=rank.number, memory=memory, policy=given
    )
    assert (plan.policy == given) is (memory is None)
    zero3.shard(model, policy=plan.policy)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
    plan.watch(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ids = torch.zeros(batch, 256, dtype=torch.long)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in caught if "plan" in str(each.message)]


@pytest.mark.slow
def test_watch_of_ranks_on_gloo() -> None:
    assert on_ranks(2, run, 2, 2) == [[], []]
    for number, said in enumerate(on_ranks(2, run, 2, 6)):
        assert len(said) == 1 and f"rank {number}: this run has left its plan: at the end of a forward" in said[0]


@pytest.mark.slow
def test_watch_holds_a_run_with_the_plans_own_policy_against_that(tmp_path: Path) -> None:
    """Where there is room, a plan chooses another policy than the given one, which takes more."""
    assert on_ranks(2, run, 1, 1, "4GiB", 512) == [[], []]
    assert on_ranks(2, run, 1, 1, "4GiB", 512, str(tmp_path)) == [[], []]
