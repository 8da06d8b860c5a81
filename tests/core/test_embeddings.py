"""A backward through torch's own embedding knows of the ids alone: a layer that is one is not gathered for it, on any rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.inside import states_of
from tests.support.models import WIDTH
from tests.support.ranks import ThreadCommunicator, ThreadPartsCommunicator, run_ranks
from tests.support.reference import Turn, check_parity
from zero3 import ShardingPolicy
from zero3.build import construction

WORDS, BLOCKS = 11, 3


class Scaled(nn.Embedding):
    """One whose backward reads the weight."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.weight.norm()


class Text(nn.Module):
    """`around`: how the embedding is called. `first`: where the embedding's call stands among those of blocks."""

    def __init__(self, embedding: Callable[..., nn.Module] = nn.Embedding, **options: Any) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding = embedding(WORDS, WIDTH, **options)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
            self.double()
        self.around: Callable[[nn.Module, Tensor], Tensor] = lambda module, ids: module(ids)
        self.twice = self.cut = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.around(self.embedding, ids)
        x = x.detach().requires_grad_() if self.cut else x
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if self.twice and number == 1:
                x = x + self.embedding(ids.flip(0))
        return x


def by_layer(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
    return zero3.shard(model, [nn.Embedding, nn.Linear], policy=policy, process_group=group)


def loss_of(model: nn.Module, turn: Turn) -> Tensor:
    return model(turn.integers(WORDS, 3, 4)).pow(2).mean()


def program(model: nn.Module, turn: Turn) -> Tensor:
    loss = loss_of(model, turn)
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense() + 0  # a look at it, at which stage 1 reduces
    return loss


def gathers(make: Callable[[int], Any] = lambda rank: Text(), world_size: int = 2, shard: Any = by_layer, **policy: Any) -> list[int]:
    """Of a steady step, by rank."""
    made = [make(rank) for rank in range(world_size)]

    def body(group: ThreadCommunicator) -> int:
        model = shard(made[group.rank], group, ShardingPolicy(**policy))
        for step in range(3):
            group.log.clear()
            program(model, Turn(group.rank, step, world_size))
        return sum(entry.kind == "all_gather" for entry in group.log)

    return run_ranks(world_size, body)


ALL, ONE_LESS = 2 * (BLOCKS + 1) - 1, 2 * (BLOCKS + 1) - 2  # the last block stays


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_embedding_is_gathered_once_a_step(world_size: int, depth: int) -> None:
    assert gathers(world_size=world_size, prefetch_depth=depth) == [ONE_LESS] * world_size


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 1}, {"sparse": True}, {"scale_grad_by_freq": True}], ids=["plain", "padding", "sparse", "by frequency"]
)
@pytest.mark.parametrize("kind", [ThreadCommunicator, ThreadPartsCommunicator], ids=["buffers", "pieces"])
def test_gradients_of_an_embedding_are_those_of_plain_torch(kind: Any, options: dict[str, Any]) -> None:
    if "scale_grad_by_freq" in options:  # of a rank's batch, so only one rank has it as plain torch has
        check_parity(lambda: Text(**options), program, world_size=1, shard=by_layer, steps=3)
    else:
        check_parity(lambda: Text(**options), program, world_size=3, shard=by_layer, steps=3, parts=kind is ThreadPartsCommunicator)
    assert gathers(lambda rank: Text(**options)) == [ONE_LESS] * 2


