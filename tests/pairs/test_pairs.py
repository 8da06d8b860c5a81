"""Every pair of capabilities lives on threads as in one process, in a life with two others, or is refused by name. `python -m tests.pairs`
tries pairs one by one.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest

import zero3
from tests.pairs import between, life, rows
from tests.pairs.covering import covering, held, live_together
from tests.pairs.exceptions import EXCLUDED, MISSING, Names, all_of, all_pairs, is_free
from tests.pairs.rows import AXES, ROWS
from tests.pairs.threads import lead

PAIRS = [pair for pair in all_pairs() if is_free(pair)]
LIVES = covering(PAIRS)

# Public names that no row is about, and why.
ELSEWHERE = {
    "what shards": ["ShardingPolicy", "Zero3Layer", "Zero3Sequential", "is_sharded"],
    "described by other rows": ["ParamInfo", "MXFP4", "reduce_gradients", "parameter_norms", "set_forward_order", "attend"],
    "makes no step": ["check", "check_optimizer", "Cluster", "plan", "latest_checkpoint"],
    "of Hugging Face's models": ["load_pretrained", "save_merged", "save_pretrained", "causal_lm_loss", "split_sequence"],
    "of models that are not sharded": ["ZeroRedundancyOptimizer"],
}


@pytest.mark.parametrize("names", LIVES, ids=" + ".join)
def test_all_pairs_live_on_threads_as_in_one_process(names: Names) -> None:
    live_together(names, lead)


ONCE_WRONG = [
    ("resident_bytes 3000", "joinable uneven", "forward nobody walks"),
    ("joinable uneven", "GradScaler overflow", "stream_weights"),
    ("no_sync", "dynamic True", "transactional True"),
    ("group_adapters True", "unreached", "accumulation 2", "step_guard quiet", "param_groups whole"),
]


@pytest.mark.parametrize("names", ONCE_WRONG, ids=" + ".join)
def test_rows_that_were_wrong_once_though_no_two_of_them_were(names: Names) -> None:
    lead(names)


def test_every_pair_is_in_a_life_that_is_as_exact() -> None:
    assert {pair for life in LIVES for pair in held(life)} == set(PAIRS)
    assert all(is_free(life) for life in LIVES)


@pytest.mark.parametrize("names", [("stage 2", "no_sync", "accumulation 2"), ("stage 2", "no_sync", "clip_grad_norm_")], ids=" + ".join)
def test_a_life_that_fails_names_the_pair_to_blame(names: Names) -> None:
    def lead(rows: Names) -> None:
        if {"stage 2", "no_sync"} <= set(rows) or ("accumulation 2" in rows and len(rows) > 2):
            raise ValueError("no")

    with pytest.raises(AssertionError, match=r"stage 2 \+ no_sync .*'no'.* Alone fails: stage 2 \+ no_sync$"):
        live_together(names, lead)


@pytest.mark.parametrize("name", ROWS)
def test_each_row_alone(name: str) -> None:
    lead([name], seed=1)


@pytest.mark.parametrize("key", EXCLUDED, ids=" + ".join)
def test_pairs_that_are_excluded_are_refused_by_both_names(key: Names) -> None:
    for names in all_of(key):
        with pytest.raises(EXCLUDED[key].error) as caught:
            lead(names)
        missing = [word for name in names for word in ROWS[name].words if word not in str(caught.value)]
        assert not missing, f"{names}: {caught.value}"
        assert "not built" not in EXCLUDED[key].reason


@pytest.mark.parametrize("key", MISSING, ids=" + ".join)
def test_the_list_of_what_is_missing_only_shrinks(key: Names) -> None:
    working = []
    for names in all_of(key):
        try:
            lead(names)
        except Exception:
            continue
        working.append(names)
    assert not working, "strike them out"


def test_every_field_of_the_policy_has_an_axis_of_its_name() -> None:
    names = {field.name for field in fields(zero3.ShardingPolicy)}
    assert names == {axis for axis, values in AXES.items() if any(axis in row.fields for row in values.values())}


def test_every_public_name_has_a_row_or_a_place_elsewhere() -> None:
    used = set(re.findall(r"zero3\.(\w+)|\b(NF4|Int8|Float8)\b", "".join(map(inspect.getsource, (between, life, rows)))))
    named = {name for names in used for name in names} | {"joinable"}
    assert set(zero3.__all__) - named == {name for names in ELSEWHERE.values() for name in names} - named
