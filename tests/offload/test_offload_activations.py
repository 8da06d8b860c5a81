"""`offload_activations`: the same gradients, with what the graph saves in a file, and no parameter among it."""

from __future__ import annotations

import errno
import gc
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.live import LiveBytes, LonelyCommunicator
from tests.support.models import WIDTH, WORLDS, seeded
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn
from zero3.offload import scratch_file
from zero3.offload.scratch_file import ScratchFile


class Attending(nn.Module):
    """Saves views, strided and expanded tensors, one tensor in several operations, and the result of one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * self.scale.expand(x.shape)
        weights = (self.q(normed) @ self.k(normed).transpose(-1, -2)).softmax(-1)
        return x + torch.relu_(weights @ self.v(normed)[..., ::1])


class Recomputing(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Attending(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


MODELS = {"plain": Attending, "reentrant": lambda: Recomputing(True), "not reentrant": lambda: Recomputing(False)}


def gradients(
    group: ThreadCommunicator, kind: str, around: AbstractContextManager[Any], *, backward_inside: bool = False, **policy: Any
) -> list[Tensor]:
    layers = seeded(*[MODELS[kind]] * 3)
    choice = zero3.ShardingPolicy(**policy)
    model = zero3.Zero3Sequential([zero3.Zero3Layer(layer, policy=choice, process_group=group) for layer in layers])
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    found: list[Tensor] = []
    for step in range(3):
        with around:
            loss = model(Turn(group.rank, step, group.world_size).tensor(2, 7, WIDTH, requires_grad=True)).pow(2).sum()
        with around if backward_inside else nullcontext():
            loss.backward()
        found += [chunk.grad.clone() for chunk in zero3.get_trainable_chunk(model) if chunk.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("policy", [{}, {"stage": 2}, {"stage": 1}, {"param_dtype": torch.float32}], ids=str)
@pytest.mark.parametrize("kind", MODELS)
@WORLDS
def test_gradients_have_the_same_bits(world_size: int, kind: str, policy: dict[str, Any], tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        offloaded = zero3.offload_activations(tmp_path, min_bytes=1)
        found, expected = gradients(group, kind, offloaded, **policy), gradients(group, kind, nullcontext(), **policy)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        assert size_of(offloaded) > 0

    run_ranks(world_size, body)
    assert not list(tmp_path.iterdir())  # the file has no name


@pytest.mark.parametrize("kind", MODELS)
@WORLDS
def test_backward_may_be_inside_too(world_size: int, kind: str, tmp_path: Path) -> None:
    """Then what a block of reentrant checkpointing saves when it is computed anew goes out as well."""

    def body(group: ThreadCommunicator) -> None:
        inside, outside = (zero3.offload_activations(tmp_path, min_bytes=1) for _ in range(2))
        found, expected = gradients(group, kind, inside, backward_inside=True), gradients(group, kind, outside)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
        saved = [offloaded._store._count for offloaded in (inside, outside)]  # type: ignore[attr-defined]
        assert saved[0] > 2 * saved[1] if kind == "reentrant" else saved[0] == saved[1]

    run_ranks(world_size, body)


def size_of(offloaded: Any) -> int:
    wait_for(offloaded)
    return os.fstat(offloaded._store._file._file.fileno()).st_size


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_no_parameter_goes_out(world_size: int, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Of a batch of one, every activation is smaller than every weight."""

    def body(group: ThreadCommunicator) -> tuple[int, int]:
        policy = zero3.ShardingPolicy(param_dtype=dtype)
        layers = seeded(*[lambda: nn.Linear(40, 40)] * 3)
        layers[0].requires_grad_(False)
        model = zero3.Zero3Sequential([zero3.Zero3Layer(layer, policy=policy, process_group=group) for layer in layers])
        sizes = []
        for rows in (1, 80):
            offloaded = zero3.offload_activations(tmp_path, min_bytes=40 * 40 * 4)
            with offloaded:
                loss = model(torch.ones(rows, 40, dtype=torch.float64)).pow(2).sum()
            loss.backward()
            sizes.append(size_of(offloaded))
        return sizes[0], sizes[1]

    for nothing, something in run_ranks(world_size, body):
        assert nothing == 0 < something


def test_a_plain_models_parameters_stay_too(tmp_path: Path) -> None:
    model, offloaded = nn.Linear(40, 40), zero3.offload_activations(tmp_path, min_bytes=40 * 40 * 4)
    with offloaded:
        model(torch.ones(1, 40, requires_grad=True)).pow(2).sum().backward()
    assert size_of(offloaded) == 0


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


