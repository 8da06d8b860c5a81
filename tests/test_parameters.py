"""Parameters of any shape, kind and number in a layer: trained as by plain torch, named as unwrapped, one object for life."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zero3
from tests.models import WIDTH, Weights, calls, linear, mlp, seeded
from tests.ranks import ThreadCommunicator
from tests.reference import (
    Turn,
    as_one_layer,
    check_parity,
    full_parameters,
    in_place,
    in_sequence,
    nested,
    on_ranks,
    process_group,
    sgd,
    unsharded,
)

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])
X = torch.linspace(-1, 1, 3 * WIDTH, dtype=torch.float64).view(3, WIDTH)


def mean_square(model: nn.Module, turn: Turn) -> Any:
    x = turn.tensor(3, WIDTH, requires_grad=True)
    loss = model(x * 1).pow(2).mean()
    loss.backward()
    return loss, x.grad


def sharded(model: nn.Module, group: ThreadCommunicator, **options: Any) -> zero3.Zero3Sequential:
    model = in_sequence(model, process_group(group), zero3.ShardingPolicy(**options))
    assert isinstance(model, zero3.Zero3Sequential)
    return model


# -- shapes and kinds


def tied_inside() -> nn.Module:
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    block[2].weight = block[0].weight
    return block


class Many(nn.Module):
    """Lists and dicts of parameters, one of them in both, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(WIDTH) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.randn(1)), "row": self.rows[1]})
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = self.linear(x * row).tanh()
        return x * self.named["scale"] + self.named["row"]


class Recurrent(nn.Module):
    """torch's LSTM keeps a list of its parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(0))[0].squeeze(0)


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(linear())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "0-dim": lambda: Weights(lambda m, x: x * m.scale, scale=torch.tensor(0.7)),
    "empty": lambda: Weights(lambda m, x: x + m.nothing.sum(), nothing=torch.ones(0, 4)),
    "smaller than the world": lambda: Weights(lambda m, x: x * m.pair.sum(), pair=torch.tensor([0.3, 0.4])),
    "0-dim, empty and odd ones": lambda: Weights(
        lambda m, x: x * m.scale + m.nothing.sum() + m.row, scale=torch.tensor(0.7), nothing=torch.ones(0), row=torch.ones(WIDTH)
    ),
    "transposed": lambda: Weights(lambda m, x: x @ m.w, w=torch.randn(WIDTH, WIDTH).t()),
    "every other column": lambda: Weights(lambda m, x: x @ m.w, w=torch.randn(WIDTH, 2 * WIDTH)[:, ::2]),
    "channels last": lambda: Weights(
        lambda m, x: functional.conv2d(x.view(1, 1, 3, WIDTH), m.w, padding=1).mean(1).view(3, WIDTH),
        w=torch.randn(2, 1, 3, 3).contiguous(memory_format=torch.channels_last),
    ),
    "tied inside a layer": tied_inside,
    "integers": lambda: Weights(lambda m, x: x[:, m.order] * m.w, order=torch.arange(WIDTH).flip(0), w=torch.randn(WIDTH)),
    "complex": lambda: Weights(lambda m, x: (x * m.z).abs(), z=torch.randn(WIDTH, dtype=torch.complex128)),
    "none at all": lambda: nn.Tanh(),
    "lists and dicts": Many,
    "LSTM": Recurrent,
    "weight norm": normed,
    "layer norm": lambda: nn.LayerNorm(WIDTH),
}


@WORLDS
@pytest.mark.parametrize("shard", [in_sequence, as_one_layer])
@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_of_parameter_is_trained(world_size: int, shard: Any, kind: str) -> None:
    rows_stay_rows = kind != "transposed"  # a full buffer has one order; with other strides a product adds up in another
    check_parity(
        lambda: seeded(linear, KINDS[kind], linear), mean_square, world_size=world_size, shard=shard, same_bits_on_one_rank=rows_stay_rows
    )


@WORLDS
def test_embeddings_with_sparse_gradients(world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        loss = model(turn.integers(7, 4)).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = parameter.grad.to_dense() if parameter.grad is not None else None
        return loss

    check_parity(lambda: seeded(lambda: nn.Embedding(7, WIDTH, sparse=True), linear), program, world_size=world_size, steps=1)


@WORLDS
@pytest.mark.parametrize("frozen", ["0", "1", "2", "weight", "bias", "0.a", "1.b"])
def test_any_part_may_be_frozen_before_wrapping(world_size: int, frozen: str) -> None:
    def build() -> nn.Module:
        model = seeded(*[calls(lambda m, x: (m.a(x).tanh() + m.b(x)).tanh())] * 3)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (name.startswith(frozen) or name.endswith(frozen)))
        return model

    check_parity(build, mean_square, world_size=world_size)


@WORLDS
def test_a_layer_may_hold_several_dtypes(world_size: int) -> None:
    """One chunk per dtype and trainability; each rank's arithmetic is torch's own, so only the mean over ranks rounds."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.single, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.single(x.float()).tanh().bfloat16()
            return self.frozen(self.low(y).tanh()).double()

    def build() -> nn.Module:
        model = seeded(Mixed)
        model[0].low.bfloat16()
        model[0].frozen.bfloat16()
        model[0].single.float()
        return model

    check_parity(build, mean_square, world_size=world_size, tolerance=1e-2, steps=1)
    layer = zero3.Zero3Layer(build()[0])
    assert [(chunk.dtype, chunk.requires_grad) for chunk in layer.parameters()] == [
        (torch.bfloat16, True), (torch.float32, True), (torch.bfloat16, False),
    ]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: holding(w=torch.zeros(1).expand(4)), "'w' overlaps itself.*clone"),
        (lambda: holding(**dict(zip("ab", torch.arange(8.0).unfold(0, 5, 3), strict=True))), "'a' and 'b' overlap in memory.*clone"),
    ],
)
def test_parameters_that_overlap_are_refused(world_size: int, make: Callable[[], nn.Module], says: str) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=says):
            zero3.Zero3Layer(model, process_group=process_group(group))
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters()), "nothing may have changed"

    on_ranks(world_size, make, body, unsharded)


