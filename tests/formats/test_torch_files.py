"""Files of torch.save: read without torch.load, and written so that `torch.load(weights_only=True)` reads them."""

from __future__ import annotations

import gc
import zipfile
from collections import Counter
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.test_nothing_is_unpickled import Trap
from tests.support.checkpoints import assert_same
from zero3.checkpoint.safetensors_files import DTYPES
from zero3.formats import torch_files
from zero3.formats.trees import run_of
from zero3.formats.values import mapped


def read(path: Path) -> Any:
    with FileIO(str(path)) as file:
        value = torch_files.TorchFile(file, str(path)).value
        return mapped(value, lambda leaf: leaf.tensor() if isinstance(leaf, torch_files.Lazy) else leaf)


def write(path: Path, value: Any) -> None:
    with FileIO(str(path), "x") as file:
        assert torch_files.write(file, 0, value, lambda nbytes: None) == path.stat().st_size


def everything() -> dict[str, Any]:
    made: dict[str, Any] = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for _, dtype in DTYPES}
    base, told = torch.linspace(0, 1, 24).view(4, 6), torch.ones(2)
    told.note = "an attribute"  # type: ignore[attr-defined]
    made |= {
        "transposed": base.t(),
        "columns": base[:, 1:3],
        "repeated": base[0].expand(3, 6),
        "later": base[2:],
        "told": told,
        "step": torch.tensor(3.0),
    }
    made |= {"empty": torch.empty(0, 3), "parameter": nn.Parameter(torch.ones(3)), "plain": [1, 2.5, None, "x", (True, {"a": [{}]})]}
    return made | {"counter": Counter("aab"), 3: {"int": -(2**70)}}


def plainly(value: Any) -> Any:
    return mapped(value, lambda leaf: leaf.detach().clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf)


def test_what_torch_saves_is_read(tmp_path: Path) -> None:
    torch.save(everything(), tmp_path / "file")
    assert_same(read(tmp_path / "file"), plainly(everything()))


def test_what_is_written_torch_reads(tmp_path: Path) -> None:
    value = plainly(everything())
    write(tmp_path / "file", value)
    assert_same(torch.load(tmp_path / "file", weights_only=True), value)
    mapped_ = torch.load(tmp_path / "file", weights_only=True, mmap=True)
    assert_same(mapped_, value)
    assert not any(tensor.data_ptr() % 64 for tensor in mapped_.values() if isinstance(tensor, Tensor) and tensor.numel())
    assert_same(read(tmp_path / "file"), value)


def test_what_shares_memory_is_written_once(tmp_path: Path) -> None:
    shared = torch.randn(1000)
    torch.save({"a": shared, "b": shared, "c": shared.clone()}, tmp_path / "theirs")
    with FileIO(str(tmp_path / "theirs")) as file:
        value = torch_files.TorchFile(file, "theirs").value
        assert value["a"] is value["b"] is not value["c"]
        write(tmp_path / "ours", value)
    assert (tmp_path / "ours").stat().st_size < 2.5 * shared.nbytes
    assert_same(torch.load(tmp_path / "ours", weights_only=True), {"a": shared, "b": shared, "c": shared})


@pytest.mark.parametrize("part", ["conjugate", "negative", "neither"])
def test_views_that_stand_for_other_numbers_than_they_store(part: str, tmp_path: Path) -> None:
    """torch stores what they are views of, and says that beside it."""
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    view = {"conjugate": conjugate, "negative": conjugate.imag, "neither": conjugate.imag.resolve_neg()}[part]
    torch.save({"buffer": view, "resolved": view.resolve_conj().resolve_neg().clone()}, tmp_path / "file")
    if part == "neither":
        assert_same(read(tmp_path / "file"), {"buffer": view, "resolved": view})
        return
    with pytest.raises(ValueError, match=r"\(2,\) whose storage holds the conjugate or the negative .*resolve_conj\(\)\.resolve_neg\(\)"):
        read(tmp_path / "file")