@pytest.mark.parametrize(
    "policy",
    [
        {"prefetch_depth": 0}, {"prefetch_depth": 2}, {"stage": 1}, {"stage": 2}, {"reshard_after_forward": False}, {"offload": "cpu"},
        {"transactional": True}, {"dynamic": True}, {"separate_backup_group": True}, {"compare_every": 1},
    ],
    ids=str,
)  # fmt: skip
def test_policies_around_an_embedding_train_as_plain_torch(policy: dict[str, Any]) -> None:
    check_parity(Text, program, shard=by_layer, policy=ShardingPolicy(**policy), steps=3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_on_meshes_too(replicas: int) -> None:
    check_parity(Text, program, shard=by_layer, world_size=2 * replicas, replicas=replicas, steps=3)


# -- who reads the weight has it


def with_own_forward(rank: int) -> nn.Module:
    model = Text()
    model.embedding.forward = lambda ids: nn.functional.one_hot(ids, WORDS).double() @ model.embedding.weight  # type: ignore[method-assign]
    return model


def with_a_gradients_hook(rank: int) -> nn.Module:
    model = Text()
    model.embedding.weight.register_hook(lambda gradient: gradient + 0.1 * model.embedding.weight.detach())
    return model


def with_more(rank: int) -> nn.Module:
    model = Text()
    model.embedding.bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
    model.embedding.register_forward_pre_hook(lambda module, inputs: None)
    return model


@pytest.mark.parametrize(
    "make",
    [
        with_own_forward, with_a_gradients_hook, with_more, lambda rank: Text(Scaled),
        lambda rank: Text(lambda *shape: nn.Sequential(nn.Embedding(*shape))),
    ],
    ids=["a forward", "a gradient's hook", "another parameter", "a subclass", "around it"],
)  # fmt: skip
def test_what_may_read_the_weight_is_gathered_for_backward(make: Any) -> None:
    def shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        chosen = {model.embedding, *model.blocks}
        return zero3.shard(model, lambda name, module: module in chosen, policy=policy, process_group=group)

    assert gathers(make, shard=shard) == [ALL] * 2


def test_a_hook_on_one_rank_counts_on_all() -> None:
    """Its product saves the weight."""

    def make(rank: int) -> nn.Module:
        model = Text()
        if rank == 1:
            model.embedding.register_forward_hook(lambda module, _, output: output * module.weight.mean())
        return model

    assert gathers(make) == [ALL] * 2


def test_hooks_of_all_modules_count() -> None:
    """Their product saves the weight, too."""

    def added(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output + output @ module.weight.T @ module.weight if type(module) is nn.Embedding else None

    hook = nn.modules.module.register_module_forward_hook(added)
    try:
        assert gathers() == [ALL] * 2
        check_parity(Text, program, shard=by_layer)
    finally:
        hook.remove()
    assert gathers() == [ONE_LESS] * 2


def test_a_forward_that_the_class_got_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Embedding.forward

    @functools.wraps(own)
    def forward(module: nn.Embedding, ids: Tensor) -> Tensor:
        return own(module, ids) @ module.weight.T @ module.weight

    monkeypatch.setattr(nn.Embedding, "forward", forward)
    assert gathers() == [ALL] * 2
    check_parity(Text, program, shard=by_layer)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_an_embedding_has_it_for_its_recomputation(reentrant: bool) -> None:
    def build() -> Text:
        model, one = Text(), torch.ones((), dtype=torch.float64, requires_grad=True)
        options = {"use_reentrant": reentrant, "preserve_rng_state": False}
        model.around = lambda module, ids: checkpoint(lambda ids, _: module(ids), ids, one, **options)
        return model

    check_parity(build, program, shard=by_layer, steps=3)
    assert gathers(lambda rank: build()) == [ALL] * 2


def test_the_weight_read_in_backward_is_a_released_one() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = by_layer(made[group.rank], group, ShardingPolicy())
        x = model.embedding(torch.arange(3))
        x.register_hook(lambda gradient: gradient * model.embedding.weight.sum())
        x.sum().backward()

    made = [Text() for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"sum: 'weight' of layer 'embedding' .* is released"):
        run_ranks(2, body)


# -- every rank does the same, whatever its data


@pytest.mark.parametrize("twice", [False, True])
def test_a_rank_without_a_gradient_for_the_embedding_makes_the_same_transfers(twice: bool) -> None:
    def make(rank: int) -> Text:
        model = Text()
        model.twice, model.cut = twice, rank == 1
        return model

    def body(group: ThreadCommunicator) -> tuple[list[Any], Tensor]:
        model = by_layer(made[group.rank], group, ShardingPolicy())
        for step in range(3):
            model.zero_grad()
            group.log.clear()
            program(model, Turn(group.rank, step, 2))
        transfers = list(group.log)
        with zero3.full_gradients(model) as found:
            return transfers, found["embedding.weight"].clone()

    made, expected = [make(rank) for rank in range(2)], torch.zeros(WORDS, WIDTH, dtype=torch.float64)
    for rank in range(2):
        program(model := make(rank), Turn(rank, 2, 2))
        expected += 0 if model.embedding.weight.grad is None else model.embedding.weight.grad / 2
    (first, found), (second, _) = run_ranks(2, body)
    assert first == second and sum(each.kind == "all_gather" for each in first) == ONE_LESS + twice
    torch.testing.assert_close(found, expected)


def test_in_a_checkpoint_too() -> None:
    """Its recomputation, which reads the weight, happens on one rank alone."""

    def body(group: ThreadCommunicator) -> list[Any]:
        model = by_layer(made[group.rank], group, ShardingPolicy())
        for step in range(3):
            group.log.clear()
            program(model, Turn(group.rank, step, 2))
        return list(group.log)

    made = [Text() for _ in range(2)]
    for model in made:
        model.around = lambda module, ids: checkpoint(module, ids, use_reentrant=False, preserve_rng_state=False)
    made[1].cut = True
    first, second = run_ranks(2, body)
    assert first == second


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_embedding_that_is_called_twice(depth: int) -> None:
    def build() -> Text:
        model = Text()
        model.twice = True
        return model

    check_parity(build, program, shard=by_layer, policy=ShardingPolicy(prefetch_depth=depth), steps=3)
    forward = 3 + (2 if depth < 2 else 1)  # two ahead it is gathered before it is released
    assert gathers(lambda rank: build(), prefetch_depth=depth) == [forward + 2] * 2


def test_retain_graph_walks_twice_without_it() -> None:
    def twice(model: nn.Module, turn: Turn) -> Tensor:
        loss = loss_of(model, turn)
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    check_parity(Text, twice, shard=by_layer, steps=3)


def test_no_buffer_is_filled_for_it_in_backward() -> None:
    """And so no memory is taken: the buffer has no storage when its gradient comes."""
    seen: list[tuple[str, int]] = []

    def body(group: ThreadCommunicator) -> None:
        model = by_layer(made[group.rank], group, ShardingPolicy())
        state = next(state for state in states_of(model) if "embedding" in state.label)
        add = state.gradients.accounts[state.chunks[0]].add

        def noted(index: int, gradient: Tensor) -> None:
            seen.append((state.presence.value, state.chunks[0].full.tensor.untyped_storage().nbytes()))
            add(index, gradient)

        state.gradients.accounts[state.chunks[0]].add = noted  # type: ignore[method-assign]
        program(model, Turn(group.rank, 0, 2))

    made = [Text(), Text()]
    run_ranks(2, body)
    assert seen == [("released", 0)] * 2


def test_ranks_that_differ_are_told() -> None:
    """A checkpoint around the embedding on one rank alone."""

    def body(group: ThreadCommunicator) -> None:
        model = by_layer(made[group.rank], group, ShardingPolicy())
        if group.rank:
            model.around = lambda module, ids: checkpoint(module, ids, use_reentrant=False, preserve_rng_state=False)  # type: ignore[assignment]
        program(model, Turn(group.rank, 0, 2))

    made = [Text(), Text()]
    with pytest.raises(ValueError, match="parameters not gathered"):
        run_ranks(2, body)


# -- lives, beside those in which it is gathered


def no_sync(model: Any, rank: int) -> None:
    with zero3.no_sync(model):
        loss_of(model, Turn(rank, 1, 2)).backward()
    loss_of(model, Turn(rank, 2, 2)).backward()


def two_forwards(model: Any, rank: int) -> None:
    (loss_of(model, Turn(rank, 1, 2)) + loss_of(model, Turn(rank, 2, 2))).backward()


def frozen_before_its_backward(model: Any, rank: int) -> None:
    loss = loss_of(model, Turn(rank, 1, 2))
    for chunk in model.embedding.get_trainable_chunk():
        chunk.requires_grad_(False)
    loss.backward()


def changed_before_its_backward(model: Any, rank: int) -> None:
    loss = loss_of(model, Turn(rank, 1, 2))
    with torch.no_grad():
        for chunk in model.embedding.get_trainable_chunk():
            chunk.mul_(2)
    loss.backward()


def evaluated_before_its_backward(model: Any, rank: int) -> None:
    loss = loss_of(model, Turn(rank, 1, 2))
    with torch.no_grad():
        loss_of(model, Turn(rank, 2, 2))
    loss.backward()


def failing(model: Any, rank: int) -> None:
    for step in range(4):
        with zero3.step_guard(model):
            loss = loss_of(model, Turn(rank, step, 2))
            if (rank, step) == (1, 2):
                raise ArithmeticError
            loss.backward()


def fetched_by_hand(model: Any, rank: int) -> None:
    zero3.fetch(model.embedding)
    loss_of(model, Turn(rank, 1, 2)).backward()
    zero3.release(model.embedding)


def of_some_inputs(model: Any, rank: int) -> None:
    loss_of(model, Turn(rank, 1, 2)).backward(inputs=model.blocks[1].get_trainable_chunk())


def as_one_gradient(model: Any, rank: int) -> None:
    """`autograd.grad` of inputs, through a second call of the blocks."""
    x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(model.blocks[0](x + model.embedding(torch.tensor([1, 2]))).sum(), x)
    loss_of(model, Turn(rank, 1, 2)).backward()


LIVES = [
    no_sync, two_forwards, frozen_before_its_backward, changed_before_its_backward, evaluated_before_its_backward, failing, fetched_by_hand,
    of_some_inputs, as_one_gradient,
]  # fmt: skip


@pytest.mark.parametrize("life", LIVES)
def test_a_life_is_that_of_a_model_whose_embedding_is_gathered(life: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits, errors, and all transfers but gathers of the embedding."""

    def run() -> list[Any]:
        made = [Text() for _ in range(2)]

        def body(group: ThreadCommunicator) -> Any:
            model = by_layer(made[group.rank], group, ShardingPolicy())
            optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
            told = []
            for _ in range(2):
                try:
                    life(model, group.rank)
                except (RuntimeError, ValueError, TypeError) as error:
                    told.append(f"{type(error).__name__}: {error}")
                    zero3.reset(model)
                optimizer.step()
                optimizer.zero_grad()
            return told, zero3.full_state_dict(model, rank0_only=False), [each.numel for each in group.log if each.kind == "reduce_scatter"]

        return run_ranks(2, body)

    found = run()
    monkeypatch.setattr(construction, "reads_weights", lambda *_: True)
    for (told, values, reduced), (others, expected, theirs) in zip(found, run(), strict=True):
        assert (told, reduced) == (others, theirs)
        assert all(torch.equal(values[name], expected[name]) for name in expected)
