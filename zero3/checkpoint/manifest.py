"""A checkpoint is a directory with a manifest. The manifest names every file, its size, the hashes
of its blocks, and its own hash.

checkpoint/ manifest.json                          is written last, by one rename
  data-1f2e3d4c5b6a7988/                 holds the files of this save; each save makes a data
  directory of its own
    model-00000-of-00002.safetensors     rank 0's ranges of parameters
    optimizer-00000-of-00002.safetensors rank 0's ranges of the optimizer's state
    ...
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from . import file_operations
from .safetensors_files import fill
from .safetensors_writing import BLOCK_BYTES, Written, write_text

__all__: list[str] = []

NAME = "manifest.json"
FORMAT = "zero3 checkpoint"
VERSION = 1
DATA = re.compile(r"data-[0-9a-f]{16}")
_DELETED = "manifest.deleted"
_FILE = re.compile(r"(model|optimizer)-\d{5}-of-\d{5}\.safetensors")
# is there while a save is under way, and tells of which run it is
_RUN = re.compile(r"run\.[0-9a-f]{16}\.([0-9a-f]{16})")
_OURS = re.compile(
    rf"{DATA.pattern}|manifest\.json\.[0-9a-f]{{16}}|{_RUN.pattern}|{re.escape(_DELETED)}"
)


@dataclass(frozen=True)
class Manifest:
    """A manifest that was read from a file. `content` is the JSON, of which `parse` has checked a
    part.
    """

    directory: Path
    content: dict[str, Any]
    files: dict[str, Written]

    @classmethod
    def of(cls, directory: Path, content: dict[str, Any]) -> Manifest:
        files = content["files"].items()
        written = {name: Written(each["bytes"], each["sha256"]) for name, each in files}
        return cls(directory, content, written)

    @property
    def data(self) -> Path:
        return self.directory / str(self.content["data"])

    def names(self, kind: str) -> list[str]:
        """Returns the names of the files of one kind ("model" or "optimizer"), in the order of the
        ranks that wrote them.
        """
        return [name for name in self.files if name.startswith(kind)]

    def check_values(self) -> None:
        """Raises ValueError if it does not hold the values of all parameters, or not as numbers."""
        tensors = self.content["tensors"]
        if lacking := [name for name, described in tensors.items() if not described["stored"]]:
            raise ValueError(
                f"{self.directory} was saved with frozen=False, without {len(lacking)} parameters "
                f"({lacking[0]}, ...)"
            )
        if quantized := [name for name, described in tensors.items() if "quantized" in described]:
            first, kind = quantized[0], tensors[quantized[0]]["quantized"]
            raise ValueError(
                f"{self.directory} holds {len(quantized)} quantised parameters ({first} as "
                f"{kind}, ...), which other programs can't read: load it into a sharded model, "
                "and save zero3.full_state_dict(model)"
            )


def write(directory: Path, content: dict[str, Any], files: dict[str, Written], token: str) -> None:
    """Commits a save: all other files are on the disk already, and the rename makes them the
    checkpoint in `directory`.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "data": f"data-{token}",
        "block_bytes": BLOCK_BYTES,
        **content,
    }
    content["files"] = {
        name: {"bytes": written.nbytes, "sha256": written.blocks} for name, written in files.items()
    }
    content["sha256"] = _own_hash(content)
    write_text(directory / NAME, json.dumps(content, indent=1), token)
    file_operations.sync_directory(directory)


def number_of(file: str) -> int:
    """The number of the rank that wrote a checkpoint's file."""
    return int(file.split("-")[1])


def read(path: str | os.PathLike[str]) -> Manifest:
    """Reads a checkpoint's manifest, and checks that exactly the files that it names exist, with
    their sizes. Raises ValueError if there is no checkpoint, or if it was changed. It names the
    file.
    """
    directory = file_operations.directory_of(path)
    if not (directory / NAME).is_file():
        other = "a file" if directory.is_file() else "no such directory"
        names = file_operations.names_in(directory)[:8]
        found = ", ".join(names) or ("nothing" if directory.is_dir() else other)
        raise ValueError(f"{directory} is no checkpoint: there is no {NAME} in it (found {found})")
    _refuse_links(directory / NAME)
    manifest = Manifest.of(directory, parse(directory / NAME))
    files = manifest.files
    _refuse_links(manifest.data)
    there = set(file_operations.names_in(manifest.data))
    if missing := sorted(set(files) - there):
        raise ValueError(f"{manifest.data / missing[0]} is missing; {NAME} names it")
    if foreign := sorted(there - set(files)):
        raise ValueError(
            f"{manifest.data / foreign[0]} does not belong to this checkpoint: {NAME} does not "
            "name it. Take it away."
        )
    for name, written in files.items():
        _refuse_links(manifest.data / name)
        if (size := (manifest.data / name).stat().st_size) != written.nbytes:
            raise ValueError(
                f"{manifest.data / name} has {size} bytes, {NAME} says {written.nbytes}: it was "
                "cut off or replaced"
            )
    return manifest


