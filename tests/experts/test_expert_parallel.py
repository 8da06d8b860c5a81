"""Experts at home on threads: the numbers of one process that has the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3
from tests.support.experts import Model, Prepare, Training, made, tokens
from tests.support.ranks import run_mesh, run_ranks

Policy = zero3.ShardingPolicy


def train(policy: Policy, prepare: Prepare = lambda model: None, experts: int = 5, **steps: Any) -> Callable[[Any], None]:
    def body(group: Any) -> None:
        training = Training(group, policy, experts, prepare).train(**steps).check()
        for module in training.experts():
            assert module.num_experts == len(module.up) == len(module.bias) == experts

    return body


def routed(how: str) -> Prepare:
    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.routes = how

    return prepare


def trained(which: Callable[[str], bool]) -> Prepare:
    def prepare(model: Model) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(which(name))

    return prepare


def recomputed(kind: str, where: str) -> Prepare:
    def prepare(model: Model) -> None:
        for module in [model] if where == "blocks" else model.blocks:
            module.checkpoints = kind

    return prepare


@pytest.mark.parametrize(("ranks", "experts"), [(1, 5), (2, 5), (3, 5), (4, 4), (4, 3)])
def test_ranks_train_as_one_process(ranks: int, experts: int) -> None:
    run_ranks(ranks, train(Policy(expert_parallel=True), experts=experts))


FIELDS: list[dict[str, Any]] = [
    {"gradient_reduction": "sum"}, {"reshard_after_forward": False}, {"prefetch_depth": 0}, {"prefetch_depth": 2}, {"compare_every": 1},
    {"transactional": True}, {"offload": "cpu"},
]  # fmt: skip


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_fields_of_the_policy_hold_as_everywhere(fields: dict[str, Any]) -> None:
    run_ranks(2, train(Policy(expert_parallel=True, **fields), micros=2, steps=2))


def test_chunks_of_experts_rest_in_files(tmp_path: Path) -> None:
    run_ranks(2, train(Policy(expert_parallel=True, offload=tmp_path), micros=2, steps=2))


@pytest.mark.parametrize("routes", ["one", "first"])
def test_all_tokens_go_to_one_expert_or_to_one_rank(routes: str) -> None:
    """With one, each token has it twice."""
    run_ranks(3, train(Policy(expert_parallel=True), routed(routes)))


@pytest.mark.parametrize(
    "which",
    [
        lambda name: "experts" not in name, lambda name: "experts" in name, lambda name: not name.endswith("experts.up"),
        lambda name: not name.startswith(("first", "blocks.0")),
    ],
    ids=["all but experts", "experts alone", "all but one parameter", "the second block"],
)  # fmt: skip
def test_parts_train(which: Callable[[str], bool]) -> None:
    run_ranks(2, train(Policy(expert_parallel=True), trained(which)))


@pytest.mark.parametrize("keeps", [True, False])
def test_micro_batches_add_up(keeps: bool) -> None:
    run_ranks(2, train(Policy(expert_parallel=True), micros=2, keeps=keeps))


@pytest.mark.parametrize("where", ["blocks", "experts"])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_recomputation_makes_the_same_exchanges_on_all_ranks(kind: str, where: str) -> None:
    """One rank has no tokens in most micro-batches."""
    run_ranks(4, train(Policy(expert_parallel=True), recomputed(kind, where)))


@pytest.mark.parametrize("keeps", [True, False])
def test_replicas_sum_the_gradients_of_experts(keeps: bool) -> None:
    run_mesh(2, 2, train(Policy(expert_parallel=True), micros=2, keeps=keeps))


def test_one_rank_has_the_bits_of_the_plain_model() -> None:
    def body(group: Any) -> None:
        training = Training(group, Policy(expert_parallel=True))
        out, plain = training.model(tokens(0, 1)), training.plain(tokens(0, 1))
        assert torch.equal(out, plain)

    run_ranks(1, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_numbers_are_as_near_as_one_process_s(dtype: torch.dtype) -> None:
    def exact(model: Any, ranks: int) -> dict[str, torch.Tensor]:
        for rank in range(ranks):
            (model(tokens(rank, 1, model.last.weight.dtype)).square().sum() / ranks).backward()
        return {name: parameter.grad.double() for name, parameter in model.named_parameters()}

    def body(group: Any) -> None:
        expected, rounded, model = exact(made(), 2), exact(made(dtype=dtype), 2), made(dtype=dtype)
        zero3.shard(model, [*model.blocks], policy=Policy(expert_parallel=True), process_group=group)
        model(tokens(group.rank, 1, dtype)).square().sum().backward()
        with zero3.full_gradients(model) as found:
            for name, gradient in found.items():
                error = (gradient.double() - expected[name]).norm() / expected[name].norm()
                allowed = 1e-5 if dtype == torch.float32 else 2 * (rounded[name] - expected[name]).norm() / expected[name].norm() + 1e-3
                assert error <= allowed, (name, error, allowed)

    run_ranks(2, body)


def test_the_module_sees_its_own_experts_and_nobody_else_does() -> None:
    def body(group: Any) -> None:
        training = Training(group, Policy(expert_parallel=True))
        first = next(training.experts())
        own = 3 if group.rank == 0 else 2
        training.micro(1)
        assert {call[:4] for call in first.calls} == {(own, own, own, own)} and all(call[5] == 1 for call in first.calls)
        first.fails = True  # on all ranks
        with pytest.raises(ArithmeticError):
            training.model(tokens(group.rank, 1))
        assert (first.num_experts, len(first.up), len(first.down)) == (5, 5, 5)
        first.fails = False
        training.step()
        training.train(2, first=2).check()

    run_ranks(2, body)
