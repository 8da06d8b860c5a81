"""Checkpoints on storage that only a host's own ranks see: which ranks share a directory, and how
files come from one host to another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.agreement import Meets, agreeing, exchange_texts
from ..core.layer_state import LayerState
from . import file_operations, manifest
from .lazy import bytes_of
from .manifest import Manifest
from .safetensors_files import fill
from .safetensors_writing import write_text

__all__: list[str] = []

PIECE = 1 << 24  # bytes that a rank sends at a time


def _place_of(directory: Path) -> str:
    """What makes a directory the same one for two ranks: the kernel, the file system, the inode."""
    found, boot = directory.stat(), Path("/proc/sys/kernel/random/boot_id")
    kernel = boot.read_text().strip() if boot.is_file() else ""
    return f"{kernel}/{found.st_dev}/{found.st_ino}"


class Parcel(NamedTuple):
    """The first `nbytes` of a file, which one rank sends to another."""

    source: int
    target: int
    name: str
    nbytes: int


Piece = tuple[Parcel, int, int]  # of a file: where it begins, and its bytes


class Hosts:
    """The ranks by what they see."""

    def __init__(self, among: Meets, directory: Path) -> None:
        """Every rank calls it, with its own directory, which is there."""
        self._among = among
        mine = json.dumps([_place_of(directory), os.urandom(8).hex()])
        told = exchange_texts(among, mine)
        self.me = told.index(mine)  # this rank among all
        by_place: dict[str, list[int]] = {}
        for rank, text in enumerate(told):
            by_place.setdefault(json.loads(text)[0], []).append(rank)
        # in the order of their lowest ranks, which lead
        self.ranks = list(by_place.values())
        self.number = {rank: n for n, ranks in enumerate(self.ranks) for rank in ranks}
        leader = self.ranks[self.number[self.me]][0]
        self.leads = leader == self.me
        # new, and the same on all ranks of this host
        self.token = str(json.loads(told[leader])[1])

    def copies(self, files: Iterable[tuple[str, int]], replicas: int) -> list[Parcel]:
        """Each rank's files, of so many bytes, go to the next hosts: each to another rank of it."""
        parcels = []
        for name, nbytes in files:
            source = manifest.number_of(name)
            home = self.number[source]
            nth = self.ranks[home].index(source)
            for step in range(1, min(replicas, len(self.ranks) - 1) + 1):
                there = self.ranks[(home + step) % len(self.ranks)]
                parcels.append(Parcel(source, there[nth % len(there)], name, nbytes))
        return parcels

    def deliver(self, parcels: Sequence[Parcel], source: Path, target: Path, caller: str) -> None:
        """Copies files from ranks' directories `source` to others' `target`. All ranks call it.
        Raises OSError if a rank could not read or write. Every rank raises it, when all is sent.
        """
        try:
            with agreeing(self._among, f"the copies of {caller}", caller):
                self._deliver(parcels, source, target)
        except BaseException:  # what has come may be of the right size, and wrong
            for parcel in parcels:
                if parcel.target == self.me:
                    file_operations.remove(target / parcel.name)
            raise

    def _deliver(self, parcels: Sequence[Parcel], source: Path, target: Path) -> None:
        error: OSError | None = None
        for pieces in _in_rounds(parcels):
            sends = next((each for each in pieces if each[0].source == self.me), None)
            takes = next((each for each in pieces if each[0].target == self.me), None)
            sent = torch.zeros(sends[2] if sends else 0, dtype=torch.uint8)
            try:
                if sends is not None:
                    _read(source / sends[0].name, sends[1], sent)
            except OSError as caught:  # the others go on, so this rank does
                error = error or caught
            taken = self._swap(pieces, sent, takes)
            try:
                if takes is not None and error is None:
                    _write(target / takes[0].name, takes[1], taken)
            except OSError as caught:
                error = caught
        if error is not None:
            raise error

    def _swap(self, pieces: Sequence[Piece], sent: Tensor, takes: Piece | None) -> Tensor:
        """What comes to this rank in one round."""
        ranks, device = self._among.communicator, self._among.device
        taken = torch.empty(takes[2] if takes else 0, dtype=torch.uint8)
        if ranks.shards != ranks.world_size:  # on a mesh no all-to-all is among all ranks
            for parcel, _, nbytes in pieces:
                passing = torch.empty(nbytes, dtype=torch.uint8, device=device)
                if parcel.source == self.me:
                    passing.copy_(sent)
                ranks.broadcast(passing, parcel.source)
                if parcel.target == self.me:
                    taken = passing.cpu()
            return taken
        going, coming = [0] * ranks.world_size, [0] * ranks.world_size
        for parcel, _, nbytes in pieces:
            if parcel.source == self.me:
                going[parcel.target] = nbytes
            if parcel.target == self.me:
                coming[parcel.source] = nbytes
        bounds, into = (tuple(accumulate(each, initial=0)) for each in (going, coming))
        there = taken.to(device)
        ranks.all_to_all(there, sent.to(device), bounds, into).wait()
        return there.cpu()


