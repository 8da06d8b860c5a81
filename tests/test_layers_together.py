"""Several modules as one layer, as FSDP2's `fully_shard([a, b])`: the numbers of plain torch, and everything else that knows layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support import processes
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_close, check_parity, process_group
from tests.support.stacks import WIDTH, Block, Stack, built, loss_of, stack, train, train_and_look
from zero3 import ShardingPolicy

POLICIES = [
    ShardingPolicy(),
    ShardingPolicy(prefetch_depth=0),
    ShardingPolicy(prefetch_depth=3),
    ShardingPolicy(reshard_after_forward=False),
    ShardingPolicy(stage=1),
    ShardingPolicy(stage=2),
    ShardingPolicy(dynamic=True),
    ShardingPolicy(transactional=True),
]


def layers_of(model: Any) -> list[Any]:
    """The embedding and the head are one layer, the outer blocks another; the block between them is one by itself."""
    return [(model.embed, model.head), model.blocks[1], [model.blocks[0], model.blocks[2]]]


def state_at(model: Any, place: str) -> Any:
    return vars(model)["_zero3_root"] if not place else model.get_submodule(place)._state


def shard(model: Any, group: Any, policy: ShardingPolicy) -> Any:
    return zero3.shard(model, layers_of(model), process_group=group, policy=policy)


@WORLDS
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_modules_that_are_no_neighbours_train_as_one_layer(world_size: int, tied: bool, policy: ShardingPolicy) -> None:
    check_parity(lambda: stack(tied=tied), train_and_look, world_size=world_size, shard=shard, policy=policy, steps=3)


class Odd(Stack):
    """Calls the modules of one layer twice in a row, in both orders, and one of them not at all in some steps."""

    order: tuple[int, ...] = ()

    def through_blocks(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


@WORLDS
@pytest.mark.parametrize("policy", [each for each in POLICIES if not each.dynamic], ids=str)
def test_modules_of_one_layer_may_be_called_in_any_order_and_often(world_size: int, policy: ShardingPolicy) -> None:
    orders = [(0, 1, 2), (2, 1, 0), (0, 0, 1), (1,), (2, 1, 2, 0, 1, 0), (0, 2, 1)]

    def program(model: Any, turn: Turn) -> Tensor:
        model.order = orders[turn.step]
        with torch.no_grad():
            loss_of(model, turn)
        return train_and_look(model, turn)

    build = lambda: built(lambda: Odd(*[Block(7 + i) for i in range(3)]))  # noqa: E731
    check_parity(build, program, world_size=world_size, shard=shard, policy=policy, steps=len(orders))


class Checkpointed(Stack):
    """Recomputes its blocks, from outside of their layers."""

    reentrant = False

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


@WORLDS
@pytest.mark.parametrize("kind", [Checkpointed, Reentrant])
@pytest.mark.parametrize("policy", [ShardingPolicy(), ShardingPolicy(stage=2)], ids=str)
def test_modules_of_one_layer_are_recomputed(world_size: int, kind: type[Stack], policy: ShardingPolicy) -> None:
    check_parity(
        lambda: built(lambda: kind(*[Block(7 + i) for i in range(3)])), train_and_look, world_size=world_size, shard=shard, policy=policy
    )


class Around(nn.Module):
    """A block with a layer inside, that shares a layer with one that stands elsewhere, inside of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = Block(6), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner(x)).sin()


def nested() -> Any:
    return built(lambda: Stack(Around(), Block(8), Around()))  # type: ignore[arg-type]


def shard_crosswise(model: Any, group: Any, policy: ShardingPolicy) -> nn.Module:
    """Each of two layers has a module inside one of the other."""
    first, last = model.blocks[0], model.blocks[2]
    layers = [(first, last.inner), (last, first.inner), model.embed]
    return zero3.shard(model, layers, process_group=group, policy=policy)


@WORLDS
@pytest.mark.parametrize("policy", POLICIES[:6], ids=str)
def test_modules_of_one_layer_may_be_inside_other_layers(world_size: int, policy: ShardingPolicy) -> None:
    check_parity(nested, train_and_look, world_size=world_size, shard=shard_crosswise, policy=policy, steps=3)


# -- everything else that knows layers


def test_chunks_names_and_reports_of_a_layer_of_several_modules() -> None:
    def body(group: ThreadCommunicator) -> None:
        model: Any = shard(stack(), group, ShardingPolicy())
        assert isinstance(model.head, zero3.Zero3Layer) and model.head._state is model.embed._state
        assert model.head.get_trainable_chunk() == model.embed.get_trainable_chunk()
        chunks = zero3.get_trainable_chunk(model)
        assert len(chunks) == len({id(chunk) for chunk in chunks}) == 4 == zero3.report(model).layers
        sizes = {place: state_at(model, place).chunks.full_nbytes() for place in ("embed", "blocks.0", "blocks.1", "")}
        assert zero3.report(model).full_parameters == sum(sizes.values())  # two stay, and two of the others are held at once
        assert model.head._state.label == "'embed' (Embedding) and 'head' (Linear)"
        with zero3.full_params(model.head):
            assert model.head.module.weight.shape == (23, WIDTH) == model.embed.module.weight.shape
        zero3.fetch(model.head)
        assert model.embed._state.presence.value == "kept"
        zero3.release(model.embed)
        zero3.set_forward_order(model, [model.embed, *model.blocks, model.head])
        loss_of(model, Turn(group.rank, 0, 2)).backward()
        assert set(zero3.named_gradients(model)) == set(dict(stack().named_parameters()))
        assert sorted(zero3.full_state_dict(model, rank0_only=False)) == sorted(stack().state_dict())

    run_ranks(2, body)


