"""What code that knows nothing of layers asks: of which class a block is, and in which order parameters come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, by_shard, check_parity
from tests.support.stacks import WIDTH, Block, Stack, built, stack, train, words_of


class Asking(Stack):
    """Calls its blocks by their class, as models with several kinds of them do."""

    def __init__(self) -> None:
        super().__init__(Block(7), nn.Sequential(nn.Linear(WIDTH, WIDTH)), Block(9))

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = called_by_class(block, x)
        return x


def called_by_class(block: nn.Module, x: Tensor) -> Tensor:
    x = 2 * x
    if isinstance(block, Block):
        return block(x)
    return x - block(x) if block.__class__ is nn.Sequential else x.exp()


@WORLDS
def test_isinstance_in_a_models_forward_is_as_without_sharding(world_size: int) -> None:
    check_parity(lambda: built(Asking), train, world_size=world_size, shard=by_shard)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks, whoever's tensor it is
def test_isinstance_under_torch_compile_is_as_without() -> None:
    """dynamo's own `isinstance` looks at the type alone, and would go the other way: so it traces no code that has a layer in its hands."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    model = zero3.shard(built(Asking))
    compiled: Any = torch.compile(model, backend="eager")
    assert torch.allclose(compiled(words_of(Turn(0, 0, 1))), built(Asking)(words_of(Turn(0, 0, 1))), rtol=0, atol=1e-12)
    assert counters["stats"]["unique_graphs"] > 0, "something was compiled"


def test_isinstance_of_a_layer_answers_for_both_classes() -> None:
    model: Any = zero3.shard(built(Asking))
    for layer, kind in zip(model.blocks, (Block, nn.Sequential, Block), strict=True):
        assert isinstance(layer, kind) and isinstance(layer, zero3.Zero3Layer) and type(layer) is zero3.Zero3Layer
        assert type(layer.module) is kind and layer.__class__ is kind and repr(layer).startswith("Zero3Layer(\n  rank 0 of 1, ")
    assert isinstance(zero3.Zero3Layer(built(Block)), Block)


@pytest.mark.parametrize("together", [False, True])
def test_modules_has_each_block_once_under_its_own_name(together: bool) -> None:
    plain, model = stack(), stack()
    zero3.shard(model, [model.blocks[1], (model.blocks[0], model.blocks[2])] if together else None)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [type(child) for child in model.blocks[0].children()] == [nn.Linear, nn.Linear]
    applied: list[nn.Module] = []
    model.apply(applied.append)
    for found in (list(model.modules()), applied):
        assert [sum(isinstance(module, kind) for module in found) for kind in (Block, nn.Linear)] == [3, 7]
    assert model.get_submodule("blocks.1.up") is model.blocks[1].module.up


class Listing(nn.Module):
    """Multiplies by each of its parameters in turn, as code does that takes them by number."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.bias = None
        sizes = [3, 0, 1, 3, 0] if what == "empty" else [3] * 5
        for number, size in enumerate(sizes):
            odd = number % 2 == 1
            dtype = torch.float32 if odd and what == "of two dtypes" else torch.float64
            trains = not (odd and what == "frozen")
            self.register_parameter(f"p{number}", nn.Parameter(torch.full((size,), 1.0 + number, dtype=dtype), requires_grad=trains))
        if what == "tied":
            self.inner = nn.Linear(3, 1, dtype=torch.float64)
            nn.init.ones_(self.inner.weight)
            self.inner.bias = self.p3

    def forward(self, x: Tensor) -> Tensor:
        self.order = [name for name, _ in self.named_parameters(remove_duplicate=False)]
        for number, parameter in enumerate(self.parameters()):
            x = x * (number + parameter.sum())
        return x


@pytest.mark.parametrize("what", ["frozen", "of two dtypes", "empty", "ignored", "tied"])
def test_parameters_of_a_layer_that_computes_come_in_the_models_order(what: str) -> None:
    plain, model = nn.Sequential(Listing(what)), nn.Sequential(Listing(what))
    ignored = (lambda name, info: name.endswith("p1")) if what == "ignored" else None
    zero3.shard(model, Listing, policy=zero3.ShardingPolicy(ignored=ignored))
    x = torch.ones(2, dtype=torch.float64)
    expected = plain(x)
    for options in (None, {}, {"whole": True}):
        if options is not None:
            zero3.param_groups(model, lambda name, info, options=options: options)
        assert torch.allclose(model(x), expected)
        assert model[0].module.order == plain[0].order
        with zero3.full_params(model):
            assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]


def test_parameters_of_a_layer_whose_chunk_was_cut_anew_come_in_the_models_order() -> None:
    """Those that are whole have a chunk of their own, behind the others'."""

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(nn.Sequential(Listing("")), Listing, process_group=group)
        zero3.param_groups(model, lambda name, info: {"whole": name in ("0.p0", "0.p3")})
        assert torch.allclose(model(x), expected)
        assert model[0].module.order == plain[0].order
        with zero3.full_params(model):
            assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]

    plain, x = nn.Sequential(Listing("")), torch.ones(2, dtype=torch.float64)
    expected = plain(x)
    run_ranks(2, body)


class Sharing(nn.Module):
    """Has a parameter that another block has too: it is the root's own layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Listing(""), Listing("")])
        self.blocks[1].p1 = self.blocks[0].p3

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_parameters_of_several_layers_in_one_module_come_in_the_models_order() -> None:
    plain, model = Sharing(), zero3.shard(Sharing())
    x = torch.ones(2, dtype=torch.float64)
    for _ in range(3):
        assert torch.allclose(model(x), plain(x))
        with zero3.full_params(model):
            assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_get_trainable_chunk_has_the_order_of_named_parameters(tied: bool, grouped: bool) -> None:
    model = stack(tied=tied)
    model.blocks[1].requires_grad_(False)
    zero3.shard(model)
    if grouped:
        zero3.param_groups(model, lambda name, info: {"weight_decay": 0.1 if info.ndim > 1 else 0.0})
    chunks = zero3.get_trainable_chunk(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(chunks) == len(trained) > 2
    assert all(one is other for one, other in zip(chunks, trained, strict=True))
