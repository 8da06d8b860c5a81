"""Plain torch as the judge of a sharded model.

A *program* is what one rank does in one step, up to and with its backward, written for any module. `check_parity` runs it
on the plain model in one process, for every rank in turn, so that autograd itself adds the ranks' gradients up; and on
the sharded model, one thread a rank. What it returns, every gradient and every parameter must be the same after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import chunks_of, states_of
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from zero3.core.autograd import tensors_in

TOLERANCE = 1e-12  # fp64; only the order of a few sums differs


class Turn(NamedTuple):
    """Whose turn it is, in which step: the seed of that rank's data."""

    rank: int
    step: int
    world_size: int

    def tensor(self, *shape: int, requires_grad: bool = False) -> Tensor:
        return torch.randn(shape, generator=self._generator(), dtype=torch.float64).requires_grad_(requires_grad)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self._generator())

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.step + self.rank)


Build = Callable[[], nn.Module]
Program = Callable[[nn.Module, Turn], Any]
Shard = Callable[[nn.Module, Any, zero3.ShardingPolicy], nn.Module]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def unsharded(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    return model


def in_sequence(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    """Every child of an `nn.Sequential` becomes a layer of a `Zero3Sequential`."""
    return zero3.Zero3Sequential([zero3.Zero3Layer(child, policy=policy, process_group=group) for child in model.children()])


def as_one_layer(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    return zero3.Zero3Layer(model, policy=policy, process_group=group)


def in_place(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    """The children become layers, called by the plain module as it likes."""
    for name, child in list(model.named_children()):
        setattr(model, name, zero3.Zero3Layer(child, policy=policy, process_group=group))
    return model


def by_shard(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    """As `zero3.shard` chooses layers."""
    return zero3.shard(model, process_group=group, policy=policy)


def nested(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    """The children become layers inside one more, which keeps the parameters that they leave."""
    return as_one_layer(in_place(model, group, policy), group, policy)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # Adam could not see a gradient of the wrong scale


@dataclass
class Record:
    """What a training run showed, one entry a step. A gradient that is None is written as zeros."""

    outputs: list[list[list[Tensor]]] = field(default_factory=list)  # [step][rank][tensor]
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)


def check_parity(
    build: Build,
    program: Program,
    *,
    world_size: int = 2,
    steps: int = 2,
    shard: Shard = in_sequence,
    policy: zero3.ShardingPolicy = zero3.ShardingPolicy(),
    optimizer: MakeOptimizer = sgd,
    tolerance: float = TOLERANCE,
    same_bits_on_one_rank: bool = True,
    parts: bool = False,  # gradients travel from where they are
    replicas: int = 1,  # of `world_size` ranks in all
) -> None:
    tolerance = tolerance if world_size > 1 or not same_bits_on_one_rank else 0
    expected = train_plain(build, program, world_size, steps, policy, optimizer)
    copies = [build() for _ in range(world_size)]  # here: threads share one random generator
    for copy in copies[1:]:
        spoil(copy)

    def body(group: ThreadCommunicator) -> tuple[Record, list[Any]]:
        model = shard(copies[group.rank], process_group(group), policy)
        return train_sharded(model, program, group, steps, optimizer), group.log

    results = run_mesh(replicas, world_size // replicas, body, parts=parts) if replicas > 1 else run_ranks(world_size, body, parts=parts)
    for rank, (found, log) in enumerate(results):
        first = rank - rank % (world_size // replicas)  # of its replica: only the first one scatters rank 0's values
        assert log == results[first][1], f"rank {rank} made other collectives than rank {first}"
        for step in range(steps):
            assert_close(found.outputs[step][0], expected.outputs[step][rank], tolerance, f"outputs of step {step}, rank {rank}")
            assert_close(found.gradients[step], expected.gradients[step], tolerance, f"gradients of step {step}, rank {rank}")
            assert_close(found.parameters[step], expected.parameters[step], tolerance, f"parameters after step {step}, rank {rank}")


def on_ranks(
    world_size: int, build: Build, body: Callable[[Any, ThreadCommunicator], Any], shard: Shard = in_sequence, timeout: float = 60.0
) -> list[Any]:
    """`body(model, group)` on every rank, for what is no matter of equal numbers; what each returned."""
    models = [build() for _ in range(world_size)]  # here: threads share one random generator

    def rank(group: ThreadCommunicator) -> Any:
        return body(shard(models[group.rank], process_group(group), zero3.ShardingPolicy()), group)

    return run_ranks(world_size, rank, timeout)


def train_plain(
    build: Build, program: Program, world_size: int, steps: int, policy: zero3.ShardingPolicy, make_optimizer: MakeOptimizer
) -> Record:
    model, record = build(), Record()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(trainable.values())
    for step in range(steps):
        optimizer.zero_grad()
        record.outputs.append([detached(program(model, Turn(rank, step, world_size))) for rank in range(world_size)])
        for parameter in trainable.values():
            if policy.gradient_reduction == "mean" and parameter.grad is not None:
                parameter.grad /= world_size
        record.gradients.append({name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trainable.items()})
        optimizer.step()
        record.parameters.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return record


def train_sharded(model: nn.Module, program: Program, group: ThreadCommunicator, steps: int, make_optimizer: MakeOptimizer) -> Record:
    record, optimizer = Record(), make_optimizer(zero3.get_trainable_chunk(model))
    for step in range(steps):
        optimizer.zero_grad()
        record.outputs.append([detached(program(model, Turn(group.rank, step, group.world_size)))])
        record.gradients.append(full_gradients(model, group))
        optimizer.step()
        record.parameters.append(full_parameters(model))
        assert_at_rest(model)
    return record


def process_group(group: ThreadCommunicator) -> ThreadCommunicator | None:
    """One rank needs no group at all."""
    return group if group.world_size > 1 else None


def spoil(model: nn.Module) -> None:
    """Rank 0's values win: whatever the others bring must not be seen again."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(7)


def on_two(build: Build, body: Callable[[Any, ThreadCommunicator], Any]) -> list[Any]:
    """`body(model, group)` on two ranks, of which each has a model that `zero3.shard` has sharded."""
    return on_ranks(2, build, body, by_shard)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    with zero3.full_params(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module, group: ThreadCommunicator) -> dict[str, Tensor]:
    """Every trainable parameter's whole gradient under its own name. Padding is checked to be zero on the way."""
    with zero3.full_params(model):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    gradients = {}
    for state in states_of(model):
        full = {}
        for chunk in state.chunks:
            gradient = chunk.shard.grad if chunk.shard.grad is not None else torch.zeros_like(chunk.shard)
            full[chunk] = torch.empty(chunk.layout.padded_numel, dtype=gradient.dtype)
            group.all_gather(full[chunk], gradient.as_subclass(Tensor)).wait()
            assert not full[chunk][chunk.layout.numel :].any(), f"padding of {state.label}: {full[chunk]}"
        for sharded in state.parameters:
            if sharded.chunk.shard.requires_grad:
                slot = sharded.chunk.layout.slots[sharded.index]
                gradients[names[id(sharded.sites.parameter)]] = full[sharded.chunk][slot.offset : slot.stop].reshape(slot.shape)
    return gradients


def assert_at_rest(model: nn.Module) -> None:
    """Nothing is fetched, no full buffer holds memory, `parameters()` yields exactly the chunks, padding is zero."""
    for state in states_of(model):
        assert state.presence.value == "released", state.label
        for chunk in state.chunks:
            if state.communicator.shards > 1:
                assert chunk.full.tensor.untyped_storage().nbytes() == 0, state.label
            own = chunk.layout.numel - chunk.layout.chunk_range(state.communicator.shard_rank)[0]
            assert not chunk.shard.detach()[max(0, own) :].any(), "padding of a chunk must stay zero"
    assert {id(p) for p in model.parameters()} == {id(chunk.shard) for chunk in chunks_of(model)}


def detached(value: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors_in(value)]


def assert_close(found: Any, expected: Any, tolerance: float, what: str) -> None:
    """Of two lists or two dicts of tensors: same keys, same shapes and dtypes, differences below `tolerance` of the largest value."""
    mine, theirs = dict(_items(found)), dict(_items(expected))
    assert mine.keys() == theirs.keys(), f"{what}: {sorted(mine)} instead of {sorted(theirs)}"
    for key, value in mine.items():
        other = theirs[key]
        assert (value.shape, value.dtype) == (other.shape, other.dtype), f"{what}: {key}"
        if other.numel():
            inexact = value.is_floating_point() or value.is_complex()
            error = (value - other).abs().max().item() if inexact else float((value != other).any())
            assert error <= tolerance * (1 + other.abs().max().item()), f"{what}: {key} is off by {error}"


def _items(tensors: Any) -> Iterator[tuple[Any, Tensor]]:
    return iter(tensors.items()) if isinstance(tensors, dict) else enumerate(tensors)
