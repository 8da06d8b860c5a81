"""The file of `offload_activations`: what of a graph is in it, when places are free again, and what comes of a disk that is full."""

from __future__ import annotations

import errno
import gc
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.offload.test_offload_activations import size_of, through, wait_for
from tests.support.live import LiveBytes, LonelyCommunicator
from tests.support.models import WIDTH
from zero3.offload import rests
from zero3.offload.rests import ScratchFile


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointed_blocks_keep_is_on_the_disk(reentrant: bool, tmp_path: Path) -> None:
    """In memory are the tensors on their way, however many blocks there are."""

    def peak(around: AbstractContextManager[Any]) -> int:
        inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12)]
        policy, group = zero3.ShardingPolicy(), LonelyCommunicator(2)
        layers = [zero3.Zero3Layer(block, policy=policy, process_group=group) for block in inner]

        def step() -> None:
            x = torch.ones(1000, 8, requires_grad=True)
            with around:
                for layer in layers:
                    x = checkpoint(layer, x, use_reentrant=reentrant)
            x.sum().backward()

        step()
        with LiveBytes() as live:
            return live.peak_of(step)

    block = 1000 * 8 * 4
    without, with_it = peak(nullcontext()), peak(zero3.offload_activations(tmp_path, min_bytes=1024))
    assert without >= 13 * block
    assert with_it <= without - 6 * block


def test_large_logits_hold_up_no_inputs_of_blocks(tmp_path: Path) -> None:
    """What the end of a step saves says nothing about how much may be on its way in the blocks: neither out, nor back."""
    offloaded = zero3.offload_activations(tmp_path, min_bytes=1024)
    block, count, found = 1000 * 8 * 4, 12, []
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(count)])
    with LiveBytes() as live:
        for _ in range(2):
            before = live.now
            with offloaded:
                x = torch.ones(1000, 8, requires_grad=True)
                for each in blocks:
                    x = checkpoint(each, x, use_reentrant=False)
                found.append(live.now - before)
                x.register_hook(lambda _, before=before: (wait_for(offloaded), found.append(live.now - before))[1])
                loss = (x.repeat(1, count) * 2).log_softmax(-1).sum()
            x = torch.empty(0)
            loss.backward()
            del loss
    assert all(nbytes <= 6 * block for nbytes in found), [nbytes / block for nbytes in found]


def test_one_tensor_that_many_operations_save_goes_once(tmp_path: Path) -> None:
    offloaded, heads = zero3.offload_activations(tmp_path, min_bytes=1), [nn.Linear(WIDTH, 1) for _ in range(5)]
    x = torch.ones(9, WIDTH, requires_grad=True)
    with offloaded:
        sum(head(x).sum() for head in heads).backward()
    assert size_of(offloaded) == x.nbytes


def test_a_graph_that_is_dropped_gives_its_places_back(tmp_path: Path) -> None:
    offloaded, sizes = zero3.offload_activations(tmp_path, min_bytes=1), set()
    for _ in range(4):
        through(offloaded, torch.ones(4, requires_grad=True))
        gc.collect()
        sizes.add(size_of(offloaded))
    assert len(sizes) == 1


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rests, "write_at", refuse)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_is_a_warning_and_nothing_is_lost(tmp_path: Path) -> None:
    x = torch.full((4,), 0.9, requires_grad=True)
    with pytest.warns(UserWarning, match=r"activations stay in memory.*No space left"):
        through(zero3.offload_activations(tmp_path, min_bytes=1), x)[0].backward()
    mine, x.grad = x.grad, None
    through(nullcontext(), x)[0].backward()
    assert torch.equal(mine, x.grad)  # type: ignore[arg-type]


@pytest.mark.usefixtures("full_disk")
@pytest.mark.filterwarnings("ignore:activations stay in memory")
def test_a_full_disk_uses_up_no_places(tmp_path: Path) -> None:
    offloaded, ends = zero3.offload_activations(tmp_path, min_bytes=1), set()
    for _ in range(3):
        through(offloaded, torch.ones(4, requires_grad=True))[0].backward()
        wait_for(offloaded)
        ends.add(offloaded._store._file._end)  # type: ignore[attr-defined]
    assert len(ends) == 1


def test_a_file_that_ends_too_soon_is_an_error(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    with pytest.raises(RuntimeError, match="something else has cut it short"):
        file.read(file.place(8), torch.empty(8, dtype=torch.uint8))


def test_bad_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r'to must be "cpu" or a directory, found an empty text'):
        zero3.offload_activations("")
    for wrong in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"can't hold what is offloaded.*Name a directory"):
            zero3.offload_activations(wrong)
