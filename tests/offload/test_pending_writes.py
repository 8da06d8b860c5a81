"""A save asks whether the optimizer's last step has reached the disk. If not on one rank, all raise the same error and write nothing."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import linear, seeded, step
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence, process_group
from zero3.scratch.mapped_files import MappedFiles

SAYS = (
    r"^rank 1: \[Errno 5\] what an optimizer's step has made of layer .+ may be lost: \d+ bytes of what is offloaded to '.+/1' "
    r"can't be written: Input/output error\. Begin again, from the last checkpoint, with offload= a directory on a disk that works$"
)
Saves = Callable[..., Any]  # a path, a model, and its optimizer


class Disks:
    """Memory is short on all ranks, so that all is written. The disk of rank 1 can be made to fail, late: it is held up until then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails, self.may_fail = False, threading.Event()
        self._write = MappedFiles.write
        monkeypatch.setattr(MappedFiles, "is_away", lambda files, tensor: tensor in files)
        monkeypatch.setattr(MappedFiles, "write", lambda files, tensor, *, wait: self.write(files, tensor, wait))

    def write(self, files: MappedFiles, tensor: Tensor, wait: bool) -> None:
        if wait and self.fails and files._directory.endswith("/1"):
            self.may_fail.wait(100)
            text = f"{tensor.nbytes} bytes of what is offloaded to {files._directory!r} can't be written: Input/output error"
            raise OSError(errno.EIO, text)
        self._write(files, tensor, wait=wait)

    def assert_told(self, save: Saves, path: Path, model: nn.Module, *optimizer: torch.optim.Optimizer) -> str:
        """All ranks have made their steps. What fails does so soon, and then `save` says so on all of them."""
        threading.Timer(0.05, self.may_fail.set).start()
        with pytest.raises(OSError, match=SAYS) as caught:
            save(path, model, *optimizer)
        return str(caught.value)


def meet(group: ThreadCommunicator) -> None:
    group.exchange(b"", torch.device("cpu"))


@pytest.fixture
def disks(monkeypatch: pytest.MonkeyPatch) -> Disks:
    return Disks(monkeypatch)


def ready(group: ThreadCommunicator, place: Path | None, depth: int = 3, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    if place is not None:
        place = place / str(group.rank)
        place.mkdir(exist_ok=True)
    model = in_sequence(seeded(*[linear] * depth), process_group(group), zero3.ShardingPolicy(offload=place))
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    return model, zero3.offload_optimizer(optimizer, **how)


def train(group: ThreadCommunicator, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    step(model, Turn(group.rank, number, group.world_size))
    optimizer.step()
    optimizer.zero_grad()


def contents(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


SAVES: dict[str, Saves] = {
    "save_checkpoint": zero3.save_checkpoint,
    "save_checkpoint background": lambda path, model, optimizer: zero3.save_checkpoint(path, model, optimizer, background=True).wait(),
    "save_checkpoint model alone": lambda path, model, _: zero3.save_checkpoint(path, model),
    "save_pretrained": lambda path, model, _: zero3.save_pretrained(model, path),
    "save_merged": lambda path, model, _: zero3.save_merged(model, path),
    "full_state_dict": lambda _, model, __: zero3.full_state_dict(model),
    "full_optimizer_state_dict": lambda _, model, optimizer: zero3.full_optimizer_state_dict(model, optimizer),
}


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("how", SAVES)
def test_a_save_after_a_step_that_one_disk_has_lost_is_one_error_on_all_ranks(
    how: str, in_backward: bool, disks: Disks, tmp_path: Path
) -> None:
    def body(group: ThreadCommunicator) -> str:
        model, optimizer = ready(group, tmp_path, in_backward=in_backward)
        train(group, model, optimizer, 0)
        zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
        before = contents(tmp_path / "saved")
        meet(group)
        disks.fails = True
        train(group, model, optimizer, 1)
        meet(group)
        told = disks.assert_told(SAVES[how], tmp_path / "saved", model, optimizer)
        for _ in range(2):  # whoever asks again hears it again
            with pytest.raises(OSError, match=SAYS):
                zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
        assert contents(tmp_path / "saved") == before
        return told

    assert len(set(run_ranks(2, body))) == 1


def test_what_was_lost_is_not_forgotten(disks: Disks, tmp_path: Path) -> None:
    """Neither by later steps, nor by another optimizer over the same chunks."""

    def body(group: ThreadCommunicator) -> None:
        model, optimizer = ready(group, tmp_path)
        disks.fails = True
        train(group, model, optimizer, 0)
        meet(group)
        disks.assert_told(zero3.save_checkpoint, tmp_path / "saved", model, optimizer)
        disks.fails = False
        for number in range(1, 3):
            step(model, Turn(group.rank, number, 2))
            if group.rank == 1:
                with pytest.raises(OSError, match=r"made of layer .+ may be lost"):
                    optimizer.step()
        del optimizer
        with pytest.raises(OSError, match=SAYS):
            zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1))

    run_ranks(2, body)


def test_chunks_of_a_group_that_was_added_later_are_asked_for_too(disks: Disks, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model, optimizer = ready(group, tmp_path, depth=1)
        added, _ = ready(group, tmp_path, depth=1)
        optimizer.add_param_group({"params": zero3.get_trainable_chunk(added)})
        disks.fails = True
        for one in (model, added):
            step(one, Turn(group.rank, 0, 2))
        optimizer.step()
        meet(group)
        disks.assert_told(zero3.save_checkpoint, tmp_path / "saved", added)

    run_ranks(2, body)


def test_each_of_several_optimizers_is_asked(disks: Disks, tmp_path: Path) -> None:
    """Also those that share a chunk: matrices for one of them, all else for the other."""

    def body(group: ThreadCommunicator) -> None:
        model, _ = ready(group, tmp_path, depth=1)
        groups = zero3.param_groups(model, lambda name, info: {"weight_decay": 0.1 if info.ndim > 1 else 0.0})
        optimizers = [zero3.offload_optimizer(torch.optim.AdamW([each], lr=0.1)) for each in groups]
        assert len(optimizers) == 2
        step(model, Turn(group.rank, 0, 2))
        optimizers[1].step()
        zero3.save_checkpoint(tmp_path / "saved", model)
        meet(group)
        disks.fails = True
        optimizers[0].step()
        meet(group)
        disks.assert_told(zero3.save_checkpoint, tmp_path / "saved", model)

    run_ranks(2, body)


def test_asking_takes_no_transfer(disks: Disks, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        counts = []
        for place in (None, tmp_path):
            model, optimizer = ready(group, place)
            train(group, model, optimizer, 0)
            group.log.clear()
            zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
            counts.append([collective.kind for collective in group.log])
        assert counts[0] == counts[1]

    run_ranks(2, body)


def saves_after_a_lost_step(rank: Rank) -> tuple[str, bool]:
    """The error of a save, and whether it has left nothing."""
    with pytest.MonkeyPatch.context() as patch:
        disks = Disks(patch)
        place = rank.scratch / str(rank.number)
        place.mkdir()
        model = in_sequence(seeded(linear, linear, linear), None, zero3.ShardingPolicy(offload=place))
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
        disks.fails = True
        step(model, Turn(rank.number, 0, rank.world_size))
        optimizer.step()
        told = disks.assert_told(zero3.save_checkpoint, rank.scratch / "saved", model, optimizer)
        return told, not (rank.scratch / "saved").exists()


def test_on_processes() -> None:
    (first, nothing), (second, nothing_too) = on_ranks(2, saves_after_a_lost_step)
    assert first == second and nothing and nothing_too
