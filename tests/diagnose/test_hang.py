"""`python -m zero3 hang`: each kind of hang, on threads and in gloo's processes; rings that are damaged, old or have no place."""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zero3
from tests.support import processes
from tests.support.hanging import PLACES, Stops, behind, train
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3.__main__ import main
from zero3.comm import ring as rings
from zero3.comm.ring import FORWARD, OUTSIDE, Ring
from zero3.diagnose.hang import judge


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZERO3_RING_DIR", str(tmp_path / "rings"))
    return tmp_path / "rings"


def told(directory: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["hang", str(directory), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# -- who is behind


@pytest.mark.parametrize("place", PLACES)
def test_hang_names_the_rank_and_its_layer(place: str, directory: Path, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    def body(group: ThreadCommunicator) -> None:
        train(tmp_path, place, (lambda: found.append(behind(directory, 1))) if group.rank == 1 else None, group=group)

    run_ranks(3, body)
    assert (found[0]["layer"], found[0]["direction"]) == PLACES[place]
    if found[0]["layer"] is not None:
        assert found[0]["ranks"]["1"]["at"]["doing"] == "computing", "it waits for nobody"
    assert found[0]["ranks"]["1"]["alive"] is True and found[0]["missing"] == []
    assert found[0]["waiting_for"]["number"] >= found[0]["last_common"]["number"]
    if place.endswith("a save"):
        assert found[0]["waiting_for"]["doing"] == "save_checkpoint"
    assert found[0]["forward"] == (2 if place == "data loader" else 3)


def _stop(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "aborted":
        os.abort()  # in C: no handler of Python's runs
    raise torch.OutOfMemoryError("made up")


def _in_process(rank: processes.Rank, directory: str, place: str, how: str) -> None:
    os.environ["ZERO3_RING_DIR"] = directory
    train(rank.scratch, place, (lambda: _stop(how)) if rank.number == 1 else None)


@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("killed", "forward"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            ("killed", "data loader"), ("killed", "optimizer"), ("aborted", "backward"),
            ("out of memory", "forward"), ("out of memory", "last forward"),
        ]),
    ],
)  # fmt: skip
def test_hang_after_a_process_ended(how: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = processes.try_on_ranks(2, _in_process, str(tmp_path), place, how, fresh=True, group_timeout=3.0)
    assert outcomes[1].error == ("OutOfMemoryError" if how == "out of memory" else "killed")
    found = told(tmp_path, capsys)
    assert (found["verdict"], found["behind"]) == ("behind", [1])
    if how != "out of memory":  # its exception leaves the model
        assert (found["layer"], found["direction"]) == PLACES[place]
        assert found["ranks"]["1"]["alive"] is False


def _goes_another_way(rank: processes.Rank, directory: str) -> None:
    os.environ["ZERO3_RING_DIR"] = directory
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model.forward = lambda x, order: [x := model[n](x) for n in order][-1]
    zero3.shard(model, [*model])
    for step in range(3):
        model(torch.randn(2, 4), [1, 0, 2] if (step, rank.number) == (2, 1) else [0, 1, 2]).sum().backward()


@pytest.mark.slow
def test_hang_tells_which_transfers_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processes.try_on_ranks(2, _goes_another_way, str(tmp_path), fresh=True, group_timeout=3.0)
    found = told(tmp_path, capsys)
    assert found["verdict"] == "differ"
    assert [found["made"][rank]["doing"] for rank in "01"] == ["gathering", "comparing"]
    assert found["made"]["1"]["layer"] == "'1' (Linear)"
    assert found["last_common"]["number"] + 1 == found["made"]["0"]["number"] == found["made"]["1"]["number"]


def test_hang_says_that_all_are_together_or_that_one_is_missing(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(3, lambda group: train(tmp_path, "", None, group=group) and None)
    assert told(directory, capsys, 2)["verdict"] == "together"
    assert main(["hang", str(directory)]) == 2
    assert "wait for something else" in capsys.readouterr().out
    next(directory.glob("*rank1.ring")).unlink()
    found = told(directory, capsys)
    assert (found["verdict"], found["missing"]) == ("missing", [1])


def test_hang_without_a_directory_looks_where_a_run_writes(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(2, lambda group: train(tmp_path, "", None, group=group) and None)
    assert main(["hang"]) == 2
    for elsewhere in ("0", str(tmp_path / "elsewhere")):
        monkeypatch.setenv("ZERO3_RING_DIR", elsewhere)
        assert main(["hang"]) == 1


def test_hang_takes_the_newest_run(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hosts' directories side by side, and a run of before in which a rank was behind."""
    old = Ring(_made(tmp_path / "all" / "old"), 1, 0, 2), Ring(tmp_path / "all" / "old", 1, 1, 2)
    old[0].put(old[0].code("comparing"), 1)
    for path in (tmp_path / "all" / "old").iterdir():  # of another process
        text = path.read_bytes()
        path.write_bytes(text.replace(f'"pid": {os.getpid()}'.encode(), f'"pid": {2:{len(str(os.getpid()))}}'.encode()))
    run_ranks(2, lambda group: train(tmp_path, "", None, group=group) and None)
    for number, path in enumerate(directory.iterdir()):
        path.rename(_made(tmp_path / "all" / f"host{number}") / path.name)
    assert told(tmp_path / "all", capsys, 2)["world_size"] == 2


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


# -- the ring


def test_a_ring_changes_no_bit_and_no_collective(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ThreadCommunicator) -> tuple[list[Tensor], list[Any]]:
        return train(tmp_path, "", None, group=group), group.log

    kept = run_ranks(2, body)
    assert len(list(directory.iterdir())) == 2
    monkeypatch.setenv("ZERO3_RING_DIR", "0")
    for one, other in zip(kept, run_ranks(2, body), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
        assert one[1] == other[1] and all(bool(values.isfinite().all()) for values in one[0])


events = st.lists(
    st.tuples(st.sampled_from(["gathering", "reducing", "comparing"]), st.integers(0, 5), st.booleans()), min_size=1, max_size=40
)


@settings(max_examples=30)
@given(events=events, laps=st.integers(0, 3), forward=st.integers(0, 9))
def test_a_ring_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, events: Any, laps: int, forward: int) -> None:
    where = tmp_path_factory.mktemp("ring")
    ring, expected, number = Ring(where, 5, 1, 2), [], 0
    for doing, layer, moves in events * (1 + laps * 3100 // len(events)):
        ring.turn(FORWARD if moves else OUTSIDE)
        number = ring.put(ring.code(doing, f"layer {layer}", layer), forward, int(moves))
        expected.append((number, doing, f"layer {layer}", layer, "forward" if moves else None, forward))
    (path,) = where.iterdir()
    found = rings.read(path)
    assert len(found.events) == min(len(expected), 3072) >= min(len(expected), 1000)
    assert [(e.number, e.doing, e.layer, e.identity, e.direction, e.forward) for e in found.events] == expected[-3072:]
    assert path.stat().st_size <= 1 << 18 and path.stat().st_mode & 0o777 == 0o600
    path.unlink()


@settings(max_examples=30)
@given(made=st.lists(st.integers(0, 30), min_size=2, max_size=5), twist=st.integers(1, 60))
def test_hang_judges_by_what_each_rank_has_made(tmp_path_factory: pytest.TempPathFactory, made: list[int], twist: int) -> None:
    """`twist`: where the last rank has made something else, if it has come so far."""
    where = tmp_path_factory.mktemp("rings")
    for rank, count in enumerate(made):
        ring = Ring(where, 5, rank, len(made))
        for n in range(1, count + 1):
            other = rank == len(made) - 1 and n == twist
            ring.put(ring.code("gathering", "layer", 1 + other), 1)
            ring.put(ring.code("computing", "layer", 1), 1, 0)
    model = {each.about["rank"]: each for each in map(rings.read, where.iterdir())}
    found = judge(model)
    if twist <= min(made):
        assert found["verdict"] == "differ" and found["made"]["0"]["number"] == twist
    elif len(set(made)) == 1:
        assert found["verdict"] == "together"
    else:
        assert found["behind"] == [rank for rank, count in enumerate(made) if count == min(made)]
        assert found["waiting_for"]["number"] == min(made) + 1
    for path in where.iterdir():
        path.unlink()


def test_old_rings_go_and_those_of_living_models_stay(directory: Path, tmp_path: Path) -> None:
    living: list[nn.Module] = []

    def body(group: ThreadCommunicator) -> None:
        for number in range(12):
            model = zero3.shard(nn.Sequential(nn.Linear(2, 2)), nn.Linear, process_group=group)
            if number < 6:
                living.append(model)
            del model

    def count(rank: int) -> int:
        return len(list(directory.glob(f"*rank{rank}.ring")))

    for _ in range(3):
        run_ranks(2, body)
        gc.collect()
    assert count(0) > 16  # the living: 18
    living.clear()
    gc.collect()
    run_ranks(2, body)
    living.clear()
    gc.collect()
    run_ranks(2, body)
    assert count(0) == count(1) == 16


def test_rings_without_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZERO3_RING_DIR", str(tmp_path / "file"))
    run_ranks(2, lambda group: train(tmp_path, "", None, group=group) and None)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "ZERO3_RING_DIR" in said[0] and str(tmp_path / "file") in said[0]
    assert main(["hang", str(tmp_path / "nowhere")]) == 1
    assert "no rank's transfers" in capsys.readouterr().err


def test_a_full_disk_leaves_no_ring(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    run_ranks(2, lambda group: train(tmp_path, "", None, group=group) and None)
    assert list(directory.iterdir()) == []


def test_a_forked_child_leaves_its_parent_s_ring_alone(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(nn.Sequential(Stops(4, 4)), Stops, process_group=group)
        model(torch.randn(2, 4)).sum().backward()
        path = next(directory.glob(f"*rank{group.rank}.ring"))
        before = len(rings.read(path).events)
        group.world.meet("pid", 0, group.rank, "", "")
        monkeypatch.setattr(os, "getpid", lambda: 1)
        group.world.meet("pid", 1, group.rank, "", "")
        model(torch.randn(2, 4)).sum().backward()
        assert len(rings.read(path).events) == before

    run_ranks(2, body)


def test_where_rings_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ZERO3_RING_DIR", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert rings.directory() is not None and str(rings.directory()).endswith(f"zero3-{os.getuid()}")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/dumps/nccl_trace_rank_")
    assert rings.directory() == Path("/dumps")
    monkeypatch.setenv("ZERO3_RING_DIR", "0")
    assert rings.directory() is None


# -- what is not whole, and what is torch's


@settings(max_examples=30)
@given(cut=st.integers(0, rings.SIZE), at=st.integers(0, rings.SIZE - 1), byte=st.integers(0, 255))
def test_damaged_rings_are_passed_over_by_name(tmp_path_factory: pytest.TempPathFactory, cut: int, at: int, byte: int) -> None:
    where = tmp_path_factory.mktemp("rings")
    for rank in range(2):
        ring = Ring(where, 5, rank, 2)
        ring.put(ring.code("comparing"), 1)
    first, second = sorted(where.iterdir())
    text = bytearray(second.read_bytes())
    text[at] = byte
    second.write_bytes(text)
    assert main(["hang", str(where), "--json"]) in (0, 2)
    first.write_bytes(first.read_bytes()[:cut])
    second.unlink()
    second.symlink_to(first)
    os.mkfifo(where / "zero3-5-0123456789abcdef-rank7.ring")
    assert main(["hang", str(where)]) == (0 if cut == rings.SIZE else 1)
    for path in where.iterdir():
        path.unlink()


def test_noise_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Ring(tmp_path, 5, 0, 2)
    noise = tmp_path / "zero3-5-0123456789abcdef-rank1.ring"
    noise.write_bytes(os.urandom(rings.SIZE))
    assert list(told(tmp_path, capsys)["damaged"]) == [noise.name]
    nested = b"zero3 ring 1\n\0\0\0".ljust(64, b"\0") + b"[" * 4032
    noise.write_bytes(nested.ljust(rings.SIZE, b"\0"))
    assert list(told(tmp_path, capsys)["damaged"]) == [noise.name]


def test_hang_joins_dumps_of_torch_s_flight_recorder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        ring = Ring(tmp_path, 5, rank, 2)
        for layer in range(3 - rank):
            ring.put(ring.code("gathering", f"'{layer}'", layer), 1)
    made = [event.when for event in rings.read(next(tmp_path.glob("*rank0.ring"))).events]
    entries = [
        {"state": state, "collective_seq_id": n, "profiling_name": "nccl:all_gather", "time_created_ns": made[n] + 1}
        for n, state in enumerate(["completed", "started", "scheduled"])
    ]
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"version": "2.10", "entries": entries}))
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps({"version": "2.10", "entries": [], "called": time.sleep}))
    (tmp_path / "trace_rank_2").write_bytes(b"\x80\x04]q\x00(\x8c\x02os\x94\x8c\x06system\x94\x93\x8c\x02id\x85R.")
    found = told(tmp_path, capsys)
    expected = {"collective": 1, "doing": "nccl:all_gather", "state": "started", "layer": "'1'"}
    assert found["recorder"]["0"] == expected
    assert "trace_rank_2" in found["damaged"]
    assert main(["hang", str(tmp_path)]) == 0
    assert "flight recorder: nccl:all_gather (number 1) is started, of layer '1'" in capsys.readouterr().out


def test_hang_s_picture(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run_ranks(2, lambda group: train(tmp_path, "", None, group=group) and None)
    assert main(["hang", str(directory), "--picture", str(tmp_path / "hang.png")]) == 2
    assert (tmp_path / "hang.png").stat().st_size > 5000
    assert main(["hang", str(directory), "--picture", str(tmp_path / "hang.none")]) == 1


def test_hang_of_many_ranks_is_one_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(64):
        ring = Ring(tmp_path, 5, rank, 64)
        for layer in range(9 - (rank == 40)):
            ring.put(ring.code("gathering", f"'{layer}'", layer), 1)
    assert main(["hang", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24 and "rank 40 is behind" in lines[1] and "rank 0-39, 41-63: 9 transfers" in "\n".join(lines)


def test_a_header_is_not_changed_by_events(tmp_path: Path) -> None:
    ring = Ring(tmp_path, 5, 0, 2)
    for _ in range(3073):
        ring.put(ring.code("comparing"), 1)
    ring.put(ring.code("computing", "0", 1), 0, 0, 7)
    (path,) = tmp_path.iterdir()
    found = rings.read(path)
    assert (found.completed, found.events[0].number, found.events[-1].number) == (7, 3, 3073)
    assert struct.unpack_from("<Q", path.read_bytes(), 32)[0] == 0
    del ring
    assert rings.read(path).closed


def test_a_ring_is_closed_when_its_process_ends_well(tmp_path: Path) -> None:
    """Also if something still holds it then."""
    script = "import sys; from pathlib import Path; from zero3.comm.ring import Ring; held = Ring(Path(sys.argv[1]), 5, 0, 2)"
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
    (path,) = tmp_path.iterdir()
    assert rings.read(path).closed


def test_what_is_not_ours_to_read_is_not_ours_to_delete(directory: Path, tmp_path: Path) -> None:
    """And it is no reason to have no ring. (A link is as good as another user's file.)"""
    directory.mkdir(parents=True, exist_ok=True)
    strange = [directory / f"zero3-5-{number:016x}-rank0.ring" for number in range(20)]
    for path in strange:
        path.symlink_to(tmp_path / "elsewhere")
    model = run_ranks(2, lambda group: zero3.shard(nn.Sequential(nn.Linear(2, 2)), nn.Linear, process_group=group))
    assert all(path.is_symlink() for path in strange)
    assert len([path for path in directory.glob("*.ring") if not path.is_symlink()]) == 2
    del model
