"""`ShardingPolicy(offload=)`: chunks and gradients in files, with the bits of training without."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.scratch.test_mapped_files import of_pages
from tests.support.models import WIDTH, WORLDS, seeded
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.reference import Turn, process_group
from zero3 import ShardingPolicy
from zero3.access import states_of
from zero3.core.offloaded_chunk import OffloadedChunk
from zero3.scratch.mapped_files import MappedFiles


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(3))
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


Body = Callable[[nn.Module, ThreadCommunicator], list[Tensor]]


def train(model: nn.Module, group: ThreadCommunicator, optimizer: torch.optim.Optimizer | None = None, steps: int = 3) -> list[Tensor]:
    optimizer = optimizer or torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    seen = []
    for step in range(steps):
        for micro in range(2):
            loss = model(Turn(group.rank, 10 * step + micro, group.world_size).tensor(5, WIDTH)).pow(2).mean()
            loss.backward()
            seen.append(loss.detach())
        seen.append(zero3.clip_grad_norm_(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *values(model)]


def values(model: nn.Module) -> list[Tensor]:
    return list(zero3.full_state_dict(model, rank0_only=False).values())


def on_ranks(world_size: int, body: Body, offload: Any, *, replicas: int = 1, **policy: Any) -> list[list[Tensor]]:
    copies = [seeded(Model)[0] for _ in range(world_size)]

    def run(group: ThreadCommunicator) -> list[Tensor]:
        model = zero3.shard(copies[group.rank], policy=ShardingPolicy(offload=offload, **policy), process_group=process_group(group))
        return body(model, group)

    return run_mesh(replicas, world_size // replicas, run) if replicas > 1 else run_ranks(world_size, run)


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert torch.equal(a, b), f"value {number} of rank {rank}"


def chunks_of(model: nn.Module) -> list[Any]:
    return [chunk for state in states_of(model) for chunk in state.chunks]


def in_files(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is a mapped file without a name, of which the process holds nothing as its own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    places = [line.split(maxsplit=5) for line in lines]
    return any(
        int(place[0].split("-")[0], 16) <= tensor.data_ptr() < int(place[0].split("-")[1], 16) and place[-1].endswith("(deleted)")
        for place in places
    ) and not of_pages(tensor, "Anonymous")


POLICIES: list[dict[str, Any]] = [
    {}, {"stage": 2}, {"stage": 1}, {"param_dtype": torch.float32}, {"prefetch_depth": 0}, {"transactional": True}, {"dynamic": True},
    {"prefetch_depth": 2, "reshard_after_forward": False}, {"resident_bytes": 10**6}, {"reduce_format": zero3.Int8(block_size=4)},
    {"gradient_reduction": "sum", "compare_every": 1},
]  # fmt: skip


@pytest.mark.parametrize("where", ["cpu", "files"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@WORLDS
def test_training_has_the_same_bits(world_size: int, policy: dict[str, Any], where: str, tmp_path: Path) -> None:
    offload = "cpu" if where == "cpu" else tmp_path
    assert_same(on_ranks(world_size, train, offload, **policy), on_ranks(world_size, train, None, **policy))


def test_the_sum_that_a_gradient_is_rounded_from_stays_beside_it(tmp_path: Path) -> None:
    """Chunks in fp32, sums in fp64: micro-batches are added up in fp64."""

    def run(offload: Any) -> list[list[Tensor]]:
        copies = [seeded(Model)[0].float() for _ in range(2)]
        policy = ShardingPolicy(offload=offload, reduce_dtype=torch.float64)

        def body(group: ThreadCommunicator) -> list[Tensor]:
            model = zero3.shard(copies[group.rank], policy=policy, process_group=group)
            optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
            for step in range(3):
                for micro in range(3):
                    model(Turn(group.rank, 10 * step + micro, 2).tensor(5, WIDTH).float()).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return values(model)

        return run_ranks(2, body)

    assert_same(run(tmp_path), run(None))


def test_on_a_mesh(tmp_path: Path) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        seen = train(model, group)
        with zero3.no_sync(model, replicas_only=True):
            model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
        return [*seen, *train(model, group)]

    assert_same(on_ranks(4, body, tmp_path, replicas=2), on_ranks(4, body, None, replicas=2))


@WORLDS
def test_chunks_and_gradients_are_in_files_and_nowhere_else(world_size: int, tmp_path: Path) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        for step in range(3):
            for _ in range(2):
                model(Turn(group.rank, step, world_size).tensor(5, WIDTH)).pow(2).mean().backward()
            for chunk in chunks_of(model):
                assert in_files(chunk.shard)
                assert chunk.shard.grad is None or in_files(chunk.shard.grad.as_subclass(Tensor))
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
    real_read, real_start = MappedFiles.read_ahead, OffloadedChunk.start_fetch

    def read_ahead(files: MappedFiles, tensor: Tensor) -> None:
        if tensor in files:
            told.append(("read", tensor.data_ptr()))
        real_read(files, tensor)

    def start_fetch(chunk: OffloadedChunk, lane: Any) -> None:
        told.append(("fetch", chunk.shard.data_ptr()))
        real_start(chunk, lane)

    monkeypatch.setattr(MappedFiles, "read_ahead", read_ahead)
    monkeypatch.setattr(OffloadedChunk, "start_fetch", start_fetch)
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


def test_report_says_where_chunks_rest(tmp_path: Path) -> None:
    for offload, expected in ((tmp_path, "files"), ("cpu", "memory"), (None, "memory")):
        model = zero3.shard(seeded(Model)[0], policy=ShardingPolicy(offload=offload))
        report = zero3.report(model)
        assert report.rests == (expected,)
        assert ("Chunks in files: trainable" in str(report)) is (expected == "files")


def whole_and_groups(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    groups = zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 2, "weight_decay": 0.1 * (info.ndim == 2)})
    seen = train(model, group, torch.optim.AdamW(groups, lr=0.1))
    if isinstance(chunks_of(model)[0], OffloadedChunk):
        assert all(in_files(chunk.shard) for chunk in chunks_of(model) if chunk.shard.numel())
    return seen


def accumulating(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9)
    for step in range(3):
        for micro in range(3):
            with zero3.no_sync(model) if micro != 1 else nullcontext():
                model(Turn(group.rank, 10 * step + micro, 2).tensor(5, WIDTH)).pow(2).mean().backward()
        model(Turn(group.rank, 10 * step + 5, 2).tensor(5, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return values(model)


def guarded(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    for step in range(4):
        for micro in range(2):
            with zero3.step_guard(model):
                loss = model(Turn(group.rank, 10 * step + micro, 2).tensor(5, WIDTH)).pow(2).mean()
                loss.backward()
                if (group.rank, step) == (1, 2):
                    raise ArithmeticError("as told")
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def scaled(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1, fused=True)
    scaler = zero3.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        loss = model(Turn(group.rank, step, 2).tensor(5, WIDTH)).pow(2).mean()
        scaler.scale(loss * (float("inf") if (group.rank, step) == (0, 1) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return values(model)


def over_tokens(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    for step in range(4):
        count = 3 + 2 * group.rank + step
        loss = model(Turn(group.rank, step, 2).tensor(count, WIDTH)).pow(2).sum()
        zero3.backward(loss, torch.tensor(count), model)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return values(model)


def changing_what_trains(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    seen = train(model, group, steps=1)
    zero3.set_trainable(model, lambda name, info: "weight" in name)
    seen += train(model, group, steps=1)
    zero3.set_trainable(model, lambda name, info: True)
    return [*seen, *train(model, group, steps=1)]


def shown_and_written(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    train(model, group, steps=1)
    with zero3.full_params(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    seen = train(model, group, steps=1)
    state = zero3.full_state_dict(model)
    zero3.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
    with zero3.resident(model), torch.no_grad():
        seen.append(model(torch.ones(2, WIDTH, dtype=torch.float64)))
    return [*seen, *train(model, group, steps=1)]


def broken(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
    def fails(*_: Any) -> None:
        raise ArithmeticError("as told")

    seen = train(model, group, steps=1)
    loss = model(torch.ones(2, WIDTH, dtype=torch.float64).requires_grad_()).sum()
    handle = model.blocks[1].register_forward_hook(lambda module, inputs, output: output.register_hook(fails) and None)  # type: ignore[operator,union-attr]
    with pytest.raises(ArithmeticError):
        model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
    handle.remove()
    del loss
    return [*seen, *train(model, group, steps=2)]


BODIES = [whole_and_groups, accumulating, guarded, scaled, over_tokens, changing_what_trains, shown_and_written, broken]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_capabilities_have_the_same_bits(body: Body, tmp_path: Path) -> None:
    assert_same(on_ranks(2, body, tmp_path), on_ranks(2, body, None))


def test_checkpoints_with_and_without_offload_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()

    def body(path: Path) -> Body:
        def saves(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
            optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
            train(model, group, optimizer, 1)
            zero3.save_checkpoint(path, model, optimizer)
            return train(model, group, optimizer, 1)

        return saves

    def loads(model: nn.Module, group: ThreadCommunicator) -> list[Tensor]:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        zero3.load_checkpoint(tmp_path / "with", model, optimizer)
        return train(model, group, optimizer, 1)

    found = on_ranks(2, body(tmp_path / "with"), tmp_path / "files")
    expected = on_ranks(2, body(tmp_path / "without"), None)
    assert_same(found, expected)
    for world_size, offload in ((2, tmp_path / "files"), (2, None)):
        assert_same(on_ranks(world_size, loads, offload), expected)


def test_materialize_and_load(tmp_path: Path) -> None:
    def run(offload: Any) -> list[list[Tensor]]:
        def body(group: ThreadCommunicator) -> list[Tensor]:
            with torch.device("meta"):
                model: nn.Module = Model().double()
            zero3.shard(model, policy=ShardingPolicy(offload=offload), process_group=group, device="cpu")
            zero3.materialize(model, init=lambda module: [nn.init.constant_(p, 0.1) for p in module.parameters(recurse=False)] and None)
            return [*values(model), *train(model, group, steps=1)]

        return run_ranks(2, body)

    assert_same(run(tmp_path), run(None))


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
        assert all(in_files(chunk.shard) for chunk in chunks_of(model))
        return values(model)

    expected = on_ranks(2, saves, files)
    assert_same(run_ranks(2, loads), expected)


# -- refusals


def all_raise(world_size: int, kind: type[Exception], match: str, offload: Callable[[int], Any]) -> None:
    copies = [seeded(Model)[0] for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        with pytest.raises(kind, match=match):
            zero3.shard(copies[group.rank], policy=ShardingPolicy(offload=offload(group.rank)), process_group=group)
        assert zero3.is_sharded(copies[group.rank]) is False

    run_ranks(world_size, body)


def test_a_directory_that_one_rank_does_not_have(tmp_path: Path) -> None:
    all_raise(2, ValueError, "rank 1: .*none' can't hold what is offloaded.*Name a directory", lambda rank: tmp_path / ["", "none"][rank])


def test_ranks_that_differ(tmp_path: Path) -> None:
    all_raise(2, ValueError, "rank 0: .*'offload': 'cpu'.*; rank 1: .*'offload': 'disk'", lambda rank: ["cpu", tmp_path][rank])


def test_hosts_may_have_different_directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    copies = [seeded(Model)[0] for _ in range(2)]

    def body(group: ThreadCommunicator) -> list[Tensor]:
        policy = ShardingPolicy(offload=tmp_path / "ab"[group.rank])
        return train(zero3.shard(copies[group.rank], policy=policy, process_group=group), group)

    assert_same(run_ranks(2, body), on_ranks(2, train, None))


@pytest.mark.parametrize("room", [1, 3])
def test_a_full_disk_on_one_rank_is_one_error_and_nothing_has_changed(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.posix_fallocate, [1] * room

    def refuse(*arguments: Any) -> None:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    all_raise(2, OSError, r"rank \d: .*has no room for \d+ more bytes of what is offloaded.*No space left", lambda rank: tmp_path)


def test_room_for_all_layers_is_looked_for_before_the_first_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of all ranks at once, because ranks may share a disk."""
    model, sizes = seeded(Model)[0], list[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda descriptor, offset, nbytes: sizes.append(nbytes) or os.truncate(descriptor, nbytes))
    zero3.shard(model, policy=ShardingPolicy(offload=tmp_path))
    layers = sum(bool(state.chunks) for state in states_of(model))
    asked, taken = sizes[:layers], sizes[layers:]
    assert sum(asked) == sum(chunk.shard.nbytes * (1 + chunk.shard.requires_grad) for chunk in chunks_of(model))
    assert sum(asked) <= sum(taken)


def test_gather_format_is_refused() -> None:
    with pytest.raises(ValueError, match="offload and gather_format exclude each other"):
        ShardingPolicy(offload="cpu", gather_format=zero3.Int8())


@pytest.mark.parametrize("wrong", [1, True, b"/tmp", ["/tmp"], ""])
def test_what_is_no_place_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r'offload must be "cpu", a directory or None, found'):
        ShardingPolicy(offload=wrong)
