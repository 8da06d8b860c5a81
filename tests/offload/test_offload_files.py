"""`ShardingPolicy(offload=DIRECTORY)`: chunks and gradients are in files, are read ahead of their use, and leave the process after it."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.offload.test_offload import Model, assert_same, on_ranks, train, values
from tests.scratch.test_mapped_files import of_pages
from tests.support.inside import chunks_of, states_of
from tests.support.models import WIDTH, WORLDS, seeded
from tests.support.offloaded import in_files
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn
from tests.support.uneven import joined_threads
from zero3 import ShardingPolicy
from zero3.core.chunk import Chunk
from zero3.scratch.mapped_files import MappedFiles
from zero3.stores.files import Files


@WORLDS
def test_chunks_and_gradients_are_in_files_and_nowhere_else(world_size: int, tmp_path: Path) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        for step in range(3):
            for micro in range(2):
                with zero3.no_sync(model) if (step, micro) == (1, 0) else nullcontext():
                    model(Turn(group.rank, step, world_size).tensor(5, WIDTH)).pow(2).mean().backward()
            for chunk in chunks_of(model):
                assert in_files([chunk.shard])
                assert chunk.shard.grad is None or in_files([chunk.shard.grad.as_subclass(Tensor)])
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        return []

    on_ranks(world_size, body, tmp_path)
    assert not list(tmp_path.iterdir())


def test_pages_leave_the_process_after_use(tmp_path: Path) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        train(model, group, steps=1)
        model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
        for chunk in chunks_of(model):
            assert of_pages(chunk.shard, "Rss") == 0
            assert chunk.shard.grad is None or of_pages(chunk.shard.grad.as_subclass(Tensor), "Rss") == 0
        return []

    for world_size in (1, 2):
        on_ranks(world_size, body, tmp_path)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_first_values_leave_the_process_before_they_are_used(device: str, tmp_path: Path) -> None:
    """Those that a module on meta gets layer by layer, and those that one in memory has."""

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], policy=ShardingPolicy(offload=tmp_path), process_group=group)
        if device == "meta":
            zero3.materialize(model)
        assert [of_pages(chunk.shard, "Rss") for chunk in chunks_of(model)] == [0] * len(chunks_of(model))

    with torch.device(device):
        models = [Model() for _ in range(2)]
    run_ranks(2, body)


def test_pages_leave_a_rank_without_data_that_only_takes_part(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], policy=ShardingPolicy(offload=tmp_path), process_group=group)
        with joined_threads(group, model, lambda: None) as uneven:
            for _ in range(2 * group.rank):
                model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
                uneven.step()
        for chunk in chunks_of(model):
            assert of_pages(chunk.shard, "Rss") == 0

    models = [seeded(Model)[0] for _ in range(2)]
    run_ranks(2, body)


def test_no_chunk_rests_between_its_fetch_and_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank computes with the pages themselves."""
    model, rested, looked = seeded(Model)[0], set[int](), list[bool]()
    monkeypatch.setattr(Files, "rest", lambda store, values: rested.add(values.data_ptr()))

    def look(*given: Any) -> None:
        used = [chunk for state in states_of(model) if state.presence.value == "fetched" for chunk in state.chunks]
        looked.append(bool(used) and rested.isdisjoint(chunk.shard.data_ptr() for chunk in used))

    for block in model.blocks:
        block[0].register_forward_pre_hook(look)
    zero3.shard(model, policy=ShardingPolicy(offload=tmp_path))
    rested.clear()
    model(torch.ones(2, WIDTH, dtype=torch.float64))
    assert looked == [True] * 3 and rested


def test_memory_of_gradients_is_used_again(tmp_path: Path) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        addresses = []
        for _ in range(4):
            train(model, group, steps=1)
            model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
            addresses.append([chunk.grad.data_ptr() for chunk in zero3.get_trainable_chunk(model)])  # type: ignore[union-attr]
        assert all(each == addresses[0] for each in addresses)
        return []

    on_ranks(2, body, tmp_path)