@given(st.permutations([0, 1, 2]), st.tuples(*[st.integers(1, 3)] * 3), st.booleans())
def test_strides_survive(order: list[int], steps: tuple[int, int, int], expands: bool) -> None:
    base = torch.arange(4 * 6 * 8, dtype=torch.float32).view(4, 6, 8)
    tensor = base.permute(order)[:: steps[0], :: steps[1], :: steps[2]]
    tensor = tensor[..., None].expand(*tensor.shape, 2) if expands else tensor
    offloaded: Any = zero3.offload_activations("/tmp", min_bytes=1)
    packed = offloaded._store.pack(tensor)
    assert not isinstance(packed, Tensor)
    for turn in range(2):
        if turn:
            packed.leave()
        found = offloaded._store.unpack(packed)
        assert torch.equal(found, tensor)
        if tensor.stride() == torch.empty_like(tensor).stride():  # it has no gaps
            assert found.stride() == tensor.stride()


def through(offloaded: Any, x: Tensor, change: bool = False) -> tuple[Tensor, Tensor]:
    with offloaded:
        y = x * 2
        z = y.square()
        if change:
            y.add_(1)
        for _ in range(3):  # others push it out
            z = z.square()
        return z.sum(), y


def test_a_tensor_that_is_changed_before_it_is_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"changed in place.*shape \[4\]"):
        through(zero3.offload_activations(tmp_path, min_bytes=1), torch.ones(4, requires_grad=True), change=True)[0].backward()


def test_a_graph_can_be_walked_twice(tmp_path: Path) -> None:
    x = torch.full((4,), 0.9, requires_grad=True)
    loss, _ = through(zero3.offload_activations(tmp_path, min_bytes=1), x)
    loss.backward(retain_graph=True)
    once, x.grad = x.grad, None
    loss.backward()
    assert torch.equal(x.grad, once)  # type: ignore[arg-type]


def test_a_graph_that_is_dropped_gives_its_places_back(tmp_path: Path) -> None:
    offloaded, sizes = zero3.offload_activations(tmp_path, min_bytes=1), set()
    for _ in range(4):
        through(offloaded, torch.ones(4, requires_grad=True))
        gc.collect()
        sizes.add(size_of(offloaded))
    assert len(sizes) == 1


def wait_for(offloaded: Any) -> None:
    """Until the file's two threads have done what they were given: each of them has to come here."""
    both = threading.Barrier(2, timeout=60)
    for job in [offloaded._store._file.submit(both.wait) for _ in range(2)]:
        job.result()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(scratch_file, "write_at", refuse)


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


@pytest.mark.parametrize("lazy", [torch.Tensor.conj, lambda x: x.conj().imag], ids=["conj", "neg"])
def test_tensors_whose_bytes_are_not_their_values(lazy: Any, tmp_path: Path) -> None:
    def gradient(around: AbstractContextManager[Any]) -> Tensor:
        x = torch.complex(torch.arange(1.0, 9.0), torch.arange(2.0, 10.0)).requires_grad_()
        with around:
            y = lazy(x) * lazy(x).clone()
            z = y
            for _ in range(3):  # others push it out
                z = z * 0.5 * z
        z.abs().sum().backward()
        return x.grad  # type: ignore[return-value]

    found = gradient(zero3.offload_activations(tmp_path, min_bytes=1))
    assert torch.equal(found, gradient(nullcontext()))


def test_a_file_that_ends_too_soon_is_an_error(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    with pytest.raises(RuntimeError, match="something else has cut it short"):
        file.read(file.place(8), torch.empty(8, dtype=torch.uint8))


def test_bad_directories(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "none", tmp_path / "file", ""):
        with pytest.raises(ValueError, match=r"can't hold what is offloaded.*Name a directory"):
            zero3.offload_activations(wrong)


def test_on_the_cpu_nothing_moves_to_the_cpu() -> None:
    x = torch.full((400,), 0.9, requires_grad=True)
    offloaded: Any = zero3.offload_activations(min_bytes=1)
    through(offloaded, x)[0].backward()
    assert offloaded._store._count == 0


def test_several_threads_may_share_a_context(tmp_path: Path) -> None:
    context = zero3.offload_activations(tmp_path, min_bytes=0)
    found: list[Tensor] = []

    def body() -> None:
        for _ in range(10):
            x = torch.linspace(-1, 1, 5000, requires_grad=True)
            with context:
                loss = (x.exp() * x).sin().sum()
            loss.backward()
            assert x.grad is not None
            found.append(x.grad)

    threads = [threading.Thread(target=body) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(torch.equal(each, found[0]) for each in found)
