"""`MappedFiles`: tensors whose memory is a file without a name."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero3.scratch import mapped_files
from zero3.scratch.mapped_files import MappedFiles
from zero3.scratch.nameless_file import GrowingFile


def of_pages(tensor: Tensor, field: str) -> int:
    """The bytes that `field` of /proc/self/smaps says of the mapping that `tensor` lies in."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            start, stop = (int(each, 16) for each in line.split()[0].split("-"))
            found = line if start <= tensor.data_ptr() < stop else None
        elif found is not None and line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"no mapping at {tensor.data_ptr():x}")


def test_values_rest_outside_the_process(tmp_path: Path) -> None:
    files = MappedFiles(str(tmp_path))
    tensor = files.empty(1_000_000, torch.float32)
    tensor.copy_(torch.arange(1_000_000))
    assert of_pages(tensor, "Rss") >= tensor.nbytes
    assert of_pages(tensor, "Anonymous") == 0
    files.rest(tensor)
    assert of_pages(tensor, "Rss") == 0
    files.read_ahead(tensor)
    assert torch.equal(tensor, torch.arange(1_000_000, dtype=torch.float32))


def test_it_has_no_name(tmp_path: Path) -> None:
    files = MappedFiles(str(tmp_path))
    tensor = files.empty(100, torch.float32)
    assert not list(tmp_path.iterdir())
    tmp_path.rmdir()  # nor does it need the directory
    assert tensor.sum() == 0


def test_memory_outlives_its_owner_and_not_its_tensors(tmp_path: Path) -> None:
    files = MappedFiles(str(tmp_path))
    tensor = files.empty(100, torch.float32).fill_(7)
    view, address = tensor[50:], tensor.data_ptr()
    mapped = f"{address:x}-"
    del files, tensor
    gc.collect()
    assert view.eq(7).all()
    assert mapped in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert mapped not in Path("/proc/self/maps").read_text()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))))
def test_tensors_do_not_overlap_and_memory_is_used_again(wanted: list[tuple[int, int, torch.dtype]]) -> None:
    files = MappedFiles("/tmp")
    held: dict[int, tuple[Tensor, int]] = {}
    most = 0
    for number, (place, numel, dtype) in enumerate(wanted):
        held.pop(place, None)
        held[place] = (files.empty(numel, dtype).fill_(number % 100), number % 100)
        most = max(most, sum(-(-tensor.nbytes // 4096) for tensor, _ in held.values()))
        for tensor, value in held.values():
            files.rest(tensor)
            assert bool(tensor.eq(value).all())
            assert tensor.device.type == "cpu" and tensor.dim() == 1
    before = len(files._mapped)
    sizes = [(tensor.numel(), tensor.dtype) for tensor, _ in held.values()]
    held.clear()
    tensor = None  # type: ignore[assignment]
    for numel, dtype in sizes:
        held[len(held)] = (files.empty(numel, dtype), 0)
    assert len(files._mapped) == before


def test_many_regions_have_one_descriptor_which_closes_with_the_last_of_those_that_share_it(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = GrowingFile(str(tmp_path))
    several = [MappedFiles(str(tmp_path), file) for _ in range(3)]
    tensors = [files.empty(10, torch.float32) for files in several for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert len({tensor.data_ptr() for tensor in tensors}) == 60
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    del several, file
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(bool(tensor.eq(number).all()) for number, tensor in enumerate(tensors))


def drop(files: MappedFiles, begin: int = 0) -> None:
    """The kernel gives up what it keeps of the file, as when memory is short; but not what it has to write first."""
    files.rest_all()
    os.posix_fadvise(files._mapped[0].descriptor, begin, 0, os.POSIX_FADV_DONTNEED)


def test_what_is_written_can_be_dropped_and_comes_back(tmp_path: Path) -> None:
    files = MappedFiles(str(tmp_path))
    before, tensor = files.empty(3_000, torch.float32).fill_(1), files.empty(1_000_000, torch.float32)
    tensor.copy_(torch.arange(1_000_000))
    assert not files.is_away(tensor)
    files.write(tensor, wait=True)
    assert not files.is_away(tensor)  # written, and here as well
    drop(files)
    if not files.is_away(tensor):
        pytest.skip(f"{tmp_path} is in memory, and never dropped")
    files.read_ahead(tensor)
    files.bring(tensor, to_write=True)
    assert not files.is_away(tensor)
    files.write(tensor, wait=True)
    drop(files, 1 << 21)
    assert files.is_away(tensor) and files.is_away(tensor[700_000:]) and not files.is_away(tensor[:400_000])
    assert torch.equal(tensor, torch.arange(1_000_000, dtype=torch.float32)) and before.eq(1).all()


def test_a_disk_that_can_not_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = MappedFiles(str(tmp_path))
    tensor = files.empty(5000, torch.float32)

    def refuse(*_: Any) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(mapped_files, "_libc", SimpleNamespace(sync_file_range=refuse))
    with pytest.raises(OSError, match=f"20000 bytes of what is offloaded to '{tmp_path}' can't be written: Input/output error"):
        files.write(tensor, wait=True)
    files.write(torch.ones(5000), wait=True)  # from elsewhere: nothing to write


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([torch.float32, torch.bfloat16, torch.uint8])), min_size=1, max_size=4))
def test_put_copies_values_and_nothing_else(wanted: list[tuple[int, torch.dtype]]) -> None:
    files = MappedFiles("/tmp")
    given_ = [torch.arange(numel).to(dtype) for numel, dtype in wanted]
    for again in range(2):  # into regions that are new, and into those of others
        copies = [files.put(values, "a gradient") for values in given_]
        neighbours = [files.empty(1024, torch.float32).fill_(again) for _ in copies]
        for values, copy in zip(given_, copies, strict=True):
            assert copy is not None and torch.equal(copy, values) and (not copy.numel() or copy in files)
        assert all(bool(each.eq(again).all()) for each in neighbours)
        del copies, neighbours


def test_put_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = MappedFiles(str(tmp_path))

    def refuse(*_: Any) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(mapped_files._libc, "pwrite", refuse)
    with pytest.warns(UserWarning, match="a gradient stays in memory.*can't be written: Input/output error"):
        assert files.put(torch.ones(5000), "a gradient") is None
    assert files.put(torch.ones(5000), "a gradient") is None  # once is enough


def test_other_memory_is_left_alone(tmp_path: Path) -> None:
    files = MappedFiles(str(tmp_path))
    mine = files.empty(5000, torch.float32).fill_(1)
    other = torch.ones(1_000_000)
    for tensor in (other, torch.ones(0), mine[1000:3000]):
        files.rest(tensor)
        files.read_ahead(tensor)
    assert other.eq(1).all()
    assert mine.eq(1).all()


def test_a_full_disk_is_an_error_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = MappedFiles(str(tmp_path))
    tensor = files.empty(5000, torch.float32).fill_(1)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match=rf"{tmp_path}.* has no room for 20480 more bytes of what is offloaded: No space left"):
        files.empty(5000, torch.float32)
    monkeypatch.undo()
    assert files.empty(5000, torch.float32).fill_(2).eq(2).all()
    assert tensor.eq(1).all()


@pytest.mark.parametrize("name", ["none", "file", ""])
def test_bad_directories(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"can't hold what is offloaded.*Name a directory"):
        MappedFiles(str(tmp_path / name) if name else "").empty(1, torch.float32)