def test_a_gradient_that_somebody_keeps_stays_as_it_is(tmp_path: Path) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        chunks = zero3.get_trainable_chunk(model)
        kept, copies = [], []
        for step in range(3):
            model(Turn(group.rank, step, 2).tensor(5, WIDTH)).pow(2).mean().backward()
            kept += [chunk.grad.as_subclass(Tensor)[1:] for chunk in chunks]  # type: ignore[union-attr]
            copies += [gradient.clone() for gradient in kept[-len(chunks) :]]
            for chunk in chunks:
                chunk.grad = None
        return [torch.tensor([torch.equal(a, b) for a, b in zip(kept, copies, strict=True)])]

    assert all(bool(each.all()) for (each,) in on_ranks(2, body, tmp_path))


def test_chunks_are_read_ahead_of_their_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    real_read, real_start = MappedFiles.read_ahead, Chunk.start_fetch

    def read_ahead(files: MappedFiles, tensor: Tensor) -> None:
        if tensor in files:
            told.append(("read", tensor.data_ptr()))
        real_read(files, tensor)

    def start_fetch(chunk: Chunk, lane: Any, names: Any) -> None:
        told.append(("fetch", chunk.shard.data_ptr()))
        real_start(chunk, lane, names)

    monkeypatch.setattr(MappedFiles, "read_ahead", read_ahead)
    monkeypatch.setattr(Chunk, "start_fetch", start_fetch)
    model = zero3.shard(seeded(Model)[0], policy=ShardingPolicy(offload=tmp_path))
    for step in range(4):
        if step == 3:
            told.clear()
        model(Turn(0, step, 1).tensor(5, WIDTH)).pow(2).mean().backward()
    fetched = [place for what, place in told if what == "fetch"]
    assert len(fetched) >= 7
    expected = [("fetch", fetched[0]), ("read", fetched[0])]
    for place in fetched[1:]:
        expected += [("read", place), ("fetch", place), ("read", place)]  # the second time because it may have been dropped again
    assert told[: len(expected)] == expected


def test_chunks_may_be_replaced_after_any_fetch(tmp_path: Path) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        model(torch.ones(2, WIDTH, dtype=torch.float64))
        before = [weakref.ref(chunk) for chunk in chunks_of(model)]
        zero3.set_trainable(model, lambda name, info: "weight" in name)
        gc.collect()  # the chunk that was fetched last is gone when the next one is fetched
        assert [old() is None for old in before].count(True) == 3
        model(torch.ones(2, WIDTH, dtype=torch.float64))
        return [value.detach().clone() for value in zero3.full_state_dict(model, rank0_only=False).values()]

    assert_same(on_ranks(2, body, tmp_path), on_ranks(2, body, None))


def test_report_says_where_chunks_rest(tmp_path: Path) -> None:
    for offload, expected in ((tmp_path, "files"), ("cpu", "memory"), (None, "memory")):
        model = zero3.shard(seeded(Model)[0], policy=ShardingPolicy(offload=offload))
        report = zero3.report(model)
        assert report.rests == (expected,)
        assert ("Chunks in files: trainable" in str(report)) is (expected == "files")


def test_load_pretrained_reads_into_files(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()

    def saves(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        zero3.save_pretrained(model, tmp_path / "saved")
        return values(model)

    def loads(group: ThreadCommunicator) -> list[Tensor]:
        with torch.device("meta"):
            model: nn.Module = Model().double()
        zero3.shard(model, policy=ShardingPolicy(offload=files), process_group=group, device="cpu")
        zero3.load_pretrained(model, tmp_path / "saved")
        assert all(in_files([chunk.shard]) for chunk in chunks_of(model))
        return values(model)

    expected = on_ranks(2, saves, files)
    assert_same(run_ranks(2, loads), expected)