def _in_rounds(parcels: Sequence[Parcel]) -> Iterator[list[Piece]]:
    """In each round a rank sends at most one piece, and takes at most one."""
    left = [(parcel, 0) for parcel in parcels]
    while left:
        busy: set[tuple[str, int]] = set()
        pieces, after = [], []
        for parcel, start in left:
            ends = {("sends", parcel.source), ("takes", parcel.target)}
            if busy & ends:
                after.append((parcel, start))
                continue
            busy |= ends
            nbytes = min(PIECE, parcel.nbytes - start)
            pieces.append((parcel, start, nbytes))
            if start + nbytes < parcel.nbytes:
                after.append((parcel, start + nbytes))
        left = after
        yield pieces


def _read(path: Path, start: int, into: Tensor) -> None:
    with FileIO(os.fspath(path)) as file:
        if fill(file, start, bytes_of(into)) < into.numel():
            raise OSError(f"{path} has become shorter")


def _write(path: Path, start: int, piece: Tensor) -> None:
    if start == 0:
        file_operations.remove(path)  # the rest of an earlier attempt
        file_operations.create(path).close()
    with file_operations.reopen(path) as file:
        file_operations.write_at(file, start, bytes_of(piece))
        file_operations.sync(file)


class PartsOfHosts:
    """A checkpoint whose files lie on several hosts, while it is loaded."""

    def __init__(
        self, first: LayerState, path: Path, text: str, told: Sequence[dict[str, Any]]
    ) -> None:
        """`text`: of the manifest. `told`: what each rank sees of it."""
        self.hosts = Hosts(first, path)
        self._path, self._first = path, first
        content = json.loads(text)
        content.pop("sha256")
        self._text = text
        self._has_manifest = told[self.hosts.me]["data"] is not None
        self.found = Manifest.of(path, content)
        # the ranks that see each file
        self.seen = {
            name: [rank for rank, each in enumerate(told) if name in each["headers"]]
            for name in self.found.files
        }
        self._headers = {name: n for each in told for name, n in each["headers"].items()}
        self._assembled = path / f"data-{self.hosts.token}"

    def check(self) -> None:
        """Raises ValueError if no host has one of the files."""
        if lacking := [name for name, ranks in self.seen.items() if not ranks]:
            raise ValueError(
                f"{self._path}: no host here has {lacking[0]}, which rank "
                f"{manifest.number_of(lacking[0])} saved on its own host. "
                "zero3.latest_checkpoint(..., model=model) finds one that all hosts together have"
            )

    def assemble(self, names: Sequence[str]) -> Manifest:
        """The same checkpoint in a directory for this load, with the headers of all `names`."""
        with self._agreeing("the directories of load_checkpoint"):
            if self.hosts.leads:
                file_operations.make_directory(self.found.data)
                file_operations.make_directory(self._assembled)
        parcels = self._parcels(names, lambda _: set(names), self._headers)
        self.hosts.deliver(parcels, self.found.data, self._assembled, "load_checkpoint")
        with self._agreeing("the headers of load_checkpoint"):
            for name in names if self.hosts.leads else ():
                if self.hosts.me in self.seen[name]:
                    os.link(self.found.data / name, self._assembled / name)
                else:
                    os.truncate(self._assembled / name, self.found.files[name].nbytes)
        return Manifest.of(self._path, {**self.found.content, "data": self._assembled.name})

    def bring(self, needed: set[str]) -> set[str]:
        """Brings the files that the ranks of each host need, and that it lacks, into its directory.
        Returns the others, of which nobody knows whether they are right. Raises ValueError if a
        file that is read or sent is not as it was saved. Every rank raises it.
        """
        first = self._first
        texts = exchange_texts(first, json.dumps(sorted(needed)))
        wanted = [
            {name for rank in ranks for name in json.loads(texts[rank])}
            for ranks in self.hosts.ranks
        ]
        names = list(self.found.files)
        sizes = {name: each.nbytes for name, each in self.found.files.items()}
        parcels = self._parcels(names, lambda host: wanted[host], sizes)
        home = self.hosts.number[self.hosts.me]
        sent = {p.name for p in parcels if self.hosts.number[p.source] == home}
        self._verify(wanted[home] | sent, self.hosts.ranks[home])
        self.hosts.deliver(parcels, self.found.data, self.found.data, "load_checkpoint")
        came = {p.name for p in parcels if self.hosts.number[p.target] == home}
        with self._agreeing("the files of load_checkpoint"):
            for name in came if self.hosts.leads else ():
                file_operations.remove(self._assembled / name)
                os.link(self.found.data / name, self._assembled / name)
            if self.hosts.leads and not self._has_manifest:
                write_text(self._path / manifest.NAME, self._text, self.hosts.token)
                file_operations.sync_directory(self._path)
        return set(names) - wanted[home]

    def _verify(self, names: Iterable[str], ranks: Sequence[int]) -> None:
        """Hashes what a host reads or sends, each file once: of a copy the other one may be
        damaged.
        """
        with self._agreeing("the hashes of load_checkpoint"):
            for name in sorted(names):
                seen = [rank for rank in self.seen[name] if rank in ranks]
                if seen and seen[manifest.number_of(name) % len(seen)] == self.hosts.me:
                    try:
                        manifest.verify(self.found, [name])
                    except OSError as error:
                        raise ValueError(str(error)) from error

    def _parcels(
        self, names: Sequence[str], wanted: Callable[[int], set[str]], sizes: dict[str, int]
    ) -> list[Parcel]:
        """`wanted`: by each host. What it has is not sent. Those who have a file take turns."""
        found = []
        for number, ranks in enumerate(self.hosts.ranks):
            for name in (name for name in names if name in wanted(number)):
                seen = self.seen[name]
                if not set(seen) & set(ranks):
                    source = seen[number % len(seen)]
                    found.append(Parcel(source, ranks[0], name, sizes[name]))
        return found

    def clean(self) -> None:
        if self.hosts.leads:
            file_operations.remove(self._assembled)

    def _agreeing(self, what: str) -> Any:
        return agreeing(self._first, what, "load_checkpoint")


