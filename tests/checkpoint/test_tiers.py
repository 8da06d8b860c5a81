"""Checkpoints on storage that only a host sees, copies on other hosts, and the newest of several directories."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zero3
from tests.support import disk
from tests.support.checkpoints import OPTIMIZERS, assert_same, content_of, odd, on_ranks, plain, train
from tests.support.processes import Rank
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks

Hosts = Sequence[int]  # the host of each rank


def snapshot(model: Any, optimizer: Any) -> dict[str, Any]:
    state = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    return {"model": zero3.full_state_dict(model, rank0_only=False), "optimizer": state}


def host(root: Path, number: int) -> Path:
    return root / f"host{number}"


def saved(root: Path, hosts: Hosts, name: str = "step-1", **options: Any) -> dict[str, Any]:
    """What three steps have made; a directory stands for a host."""

    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> dict[str, Any]:
        train(model, optimizer, range(3))
        given = {"extra": {"step": 3}, "local": True, **options}
        zero3.save_checkpoint(host(root, hosts[group.rank]) / name, model, optimizer, **given).wait()
        return snapshot(model, optimizer)

    return on_ranks(len(hosts), body)[0]


def loaded(root: Path, hosts: Hosts, layers: str = "blocks") -> tuple[dict[str, Any], list[float]]:
    """What the newest checkpoint gives, and the losses of two more steps."""

    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> Any:
        train(model, optimizer, [7])
        latest = zero3.latest_checkpoint(host(root, hosts[group.rank]), model=model)
        assert latest is not None and latest.parent == host(root, hosts[group.rank])
        assert zero3.load_checkpoint(latest, model, optimizer) == {"step": 3}
        return snapshot(model, optimizer), train(model, optimizer, range(3, 5))

    return on_ranks(len(hosts), body, layers=layers)[0]


def undisturbed() -> list[float]:
    model, optimizer = plain("AdamW")
    train(model, optimizer, range(3))
    return train(model, optimizer, range(3, 5))


def check(root: Path, expected: dict[str, Any], hosts: Hosts, layers: str = "blocks") -> None:
    found, losses = loaded(root, hosts, layers)
    assert_same(found, expected)
    assert losses == pytest.approx(undisturbed(), rel=1e-9)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*.safetensors"))


def test_local_checkpoint_on_the_same_hosts_moves_rank_0_s_file_alone(tmp_path: Path) -> None:
    hosts = [0, 1, 1]
    expected = saved(tmp_path, hosts)
    before = [files(host(tmp_path, n)) for n in range(2)]
    assert before[1] == [f"{kind}-0000{n}-of-00003.safetensors" for kind in ("model", "optimizer") for n in (1, 2)]
    check(tmp_path, expected, hosts)
    for n in range(2):
        came = sorted({*before[n], "model-00000-of-00003.safetensors"})
        assert files(host(tmp_path, n)) == came
        (checkpoint,) = host(tmp_path, n).iterdir()
        assert sorted(path.name for path in checkpoint.iterdir()) == [content_of(checkpoint)["data"], "manifest.json"]
    check(tmp_path, expected, hosts)  # again: all is there


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("background", [False, True])
def test_replicas_a_lost_host_is_replaced_by_its_neighbours_copy(lost: int, background: bool, tmp_path: Path) -> None:
    hosts = [0, 0, 1, 1, 2]
    expected = saved(tmp_path, hosts, replicas=1, background=background)
    shutil.rmtree(host(tmp_path, lost))
    check(tmp_path, expected, [3 if n == lost else n for n in hosts])


@pytest.mark.parametrize(
    ("before", "after"), [([0, 1], [1, 0]), ([0, 1, 1], [0, 1]), ([0, 1], [0, 1, 2]), ([0, 1], [0, 0]), ([0, 0], [0, 0])]
)
def test_local_checkpoint_on_other_ranks_hosts_and_layers(before: Hosts, after: Hosts, tmp_path: Path) -> None:
    expected = saved(tmp_path, before, replicas=2)
    check(tmp_path, expected, after)
    check(tmp_path, expected, after, "blocks and maps")


@pytest.mark.slow
@settings(max_examples=12)
@given(
    before=st.lists(st.integers(0, 2), min_size=2, max_size=4),
    after=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    replicas=st.integers(0, 3),
    gone=st.integers(0, 3),
)
def test_local_checkpoint_is_right_or_not_found(
    tmp_path_factory: pytest.TempPathFactory, before: Hosts, after: Hosts, replicas: int, gone: int
) -> None:
    root = tmp_path_factory.mktemp("hosts")
    expected = saved(root, before, replicas=replicas)
    shutil.rmtree(host(root, gone), ignore_errors=True)
    there = {name for n in set(after) for name in files(host(root, n))}
    if len(there) == 2 * len(before):
        check(root, expected, after)
    else:

        def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> None:
            assert zero3.latest_checkpoint(host(root, after[group.rank]), model=model) is None
            with pytest.raises(ValueError, match=r"is no checkpoint|no host here has (model|optimizer)-"):
                zero3.load_checkpoint(host(root, after[group.rank]) / "step-1", model, optimizer)

        on_ranks(len(after), body)


def test_local_checkpoint_that_a_crash_left_on_some_hosts_is_passed_over(tmp_path: Path) -> None:
    hosts = [0, 1]
    saved(tmp_path, hosts, "old")

    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> Any:
        zero3.load_checkpoint(host(tmp_path, group.rank) / "old", model, optimizer)
        zero3.save_checkpoint(host(tmp_path, group.rank) / "new", model, optimizer, local=True)

    on_ranks(2, body)
    numbers = [content_of(host(tmp_path, n) / "new")["number"] for n in hosts]
    assert numbers == [2, 2]
    (host(tmp_path, 1) / "new" / "manifest.json").unlink()

    def find(model: Any, optimizer: Any, group: ThreadCommunicator) -> Any:
        return zero3.latest_checkpoint(host(tmp_path, group.rank), model=model)

    assert on_ranks(2, find) == [host(tmp_path, n) / "old" for n in hosts]


@pytest.mark.parametrize("where", [0, 1])
def test_load_checkpoint_names_a_changed_part_on_all_ranks(where: int, tmp_path: Path) -> None:
    saved(tmp_path, [0, 1])
    (part,) = host(tmp_path, where).rglob("model-*")
    text = bytearray(part.read_bytes())
    text[-1] ^= 1
    part.write_bytes(text)

    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> None:
        before = snapshot(model, optimizer)
        with pytest.raises(ValueError, match=rf"rank {where}: .*{part.name} is corrupt"):
            zero3.load_checkpoint(host(tmp_path, group.rank) / "step-1", model, optimizer)
        assert_same(snapshot(model, optimizer), before)

    on_ranks(2, body)


def test_load_checkpoint_refuses_hosts_with_different_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, [0, 1])
    saved(tmp_path / "other", [0, 1])
    shutil.rmtree(host(tmp_path, 1))
    shutil.move(host(tmp_path / "other", 1), host(tmp_path, 1))

    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match="hosts have 2 different checkpoints"):
            zero3.load_checkpoint(host(tmp_path, group.rank) / "step-1", model, optimizer)

    on_ranks(2, body)


def test_local_checkpoints_of_a_mesh_and_without_frozen_parameters(tmp_path: Path) -> None:
    models = [odd() for _ in range(8)]

    def sharded(model: Any, mesh: Any) -> tuple[Any, Any]:
        model = zero3.shard(model, process_group=mesh)
        return model, OPTIMIZERS["AdamW"](zero3.get_trainable_chunk(model))

    def save(mesh: Any) -> dict[str, Any]:
        model, optimizer = sharded(models[mesh.rank], mesh)
        train(model, optimizer, range(2))
        zero3.save_checkpoint(host(tmp_path, mesh.rank // 2) / "mesh", model, optimizer, local=True, replicas=1, frozen=False)
        return snapshot(model, optimizer)

    def load(mesh: Any) -> dict[str, Any]:
        model, optimizer = sharded(models[4 + mesh.rank], mesh)
        latest = zero3.latest_checkpoint(host(tmp_path, 3 * (mesh.rank // 2)), model=model)
        assert latest is not None
        zero3.load_checkpoint(latest, model, optimizer)
        return snapshot(model, optimizer)

    expected = run_mesh(2, 2, save)[0]
    shutil.rmtree(host(tmp_path, 1))
    assert_same(run_mesh(2, 2, load)[1], expected)


# -- several directories


def test_latest_checkpoint_over_a_fast_directory_and_a_slow_one(tmp_path: Path) -> None:
    slow = tmp_path / "slow"

    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> list[Any]:
        fast, found = host(tmp_path, group.rank), []
        for step in range(1, 6):
            if step % 2:
                zero3.save_checkpoint(fast / f"step-{step}", model, optimizer, local=True, keep_last=2)
            else:
                zero3.save_checkpoint(slow / f"step-{step}", model, optimizer, keep_last=1)
            latest = zero3.latest_checkpoint(fast, slow, model=model)
            assert latest is not None
            found.append((latest.parent == slow, latest.name))
        names = sorted(path.name for path in fast.iterdir())
        assert names == ["step-3", "step-5"]
        return found

    assert on_ranks(2, body) == [[(not step % 2, f"step-{step}") for step in range(1, 6)]] * 2
    assert [path.name for path in slow.iterdir()] == ["step-4"]
    shutil.copytree(slow, tmp_path / "as slow")
    zero3.save_checkpoint(tmp_path / "as slow" / "new", zero3.shard(nn.Sequential(nn.Linear(2, 2)), nn.Linear))
    assert content_of(tmp_path / "as slow" / "new")["number"] == 5
    shutil.rmtree(host(tmp_path, 1))

    def find(model: Any, optimizer: Any, group: ThreadCommunicator) -> Any:
        assert zero3.latest_checkpoint(host(tmp_path, group.rank), slow) == slow / "step-4"
        return zero3.latest_checkpoint(host(tmp_path, group.rank), slow, model=model)

    assert on_ranks(2, find) == [slow / "step-4"] * 2
    shutil.copytree(slow, tmp_path / "copy")
    assert zero3.latest_checkpoint(tmp_path / "copy", slow) == tmp_path / "copy" / "step-4"
    assert zero3.latest_checkpoint(slow, tmp_path / "copy") == slow / "step-4"
    next(slow.rglob("model-00001*")).write_bytes(b"")
    assert zero3.latest_checkpoint(slow, tmp_path / "copy") == tmp_path / "copy" / "step-4"
    assert zero3.latest_checkpoint(slow, tmp_path / "none") is None
    assert zero3.latest_checkpoint(slow) == slow / "step-4"  # as ever: its manifest alone


def test_latest_checkpoint_asks_which_run_is_meant(tmp_path: Path) -> None:
    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> None:
        for name in ("first", "second"):
            zero3.save_checkpoint(tmp_path / name, model, run=name)
        for found in ({"model": model}, {}):
            with pytest.raises(ValueError, match="runs first, second"):
                zero3.latest_checkpoint(tmp_path, tmp_path / "more", **found)
        with pytest.raises(ValueError, match="runs first, second"):
            zero3.latest_checkpoint(tmp_path, model=model)
        assert zero3.latest_checkpoint(tmp_path, model=model, run="first") == tmp_path / "first"
        assert zero3.latest_checkpoint(tmp_path) == tmp_path / "second"

    on_ranks(2, body)


def test_local_and_replicas_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> None:
        path, rank = tmp_path / "new", group.rank
        for wrong, kind in ((-1, ValueError), (True, TypeError), (1.0, TypeError)):
            with pytest.raises(kind, match=r"rank 0: replicas"):
                zero3.save_checkpoint(path, model, local=True, replicas=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"rank 0: replicas=1: .*local=True"):
            zero3.save_checkpoint(path, model, replicas=1)
        for differing in ({"local": rank == 0}, {"local": True, "replicas": rank}, {"run": str(rank)}):
            with pytest.raises(ValueError, match=f"ranks differ.*rank 1: {next(reversed(differing))}: "):  # by its name
                zero3.save_checkpoint(path, model, **differing)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="name: new"):
            zero3.save_checkpoint(path if rank else tmp_path / "other", model, local=True)
        with pytest.raises(ValueError, match="ranks differ"):
            zero3.latest_checkpoint(path, *[path] * rank, model=model)
        with pytest.raises(ValueError, match="ranks differ"):
            zero3.latest_checkpoint(path, model=model, run=str(rank))

    on_ranks(2, body)
    assert not list(tmp_path.iterdir())


def test_local_checkpoint_under_an_old_name_and_a_full_disk(tmp_path: Path) -> None:
    saved(tmp_path, [0, 1], "same")
    expected = saved(tmp_path, [0, 1], "same")
    check(tmp_path, expected, [0, 1])

    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(OSError, match="No space left"):
            zero3.save_checkpoint(host(tmp_path, group.rank) / "new", model, optimizer, local=True, replicas=1)
        assert not (host(tmp_path, group.rank) / "new").exists()

    with disk.replaced("write_at", disk.full):
        on_ranks(2, body)
    check(tmp_path, expected, [0, 1])


def _in_processes(rank: Rank, root: str) -> list[Any]:
    model = zero3.shard(odd())
    optimizer = OPTIMIZERS["AdamW"](zero3.get_trainable_chunk(model))
    train(model, optimizer, range(2))
    here = host(Path(root), rank.number)
    zero3.save_checkpoint(here / "step-2", model, optimizer, local=True, replicas=1)
    expected = snapshot(model, optimizer)
    train(model, optimizer, range(2, 4))
    if rank.number == 1:
        shutil.rmtree(here)
    latest = zero3.latest_checkpoint(here, model=model)
    zero3.load_checkpoint(latest, model, optimizer)  # type: ignore[arg-type]
    assert_same(snapshot(model, optimizer), expected)
    return files(here)


@pytest.mark.slow
def test_local_checkpoints_of_processes(tmp_path: Path) -> None:
    found = on_processes(2, _in_processes, str(tmp_path))
    assert len(found[0]) == 4 and set(found[1]) >= {"model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"}


def test_a_shared_checkpoint_says_nothing_of_hosts(tmp_path: Path) -> None:
    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> None:
        zero3.save_checkpoint(tmp_path / "shared", model, optimizer)

    on_ranks(2, body)
    assert "local" not in json.loads((tmp_path / "shared" / "manifest.json").read_text())


def test_load_checkpoint_looks_at_each_copy_that_it_reads(tmp_path: Path) -> None:
    """Of two copies one is damaged: the ranks beside it must not read it because the other one is whole."""
    saved(tmp_path, [0, 1], replicas=1)
    part = next(host(tmp_path, 1).rglob("model-00001-*"))
    text = bytearray(part.read_bytes())
    text[-1] ^= 1
    part.write_bytes(text)

    def body(model: Any, optimizer: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=rf"rank 1: .*{part.name} is corrupt"):
            zero3.load_checkpoint(host(tmp_path, group.rank) / "step-1", model, optimizer)

    on_ranks(2, body)


def test_a_disk_that_fails_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(nn.Sequential(nn.Linear(2, 2)), nn.Linear, process_group=group)

        with pytest.raises(OSError, match=r"rank 1.*made up"):
            zero3.latest_checkpoint(tmp_path / str(group.rank), model=model)

    def names_in(path: Path) -> Any:
        if path.name == "1":
            raise OSError(5, "made up")
        return disk.OPERATIONS["names_in"](path)

    with disk.replaced("names_in", names_in):
        run_ranks(2, body)


def test_a_directory_that_may_not_be_searched_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `lost+found` at the root of a disk."""
    (tmp_path / "lost+found").mkdir(mode=0)
    access, is_file = os.access, Path.is_file

    def looks(path: Path) -> bool:
        if path.parent.name == "lost+found":
            raise PermissionError(13, "made up", str(path))
        return is_file(path)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "lost+found" and access(path, mode))
    monkeypatch.setattr(Path, "is_file", looks)

    def body(group: ThreadCommunicator) -> Path | None:
        model = zero3.shard(nn.Sequential(nn.Linear(2, 2)), nn.Linear, process_group=group)
        for number in range(3):
            zero3.save_checkpoint(tmp_path / f"step-{number}", model, keep_last=2, run="one")
        return zero3.latest_checkpoint(tmp_path, model=model)

    assert run_ranks(2, body) == [tmp_path / "step-2"] * 2
    assert zero3.latest_checkpoint(tmp_path) == tmp_path / "step-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost+found", "step-1", "step-2"]