@pytest.mark.parametrize("grouped", [False, True])
def test_materialize_and_set_trainable_go_through_a_layer_of_several_modules(grouped: bool) -> None:
    plain = stack(tied=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for module in plain.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        expected = plain.state_dict()
        with torch.device("meta"):
            models = [stack(tied=True) for _ in range(2)]
        torch.manual_seed(3)

        def body(group: ThreadCommunicator) -> None:
            model = zero3.shard(models[group.rank], layers_of(models[group.rank]), device="cpu", process_group=process_group(group))
            zero3.materialize(model)
            assert_close(zero3.full_state_dict(model, rank0_only=False), expected, 0, "drawn")
            zero3.set_trainable(model, lambda name, info: name in ("blocks.2.up.weight", "norm.weight"))
            if grouped:
                zero3.param_groups(model, lambda name, info: {"lr": float(info.ndim), "whole": info.ndim == 2})
            loss_of(model, Turn(0, 0, 1)).backward()
            with zero3.full_gradients(model) as gradients:
                found = {name: gradient.clone() for name, gradient in gradients.items()}
            loss_of(plain, Turn(0, 0, 1)).backward() if group.rank == 0 else None
            group.exchange(b"", torch.device("cpu"))
            assert_close(found, {n: p.grad for n, p in plain.named_parameters() if n in found}, 1e-12, "gradients")
            assert sorted(found) == ["blocks.2.up.weight", "norm.weight"]

        run_ranks(2, body)


def test_policies_of_a_layer_of_several_modules_are_those_of_its_first() -> None:
    asked: dict[str, str] = {}

    def policy(name: str, module: nn.Module) -> ShardingPolicy:
        asked[name] = type(module).__name__
        return ShardingPolicy(param_dtype=(torch.bfloat16, torch.float16, torch.float32, None)[len(asked) - 1])

    model = stack()
    zero3.shard(model, layers_of(model), policy=policy)
    assert asked == {"embed": "Embedding", "blocks.0": "Block", "blocks.1": "Block", "": "Stack"}


@pytest.mark.parametrize(
    ("layers", "error", "message"),
    [
        (lambda m: [(m.embed, m.head), (m.head, m.norm)], ValueError, "a Linear twice among the modules that become one layer"),
        (lambda m: [(m.embed, m.embed)], ValueError, "a Embedding twice"),
        (lambda m: [(m.blocks[0], m.blocks[0].up)], ValueError, "a Linear together with a module that it is inside of"),
        (lambda m: [(m.embed, Block)], TypeError, "expected modules alone in what becomes one layer"),
        (lambda m: [(m.embed, nn.Linear(2, 2))], ValueError, "a Linear that is no submodule of the model"),
        (lambda m: [(nn.Linear(2, 2), nn.Linear(2, 2))], ValueError, "a Linear that is no submodule of the model"),
        (lambda m: [(m.blocks, m.head)], ValueError, "'blocks', a ModuleList: that is never called"),
        (lambda m: [(m, m.head)], ValueError, "a Linear together with a module that it is inside of"),
        (lambda m: [(m, nn.Linear(2, 2))], ValueError, "a Stack that is no submodule of the model"),
        (lambda m: [()], ValueError, "matches no submodule"),
        (lambda m: [{m.embed, m.head}], TypeError, "expected module classes or modules, or tuples of modules"),
    ],
)
def test_what_can_be_no_layer_is_refused_by_name(layers: Any, error: type[Exception], message: str) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = stack()
        with pytest.raises(error, match=message):
            zero3.shard(model, layers(model), process_group=group)
        assert not zero3.is_sharded(model)

    run_ranks(2, body)


def test_a_class_leaves_out_what_a_tuple_names() -> None:
    model: Any = stack()
    zero3.shard(model, [Block, (model.blocks[0], model.head)])
    assert model.blocks[0]._state is model.head._state
    assert zero3.report(model).layers == 4  # with the root's own


# -- processes


def on_a_process(rank: processes.Rank, path: str) -> dict[str, Tensor]:
    """Two steps, saved; loaded into a model of other layers, and one more step."""
    model = shard(stack(tied=True), None, ShardingPolicy())
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.05)
    for step in range(3):
        if step == 2:
            zero3.save_checkpoint(path, model, optimizer)
            model = zero3.shard(stack(tied=True), Block)
            optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.05)
            zero3.load_checkpoint(path, model, optimizer)
        train(model, Turn(rank.number, step, rank.world_size))
        zero3.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with zero3.resident(model):
        loss_of(model, Turn(0, 9, 1))
    return zero3.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("world_size", [2, 3])
def test_layers_of_several_modules_on_processes(world_size: int, tmp_path: Path) -> None:
    plain = stack(tied=True)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step in range(3):
        for rank in range(world_size):
            (loss_of(plain, Turn(rank, step, world_size)) / world_size).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found in processes.on_ranks(world_size, on_a_process, str(tmp_path / "checkpoint")):
        assert_close(found, plain.state_dict(), 1e-9, "after three steps")
