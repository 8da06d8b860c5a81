"""torch.func's transforms inside `resident`, against those of the unsharded model; outside of it one error."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import zero3
from tests.support import processes
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_at_rest, assert_close, process_group
from tests.support.stacks import WIDTH, Block, built

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's jvp uses it

ONE_AT_A_TIME = threading.Lock()  # torch has one level of forward-mode differentiation for all threads


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x[None])[0][0]


class Map(nn.Module):
    """A vector to a vector, with a part of the root's own, a layer that is one matrix, and a recurrent one."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block(7), Recurrent() if recurrent else Block(8), Block(9)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.gain)


def size_of(model: nn.Module) -> Callable[..., Tensor]:
    return lambda x: model(x).pow(2).sum()


def by_parameters(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Of one's own tensors in place of the parameters: those are arguments."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return grad(lambda given: functional_call(model, given, (x,)).pow(2).sum())(values)


def x_of(turn: Turn) -> Tensor:
    return turn.tensor(WIDTH)


TRANSFORMS: dict[str, Callable[[nn.Module, Turn], Any]] = {
    "grad": lambda m, t: [grad(size_of(m))(x_of(t))],
    "vjp": lambda m, t: [vjp(m, x_of(t))[1](t.tensor(3))[0]],
    "jvp": lambda m, t: [*jvp(m, (x_of(t),), (t.tensor(WIDTH),))],
    "vmap": lambda m, t: [vmap(m)(t.tensor(4, WIDTH))],
    "jacrev": lambda m, t: [jacrev(m)(x_of(t))],
    "jacfwd": lambda m, t: [jacfwd(m)(x_of(t))],
    "hessian": lambda m, t: [hessian(size_of(m))(x_of(t))],
    "vmap of grad": lambda m, t: [vmap(grad(size_of(m)))(t.tensor(4, WIDTH))],
    "functional_call": lambda m, t: by_parameters(m, x_of(t)),
}


@WORLDS
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("several", [True, False], ids=["shard", "Zero3Layer"])
def test_torch_func_inside_resident(name: str, several: bool, world_size: int) -> None:
    """Ranks make other numbers of them, and train afterwards."""
    models = [built(Map) for _ in range(world_size)]
    plain, transform = built(Map), TRANSFORMS[name]
    expected = [transform(plain, Turn(rank, 0, 1)) for rank in range(world_size)]
    size_of(plain)(x_of(Turn(0, 1, 1))).backward()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        wrap: Any = zero3.shard if several else zero3.Zero3Layer
        model = wrap(models[group.rank], process_group=process_group(group))
        with zero3.resident(model):
            before = len(group.log)
            for _ in range(1 + group.rank):
                with ONE_AT_A_TIME:
                    found = transform(model, Turn(group.rank, 0, 1))
                assert_close(found, expected[group.rank], 1e-12, name)
                assert not any(value.requires_grad for value in (found.values() if isinstance(found, dict) else found))
            assert len(group.log) == before
            with pytest.raises(RuntimeError, match="whose forward ran inside"):
                size_of(model)(x_of(Turn(0, 0, 1))).backward()
        size_of(model)(x_of(Turn(0, 1, 1))).backward()
        assert_at_rest(model)
        with zero3.full_gradients(model) as gradients:
            return dict(gradients)

    for found in run_ranks(world_size, body):
        assert_close(found, {name: p.grad for name, p in plain.named_parameters()}, 1e-12, "a training step afterwards")


@WORLDS
@pytest.mark.parametrize("name", sorted({*TRANSFORMS} - {"functional_call"}))
def test_torch_func_outside_of_resident_is_one_error(name: str, world_size: int) -> None:
    models = [built(Map) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        with (
            ONE_AT_A_TIME,
            pytest.raises(RuntimeError, match=rf"rank {group.rank}: layer .* inside a torch.func transform .*resident\(model\)"),
        ):
            TRANSFORMS[name](model, Turn(0, 0, 1))
        size_of(model)(x_of(Turn(0, 1, 1))).backward()
        assert_at_rest(model)

    run_ranks(world_size, body)


def test_torch_func_of_a_recurrent_layer() -> None:
    models = [built(lambda: Map(recurrent=True)) for _ in range(2)]
    expected = [grad(size_of(built(lambda: Map(recurrent=True))))(x_of(Turn(0, 0, 1)))]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        with zero3.resident(model):
            assert_close([grad(size_of(model))(x_of(Turn(0, 0, 1)))], expected, 1e-12, "grad")

    run_ranks(2, body)


def on_a_process(rank: processes.Rank) -> dict[str, list[Tensor]]:
    warnings.filterwarnings("ignore", "`torch.jit")
    model = zero3.shard(built(Map), policy=zero3.ShardingPolicy(param_dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"torch\.func transform"):
        grad(size_of(model))(x_of(Turn(0, 0, 1)))
    with zero3.resident(model):
        return {name: transform(model, Turn(rank.number, 0, 1)) for name, transform in TRANSFORMS.items()}


def test_torch_func_on_processes() -> None:
    plain = built(Map)
    for number, found in enumerate(processes.on_ranks(2, on_a_process)):
        for name, transform in TRANSFORMS.items():
            assert_close(found[name], transform(plain, Turn(number, 0, 1)), 1e-12, name)