@contextmanager
def reading(manifest: Manifest) -> Iterator[None]:
    """Context for code that reads `content`, which may have any structure. Raises ValueError if the
    structure is not the one that a save writes. It replaces Python's own error (KeyError,
    TypeError, ...).
    """
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        raise ValueError(
            f"{manifest.directory / NAME} is malformed: {type(error).__name__}: {error}"
        ) from error


def _refuse_links(path: Path) -> None:
    """A save writes plain files into its own directory. A link would lead out of it, and reading a
    pipe would not end.
    """
    mode = path.lstat().st_mode if os.path.lexists(path) else stat.S_IFREG
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(
            f"{path} is a link or a device, which no save makes: replace it by its target"
        )


def parse(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is corrupt: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of a {FORMAT}")
    if content.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {content.get('version')!r}, this zero3 reads {VERSION}"
        )
    if content.pop("sha256", None) != _own_hash(content):
        raise ValueError(f"{path} is corrupt: its hash is not the one that it holds")
    data, files, nbytes = (content.get(key) for key in ("data", "files", "block_bytes"))
    if not isinstance(files, dict) or nbytes != BLOCK_BYTES or not DATA.fullmatch(str(data)):
        found = f"data {data!r:.80}, blocks of {nbytes!r:.20}"
        raise ValueError(f"{path}: {found}, which no save writes")
    for name, entry in content["files"].items():
        blocks = entry.get("sha256") if isinstance(entry, dict) else None
        if (
            not _FILE.fullmatch(name)
            or not isinstance(blocks, list)
            or type(entry.get("bytes")) is not int
        ):
            raise ValueError(f"{path} names the file {name!r:.80}, which no save writes")
        if len(blocks) != -(-entry["bytes"] // BLOCK_BYTES):
            raise ValueError(
                f"{path}: {name} has {len(blocks)} hashes for {entry['bytes']} bytes, one for "
                f"every {BLOCK_BYTES} expected"
            )
    return content


def _own_hash(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def verify(
    manifest: Manifest,
    names: Iterable[str],
    rank: int = 0,
    world_size: int = 1,
    advance: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Reads this rank's share of the blocks of the named files, and compares their hashes. All
    ranks together read all blocks. `advance` is told of the bytes of each. Raises ValueError if a
    file was changed after the save.
    """
    files = manifest.files
    every = [(name, number) for name in names for number in range(len(files[name].blocks))]
    mine = every[len(every) * rank // world_size : len(every) * (rank + 1) // world_size]
    longest = max((files[name].nbytes for name, _ in mine), default=0)
    buffer = memoryview(bytearray(min(BLOCK_BYTES, longest)))
    for name, blocks in groupby(mine, key=itemgetter(0)):
        with FileIO(os.fspath(manifest.data / name)) as file:
            for _, number in blocks:
                block = buffer[: fill(file, number * BLOCK_BYTES, buffer)]
                advance(len(block))
                if sha256(block).hexdigest() != files[name].blocks[number]:
                    where = f"bytes {number * BLOCK_BYTES} to {number * BLOCK_BYTES + len(block)}"
                    raise ValueError(
                        f"{manifest.data / name} is corrupt: its {where} are not what was saved"
                    )


def clean(directory: Path, keep: str | None) -> None:
    """Removes the files of all saves into `directory`, failed or complete, except for the data
    directory `keep`.
    """
    for name in file_operations.names_in(directory):
        if _OURS.fullmatch(name) and name != keep:
            file_operations.remove(directory / name)


def delete(directory: Path) -> None:
    """Deletes a checkpoint, or the rest of a checkpoint whose deletion was interrupted. Files of
    others in its directory stay.

    The manifest is renamed first. So a deletion that is interrupted leaves no checkpoint with
    missing files.
    """
    if (directory / NAME).is_file():
        file_operations.replace(directory / NAME, directory / _DELETED)
    names = file_operations.names_in(directory)
    clean(directory, None)
    if all(_OURS.fullmatch(name) or name == NAME for name in names):
        file_operations.remove(directory)


def begin(directory: Path, run: str, token: str) -> None:
    """Makes the first file of a save. Until the manifest is there, its name tells other runs that
    these files are not theirs.
    """
    file_operations.make_directory(directory)
    file_operations.create(directory / f"run.{token}.{_short(run)}").close()
    file_operations.sync_directory(directory)
    file_operations.make_directory(directory / f"data-{token}")


def names_another_run(directory: Path, run: str) -> bool:
    """Whether what interrupted saves and deletions have left is said to be another run's."""
    names = file_operations.names_in(directory)
    found = {match[1] for name in names if (match := _RUN.fullmatch(name))}
    with suppress(ValueError, OSError):  # there was no deletion
        _refuse_links(directory / _DELETED)
        of = parse(directory / _DELETED).get("run")
        found |= {_short(of)} if of is not None else set()
    return not found <= {_short(run)}


def _short(run: object) -> str:
    return sha256(str(run).encode()).hexdigest()[:16]


def is_remains(directory: Path) -> bool:
    """Whether the directory holds nothing except what interrupted saves and deletions have left."""
    names = file_operations.names_in(directory)
    return bool(names) and all(_OURS.fullmatch(name) for name in names)
