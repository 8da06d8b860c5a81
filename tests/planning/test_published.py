"""Plans against published steps: what is compared, how it is told, and what a kernel of the planned device reads and writes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from benchmarks.plan import published
from benchmarks.plan.published import APART, FITTED, JUDGED, Row, Told
from tests.support.planned import PLANS
from zero3.planning.cluster import GPUS, cluster_of
from zero3.planning.work import Work, work_of

pytestmark = PLANS
ATEN = torch.ops.aten
# llm-foundry's own counts, at 2048 tokens
PARAMETERS = {
    "mpt-125m": 125311488, "mpt-350m": 355985408, "mpt-760m": 760470528, "mpt-1b": 1315950592, "mpt-3b": 2651837440,
    "mpt-7b": 6658859008, "mpt-13b": 12853954560, "mpt-30b": 29975214080, "mpt-70b": 64862437376,
}  # fmt: skip


def row(**changes: Any) -> Row:
    return replace(Row("llm-foundry", "a100", "mpt-125m", 512, 8, 2, 3, "none", "fp32", 1000, JUDGED), **changes)


def told(seconds: float, flops: int = 1, **changes: Any) -> Told:
    return Told(row(**changes), seconds, flops)


def apart(row: Row) -> bool:
    return row.source == "llm-foundry" and row.tokens != 2048


def test_rows_are_whole_and_none_is_judged_by_what_it_was_fitted_to() -> None:
    rows = published.rows()
    assert len(rows) == len({replace(each, published=0, standing="") for each in rows}), "none twice"
    for each in rows:
        assert each.source in published.SOURCES and each.cluster == cluster_of(each.gpu, published.LINKS[each.gpu])
        assert each.model in {**published.LLAMAS, **published.MPTS}
        assert each.standing == APART if apart(each) else each.standing in {FITTED, JUDGED}
        assert each.checkpointing in {"none", "full", "layer", "op"} and each.reduction in {"bf16", "fp32"}
    assert sum(each.standing == JUDGED for each in rows) >= 10
    fits = {GPUS[each.gpu][3] for each in rows if each.standing == FITTED}
    assert fits == {GPUS[gpu][3] for gpu in published.LINKS} and len(fits) == 2, "one constant for each kind of GPU, and no other"


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_the_published_number_of_parameters(name: str) -> None:
    assert published.model_of(name, 2048).num_parameters() == PARAMETERS[name]


@pytest.mark.parametrize(("how", "which"), [("none", []), ("full", [0, 1, 2, 3]), ("op", [0, 1, 2, 3]), ("layer", [1, 3])])
def test_blocks_are_checkpointed_as_a_row_says(how: str, which: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(published.LLAMAS, "8b", replace(published.SHAPES["tiny"], blocks=4))
    blocks = published.model_of("8b", 16, how).model.layers
    assert [number for number, block in enumerate(blocks) if block.gradient_checkpointing] == which


def test_seconds_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `zero3.plan` tells them. Checkpoints compute more; those by operator less than those of all."""
    monkeypatch.setitem(published.LLAMAS, "8b", published.SHAPES["tiny"])
    of = row(model="8b", tokens=64, accumulation=1, published=7)
    policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = zero3.plan(published.model_of("8b", 64), ranks=8, batch=2, sequence=64, policy=policy, cluster=of.cluster)
    made = {how: published.told(each := replace(of, checkpointing=how), published.events(each)) for how in ("none", "op", "full")}
    assert made["none"].seconds == pytest.approx(found.seconds, rel=1e-9) and of.seconds == 2 * 64 / 7
    assert made["none"].flops < made["op"].flops < made["full"].flops


def test_a_share_that_was_put_in_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps of one product, two transfers of which hide nothing."""
    monkeypatch.setattr(published, "events", lambda _: [Work(flops=10**15, nbytes=0, narrow=0, kernels=1)])
    slow = row(gpu="h100", batch=1, accumulation=1, tokens=1000)
    made = [replace(slow, published=round(1000 / (1e15 / (989e12 * share)))) for share in (0.5, 0.6)]
    assert published.fitted(made[:1]) == 0.5 and published.fitted(made[1:]) == 0.6
    assert published.fitted(made) in (0.54, 0.55)


def test_errors_their_root_mean_square_and_the_null() -> None:
    seconds = row().seconds
    found = [told(1.03 * seconds, 4), told(0.96 * seconds, 1), told(2 * seconds, 5, gpu="h100")]
    assert [each.error for each in found] == pytest.approx([0.03, -0.04, 1.0])
    assert published.rms(each.error for each in found[:2]) == pytest.approx(math.sqrt((0.03**2 + 0.04**2) / 2))
    assert published.null(found) == pytest.approx([1.0, -0.5, 0.0]), "of one GPU, rates of 4 and 1 have a mean of 2"
    assert [line[:2] for line in published.summary(found)] == [["a100", "2"], ["h100", "1"], ["all", "3"]]
    assert published.summary(found)[0][2:] == ["3.5%", "-0.5%", "-4.0% to +3.0%", "79.1%"]


def test_the_command_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in (["--help"], "0"), (["--models", "8b", "--gpus", "a100-40"], "2"):
        monkeypatch.setattr(sys, "argv", ["published.py", *arguments])
        with pytest.raises(SystemExit, match=f"^{code}$"):
            published.main()
    told = capsys.readouterr()
    assert "--output" in told.out and "no row of published.csv" in told.err


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


IDS = empty(6, dtype=torch.long)
TABLE, RESULT = empty(100, 4), empty(6, 4)
KERNELS: dict[str, tuple[Callable[..., Any], list[Any], int]] = {
    "a sum": (ATEN.add.Tensor, [RESULT, RESULT], 3 * 48),
    "a sum in place": (ATEN.add_.Tensor, [RESULT, RESULT], 3 * 48),
    "a copy": (ATEN.copy_.default, [RESULT, empty(6, 4, dtype=torch.float32)], 48 + 96),
    "zeros": (ATEN.zero_.default, [RESULT], 48),
    "lists": (ATEN._foreach_addcmul_.Scalar, [[empty(6, 4), empty(6, 4)] for _ in range(3)], 2 * 4 * 48),
    "rows of a table": (ATEN.embedding.default, [TABLE, IDS], 2 * 48),
    "an expanded tensor": (ATEN.mul.Tensor, [RESULT, empty(1).expand(6, 4)], 2 * 48 + 2),
    "one number of each row": (ATEN.nll_loss_forward.default, [TABLE, empty(100, dtype=torch.long), None, 1, -100], 2 * 800),
    "their gradient": (ATEN.nll_loss_backward.default, [empty(()), TABLE, empty(100, dtype=torch.long), None, 1, -100, empty(())], 800),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_bytes_that_a_kernel_moves(name: str) -> None:
    func, given, nbytes = KERNELS[name]
    work = work_of(func, given, func(*given))
    assert work is not None and (work.nbytes, work.flops) == (nbytes, 0)


def test_attention_is_as_narrow_as_a_head() -> None:
    """Forward and backward alike: the backward is given a number for each row of each head as well."""
    query = empty(1, 3, 128, 64)
    found = ATEN._scaled_dot_product_flash_attention(query, query, query, 0.0, True)
    forward = work_of(ATEN._scaled_dot_product_flash_attention.default, [query, query, query, 0.0, True], found)
    given = [query, query, query, query, found[0], found[1], None, None, 128, 128, 0.0, True, found[6], found[7]]
    backward = work_of(ATEN._scaled_dot_product_flash_attention_backward.default, given, (query, query, query))
    assert forward is not None and backward is not None and forward.narrow == backward.narrow == 64
