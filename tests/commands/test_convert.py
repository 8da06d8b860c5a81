"""`python -m zero3 convert`: which format IN has, what is refused, what a failure leaves, and how much memory it takes."""

from __future__ import annotations

import pickle
import random
import resource
import shutil
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

import zero3
from tests.checkpoint.test_nothing_is_unpickled import Trap
from tests.formats.test_round_trips import convert, fails, saved
from tests.support import disk
from tests.support.checkpoints import assert_same, content_of, odd
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import run_ranks
from zero3.__main__ import main


def one() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours after two steps, that DeepSpeed could hold too."""
    path = tmp_path_factory.mktemp("convert") / "run"
    model = zero3.Zero3Layer(one())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
    zero3.save_checkpoint(path, model, optimizer)
    return path


KINDS = ["zero3", "torch", "dcp", "deepspeed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("to", KINDS)
def test_every_kind_to_every_kind(kind: str, to: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """IN says what it is, and nothing in it differs after the way there."""
    source = convert(run, tmp_path / "in", "--to", kind)
    capsys.readouterr()
    target = convert(source, tmp_path / "out", "--to", to)
    assert capsys.readouterr().out == f"{target}: {kind} to {to}, 4 tensors, 4 with optimizer state, 720 bytes\n"
    expected, found = (
        torch.load(convert(path, tmp_path / f"{path.name} file", "--to", "torch"), weights_only=True) for path in (run, target)
    )
    for entry in (found, expected):
        entry.pop("deepspeed", None)
    assert_same(found, expected)


def test_the_default_is_ours(run: Path, tmp_path: Path) -> None:
    convert(convert(run, tmp_path / "file", "--to", "torch"), tmp_path / "ours")
    assert main(["inspect", str(tmp_path / "ours"), "--verify", "--json"]) == 0


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


class FailsAt:
    """In the place of an operation: the call of this number says that the disk is full. 0: none."""

    def __init__(self, name: str, number: int) -> None:
        self.original, self.number, self.calls = disk.OPERATIONS[name], number, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self.number:
            raise OSError(28, "No space left on device")
        return self.original(*arguments)


@pytest.mark.parametrize("operation", ["create", "write", "write_at", "sync", "make_directory", "sync_directory"])
@pytest.mark.parametrize("to", KINDS)
def test_a_failed_conversion_leaves_nothing(
    to: str, operation: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the disk is full: at up to a dozen calls of each operation, from the first to the last."""

    def converts(number: int) -> tuple[int, int]:
        failing = FailsAt(operation, number)
        with disk.replaced(operation, failing):
            return main(["convert", str(run), str(tmp_path / "out"), "--to", to]), failing.calls

    status, calls = converts(0)
    assert status == 0
    for number in sorted({1, calls, *range(1, calls + 1, max(1, calls // 10))} if calls else ()):
        remove(tmp_path / "out")
        assert converts(number)[0] == 1
        assert "No space left on device" in capsys.readouterr().err
        if (operation, number) == ("sync_directory", calls):  # it is there, whole, and only its name is perhaps not on the disk
            remove(tmp_path / "out")
        assert not list(tmp_path.iterdir())


def test_what_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "no such file or directory" in fails(capsys, tmp_path / "nowhere", out)
    (tmp_path / "empty").mkdir()
    assert "is no checkpoint of zero3, torch.distributed.checkpoint, DeepSpeed ZeRO-3 or torch.save (found nothing)" in fails(
        capsys, tmp_path / "empty", out
    )
    (tmp_path / "text").write_text("hello")
    assert "text is no file of torch's" in fails(capsys, tmp_path / "text", out)
    assert "can't be made" in fails(capsys, run, tmp_path / "nowhere" / "out")
    assert "goes with --to deepspeed" in fails(capsys, run, out, "--ranks", "2")
    assert "a number from 1 up" in fails(capsys, run, out, "--to", "deepspeed", "--ranks", "0")
    out.touch()
    assert main(["convert", str(run), str(out)]) == 1 and out.stat().st_size == 0
    assert f"{out} is there already" in capsys.readouterr().err


Size = tuple[int, ...]
WRONG_BLOCKS: dict[str, list[tuple[Size, Size]]] = {  # of a tensor [5, 5]: offsets and sizes
    "an offset too few": [((0,), (5, 5))],
    "an offset too many": [((0, 0, 0), (5, 5))],
    "a size too few": [((0, 0), (25,))],
    "one twice": [((0, 0), (5, 5)), ((0, 0), (5, 5))],
    "an overlap": [((0, 0), (3, 5)), ((1, 0), (2, 5))],
    "an overlap of columns": [((0, 0), (5, 3)), ((0, 1), (5, 2))],
    "a gap": [((0, 0), (2, 5)), ((3, 0), (2, 5))],
    "beyond the end": [((0, 0), (2, 5)), ((3, 0), (3, 5))],
    "beyond a row": [((0, 2), (5, 5))],
    "before the beginning": [((-1, 0), (5, 5))],
    "less than nothing": [((0, 0), (5, 6)), ((0, 5), (5, -1))],
    "nothing": [],
}


@pytest.mark.parametrize("wrong", WRONG_BLOCKS)
def test_blocks_that_do_not_fill_a_tensor(wrong: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of torch.distributed.checkpoint. If their elements were as many as the tensor's, what no block has was read from memory of before."""
    path = convert(run, tmp_path / "dcp", "--to", "dcp")
    metadata = pickle.loads((path / ".metadata").read_bytes())
    described = metadata.state_dict_metadata["model.1.weight"]
    described.chunks = [ChunkStorageMetadata(torch.Size(begin), size) for begin, size in WRONG_BLOCKS[wrong]]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    said = fails(capsys, path, tmp_path / "out")
    assert "model.1.weight has (5, 5), which its blocks don't fill, each element once: " in said and not (tmp_path / "out").exists()


def test_what_torch_reads_of_our_blocks(tmp_path: Path) -> None:
    """One block each, which begins at 0 in each dimension: of numbers, empty tensors, and four dimensions, too."""
    tensors = {f"t{number}": torch.ones(shape) for number, shape in enumerate([(), (3,), (0, 2), (2, 3), (1, 2, 3, 1)])}
    torch.save({"model": tensors}, tmp_path / "file")
    metadata = FileSystemReader(convert(tmp_path / "file", tmp_path / "dcp", "--to", "dcp")).read_metadata()
    for name, tensor in tensors.items():
        described = metadata.state_dict_metadata[f"model.{name}"]
        assert isinstance(described, TensorStorageMetadata) and described.size == tensor.shape
        begin = torch.Size([0] * tensor.dim())
        assert described.chunks == [ChunkStorageMetadata(begin, tensor.shape)]
        assert MetadataIndex(f"model.{name}", begin) in metadata.storage_data
    found: dict[str, Any] = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(found["model"], tensors)


BAD: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "holds a list"),
    "no model": ({"epoch": 3, "name": "x"}, "holds no model: expected one of model"),
    "a number among tensors": ({"model": {"a": torch.ones(2), "b": 3}}, "'b' of the model is a int, expected a plain tensor"),
    "twice": ({"model": {"a": torch.ones(2), "_orig_mod.a": torch.ones(2)}}, "has 'a' twice"),
    "numbers": ({"model": {"a": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": [{"params": [0]}]}}, "state is by numbers"),
    "strangers": ({"model": {"a": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": [{"params": ["z"]}]}}, "has not: z"),
    "a name twice": ({"model": {"a": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": [{"params": ["a", "a"]}]}}, "name a twice"),
    "no group": ({"model": {"a": torch.ones(2)}, "optimizer": {"state": {"a": {"x": 1}}, "param_groups": []}}, "in no group: a"),
    "no lists": ({"model": {"a": torch.ones(2)}, "optimizer": {"state": [], "param_groups": {}}}, "must be a dict"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(BAD[name][0], tmp_path / "file")
    assert BAD[name][1] in fails(capsys, tmp_path / "file", tmp_path / "out")


@pytest.mark.parametrize("to", KINDS)
def test_a_trap_is_left_out_and_not_sprung(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"state": {"a": {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 1.0, "params": ["a"]}]}
    torch.save({"model": {"a": torch.ones(2)}, "optimizer": state, "args": {"trap": Trap(tmp_path)}, "epoch": 1}, tmp_path / "file")
    convert(convert(tmp_path / "file", tmp_path / "out", "--to", to), tmp_path / "back")
    assert "extra['args']['trap']" in capsys.readouterr().err
    assert not (tmp_path / "sprung").exists()
    content = torch.load(convert(tmp_path / "back", tmp_path / "again", "--to", "torch"), weights_only=True)
    assert content["epoch"] == 1 and content["args"] == {}


def damage(text: bytes, generator: random.Random) -> bytes:
    content = bytearray(text)
    for _ in range(generator.randint(1, 3)):
        content[generator.randrange(len(content))] = generator.randrange(256)
    return bytes(content)


def damage_pickle(path: Path, generator: random.Random) -> None:
    """Of a file of torch's, whose hash of it becomes right again, or of the metadata of torch.distributed.checkpoint."""
    if path.name == ".metadata":
        path.write_bytes(damage(path.read_bytes(), generator))
        return
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, damage(content, generator) if name.endswith("data.pkl") else content)


@pytest.mark.parametrize("kind", ["torch", "dcp", "deepspeed"])
def test_damaged_pickles_are_an_error_or_are_read(kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That is one line, or nothing that matters (a learning rate): never a traceback, and never half an OUT."""
    whole = convert(run, tmp_path / "whole", "--to", kind)
    generator, statuses = random.Random(0), set()
    for _ in range(80):
        source = Path(shutil.copytree(whole, tmp_path / "in") if whole.is_dir() else shutil.copyfile(whole, tmp_path / "in"))
        files = sorted(path for path in source.rglob("*") if path.is_file() and path.suffix != ".distcp" and path.name != "latest")
        damage_pickle(generator.choice(files or [source]), generator)
        status = main(["convert", str(source), str(tmp_path / "out")])
        statuses.add(status)
        assert (tmp_path / "out").exists() == (status == 0) and not (tmp_path / "out.unfinished").exists()
        for path in (tmp_path / "out", source):
            remove(path)
    assert statuses == {0, 1}


def test_frozen_parameters_that_were_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = one()
    model[0].requires_grad_(False)
    zero3.save_checkpoint(tmp_path / "run", zero3.shard(model, [nn.Linear]), frozen=False)
    assert "was saved with frozen=False, without 2 parameters" in fails(capsys, tmp_path / "run", tmp_path / "out")


def test_a_changed_checkpoint_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path / "run", 2, "SGD", odd, None)
    file = next(tmp_path.rglob("model-00001*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert "model-00001-of-00002.safetensors is corrupt" in fails(capsys, tmp_path / "run", tmp_path / "out")


def conversions(rank: Rank, directory: str, sizes: list[int]) -> list[list[int]]:
    """How much the most that this process ever held grows by each conversion, of each size, in bytes."""
    grown = []
    for size in sizes:
        path = Path(directory) / str(size)
        names = [path / kind for kind in ("zero3", "dcp", "deepspeed", "torch")]
        each = []
        for source, target, to in zip([path / "file", *names[:-1]], names, ("zero3", "dcp", "deepspeed", "torch"), strict=True):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            assert main(["convert", str(source), str(target), "--to", to]) == 0
            each.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
            shutil.rmtree(source) if source.is_dir() else source.unlink()
        grown.append(each)
        names[-1].unlink()
    return grown


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kB on Linux")
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """After a small run has warmed everything up, a large one takes at most 96 MiB more: it has 384 MiB, and its one tensor 128."""
    sizes = [1 << 20, 32 << 20]
    for size in sizes:
        (tmp_path / str(size)).mkdir()
        state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(size), "exp_avg_sq": torch.zeros(size)}
        optimizer = {"state": {"a": state}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
        torch.save({"model": {"a": torch.zeros(size)}, "optimizer": optimizer}, tmp_path / str(size) / "file")
    _, grown = on_ranks(1, conversions, str(tmp_path), sizes, process_group=False, fresh=True)[0]
    assert max(grown) <= 96 << 20, grown


def with_buffers(group: Any, *, differ: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    sharded = zero3.shard(model, layers=nn.Linear, process_group=group)
    sharded[1].running_mean.fill_(group.rank if differ else 1)
    return sharded


@pytest.mark.parametrize("differ", [False, True])
def test_convert_says_which_buffers_are_left_out(differ: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, lambda group: zero3.save_checkpoint(tmp_path / "in", with_buffers(group, differ=differ)))
    convert(tmp_path / "in", tmp_path / "out", "--to", "torch")
    said = capsys.readouterr().err.partition("or not yet: ")[2].strip()
    assert said == "random generators" + ", buffers in which other ranks differ from rank 0" * differ


@pytest.mark.parametrize("named", [True, False])
def test_convert_keeps_the_class_of_the_optimizer(named: bool, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = run
    if not named:  # as plain torch saves it
        model = one()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        source = tmp_path / "file"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, source)
    found = content_of(convert(source, tmp_path / "out"))["optimizer"]["class"]
    assert found == ("AdamW" if named else None)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert ("optimizer  " in printed) is named and "groups  " in printed
