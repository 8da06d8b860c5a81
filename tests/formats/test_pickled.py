"""Pickles as data: what `pickle` writes is read, what we write `pickle` reads, and nothing that a pickle names is called."""

from __future__ import annotations

import collections
import contextlib
import pickle
import zipfile
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_nothing_is_unpickled import DictTrap, Trap
from zero3.formats import pickled
from zero3.formats.pickled import Global, Made, Persistent
from zero3.formats.torch_files import TorchFile, plain

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.integers() | st.text() | st.booleans()
PLAIN = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.lists(inner).map(tuple), max_leaves=20)


@pytest.mark.slow
@given(PLAIN, st.integers(0, 5))
def test_what_pickle_writes_is_read(value: Any, protocol: int) -> None:
    assert same(pickled.read(pickle.dumps(value, protocol), "it", plain), value)


@given(PLAIN)
def test_what_is_written_pickle_reads(value: Any) -> None:
    assert same(pickle.loads(pickled.write(value, lambda other: None)), value)


def same(found: Any, expected: Any) -> bool:
    return repr(found) == repr(expected) and found == expected


def test_names_that_checkpoints_use() -> None:
    value = [collections.OrderedDict(a=1), collections.Counter("aab"), collections.defaultdict(list, {1: [2]}), {1, 2}, frozenset({3})]
    found = pickled.read(pickle.dumps(value), "it", plain)
    assert found[0] == {"a": 1} and found[1] == collections.Counter("aab") and found[2] == {1: [2]} and found[3] == {1, 2}


@pytest.mark.parametrize("protocol", range(6))
def test_attributes_of_a_dict_are_left_out(protocol: int) -> None:
    """Each state dict of torch's has some."""
    value = collections.OrderedDict(a=1)
    value.told = 2  # type: ignore[attr-defined]
    assert pickled.read(pickle.dumps(value, protocol), "it", plain) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "operation"),
    [
        (b"N2.", "DUP"), (b"(ios\nsystem\n.", "INST"), (b"(cos\nsystem\no.", "OBJ"), (b"\x82\x01.", "EXT1"), (b"P1\n.", "PERSID"),
        (b"NQ.", "BINPERSID"),
    ],
)  # fmt: skip
def test_operations_that_no_checkpoint_has_are_refused(text: bytes, operation: str) -> None:
    with pytest.raises(ValueError, match=f"it is no pickle that can be read: ValueError: the operation {operation}"):
        pickled.read(text, "it", plain)


def test_an_object_stays_what_it_is_made_of() -> None:
    found = pickled.read(pickle.dumps(Path("a/b")), "it", plain)
    assert isinstance(found, Made) and found.arguments == ("a", "b")
    again = pickle.loads(pickled.write(found, lambda other: None))
    assert again == Path("a/b")


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("trap", [Trap, DictTrap])
def test_a_trap_is_not_sprung(trap: type, protocol: int, tmp_path: Path) -> None:
    found = pickled.read(pickle.dumps({"state": [trap(tmp_path)]}, protocol), "it", plain)
    assert isinstance(found["state"][0], Made) and found["state"][0].name in ("pathlib.Path.touch", "builtins.getattr()")
    assert not (tmp_path / "sprung").exists()


@given(PLAIN, st.data())
def test_a_damaged_pickle_is_one_named_error(value: Any, data: Any) -> None:
    text = bytearray(pickle.dumps(value, data.draw(st.integers(0, 5))))
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Named):
        read_named(bytes(text[: data.draw(st.integers(0, len(text)))]))


class Named(Exception):
    """A ValueError that tells of which file it speaks."""


def read_named(text: bytes) -> None:
    try:
        pickled.read(text, "the file", plain)
    except ValueError as error:
        raise (Named if "the file is no pickle that can be read" in str(error) else AssertionError) from error


def test_what_only_its_class_could_pickle_is_refused() -> None:
    with pytest.raises(TypeError, match="PosixPath could only be pickled by its own class"):
        pickled.write([Path("a")], lambda other: None)


@pytest.mark.parametrize(
    "place",
    [(-1, (2,), (1,)), (0, (2,), (-1,)), (2, (3,), (3,)), (0, (2, 2), (1,)), (0, (2**62, 4), (4, 1)), ("0", (2,), (1,)), (1.5, (2,), (1,))],
)
def test_places_of_tensors_that_can_not_be(place: tuple[Any, ...], tmp_path: Path) -> None:
    """Of 8 elements."""
    storage = Persistent(("storage", Global("torch.FloatStorage"), "0", "cpu", 8))
    text = pickled.write([Made("torch._utils._rebuild_tensor_v2", (storage, *place, False, {}))], lambda value: None)
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/data/0", bytes(32))
    with FileIO(str(tmp_path / "file")) as file, pytest.raises(ValueError, match="file is no pickle that can be read"):
        TorchFile(file, "file")