def test_a_tensor_that_says_nothing_beside_its_place(tmp_path: Path) -> None:
    """As tensors of the first versions of torch, which have no hooks either."""
    values = torch.arange(6.0).view(2, 3)

    class Early:
        def __reduce__(self) -> Any:
            storage = torch.storage.TypedStorage(wrap_storage=values.untyped_storage(), dtype=values.dtype, _internal=True)
            return torch._utils._rebuild_tensor, (storage, 0, (2, 3), (3, 1))

    torch.save({"a": Early()}, tmp_path / "file")
    assert_same(read(tmp_path / "file"), {"a": values})


def test_a_tie_in_a_file_is_one(tmp_path: Path) -> None:
    shared = torch.ones(3)
    torch.save({"a": shared, "b": shared.clone(), "c": shared}, tmp_path / "file")
    with FileIO(str(tmp_path / "file")) as file:
        run = run_of(torch_files.TorchFile(file, "file").value, "torch", "file")
    assert run.also == {"a": ["c"]} and list(run.tensors) == ["a", "b"]


@pytest.mark.parametrize("cut", [0, 10, 500, -1, -300])
def test_a_file_that_is_cut_off(cut: int, tmp_path: Path) -> None:
    torch.save({"a": torch.randn(1000)}, tmp_path / "file")
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"file is no file of torch's, or is cut off: .*torch\.save"):
        read(tmp_path / "file")


def altered(tmp_path: Path, record: str, change: Any, how: int = zipfile.ZIP_STORED) -> Path:
    """One record is another, and those behind it are as they were."""
    torch.save({"a": torch.randn(1000), "b": torch.randn(3000)}, tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file") as old, zipfile.ZipFile(tmp_path / "other", "w") as new:
        for name in old.namelist():
            if name.endswith(record):
                new.writestr(name, change(old.read(name)), how)
            else:
                new.writestr(name, old.read(name))
    return tmp_path / "other"


def test_files_that_say_what_can_not_be(tmp_path: Path) -> None:
    """torch.load(mmap=True) takes the first and the last of them, and reads wrong numbers."""
    with pytest.raises(ValueError, match=r"lies beyond data/0, or that is missing"):
        read(altered(tmp_path, "data/0", lambda old: old[:100]))
    with pytest.raises(ValueError, match="big-endian, this machine is not"):
        read(altered(tmp_path, "byteorder", lambda old: b"big"))
    with pytest.raises(ValueError, match="data/0 is compressed"):
        read(altered(tmp_path, "data/0", bytes, zipfile.ZIP_DEFLATED))


def test_of_tensors_that_do_not_lie_in_order_one_is_in_memory(tmp_path: Path) -> None:
    """Whoever reads a part of each, as DeepSpeed's ranks do, does not come to hold them all."""
    torch.save([torch.randn(7, 1013).t() for _ in range(5)], tmp_path / "file")
    with FileIO(str(tmp_path / "file")) as file:
        value = torch_files.TorchFile(file, "file").value
        for lazy in value:
            lazy.read(0, torch.empty(3))
        held = [found for found in gc.get_objects() if type(found) is Tensor and found.numel() == 7 * 1013]
        assert len(held) == 1
        assert torch.equal(value[0].tensor(), torch.load(tmp_path / "file", weights_only=True)[0])


def test_a_trap_is_not_sprung(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "trap": Trap(tmp_path)}, tmp_path / "file")
    found = read(tmp_path / "file")
    assert found["a"].sum() == 2 and isinstance(found["trap"], torch_files.Made)
    assert not (tmp_path / "sprung").exists()


def test_convert_names_the_class_of_a_whole_model(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    with FileIO(str(tmp_path / "model.pt")) as file:
        value = torch_files.TorchFile(file, "model.pt").value
    with pytest.raises(ValueError, match=r"model\.pt holds a torch\.nn\.modules\.linear\.Linear, expected a dict"):
        run_of(value, "torch", "model.pt")