def parts_of(path: str | os.PathLike[str], first: LayerState) -> PartsOfHosts | None:
    """None: the checkpoint is where all ranks see it, or nowhere. Every rank calls it. Raises
    ValueError if hosts have different checkpoints there. All ranks raise it.
    """
    if first.communicator.world_size == 1:
        return None
    what = "the place of load_checkpoint"  # first of all, with its name: it may be called alone
    with agreeing(first, what, "load_checkpoint"):
        # here: one rank's may be no path
        directory = Path(os.path.abspath(file_operations.directory_of(path)))
        text, data, headers = _seen(directory)
    mine = json.dumps({"data": data, "headers": headers})
    told = [json.loads(each) for each in exchange_texts(first, mine)]
    having = [rank for rank, each in enumerate(told) if each["data"] is not None]
    if not having:
        return None
    with agreeing(first, "the hosts of load_checkpoint"):
        file_operations.make_directory(directory)
        if len(saves := {told[rank]["data"] for rank in having}) > 1:
            raise ValueError(
                f"{directory}: hosts have {len(saves)} different checkpoints there. "
                "zero3.latest_checkpoint(..., model=model) finds one that all hosts together have"
            )
    return PartsOfHosts(first, directory, from_rank(first, text, having[0]), told)


def from_rank(among: Meets, text: str, source: int) -> str:
    """The text of one rank, which is not empty. Every rank calls it."""
    ranks, raw = among.communicator, text.encode()
    sizes = ranks.exchange(len(raw).to_bytes(8, "little"), among.device)
    size = int.from_bytes(sizes[source], "little")
    sent = torch.frombuffer(bytearray(raw.ljust(size)[:size]), dtype=torch.uint8)
    sent = sent.to(among.device)
    ranks.broadcast(sent, source)
    return bytes(bytes_of(sent.cpu())).decode()


def _seen(directory: Path) -> tuple[str, str | None, dict[str, int]]:
    """Of a local checkpoint: the manifest, its data directory's name, and the lengths of the
    headers of the files here.
    """
    nothing: tuple[str, None, dict[str, int]] = ("", None, {})
    try:
        content = manifest.parse(directory / manifest.NAME)
        if not content.get("local"):
            return nothing
        headers = {}
        for name in files_here(directory, content):
            with FileIO(os.fspath(directory / content["data"] / name)) as file:
                length = 8 + int.from_bytes(file.read(8), "little")
            headers[name] = min(length, content["files"][name]["bytes"])  # it may be damaged
        return (directory / manifest.NAME).read_text(), str(content["data"]), headers
    except (OSError, ValueError, KeyError):  # where another host's is whole, it is brought anew
        return nothing


def files_here(directory: Path, content: dict[str, Any]) -> list[str]:
    """The files of a checkpoint that are here in their sizes."""
    data, here = directory / str(content["data"]), []
    for name, entry in content["files"].items():
        path = data / name
        plain = path.is_file() and not path.is_symlink()
        if plain and path.stat().st_size == entry["bytes"]:
            here.append(name)
    return here
