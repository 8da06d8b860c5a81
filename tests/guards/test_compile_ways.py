"""torch.compile of a whole sharded model and of its blocks, before and after sharding: the numbers of eager training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

import zero3
from tests.support import processes
from tests.support.reference import Turn
from tests.support.stacks import WIDTH, Block, loss_of, stack, words_of

STEPS = 3


def compiled_by_itself(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def wrapped_blocks(model: Any, *, fullgraph: bool = False) -> Any:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend="aot_eager", fullgraph=fullgraph)
    return model


def with_compiled_blocks(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch.compile before": (lambda model: torch.compile(model, backend="aot_eager"), lambda model: model),
    "torch.compile after": (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")),
    "model.compile before": (compiled_by_itself, lambda model: model),
    "model.compile after": (lambda model: model, compiled_by_itself),
    "block.compile before": (with_compiled_blocks, lambda model: model),
    "torch.compile of blocks before": (wrapped_blocks, lambda model: model),
    "torch.compile of blocks after": (lambda model: model, wrapped_blocks),
    "block.compile after": (lambda model: model, with_compiled_blocks),
}


def trained(model: Any, parameters: Any, ranks: range) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for rank in ranks:
            loss = loss_of(model, Turn(rank, step, 2)) / len(ranks)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


def on_a_process(rank: processes.Rank, way: str) -> tuple[list[float], int]:
    from torch._dynamo.utils import counters

    warnings.filterwarnings("ignore", "The .grad attribute")  # dynamo looks, whoever's tensor it is
    torch.compiler.reset()
    before, after = WAYS[way]
    model = after(zero3.shard(before(stack()), Block))
    losses = trained(model, zero3.get_trainable_chunk(model), range(rank.number, rank.number + 1))
    return losses, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_compile_in_all_ways_trains_as_eager(way: str) -> None:
    """In processes of its own, where nothing has told torch.compile of zero3 before."""
    plain = stack()
    expected = trained(plain, plain.parameters(), range(2))
    results = processes.on_ranks(2, on_a_process, way, fresh=True, group_timeout=200)
    for step in range(STEPS):
        assert sum(losses[step] for losses, _ in results) / 2 == pytest.approx(expected[step], abs=1e-10)
    assert all(graphs > 0 for _, graphs in results), "something was compiled"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks, whoever's tensor it is
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_torch_compile_of_blocks_before_sharding_by_their_class(fullgraph: bool, together: bool) -> None:
    """The wrapper becomes the layer: it has found the block's own call when it was made, and would go past a layer inside it."""
    torch.compiler.reset()
    model = wrapped_blocks(stack(), fullgraph=fullgraph)
    first, last = model.blocks[0]._orig_mod, model.blocks[2]._orig_mod
    zero3.shard(model, [Block, (first, last)] if together else Block, policy=zero3.ShardingPolicy(param_dtype=torch.float32))
    assert isinstance(model.blocks[0], zero3.Zero3Layer) and (model.blocks[0]._state is model.blocks[2]._state) == together
    loss = loss_of(model, Turn(0, 0, 1))
    loss.backward()
    assert loss.item() == pytest.approx(loss_of(stack(), Turn(0, 0, 1)).item(), abs=1e-5)
    assert sorted(zero3.full_state_dict(model)) == sorted(stack().state_dict())


def compiled_by_itself_whole(model: Any) -> Any:
    model.compile(backend="eager", fullgraph=True)
    return model


WHOLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "torch.compile before": (lambda m: zero3.shard(torch.compile(m, backend="eager", fullgraph=True)), "a OptimizedModule"),
    "model.compile after": (lambda m: compiled_by_itself_whole(zero3.shard(m)), "a Stack"),
    "model.compile before": (lambda m: zero3.shard(compiled_by_itself_whole(m)), "a Stack"),
    "of a layer by itself": (lambda m: compiled_by_itself_whole(zero3.shard(m).blocks[0]), "a Zero3Layer"),
    "of what the root owns": (lambda m: [compiled_by_itself_whole(m.norm), zero3.shard(m)], "'norm', a LayerNorm"),
}


@pytest.mark.parametrize("way", WHOLE)
def test_compile_of_a_fullgraph_is_an_error_that_says_what_to_compile_when(way: str) -> None:
    compiled, what = WHOLE[way]
    model = stack()
    with pytest.raises(RuntimeError, match=r"block\.compile\(fullgraph=True\), then zero3\.shard") as raised:
        compiled(model)
    assert type(raised.value) is RuntimeError and f"of {what} in a sharded model" in str(raised.value)
    if way.endswith("before"):
        assert not zero3.is_sharded(model)


# What ends a graph at a layer is looked at without running code of ours there, so with fullgraph=True the error is dynamo's.
ASKS_STATICALLY = Version(torch.__version__) >= Version("2.15")

WRAPPED: dict[str, Callable[[Any], Any]] = {
    "a sharded model": lambda m: torch.compile(zero3.shard(m), backend="eager", fullgraph=True),
    "a layer": lambda m: wrapped_blocks(zero3.shard(m), fullgraph=True),
    "a Zero3Sequential": lambda m: torch.compile(sequential(m), backend="eager", fullgraph=True),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_compile_of_a_fullgraph_around_layers_is_an_error_of_the_first_call(wrapped: str) -> None:
    torch.compiler.reset()
    model = WRAPPED[wrapped](stack())
    dynamos = ASKS_STATICALLY and wrapped != "a Zero3Sequential"
    said = "FSDP with use_orig_params" if dynamos else r"block\.compile\(fullgraph=True\), then zero3\.shard"
    with pytest.raises(RuntimeError, match=said) as raised:
        model(words_of(Turn(0, 0, 1)))
    if not dynamos:
        assert type(raised.value).__module__.startswith("zero3.")


def sequential(model: Any) -> Any:
    return zero3.Zero3Sequential([zero3.Zero3Layer(model.embed), zero3.Zero3Layer(model.head)])


CALLED: dict[str, Callable[[Any], Any]] = {
    "a sharded model": zero3.shard,
    "a compiled sharded model": lambda m: torch.compile(zero3.shard(m), backend="eager"),
    "a layer": zero3.Zero3Layer,
    "a Zero3Sequential": sequential,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks, whoever's tensor it is
@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("backward", [False, True])
def test_compile_of_a_function_that_calls_what_is_sharded(called: str, backward: bool) -> None:
    """It is right. As one graph it is an error of ours, after which everything goes on."""
    model = CALLED[called](stack())

    def step(words: Tensor) -> Tensor:
        loss = 2 * model(words).sum()
        if backward:
            loss.backward()
        return loss

    torch.compiler.reset()
    words = words_of(Turn(0, 0, 1))
    with pytest.raises(RuntimeError) as raised:
        torch.compile(step, backend="eager", fullgraph=True)(words)
    if called != "a layer" or not ASKS_STATICALLY:
        assert str(raised.value).startswith("zero3: layers are fetched and released between graphs. Leave fullgraph out")
        assert type(raised.value).__module__.startswith("zero3.")
    compiled = torch.compile(step, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(words), step(words))


def test_compile_of_a_fullgraph_in_which_no_layer_is_called() -> None:
    model = zero3.shard(stack())
    inside = torch.compile(model.blocks[0].module.up, backend="eager", fullgraph=True)
    with zero3.resident(model):
        assert inside(torch.zeros(1, WIDTH, dtype=torch.float64)).shape == (1, 7)
