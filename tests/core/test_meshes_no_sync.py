"""no_sync and token means on a mesh: what waits for the sum over replicas, and what does not."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import zero3
from tests.core.test_meshes import MESHES, batch, check, count, expected, loss_of, on_mesh
from tests.support.inside import accounts_of
from tests.support.models import mlp
from tests.support.ranks import ThreadMesh, run_ranks
from tests.support.reference import TOLERANCE, assert_at_rest, assert_close, full_gradients, in_sequence


@MESHES
@pytest.mark.parametrize("transactional", [False, True])
def test_no_sync_replicas_only_reduces_in_each_replica_and_sums_once(replicas: int, shards: int, transactional: bool) -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        chunks = len(zero3.get_trainable_chunk(model))
        for _ in range(2):
            scattered, summed = count(mesh, "reduce_scatter"), count(mesh, "all_reduce_later")
            for number in range(3):
                with zero3.no_sync(model, replicas_only=True) if number < 2 else nullcontext():
                    loss_of(model, mesh, number).backward()
                assert count(mesh, "all_reduce_later") - summed == (chunks if number == 2 else 0)
                accounts = accounts_of(model)
                kept = [None if each.partial is None else each.partial.numel() for each in accounts]
                chunks_and_trailers = [each.chunk.shard.numel() + len(each.chunk.layout.slots) for each in accounts]
                assert kept == ([None] * chunks if number == 2 else chunks_and_trailers)
            if shards > 1:
                assert count(mesh, "reduce_scatter") - scattered == 3 * chunks
            check(model, mesh, wanted)
            model.zero_grad()
            assert_at_rest(model)

    wanted = expected(range(3), replicas * shards)
    on_mesh(body, (replicas, shards), transactional=transactional)


def test_no_sync_of_both_kinds_one_after_the_other() -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        for number in range(5):
            kept = [nullcontext, partial(zero3.no_sync, model, replicas_only=True), partial(zero3.no_sync, model)]
            with kept[[0, 1, 2, 1, 0][number]]():
                loss_of(model, mesh, number).backward()
        check(model, mesh, wanted)

    wanted = expected(range(5))
    on_mesh(body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_no_sync_replicas_only_and_zero_grad(set_to_none: bool) -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        with zero3.no_sync(model, replicas_only=True):
            loss_of(model, mesh, 7).backward()
        model.zero_grad(set_to_none=set_to_none)
        loss_of(model, mesh, 0).backward()
        check(model, mesh, wanted)

    wanted = expected(range(1))
    on_mesh(body)


def test_no_sync_replicas_only_before_reduce_gradients_and_with_a_layer_left_out() -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        with zero3.no_sync(model, replicas_only=True):
            loss_of(model, mesh, 0).backward()
            with pytest.raises(RuntimeError, match="reduce_gradients inside no_sync"):
                zero3.reduce_gradients(model)
            with pytest.raises(RuntimeError, match="this gradient is not known yet"):
                zero3.clip_grad_norm_(model, 1.0)
        zero3.reduce_gradients(model)
        check(model, mesh, wanted[1])
        model.zero_grad()
        with zero3.no_sync(model, replicas_only=True):
            loss_of(model, mesh, 0).backward()
        model[0](batch(mesh.rank, 1)).sum().backward()  # the other layers are reduced too
        check(model, mesh, wanted[2])

    wanted = {1: expected(range(1))}
    plain = mlp()
    for rank in range(4):
        ((plain(batch(rank, 0)).pow(2).sum() + plain[0](batch(rank, 1)).sum()) / 4).backward()
    wanted[2] = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    on_mesh(body)


@pytest.mark.parametrize("stage", [1, 2])
def test_no_sync_replicas_only_at_other_stages(stage: int) -> None:
    def body(model: Any, mesh: ThreadMesh) -> None:
        with zero3.no_sync(model, replicas_only=True):
            loss_of(model, mesh, 0).backward()
            with pytest.raises(RuntimeError, match="this gradient is not known yet"):
                zero3.clip_grad_norm_(model, 1.0)
        loss_of(model, mesh, 1).backward()
        norm = zero3.clip_grad_norm_(model, float("inf"))
        torch.testing.assert_close(norm, torch.cat([each.view(-1) for each in wanted.values()]).norm())
        check(model, mesh, wanted)

    wanted = expected(range(2))
    on_mesh(body, stage=stage)


def test_no_sync_replicas_only_is_no_restriction_without_replicas() -> None:
    models = [mlp() for _ in range(2)]

    def body(group: Any) -> None:
        model = in_sequence(models[group.rank], group, zero3.ShardingPolicy())
        with zero3.no_sync(model, replicas_only=True):
            model(batch(group.rank, 0)).pow(2).sum().backward()
            assert_close(full_gradients(model, group), expected(range(1), 2), TOLERANCE, "gradients")

    run_ranks(2, body)


def test_backward_of_token_means_over_a_mesh() -> None:
    """Ranks have different numbers of tokens, and earlier sums of a replica get another weight."""

    def body(model: Any, mesh: ThreadMesh) -> None:
        for number in range(3):
            with zero3.no_sync(model, replicas_only=True) if number < 2 else nullcontext():
                zero3.backward(loss_of(model, mesh, number), 3 + number + mesh.rank, model)
        check(model, mesh, wanted)

    plain = mlp()
    tokens = sum(3 + number + rank for number in range(3) for rank in range(4))
    for rank in range(4):
        for number in range(3):
            (plain(batch(rank, number)).pow(2).sum() / tokens).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    on_mesh(body)


def test_no_sync_replicas_only_on_one_rank_alone_is_told_to_all() -> None:
    """The error says which rank does what."""

    def body(model: Any, mesh: ThreadMesh) -> None:
        with zero3.no_sync(model, replicas_only=True) if mesh.rank == 1 else nullcontext():
            loss = loss_of(model, mesh, 0)
            each = r"ranks 0, 2, 3: [^;]*, gradients reduced; rank 1: [^;]*, gradients reduced in each replica \(as under no_sync"
            with pytest.raises(ValueError, match=each + r"\(replicas_only=True\)\)\. All"):
                loss.backward()
        zero3.reset(model)

    on_mesh(body, (2, 2))
