"""Plans of long sequences: parts over ranks, the head by chunks, tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t

import zero3
from tests.support.planned import PLANS
from zero3.__main__ import main
from zero3.planning.alike import Alike
from zero3.planning.ledger import Ledger
from zero3.planning.setup import Setup
from zero3.planning.trace import Trace
from zero3.sequences.tiles import joined

pytestmark = PLANS

SIZES: dict[str, Any] = {"vocab_size": 5000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}


def model(dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        return t.LlamaForCausalLM(t.LlamaConfig(**SIZES)).to(dtype)


def planned(**options: Any) -> Any:
    return zero3.plan(model(options.pop("dtype", torch.float32)), **{"ranks": 4, "sequence": 4096, **options})


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_a_plan_with_a_chunked_head(dtype: torch.dtype) -> None:
    whole, chunked = planned(dtype=dtype), planned(dtype=dtype, chunked_head=True)
    logits = 4096 * 5000 * 4
    assert whole.by_cause["logits"] >= logits
    assert chunked.by_cause["logits"] < logits / 4
    weight = 5000 * 64 * dtype.itemsize
    assert chunked.peak_bytes < whole.peak_bytes
    head = next(moment for moment in chunked.moments if moment.name == "backward of lm_head")
    assert head.by_cause["gradients"] >= weight  # made in forward


def test_a_plan_with_parts_of_sequences() -> None:
    alone = planned(chunked_head=True)
    for parts in (2, 4):
        divided = planned(sequence_parallel=parts)
        ratio = divided.by_cause["activations"] / alone.by_cause["activations"]
        assert 0.8 / parts <= ratio <= 1.2 / parts
        assert f"parts of sequences over {parts} ranks" in str(divided)
        assert divided.by_cause["chunks"] == alone.by_cause["chunks"]


def test_exchanges_take_time() -> None:
    """Those of a part's queries, keys, values and outputs, there and back."""
    fast, slow = ({"flops": 1e15, "memory_bandwidth": 1e13, "link": link, "ranks_per_node": 1} for link in (1e12, 1e8))
    times = [planned(ranks=2, sequence_parallel=2, cluster=zero3.Cluster(**each)).seconds for each in (fast, slow)]
    alone = [planned(ranks=2, chunked_head=True, cluster=zero3.Cluster(**each)).seconds for each in (fast, slow)]
    exchanged = 2 * (2 * 4 * 2048 * 64 * 4) // 2  # two blocks, forward and backward: half of q, k, v and the output leave
    assert times[1] - times[0] > alone[1] - alone[0] + 0.8 * exchanged / 1e8


def test_a_plan_with_tiles() -> None:
    whole, tiles = planned(sequence=2048, chunked_head=True), planned(sequence=2048, chunked_head=True, tile=256)
    assert tiles.by_cause["activations"] < 0.6 * whole.by_cause["activations"]
    with pytest.raises(ValueError, match="mlp"):
        zero3.plan(
            t.OPTForCausalLM(t.OPTConfig(num_hidden_layers=1, hidden_size=8, ffn_dim=8, num_attention_heads=2, vocab_size=16)),
            ranks=2,
            tile=2,
        )


@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_plan_that_leaves_out_tiles_has_the_bytes_and_the_time_of_all(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = zero3.Cluster(flops=1e12, memory_bandwidth=1e10, link=1e10, ranks_per_node=1)
    options: dict[str, Any] = {"chunked_head": True, "tile": 128, "cluster": cluster, "checkpointing": checkpointing}
    lengths = (512, 1024, 1100)  # tiles: as many as always run; more; more, the last of them shorter
    found = [planned(sequence=length, **options) for length in lengths]
    monkeypatch.setattr(Alike, "join", lambda self, *given: joined(*given))
    for length, plan in zip(lengths, found, strict=True):
        each = planned(sequence=length, **options)
        assert plan.by_cause == each.by_cause
        assert [(moment.name, moment.peak) for moment in plan.moments] == [(moment.name, moment.peak) for moment in each.moments]
        assert plan.seconds == pytest.approx(each.seconds, rel=1e-6)


def test_what_a_plan_runs_does_not_grow_with_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest sequence neither: that begins at the one that was asked for."""
    counts: list[list[int]] = []
    measure, count = Trace.measure, Ledger.__torch_dispatch__

    def measured(self: Trace, *shape: int) -> Any:
        counts.append([])
        return measure(self, *shape)

    def counted(self: Ledger, *args: Any) -> Any:
        counts[-1].append(1)
        return count(self, *args)

    sizes = SIZES | {"vocab_size": 64}  # or there are more chunks of the head, up to a limit
    with torch.device("meta"):
        small = t.LlamaForCausalLM(t.LlamaConfig(**sizes))
    trace = Setup(
        source=small, ranks=2, batch=1, sequence=4096, policy=zero3.ShardingPolicy(), checkpointing=True, optimizer=torch.optim.AdamW,
        accumulation=1, lora=None, device="cuda", chunked_head=True, tile=128,
    ).trace()  # fmt: skip
    trace.measure(1, 4096)  # learns
    monkeypatch.setattr(Trace, "measure", measured)
    monkeypatch.setattr(Ledger, "__torch_dispatch__", counted)
    for length in (4096, 1 << 17):
        trace.measure(1, length)
    assert len(counts[0]) == len(counts[1])


def test_a_plan_refuses_parts_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ValueError, match="sequence_parallel=3"):
        planned(sequence_parallel=3)
    with pytest.raises(ValueError, match=r"8 ranks .* 4 query heads"):
        planned(ranks=8, sequence_parallel=8)


def test_the_command_line_plans_long_sequences(tmp_path: Any, capsys: Any) -> None:
    t.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--ranks", "4", "--sp", "2", "--tile", "256", "--chunked-head", "--sequence", "1024"]) == 2
    assert "parts of sequences over 2 ranks" in capsys.readouterr().out
