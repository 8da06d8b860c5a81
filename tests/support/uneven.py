"""A training run in which ranks have different numbers of batches: told by plain torch, and by ranks that run out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import Checkpointed
from tests.support.reference import assert_close
from tests.support.training import WORDS, loss_of, odd_model
from zero3.towers.entering import gates_of
from zero3.uneven.coordinator import JoinCoordinator
from zero3.uneven.joinable import runtimes_of

EVEN = 2  # steps after those that are uneven, which all ranks take


class Failure(NamedTuple):
    """`place`: before the forward, in one of its layers, after it, in the backward of that layer, or after the backward."""

    rank: int
    step: int
    batch: int
    place: str


PLACES = "before", "forward", "between", "backward", "after"


@dataclass(frozen=True)
class Plan:
    """What is trained, and how. `batches`: of each rank, how many in each of its steps."""

    batches: tuple[tuple[int, ...], ...] = ((), (1, 1, 1), (1, 1, 1, 1, 1))
    kind: str = "sequential"
    by_all: bool = False
    policy: zero3.ShardingPolicy = zero3.ShardingPolicy()
    clip: float = 0.9  # of norms from 0.8 to 1.2
    frozen: bool = False
    zero_first: bool = False  # gradients are zeroed at the start of a step, not at its end
    evaluate: bool = False
    tokens: bool = False  # the mean over tokens, of which batches have different numbers, by zero3.backward
    defer: bool = False  # all but the second batch of a step under no_sync
    reduces: bool = False  # all batches of a step are under no_sync, and its step function reduces them
    replicas_only: bool = False  # that no_sync is for replicas only
    mesh: tuple[int, int] | None = None  # replicas and shards
    whole: bool = False  # matrices are whole parameters
    scaled: bool = False  # losses, by a GradScaler
    guarded: bool = False  # each batch is in a step_guard
    fails: tuple[Failure, ...] = ()  # in their step_guards

    def dropped(self, step: int, batch: int) -> bool:
        return any((failure.step, failure.batch) == (step, batch) for failure in self.fails)

    def steps(self) -> int:
        return max(map(len, self.batches))

    def ranks_with(self, step: int, batch: int) -> list[int]:
        return [rank for rank, steps in enumerate(self.batches) if step < len(steps) and batch < steps[step]]


Built = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]  # and its loss of some words


class Stepper(Protocol):
    def step(self) -> Any: ...


Enter = Callable[[nn.Module, Callable[[], None]], AbstractContextManager[Stepper]]


class Story(NamedTuple):
    losses: dict[tuple[int, int], float]  # by step and batch
    parameters: dict[str, Tensor]
    later: list[float]  # losses of the even steps
    end: dict[str, Tensor]


def words(rank: int, step: int, batch: int) -> Tensor:
    return torch.randint(WORDS, (1 + (rank + batch) % 3, 5), generator=torch.Generator().manual_seed(1000 * step + 10 * batch + rank))


def plain(plan: Plan) -> Built:
    if "llama" not in plan.kind:
        model: nn.Module = nn.Sequential(*odd_model(torch.float64))
        loss = loss_of
    else:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 2}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings="tied" in plan.kind)).double()
        loss = lambda model, ids: model(input_ids=ids, labels=ids).loss  # noqa: E731
    if plan.frozen:
        for parameter in list(model.parameters())[:4]:
            parameter.requires_grad_(False)
    return model, loss


def sharded(plan: Plan, built: Built, group: Any = None) -> Built:
    model, loss = built
    if "llama" in plan.kind:
        return zero3.shard(model, policy=plan.policy, process_group=group), loss
    if plan.kind == "container":  # layers that a plain module calls
        for name, child in list(model.named_children()):
            setattr(model, name, zero3.Zero3Layer(child, policy=plan.policy, process_group=group))
        return model, loss
    children = list(model.children())
    if plan.kind.startswith("checkpointed"):
        children = [children[0], *(Checkpointed(child, "non" not in plan.kind) for child in children[1:-1]), children[-1]]
    layers = [zero3.Zero3Layer(child, policy=plan.policy, process_group=group) for child in children]
    return zero3.Zero3Sequential(layers), loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # so large an eps that the scale of gradients is seen
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=0.01)


def tell_plain(plan: Plan) -> tuple[list[dict[tuple[int, int], float]], dict[str, Tensor], list[list[float]], dict[str, Tensor]]:
    """Of one process with all ranks' batches: losses of each rank, parameters, losses of the even steps, parameters at the end."""
    model, loss_of_model = plain(plan)
    optimizer = adamw(parameter for parameter in model.parameters() if parameter.requires_grad)
    world_size = len(plan.batches)
    losses: list[dict[tuple[int, int], float]] = [{} for _ in range(world_size)]

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        optimizer.zero_grad()

    for step in range(plan.steps()):
        batch = 0
        while ranks := plan.ranks_with(step, batch):
            if plan.dropped(step, batch):
                batch += 1
                continue
            found = [loss_of_model(model, words(rank, step, batch)) for rank in ranks]
            if plan.tokens:
                kept = [b for b in range(9) if not plan.dropped(step, b)]
                everything = [words(r, step, b).numel() for b in kept for r in plan.ranks_with(step, b)]
                sum(loss * words(rank, step, batch).numel() / sum(everything) for loss, rank in zip(found, ranks, strict=True)).backward()
            else:
                (sum(found) / (world_size if plan.by_all else len(ranks))).backward()
            for rank, loss in zip(ranks, found, strict=True):
                losses[rank][step, batch] = loss.item()
            batch += 1
        update()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    later: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(EVEN):
        found = [loss_of_model(model, words(rank, 50 + step, 0)) for rank in range(world_size)]
        (sum(found) / world_size).backward()
        for rank, loss in enumerate(found):
            later[rank].append(loss.item())
        update()
    return losses, parameters, later, {name: p.detach().clone() for name, p in model.named_parameters()}


