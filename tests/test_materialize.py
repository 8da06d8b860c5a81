"""materialize: a model that was sharded on the meta device gets the values that one process would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support import processes
from tests.support.adapters import adapted
from tests.support.architectures import ARCHITECTURES
from tests.support.live import LiveBytes, LonelyCommunicator
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_close, process_group
from tests.support.stacks import WIDTH, Block, Stack, loss_of, stack, train

Init = Callable[[nn.Module], Any] | None


class SelfMade(Stack):
    """Its own initialisation goes over all of its layers before those of the layers do, and reads what it has written."""

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        with torch.no_grad():
            self.norm.weight.copy_(self.head.weight[0] + self.blocks[0].up.bias[:WIDTH])
            self.blocks[1].down.bias.data.mul_(0.1)


class Afterwards(Stack):
    """What comes at the end reads other layers' values, and keeps them."""

    class Last(nn.Module):
        def __init__(self, first: Block) -> None:
            super().__init__()
            self.first, self.scale = [first], nn.Parameter(torch.empty(WIDTH))

        def reset_parameters(self) -> None:
            nn.init.uniform_(self.scale)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.blocks.append(self.Last(self.blocks[0]))


class Odd(nn.Module):
    """Recurrent, with buffers, with a part that stands twice, an integer parameter, and one smaller than the world."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.LSTM(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), Self(), nn.PReLU()]
        )
        self.again = self.blocks[1]


class Self(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, WIDTH))
        self.steps = nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False)
        self.register_buffer("table", torch.empty(4))

    def reset_parameters(self) -> None:
        self.weight.data = torch.rand(3, WIDTH, dtype=self.weight.dtype)
        self.steps.data.fill_(3)
        self.table.copy_(torch.rand(4))


def whole(model: nn.Module, init: Init) -> nn.Module:
    """As one process would."""
    with torch.no_grad():
        if init is not None:
            model.apply(init)
        elif hasattr(model, "_init_weights"):
            model.apply(model._init_weights)
        else:
            for module in model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()
    return model


def uniform(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.uniform_(parameter, 1, 2)


def deep(module: nn.Module) -> None:
    """By names, as some models do: whatever is inside, from each module around it."""
    for name, parameter in module.named_parameters():
        if name.endswith("weight"):
            parameter.data.normal_(0, 0.1)
        else:
            nn.init.uniform_(parameter)


MODELS: dict[str, tuple[Callable[[], nn.Module], Init]] = {
    "stack": (stack, None),
    "tied": (lambda: stack(tied=True), None),
    "self-made": (lambda: SelfMade(Block(7), Block(3)).double(), None),
    "self-made, tied": (lambda: SelfMade(Block(7), Block(3), tied=True).double(), None),
    "adapters": (adapted, None),
    "in bf16": (lambda: stack().to(torch.bfloat16), None),
    "odd": (lambda: Odd().double(), None),
    "an init": (stack, uniform),
    "an init over all": (lambda: stack(tied=True), deep),
    **{name: (ARCHITECTURES[name].build, None) for name in ("Llama", "GPT-2", "T5", "Mixtral", "Whisper")},
}


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


@pytest.fixture(autouse=True)
def _seeds_stay() -> Any:
    with torch.random.fork_rng(devices=[]):
        yield


@WORLDS
@pytest.mark.parametrize("name", MODELS)
def test_materialize_draws_what_one_process_would(name: str, world_size: int) -> None:
    build, init = MODELS[name]
    plain = build()
    torch.manual_seed(5)
    expected = whole(plain, init).state_dict()
    following = torch.rand(3)
    models = [on_meta(build) for _ in range(world_size)]
    torch.manual_seed(5)

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], list[str]]:
        model = zero3.shard(models[group.rank], process_group=process_group(group), device="cpu")
        zero3.materialize(model, init)
        return zero3.full_state_dict(model, rank0_only=False), [name for name, tensor in model.named_buffers() if tensor.is_meta]

    for found, on_meta_still in run_ranks(world_size, body):
        assert not on_meta_still
        assert_close(found, expected, 0, name)
    assert torch.equal(torch.rand(3), following), "the generator is where one process leaves it"


@pytest.mark.parametrize("frozen", [False, True])
def test_materialize_draws_in_the_dtype_of_the_chunks(frozen: bool) -> None:
    """With `master_dtype` it is that of what trains alone."""
    model = on_meta(lambda: stack().to(torch.bfloat16).requires_grad_(not frozen))
    zero3.shard(model, policy=zero3.ShardingPolicy(master_dtype=torch.float32), device="cpu")
    torch.manual_seed(5)
    zero3.materialize(model)
    torch.manual_seed(5)
    expected = whole(stack().to(torch.bfloat16 if frozen else torch.float32), None).state_dict()
    with zero3.full_params(model):
        assert_close({name: p.detach().clone() for name, p in model.named_parameters()}, expected, 0, "in the dtype of the chunks")


def test_materialize_draws_in_the_modules_own_order_where_the_policy_ignores_some() -> None:
    model = zero3.shard(on_meta(stack), policy=zero3.ShardingPolicy(ignored=lambda name, info: name.endswith("bias")), device="cpu")
    torch.manual_seed(5)
    zero3.materialize(model, uniform)
    torch.manual_seed(5)
    assert_close(zero3.full_state_dict(model), whole(stack(), uniform).state_dict(), 0, "biases ignored")


@WORLDS
@pytest.mark.parametrize("whole_matrices", [False, True], ids=["chunks", "whole"])
def test_materialize_then_train(world_size: int, whole_matrices: bool) -> None:
    torch.manual_seed(3)
    plain = whole(stack(), None)
    models = [on_meta(stack) for _ in range(world_size)]
    torch.manual_seed(3)

    def options(name: str, info: zero3.ParamInfo) -> dict[str, Any]:
        return {"whole": info.ndim == 2}

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=process_group(group), device="cpu")
        parameters: Any = zero3.param_groups(model, options) if whole_matrices else zero3.get_trainable_chunk(model)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        zero3.materialize(model)
        train(model, Turn(0, 0, 1))
        optimizer.step()
        return zero3.full_state_dict(model, rank0_only=False)

    train(plain, Turn(0, 0, 1))
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for found in run_ranks(world_size, body):
        assert_close(found, plain.state_dict(), 1e-12, "after a step")


def layered(models: list[nn.Module]) -> Callable[[ThreadCommunicator], nn.Module]:
    return lambda group: zero3.shard(models[group.rank], process_group=process_group(group), device="cpu")


@WORLDS
def test_materialize_keeps_what_has_values(world_size: int) -> None:
    """Half of a block was loaded: the rest is drawn as if all were."""
    loaded = {name: value for name, value in stack().state_dict().items() if "blocks.1.up" in name or "head" in name}
    torch.manual_seed(3)
    expected = whole(stack(), None).state_dict() | loaded
    models = [on_meta(stack) for _ in range(world_size)]
    for model in models:
        for name, value in loaded.items():
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(value.clone()))
    torch.manual_seed(3)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = layered(models)(group)
        zero3.materialize(model)
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(world_size, body):
        assert_close(found, expected, 0, "half loaded")


class Bare(Stack):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.blocks[1].register_parameter("gate", nn.Parameter(torch.ones(2)))


def half(module: nn.Module) -> None:
    """Leaves a part of each bias alone."""
    for parameter in module.parameters(recurse=False):
        nn.init.ones_(parameter[1:] if parameter.ndim == 1 else parameter)


MISTAKES: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    "nothing": (
        lambda: Bare(Block(7), Block(3)),
        None,
        ValueError,
        r"nothing has initialised 'gate' of layer 'blocks.1'.*'gain' of layer the root",
    ),
    "only in part": (stack, half, ValueError, r"nothing has initialised .*bias"),
    "not at all": (stack, lambda module: None, ValueError, r"nothing has initialised .*and \d+ more"),
    "no function": (stack, 3, TypeError, r"rank 0: init must be a function|^init must be a function"),
    "raises": (stack, lambda module: module.weight.nope(), RuntimeError, "nope|has no attribute"),
    "another shape": (stack, lambda module: setattr(next(module.parameters()), "data", torch.ones(1)), ValueError, "shape"),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_materialize_tells_all_ranks_of_a_mistake(mistake: str, world_size: int) -> None:
    build, init, kind, text = MISTAKES[mistake]
    models = [on_meta(build) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model = layered(models)(group)
        with pytest.raises((kind, AttributeError) if world_size == 1 else kind, match=text):
            zero3.materialize(model, init)
        with pytest.raises(RuntimeError, match="has no values yet"):
            loss_of(model, Turn(0, 0, 1))

    run_ranks(world_size, body)


def test_materialize_names_itself_where_values_are_missing() -> None:
    model = zero3.shard(on_meta(stack), device="cpu")
    with pytest.raises(RuntimeError, match=r"zero3\.materialize"):
        loss_of(model, Turn(0, 0, 1))


@pytest.mark.parametrize("init", [None, deep])
def test_materialize_holds_one_layer_at_a_time(init: Init) -> None:
    """Rank 0 of 4: its chunks, the largest layer, and the states of generators."""
    model = on_meta(lambda: Stack(*[Block(2000 + i) for i in range(12)]))
    model = zero3.shard(model, process_group=LonelyCommunicator(4), device="cpu")
    largest, chunks, live = zero3.report(model).largest_layer_bytes, sum(c.nbytes for c in model.parameters()), LiveBytes()
    with live:
        peak = live.peak_of(lambda: zero3.materialize(model, init))
    assert chunks + largest < peak < chunks + largest + 2**16 < chunks + 2 * largest


def on_a_process(rank: processes.Rank, name: str) -> tuple[dict[str, Tensor], Tensor]:
    build, init = MODELS[name]
    torch.manual_seed(5 if name == "Llama" else 5 + rank.number)
    model = zero3.shard(on_meta(build), device="cpu")
    zero3.materialize(model, init)
    return zero3.full_state_dict(model, rank0_only=False), torch.rand(3)


@pytest.mark.parametrize("name", ["Llama", "self-made, tied"])
def test_materialize_on_processes(name: str) -> None:
    build, init = MODELS[name]
    plain = build()
    torch.manual_seed(5)
    expected, following = whole(plain, init).state_dict(), torch.rand(3)
    for number, (found, after) in enumerate(processes.on_ranks(2, on_a_process, name)):
        assert_close(found, expected, 0, name)
        assert torch.equal(after, following) == (name == "Llama" or number == 0), "seeded alike, ranks go on alike; else each by itself"
