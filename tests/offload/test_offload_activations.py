"""`offload_activations`: the same gradients, with what the graph saves in a file, and no parameter among it."""

from __future__ import annotations

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
from tests.support.models import WIDTH, WORLDS, seeded
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn


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


class Multiplied(torch.autograd.Function):
    """As kernels do that torch does not know: what it saves is no parameter, and no view of one, but its memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight.detach())
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class ByAKernel(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Multiplied.apply(x, self.weight) + self.bias


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("kind", [nn.Linear, ByAKernel])
def test_no_parameter_goes_out(world_size: int, dtype: torch.dtype | None, kind: type[nn.Linear], tmp_path: Path) -> None:
    """Of a batch of one, every activation is smaller than every weight."""

    def body(group: ThreadCommunicator) -> tuple[int, int]:
        policy = zero3.ShardingPolicy(param_dtype=dtype)
        layers = seeded(*[lambda: kind(40, 40)] * 3)
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


def wait_for(offloaded: Any) -> None:
    """Until the file's two threads have done what they were given: each of them has to come here."""
    both = threading.Barrier(2, timeout=60)
    for job in [offloaded._store._file.submit(both.wait) for _ in range(2)]:
        job.result()


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
