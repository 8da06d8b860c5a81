"""`MappedFiles`: tensors whose memory is a file without a name."""

from __future__ import annotations

import errno
import gc
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero3.scratch.mapped_files import MappedFiles


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
    before = files.nbytes
    sizes = [(tensor.numel(), tensor.dtype) for tensor, _ in held.values()]
    held.clear()
    tensor = None  # type: ignore[assignment]
    for numel, dtype in sizes:
        held[len(held)] = (files.empty(numel, dtype), 0)
    assert files.nbytes == before


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    files = MappedFiles(str(tmp_path))
    before = len(os.listdir("/proc/self/fd"))
    tensors = [files.empty(10, torch.float32) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len({tensor.data_ptr() for tensor in tensors}) == 50


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
