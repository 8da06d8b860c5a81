"""Parameters of any shape, kind and number in a layer: trained as by plain torch, named as unwrapped, one object for life."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zero3
from tests.support.models import WIDTH, WORLDS, Weights, calls, linear, mean_square, rows, seeded
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import Turn, as_one_layer, check_parity, in_sequence, on_ranks, process_group, unsharded
from zero3.guards import unshardable

X = rows(3)


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


def test_only_odd_parameters_are_compared_element_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes eight bytes an element, and long."""
    monkeypatch.setattr(unshardable, "_addresses", lambda tensor: pytest.fail(f"of {tuple(tensor.shape)}, {tensor.stride()}"))
    stored = torch.zeros(3, 4)
    zero3.Zero3Layer(holding(a=torch.zeros(2, 3), b=torch.zeros(4, 2).T, c=torch.zeros(()), d=torch.zeros(0, 2), e=stored[:, ::2]))


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
        with pytest.raises(ValueError, match=r"'weight' of Linear is already sharded, as 'weight' of layer Embedding.*tied"):
            zero3.Zero3Layer(model[1], process_group=process_group(group))
        del first

    on_ranks(world_size, build, body, unsharded)
