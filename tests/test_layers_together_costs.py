"""What a layer of several modules costs: one gather a forward, one a backward, and nothing that stays fetched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zero3
from tests.support.inside import presences
from tests.support.ranks import Collective, ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_at_rest, assert_close
from tests.support.stacks import WIDTH, Block, built, loss_of, stack, train
from tests.test_layers_together import Odd, layers_of, shard, state_at
from zero3 import ShardingPolicy


def gathered(group: ThreadCommunicator) -> list[Any]:
    found = [entry.numel for entry in group.log if isinstance(entry, Collective) and entry.kind == "all_gather"]
    group.log.clear()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_layer_of_several_modules_is_gathered_once_a_forward_and_once_a_backward(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = shard(stack(), group, ShardingPolicy())
        ends, outer, middle, root = (
            state_at(model, place).chunks[0].layout.padded_numel for place in ("embed", "blocks.0", "blocks.1", "")
        )
        for _ in range(2):
            group.log.clear()
            loss = loss_of(model, Turn(0, 0, 1))
            assert sorted(gathered(group)) == sorted([root, ends, outer, middle])
            loss.backward()
            assert sorted(gathered(group)) == sorted([outer, middle])  # the head is needed at once, and the root stays
            assert_at_rest(model)
        with torch.no_grad():
            loss_of(model, Turn(0, 0, 1))
        assert sorted(gathered(group)) == sorted([root, ends, outer, middle])
        assert_at_rest(model)

    run_ranks(world_size, body)


def test_a_layer_of_several_modules_is_released_after_the_last_of_them() -> None:
    def body(group: ThreadCommunicator) -> None:
        plain: Any = stack(4)
        layers, seen = [*layers_of(plain), plain.blocks[3]], dict[str, str]()
        model = zero3.shard(plain, layers, process_group=group, policy=ShardingPolicy(prefetch_depth=0))
        state = state_at(model, "blocks.0")
        for name in ("blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"):
            model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.update({name: state.presence.value}))
        loss_of(model, Turn(0, 0, 1))
        # blocks 0 and 2 compute; in between their parameters are hidden, though they are in memory
        assert seen == {"blocks.0": "fetched", "blocks.1": "kept", "blocks.2": "fetched", "blocks.3": "released", "head": "released"}

    run_ranks(2, body)


def test_a_forward_that_raises_between_two_modules_of_a_layer_leaves_nothing_fetched() -> None:
    expected = stack()
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.add_(0.1)
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model: Any = shard(models[group.rank], group, ShardingPolicy())
        hook = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model, Turn(0, 0, 1))
        hook.remove()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1)  # what is fetched is old from now on
        assert_close([loss_of(model, Turn(0, 0, 1)).detach()], [loss_of(expected, Turn(0, 0, 1)).detach()], 1e-12, "the loss")
        zero3.reset(model)
        assert set(presences(model)) == {"released"}

    run_ranks(2, body)


def test_a_backward_that_ends_between_two_modules_of_a_layer_leaves_nothing_fetched() -> None:
    def body(group: ThreadCommunicator) -> None:
        model: Any = shard(stack(), group, ShardingPolicy())
        middle = torch.zeros(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
        with_middle = model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + middle,))
        (found,) = torch.autograd.grad(loss_of(model, Turn(0, 0, 1)), [middle])
        assert found.abs().sum() > 0
        with_middle.remove()
        assert_at_rest(model)

    run_ranks(2, body)


def test_a_forward_that_calls_one_module_of_a_layer_alone_leaves_nothing_fetched() -> None:
    models = [built(lambda: Odd(*[Block(7 + i) for i in range(3)])) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model: Any = shard(models[group.rank], group, ShardingPolicy())
        model.order = (0, 1)
        with torch.no_grad():
            loss_of(model, Turn(0, 0, 1))
        assert_at_rest(model)
        train(model, Turn(0, 0, 1))
        assert_at_rest(model)

    run_ranks(2, body)