def holding(**tensors: Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor))
    return module


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_tied_across_layers_is_refused_with_both_names(world_size: int) -> None:
    def build() -> nn.Module:
        model = seeded(lambda: nn.Embedding(7, WIDTH), lambda: nn.Linear(WIDTH, 7, bias=False))
        model[1].weight = model[0].weight
        return model

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        first = zero3.Zero3Layer(model[0], process_group=process_group(group))
        with pytest.raises(ValueError, match=r"'weight' is already sharded, as 'weight' of layer Embedding.*tied"):
            zero3.Zero3Layer(model[1], process_group=process_group(group))
        del first

    on_ranks(world_size, build, body, unsharded)


# -- what a user sees of them


@WORLDS
@pytest.mark.parametrize("shard", [in_sequence, in_place, nested, as_one_layer])
def test_names_shapes_and_values_are_those_of_the_unwrapped_model(world_size: int, shard: Any) -> None:
    def build() -> nn.Module:
        return seeded(linear, tied_inside, calls(lambda m, x: m.a(x)))

    plain = build()

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        model = shard(model, process_group(group), zero3.ShardingPolicy())
        found = full_parameters(model)
        assert list(found) == [name for name, _ in plain.named_parameters()]
        assert all(torch.equal(found[name], value) for name, value in plain.named_parameters())
        with zero3.full_params(model):
            assert list(model.state_dict()) == list(plain.state_dict())
            assert [type(p) for p in model.parameters()] == [nn.Parameter] * len(found)

    on_ranks(world_size, build, body, unsharded)


@WORLDS
def test_a_parameter_is_one_object_for_life(world_size: int) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        kept, seen = list(model.parameters()), []
        for child in model:
            child.register_forward_pre_hook(lambda module, _: seen.extend(module.parameters()))
            child.register_full_backward_hook(lambda module, *_: seen.extend(module.parameters()))
        wrapped = sharded(model, group)
        for _ in range(2):
            wrapped(X.clone().requires_grad_()).sum().backward()
        with zero3.full_params(wrapped):
            seen.extend(wrapped.parameters())
        assert len(seen) == 5 * len(kept)
        assert {id(parameter) for parameter in seen} == {id(parameter) for parameter in kept}
        assert all(isinstance(parameter, nn.Parameter) for parameter in kept)

    on_ranks(world_size, mlp, body, unsharded)


@WORLDS
def test_parameters_are_the_chunks_and_nothing_else(world_size: int) -> None:
    """So an optimizer that is built on them is right."""

    def body(model: nn.Module, group: ThreadCommunicator) -> list[int]:
        model[0].requires_grad_(False)
        wrapped = sharded(model, group)
        chunks = list(wrapped.parameters())
        assert [chunk.requires_grad for chunk in chunks] == [False, True, True]
        assert [id(chunk) for chunk in wrapped.get_trainable_chunk()] == [id(chunk) for chunk in chunks[1:]]
        wrapped(X).sum().backward()
        assert [id(chunk) for chunk in wrapped.parameters()] == [id(chunk) for chunk in chunks]
        assert all(type(chunk) is nn.Parameter and chunk.dim() == 1 for chunk in chunks)
        return [chunk.numel() for chunk in chunks]

    numel = WIDTH * WIDTH + WIDTH
    assert on_ranks(world_size, mlp, body, unsharded) == [[-(-numel // world_size)] * 3] * world_size


@WORLDS
def test_a_chunk_may_be_frozen_and_thawed_as_a_whole(world_size: int) -> None:
    def freeze(model: nn.Module, step: int) -> None:
        for parameter in list(model.children())[1].parameters():
            parameter.requires_grad_(step % 2 == 0)

    def program(model: nn.Module, turn: Turn) -> Any:
        freeze(model, turn.step)
        return mean_square(model, turn)

    plain, history = mlp(), []
    optimizer = sgd(plain.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(world_size):
            program(plain, Turn(rank, step, world_size))
        for parameter in plain.parameters():
            parameter.grad = parameter.grad / world_size if parameter.grad is not None else None
        optimizer.step()
        history.append({name: parameter.detach().clone() for name, parameter in plain.named_parameters()})

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        wrapped = sharded(model, group)
        optimizer = sgd(wrapped.parameters())
        for step in range(4):
            optimizer.zero_grad()
            program(wrapped, Turn(group.rank, step, world_size))
            assert len(wrapped.get_trainable_chunk()) == (3 if step % 2 == 0 else 2)
            optimizer.step()
            found = full_parameters(wrapped)
            assert all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in history[step].items())

    on_ranks(world_size, mlp, body, unsharded)


@WORLDS
def test_what_was_wrapped_frozen_may_be_thawed(world_size: int) -> None:
    def build() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    plain = mlp()
    plain(X).pow(2).mean().backward()
    expected = {name: p.detach() - 0.1 * p.grad for name, p in plain.named_parameters() if p.grad is not None}

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        wrapped = sharded(model, group)
        assert len(wrapped.get_trainable_chunk()) == 2
        wrapped(X).sum().backward()
        wrapped.zero_grad()
        wrapped[0].requires_grad_(True)
        optimizer = sgd(wrapped.get_trainable_chunk())
        wrapped(X).pow(2).mean().backward()
        optimizer.step()
        found = full_parameters(wrapped)
        assert all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in expected.items())

    on_ranks(world_size, build, body, unsharded)
