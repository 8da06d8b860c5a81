"""The reader of safetensors files: what the safetensors package wrote, by any range; and files that are not what they claim."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zero3.checkpoint import safetensors_files
from zero3.checkpoint.safetensors_files import SafetensorsFiles

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]  # fmt: skip


def opened(directory: Path, header: Any = None, data: bytes = b"", raw: bytes | None = None) -> SafetensorsFiles:
    """The reader on a file made by hand."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data if raw is None else raw)
    return SafetensorsFiles(directory)


def entry(start: int, stop: int, shape: list[int] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize("stage", [16, 48, 1 << 22])
def test_reads_what_the_package_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Every dtype, every range, in pieces of any size; 0-dim and empty tensors among them."""
    monkeypatch.setattr(safetensors_files, "STAGE_BYTES", stage)
    written = {str(dtype): (torch.arange(77) % 5).to(dtype).view(7, 11) for dtype in DTYPES}
    written |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = load_file(tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    described = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in expected.items()}
    assert {name: (stored.shape, stored.dtype) for name, stored in files.tensors.items()} == described
    for name, tensor in expected.items():
        flat = tensor.flatten()
        for start, stop in [(0, flat.numel()), (1, 2), (5, 60), (70, 77), (3, 3)]:
            if stop <= flat.numel():
                found = torch.zeros(stop - start, dtype=tensor.dtype)
                files.tensors[name].read(start, found)
                assert torch.equal(found.view(torch.uint8), flat[start:stop].view(torch.uint8)), (name, start, stop)
    files.close()


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = safetensors_files.read_bytes
    monkeypatch.setattr(safetensors_files, "read_bytes", lambda file, offset, into: whole(file, offset, into[:5]))
    save_file({"a": torch.arange(100.0)}, tmp_path / "model.safetensors")
    files, found = SafetensorsFiles(tmp_path), torch.zeros(50)
    files.tensors["a"].read(25, found)
    assert torch.equal(found, torch.arange(25.0, 75.0))
    files.close()


def test_a_file_that_ends_while_it_is_read(tmp_path: Path) -> None:
    files = opened(tmp_path, {"a": entry(0, 400)}, bytes(400))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(RuntimeError, match=r"ended within 'a'"):
        files.tensors["a"].read(0, torch.zeros(100))
    files.close()


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        ({"a": entry(0, 8)}, 4, r"cut off or corrupt: .* bytes, its header describes"),
        ({"a": entry(0, 8)}, 12, r"cut off or corrupt"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, r"'b' starts at byte \d+, expected \d+: without overlaps"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, r"'b' starts at byte"),
        ({"a": entry(0, 8, [3])}, 8, r"'a' has 8 bytes, its shape \[3\] of torch.float32 takes 12"),
        ({"a": entry(8, 0, [2])}, 8, r"'a' has -8 bytes"),
        ({"a": entry(0, 8, [-2])}, 8, r"'a' has shape \[-2\]"),
        ({"a": entry(0, 8, [True, 2])}, 8, r"'a' has shape"),
        ({"a": entry(0, 8, [1 << 62, 1 << 62])}, 8, r"takes"),
        ({"a": {**entry(0, 8), "data_offsets": [0, 8, 9]}}, 8, r"'a' has .* two offsets"),
        ({"a": {**entry(0, 8), "data_offsets": [0.0, 8]}}, 8, r"expected integers"),
        ({"a": entry(0, 8, dtype="Q4")}, 8, r"'a' has the dtype 'Q4'.*known are BOOL"),
        ({"a": entry(0, 8, dtype=["F32"])}, 8, r"which can't be read"),
        ({"a": {"dtype": "F32"}}, 0, r"'a' must have dtype, shape and data_offsets"),
        ({"a": 3}, 0, r"'a' must have dtype"),
        ([], 0, r"expected a JSON object, found list"),
        ({"__metadata__": {"format": 1}}, 0, r"__metadata__ must map strings to strings"),
        (b'{"a": 1, "a": 2}', 0, r"the name 'a' stands there twice"),
        (b"{" * 100_000, 0, r"is not the JSON"),
        (b"\xff\xfe", 0, r"is not the JSON"),
        (b"", 0, r"is not the JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_header_that_is_wrong(tmp_path: Path, header: Any, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, header, bytes(size))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cut off: 0 bytes"),
        (b"\x02\0\0", "cut off: 3 bytes"),
        (b"\xff" * 8, "cut off: 8 bytes, its header alone ends at"),
        ((1000).to_bytes(8, "little") + b"{}", "its header alone ends at 1008"),
    ],
)
def test_a_file_that_has_no_header(tmp_path: Path, raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, raw=raw)


def test_a_header_of_absurd_length_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # takes no room on the disk
    with pytest.raises(ValueError, match="a header of 200000000 bytes, the format allows 100000000"):
        SafetensorsFiles(tmp_path)


def index_of(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", "a\\b.safetensors", "a.bin", 3])
def test_an_index_stays_in_its_directory(tmp_path: Path, name: Any) -> None:
    (tmp_path / "inside").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "secret.safetensors")
    index_of(tmp_path / "inside", {"a": name})
    with pytest.raises(ValueError, match=r"'a' is said to be in .*, expected a \.safetensors file beside it"):
        SafetensorsFiles(tmp_path / "inside")


def no_map(directory: Path) -> None:
    index_of(directory, None)


def absent(directory: Path) -> None:
    index_of(directory, {"a": "x.safetensors"})


def elsewhere(directory: Path) -> None:
    save_file({"a": torch.zeros(2)}, directory / "x.safetensors")
    save_file({"b": torch.zeros(2)}, directory / "y.safetensors")
    index_of(directory, {"a": "y.safetensors", "b": "y.safetensors"})


def twice(directory: Path) -> None:
    save_file({"a": torch.zeros(2)}, directory / "x.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, directory / "y.safetensors")
    index_of(directory, {"a": "x.safetensors", "b": "y.safetensors"})


def no_json(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text("weights")


def pickles(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"")


def gone(directory: Path) -> None:
    directory.rmdir()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (no_map, "weight_map must be an object"),
        (absent, r"x\.safetensors is named by the index, but there is no such file: the download may be incomplete"),
        (elsewhere, r"says that 'a' is in y\.safetensors, where it is not"),
        (twice, r"'a' is in x\.safetensors and again in y\.safetensors"),
        (no_json, "is not the JSON"),
        (pickles, r"holds neither model\.safetensors nor .*, found pytorch_model\.bin: save the model with save_pretrained"),
        (gone, "is not a directory"),
    ],
)
def test_a_directory_that_is_wrong(tmp_path: Path, prepare: Callable[[Path], None], message: str) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    prepare(directory)
    with pytest.raises(ValueError, match=message):
        SafetensorsFiles(directory)