@contextmanager
def failing(model: nn.Module, place: str | None) -> Iterator[Callable[[str], None]]:
    """Yields a function that is told where the batch is, and fails in its place. It may be in a layer."""

    def fail(here: str = "") -> None:
        if here in ("", place):
            raise ArithmeticError(f"in {place}")

    layer = [each for each in model.modules() if isinstance(each, zero3.Zero3Layer)][2].module
    hooks = [
        layer.register_forward_pre_hook(lambda *_: fail("forward")),
        layer.register_forward_hook(lambda module, inputs, output: output.register_hook(lambda _: fail("backward")) and None),
    ]
    yield fail
    for hook in hooks:
        hook.remove()


def tell_sharded(plan: Plan, built: Built, rank: int, enter: Enter, group: Any = None) -> Story:
    """Of one rank."""
    model, loss_of_model = sharded(plan, built, group)
    whole = {"whole": True}
    optimizer = adamw(zero3.param_groups(model, lambda name, info: whole if plan.whole and info.ndim == 2 else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=plan.scaled)
    scaler.scale(torch.zeros(1))  # ranks without data scale no loss
    losses, later = {}, []

    def run(step: int, batch: int, fail: Callable[[str], None]) -> float:
        fail("before")
        loss = loss_of_model(model, words(rank, step, batch))
        fail("between")
        if plan.tokens:
            tokens = words(rank, step, batch).numel()
            zero3.backward(scaler.scale(loss * tokens), tokens, model)
        else:
            scaler.scale(loss).backward()
        fail("after")
        return loss.item()

    def guarded(step: int, batch: int) -> None:
        mine = {(failure.rank, failure.step, failure.batch): failure.place for failure in plan.fails}
        with failing(model, mine.get((rank, step, batch))) as fail, zero3.step_guard(model) as guard:
            losses[step, batch] = run(step, batch, fail)
        assert sorted(guard.errors) == sorted(failure.rank for failure in plan.fails if (failure.step, failure.batch) == (step, batch))
        if guard.failed:
            losses.pop((step, batch), None)

    def update() -> None:
        if plan.reduces:
            zero3.reduce_gradients(model)
        scaler.unscale_(optimizer)
        zero3.clip_grad_norm_(model, plan.clip)
        scaler.step(optimizer)
        scaler.update()
        if not plan.zero_first:
            optimizer.zero_grad()

    with enter(model, update) as uneven:
        for step, batches in enumerate(plan.batches[rank]):
            if plan.zero_first:
                optimizer.zero_grad()
            for batch in range(batches):
                if plan.evaluate:
                    with torch.no_grad():
                        loss_of_model(model, words(rank, 90, 0))
                deferred = plan.reduces or (plan.defer and batch != 1)
                with zero3.no_sync(model, replicas_only=plan.replicas_only) if deferred else nullcontext():
                    if plan.guarded:
                        guarded(step, batch)
                    else:
                        losses[step, batch] = run(step, batch, lambda here: None)
            uneven.step()
            if plan.evaluate:
                with torch.no_grad():
                    loss_of_model(model, words(rank, 90, 0))
    parameters = zero3.full_state_dict(model, rank0_only=False)
    for step in range(EVEN):
        if plan.zero_first:
            optimizer.zero_grad()
        loss = loss_of_model(model, words(rank, 50 + step, 0))
        scaler.scale(loss).backward()
        update()
        later.append(loss.item())
    return Story(losses, parameters, later, zero3.full_state_dict(model, rank0_only=False))


def assert_same(stories: list[Story], plan: Plan, tolerance: float) -> None:
    losses, parameters, later, end = tell_plain(plan)
    for rank, story in enumerate(stories):
        assert story.losses.keys() == losses[rank].keys()
        assert_close(
            [torch.tensor([*story.losses.values()])], [torch.tensor([*losses[rank].values()])], tolerance, f"losses of rank {rank}"
        )
        for found, expected in ((story.parameters, parameters), (story.end, end)):
            assert_close({_name(n): v for n, v in found.items() if _name(n) in expected}, expected, tolerance, f"parameters on rank {rank}")
        assert_close([torch.tensor(story.later)], [torch.tensor(later[rank])], tolerance, f"later losses of rank {rank}")


def _name(name: str) -> str:
    return name.replace(".module.", ".")


@contextmanager
def joined_threads(group: Any, model: nn.Module, step: Callable[[], None], by_all: bool = False) -> Iterator[JoinCoordinator]:
    """What torch's Join does, which works with process groups alone."""
    runtimes = runtimes_of(model)
    states = [state for runtime in runtimes for state in runtime.layers]
    rounds = JoinCoordinator(states, runtimes, group, step, gates_of(model))

    def notify() -> bool:
        group.all_reduce(torch.ones(1))
        return True

    rounds.begin(notify, divide_by_all=by_all)
    rounds.enter(lambda: rounds)
    try:
        yield rounds
    finally:
        rounds.enter(lambda: None)
    while True:
        with_data = torch.zeros(1)
        group.all_reduce(with_data)
        if not with_data:
            break
        rounds.follow()
    rounds.leave()
