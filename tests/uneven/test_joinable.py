"""Ranks as threads that run out of data at different times: the numbers of plain torch, or one error on all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support import unreached
from tests.support.live import LiveBytes
from tests.support.models import mlp, rows
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.reference import assert_close
from tests.support.uneven import PLACES, Failure, Plan, adamw, assert_same, joined_threads, plain, sharded, tell_sharded, words


def check(plan: Plan, tolerance: float = 1e-9) -> None:
    models = [plain(plan) for _ in plan.batches]  # here: threads share one random generator

    def body(group: Any) -> Any:
        return tell_sharded(plan, models[group.rank], group.rank, partial(joined_threads, group, by_all=plan.by_all), group)

    stories = run_ranks(len(plan.batches), body, 20) if plan.mesh is None else run_mesh(*plan.mesh, body, 20)
    assert_same(stories, plan, tolerance)


KINDS = ["sequential", "container", "checkpointed", "checkpointed non-reentrant", "llama", "tied llama"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str) -> None:
    check(Plan(kind=kind), 1e-6 if "llama" in kind else 1e-9)


@pytest.mark.parametrize("batches", [
    ((1,), (1,), (1,)),  # even
    ((1, 1), (1, 1, 1), ()),
    ((), (), (1, 1)),
    ((1, 1, 1), (), ()),
    ((1, 1), (1,)),
    ((2, 2), (2, 1), (2,)),  # batches of a step
    ((2, 1), (1, 3), (1, 1, 1)),
    ((3,), (1, 1), ()),
])  # fmt: skip
@pytest.mark.parametrize("by_all", [False, True])
def test_every_number_of_batches(batches: tuple[tuple[int, ...], ...], by_all: bool) -> None:
    check(Plan(batches, by_all=by_all, clip=0.5 if by_all else 0.9))


@pytest.mark.parametrize("policy", [
    {"prefetch_depth": 0}, {"prefetch_depth": 3}, {"reshard_after_forward": False}, {"separate_backup_group": False},
    {"stage": 2},
], ids=str)  # fmt: skip
def test_policies(policy: dict[str, Any]) -> None:
    check(Plan(policy=zero3.ShardingPolicy(**policy)))


def test_frozen_parameters_gradients_zeroed_first_and_evaluation_on_the_way() -> None:
    check(Plan(frozen=True, zero_first=True, evaluate=True))


def test_joinable_with_deferred_reductions() -> None:
    """Under `no_sync` a gradient is divided when it is reduced: here by the number of all ranks."""
    check(Plan(((2, 2), (1, 2, 2), (2,)), by_all=True, defer=True, clip=0.5))


REDUCING = Plan(((3, 2), (1, 2, 3), (1,), ()), by_all=True, reduces=True, clip=0.5)


@pytest.mark.parametrize("plan", [
    REDUCING, replace(REDUCING, tokens=True), replace(REDUCING, scaled=True, frozen=True), replace(REDUCING, whole=True, evaluate=True),
    replace(REDUCING, policy=zero3.ShardingPolicy(transactional=True), tokens=True), replace(REDUCING, guarded=True),
    replace(REDUCING, kind="llama"), replace(REDUCING, tokens=True, policy=zero3.ShardingPolicy(stage=2)),
    replace(REDUCING, mesh=(2, 2)), replace(REDUCING, mesh=(2, 2), replicas_only=True, tokens=True),
], ids=["plain", "tokens", "scaled", "whole", "transactional", "guarded", "llama", "tokens, stage 2", "mesh", "replicas_only"])  # fmt: skip
def test_a_step_function_reduces_what_is_kept_where_ranks_have_kept_nothing(plan: Plan) -> None:
    check(plan, 1e-6 if plan.kind == "llama" else 1e-9)


@pytest.mark.parametrize("lengths", [(0, 2), (3, 1, 0)], ids=str)
def test_what_a_context_has_kept_is_reduced_after_it(lengths: tuple[int, ...]) -> None:
    """On ranks, too, that have kept nothing."""

    def loss_of(model: nn.Module, rank: int, batch: int) -> Tensor:
        return model(rows(2) * (1 + rank + batch)).pow(2).mean()

    expected, models = mlp(2), [mlp(2) for _ in lengths]
    for rank, length in enumerate(lengths):
        for batch in range(length):
            (loss_of(expected, rank, batch) / len(lengths)).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    torch.optim.SGD(expected.parameters(), lr=1.0).step()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], nn.Linear, process_group=group)
        with joined_threads(group, model, lambda: None), zero3.no_sync(model):
            for batch in range(lengths[group.rank]):
                loss_of(model, group.rank, batch).backward()
        zero3.reduce_gradients(model)
        zero3.clip_grad_norm_(model, 0.1)
        torch.optim.SGD(zero3.get_trainable_chunk(model), lr=1.0).step()
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(len(lengths), body, 20):
        assert_close(found, dict(expected.state_dict()), 1e-9, "parameters")


def then(model: nn.Module, optimizer: torch.optim.Optimizer, *names: str) -> None:
    for name in names:
        if name == "zero":
            optimizer.zero_grad()
        elif name == "reduce":
            zero3.reduce_gradients(model)
        else:
            zero3.clip_grad_norm_(model, 0.1)
            optimizer.step()


@pytest.mark.parametrize(("inside", "at_step", "after"), [
    ((), (), ("zero", "reduce", "clip")), (("zero",), (), ("reduce", "clip")), (("zero",), (), ("clip",)),
    (("zero",), ("clip",), ("reduce",)),
], ids=["after the context", "in it, then reduced", "in it", "before a step"])  # fmt: skip
def test_what_was_kept_and_zeroed_is_nobodys(inside: tuple[str, ...], at_step: tuple[str, ...], after: tuple[str, ...]) -> None:
    """Also on a rank that has kept nothing, and never did."""
    models = [mlp(2) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], nn.Linear, process_group=group)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=1.0)
        before = zero3.full_state_dict(model, rank0_only=False)
        with joined_threads(group, model, lambda: then(model, optimizer, *at_step)) as uneven:
            if group.rank:
                with zero3.no_sync(model):
                    model(rows(2)).pow(2).mean().backward()
                then(model, optimizer, *inside)
                if at_step:
                    uneven.step()
        then(model, optimizer, *after)
        assert all(chunk.grad is None for chunk in zero3.get_trainable_chunk(model))
        assert_close(zero3.full_state_dict(model, rank0_only=False), before, 0.0, "parameters")

    run_ranks(2, body, 20)


def test_what_was_kept_and_frozen_since_is_reduced_on_all_ranks() -> None:
    expected, models = mlp(2), [mlp(2) for _ in range(2)]
    (expected(rows(2)).pow(2).mean() / 2).backward()

    def body(group: ThreadCommunicator) -> Tensor:
        model = zero3.shard(models[group.rank], nn.Linear, process_group=group)
        with joined_threads(group, model, lambda: None):
            if group.rank:
                with zero3.no_sync(model):
                    model(rows(2)).pow(2).mean().backward()
            chunks = zero3.get_trainable_chunk(model)
            for chunk in chunks:
                chunk.requires_grad_(False)
        zero3.reduce_gradients(model)
        return torch.stack([torch.as_tensor(chunk.grad.as_subclass(Tensor).sum()) for chunk in chunks])

    sums = torch.stack(run_ranks(2, body, 20)).sum()
    torch.testing.assert_close(sums, sum(p.grad.sum() for p in expected.parameters()), rtol=1e-9, atol=1e-12)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(2), mlp(3)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def test_a_backward_reduces_what_a_context_has_kept_of_layers_that_it_does_not_reach() -> None:
    expected, models = Halves(), [Halves() for _ in range(2)]
    for loss in (expected(rows(2)), expected(rows(2), both=False), expected(rows(3), both=False)):
        (loss.pow(2).mean() / 2).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    torch.optim.SGD(expected.parameters(), lr=1.0).step()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], nn.Linear, process_group=group)
        with joined_threads(group, model, lambda: None), zero3.no_sync(model):
            if group.rank:
                model(rows(2)).pow(2).mean().backward()
        model(rows(2 + group.rank), both=False).pow(2).mean().backward()
        then(model, torch.optim.SGD(zero3.get_trainable_chunk(model), lr=1.0), "clip")
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(2, body, 20):
        assert_close(found, dict(expected.state_dict()), 1e-9, "parameters")


def unscale(optimizer: torch.optim.Optimizer) -> None:
    scaler = zero3.GradScaler("cpu")
    scaler.scale(torch.zeros(1))
    scaler.unscale_(optimizer)


@pytest.mark.parametrize("look", [
    lambda model, optimizer: zero3.clip_grad_norm_(model, 1.0), lambda model, optimizer: zero3.parameter_norms(model),
    lambda model, optimizer: unscale(optimizer), lambda model, optimizer: optimizer.step(),
], ids=["clip_grad_norm_", "parameter_norms", "GradScaler", "step"])  # fmt: skip
@pytest.mark.parametrize("batches", [(0, 1, 1), (1, 2, 1)], ids=str)
def test_a_step_function_that_looks_at_what_is_not_reduced_is_told_so_on_all_ranks(
    batches: tuple[int, ...], look: Callable[..., Any]
) -> None:
    """Also on ranks that have kept nothing, before any chunk has changed. The first batch is reduced, the second one is not."""
    models = [plain(Plan()) for _ in batches]

    def body(group: ThreadCommunicator) -> str:
        model, loss = sharded(Plan(), models[group.rank], group)
        optimizer = adamw(zero3.get_trainable_chunk(model))
        before = zero3.full_state_dict(model, rank0_only=False)

        def train() -> None:
            with joined_threads(group, model, lambda: look(model, optimizer)) as uneven:
                for batch in range(batches[group.rank]):
                    last = batch == max(batches) - 1
                    with zero3.no_sync(model) if last else contextlib.nullcontext():
                        loss(model, words(group.rank, 0, batch)).backward()
                if batches[group.rank]:
                    uneven.step()

        with pytest.raises(RuntimeError) as caught:
            train()
        assert_close(zero3.full_state_dict(model, rank0_only=False), before, 0.0, "parameters")
        return str(caught.value)

    (told,) = set(run_ranks(3, body, 20))
    assert "Call zero3.reduce_gradients(model) on every rank" in told


@pytest.mark.parametrize("by_all", [False, True])
def test_the_mean_over_tokens(by_all: bool) -> None:
    check(Plan(((2, 2), (1, 3, 2), ()), by_all=by_all, tokens=True))


@pytest.mark.parametrize("place", PLACES)
def test_the_mean_over_tokens_goes_on_after_a_batch_that_was_dropped(place: str) -> None:
    """Ranks without data drop its tokens, too: the third batch of the step is weighed without them."""
    check(Plan(((3, 3), (), (3, 3)), tokens=True, guarded=True, fails=(Failure(2, 1, 1, place),)))


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("lengths", [(2, 2), (1, 3), (0, 2), (3, 1, 2)], ids=str)
def test_several_models_that_one_backward_trains(lengths: tuple[int, ...], chained: bool) -> None:
    """The round of the backward ends with that of the last model: what the other's backward still writes is no change."""

    def two() -> nn.ModuleList:
        return nn.ModuleList([mlp(2), mlp(3)])

    def loss_of_two(models: Any, rank: int, step: int) -> Tensor:
        x = rows(2) * (1 + rank + step)
        y = models[0](x)
        return y.pow(2).mean() + models[1](y if chained else x).pow(3).mean()

    expected = two()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(max(lengths)):
        optimizer.zero_grad()
        ranks = [rank for rank, length in enumerate(lengths) if step < length]
        (sum(loss_of_two(expected, rank, step) for rank in ranks) / len(ranks)).backward()
        optimizer.step()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        models = nn.ModuleList(zero3.Zero3Sequential([zero3.Zero3Layer(m, process_group=group) for m in each]) for each in two())
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(models), lr=0.1)
        with joined_threads(group, models, lambda: (optimizer.step(), optimizer.zero_grad()), by_all=False) as uneven:
            for step in range(lengths[group.rank]):
                loss_of_two(models, group.rank, step).backward()
                uneven.step()
        return zero3.full_state_dict(models, rank0_only=False)

    for found in run_ranks(len(lengths), body, 20):
        for (name, value), wanted in zip(found.items(), expected.state_dict().values(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-9, atol=1e-12, msg=name)


# -- with replicas, transactions and step_guard

MESHES = pytest.mark.parametrize("mesh", [None, (2, 1), (3, 1), (2, 2), (1, 2), (2, 3)], ids=str)


def batches_on(mesh: tuple[int, int] | None, *, of: int = 1) -> tuple[tuple[int, ...], ...]:
    """From none on rank 0 to five on the last, which have `of` batches of a step."""
    ranks = 3 if mesh is None else mesh[0] * mesh[1]
    return tuple((of,) * (5 * rank // (ranks - 1)) for rank in range(ranks))


@MESHES
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_joinable_on_meshes(mesh: tuple[int, int] | None, depth: int) -> None:
    check(Plan(batches_on(mesh), mesh=mesh, policy=zero3.ShardingPolicy(prefetch_depth=depth), by_all=depth == 1))


@pytest.mark.parametrize("plan", [
    Plan(kind="llama"), Plan(kind="checkpointed"), Plan(tokens=True), Plan(frozen=True, zero_first=True, evaluate=True), Plan(whole=True),
    Plan(scaled=True), Plan(scaled=True, guarded=True, tokens=True, fails=(Failure(2, 1, 0, "backward"),)),
    Plan(policy=zero3.ShardingPolicy(stage=2)), Plan(policy=zero3.ShardingPolicy(separate_backup_group=True)),
], ids=[
    "llama", "checkpointed", "tokens", "frozen", "whole", "scaled", "scaled and guarded", "stage 2", "separate_backup_group",
])  # fmt: skip
def test_joinable_on_a_mesh_with(plan: Plan) -> None:
    batches = ((), (2,), (2, 2, 2), (2, 2)) if plan.fails else ((), (1,), (1, 1, 1), (1, 1))
    check(replace(plan, batches=batches, mesh=(2, 2)), 1e-6 if plan.kind == "llama" else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("replicas_only", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
def test_joinable_with_several_batches_a_step_some_kept(mesh: tuple[int, int] | None, replicas_only: bool, guarded: bool) -> None:
    policy = zero3.ShardingPolicy(transactional=not guarded)
    batches = ((2, 2), (1, 2, 2), (2,), ())[: 4 if mesh == (2, 2) else 3]
    check(Plan(batches, mesh=mesh, policy=policy, by_all=True, defer=True, replicas_only=replicas_only, guarded=guarded, clip=0.5))


@MESHES
@pytest.mark.parametrize("whole", [False, True])
def test_joinable_with_transactional(mesh: tuple[int, int] | None, whole: bool) -> None:
    policy = zero3.ShardingPolicy(transactional=True)
    check(Plan(batches_on(mesh), mesh=mesh, policy=policy, whole=whole))
    check(Plan(batches_on(mesh, of=2), mesh=mesh, policy=policy, whole=whole, tokens=True))


@pytest.mark.slow
@MESHES
@pytest.mark.parametrize("tokens", [False, True])
def test_joinable_with_step_guard_and_no_failure(mesh: tuple[int, int] | None, tokens: bool) -> None:
    check(Plan(batches_on(mesh), mesh=mesh, guarded=True, tokens=tokens))
    check(Plan(((1, 2), (2, 1, 1), ())[: 3 if mesh != (2, 1) else 2], mesh=mesh if mesh in ((3, 1), (2, 1)) else None, guarded=True))


@pytest.mark.slow
@MESHES
@pytest.mark.parametrize("place", PLACES)
def test_joinable_with_a_failure_in_a_step_guard(mesh: tuple[int, int] | None, place: str) -> None:
    """Another rank fails in each step but the first: while all have data, and when some have none any more."""
    batches = batches_on(mesh, of=2)
    plan = Plan(((2, 2), *batches[1:]), mesh=mesh, guarded=True)
    fails = [Failure(max(plan.ranks_with(s, 0)) if s % 2 else min(plan.ranks_with(s, 0)), s, s % 2, place) for s in range(1, 5)]
    for depth in (1, 2):
        policy = zero3.ShardingPolicy(prefetch_depth=depth, transactional=depth == 2)
        check(replace(plan, policy=policy, whole=depth == 2, tokens=place == "backward", fails=tuple(fails)))


def test_mixed_precision_gives_the_numbers_of_the_ranks_that_have_data() -> None:
    """Which other tests compare with other libraries'; only in whose hands the chunks are differs."""
    policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def parameters(batches: tuple[tuple[int, ...], ...]) -> Any:
        plan = Plan(batches, policy=policy)
        models = [plain(plan) for _ in batches]

        def body(group: ThreadCommunicator) -> Any:
            return tell_sharded(plan, models[group.rank], group.rank, partial(joined_threads, group, by_all=False), group).parameters

        return run_ranks(len(batches), body)[0]

    assert_close(parameters(((1, 1), (1, 1), ())), parameters(((1, 1), (1, 1))), 1e-9, "parameters")


def test_a_rank_without_data_holds_less_than_one_that_computes() -> None:
    models = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(2)]

    def body(group: ThreadCommunicator) -> tuple[int, int]:
        model = zero3.Zero3Sequential([zero3.Zero3Layer(module, process_group=group) for module in models[group.rank]])
        optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
        with LiveBytes() as live:

            def train() -> None:
                with joined_threads(group, model, lambda: (optimizer.step(), optimizer.zero_grad())) as uneven:
                    for _ in range(3 * group.rank):
                        model(torch.zeros(1, 64)).sum().backward()
                        uneven.step()

            return live.peak_of(train), live.now

    (without, left_without), (active, left_active) = run_ranks(2, body)
    assert without <= active
    assert left_without <= left_active + 8  # the last count of ranks


# -- mistakes and misfortunes while a rank is out of data: one error on all, in less than the time that ranks wait


class Trial(NamedTuple):
    model: zero3.Zero3Sequential
    uneven: Any
    optimizer: torch.optim.Optimizer
    loss: Callable[[], Tensor]
    rank: int


def try_on_three(active: Callable[[Trial], Any], batches: tuple[int, ...] = (0, 4, 4)) -> list[str]:
    """What each rank raised, or "": rank 0 has no data, the others do `active` in their second step."""
    models = [plain(Plan()) for _ in range(3)]

    def body(group: ThreadCommunicator) -> str:
        model, loss = sharded(Plan(), models[group.rank], group)
        optimizer = adamw(zero3.get_trainable_chunk(model))

        def update() -> None:
            zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        try:
            with joined_threads(group, model, update) as uneven:
                for step in range(batches[group.rank]):
                    trial = Trial(model, uneven, optimizer, lambda step=step: loss(model, words(group.rank, step, 0)), group.rank)
                    if step == 1:
                        active(trial)
                    trial.loss().backward()
                    uneven.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(3, body)


def raise_on_rank_1(trial: Trial) -> None:
    with trial.model[2].register_forward_pre_hook(partial(fail, trial.rank)):
        trial.loss()


def fail(rank: int, *_: Any) -> None:
    if rank == 1:
        raise ZeroDivisionError("of rank 1")


def test_an_exception_of_one_rank_reaches_all() -> None:
    mute, failed, other = try_on_three(raise_on_rank_1)
    assert failed == "ZeroDivisionError: of rank 1"
    for text in (mute, other):
        assert text.startswith("RuntimeError: another rank raised while some had no data left")


@pytest.mark.parametrize("then", ["loss", "step"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_joinable_whose_context_an_exception_has_ended_says_so_to_who_catches_it_inside(phase: str, then: str) -> None:
    def catch(trial: Trial) -> None:
        """On all ranks that have data."""
        with contextlib.suppress(ZeroDivisionError), trial.model[2].register_forward_hook(partial(fail_in, phase)):
            trial.loss().backward()
        trial.uneven.step() if then == "step" else trial.loss()

    mute, *others = try_on_three(catch)
    assert mute.startswith("RuntimeError: another rank raised while some had no data left")
    assert "step_guard" in mute
    for rank, text in enumerate(others, 1):
        assert text.startswith(f"RuntimeError: rank {rank}: some ranks have no data left, and this rank's code has caught an exception")


@pytest.mark.parametrize("place", ["before clipping", "after clipping", "after the update"])
def test_an_exception_in_a_step_function_reaches_all_that_are_in_its_collectives(place: str) -> None:
    models = [plain(Plan()) for _ in range(3)]

    def body(group: ThreadCommunicator) -> tuple[str, bool]:
        model, loss = sharded(Plan(), models[group.rank], group)
        optimizer = adamw(zero3.get_trainable_chunk(model))
        before = [chunk.detach().clone() for chunk in model.get_trainable_chunk()]

        def update() -> None:
            for here in ("before clipping", "after clipping", "after the update"):
                if here == "after clipping":
                    zero3.clip_grad_norm_(model, 1.0)
                if here == "after the update":
                    optimizer.step()
                if here == place:
                    fail(group.rank)

        def train() -> None:
            with joined_threads(group, model, update) as uneven:
                if group.rank:
                    loss(model, words(group.rank, 0, 0)).backward()
                    uneven.step()

        with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
            train()
        changed = any(not torch.equal(chunk, old) for chunk, old in zip(model.get_trainable_chunk(), before, strict=True))
        return f"{type(caught.value).__name__}: {caught.value}", changed

    (mute, mute_changed), (failed, _), (other, other_changed) = run_ranks(3, body, 20)
    assert failed == "ZeroDivisionError: of rank 1"
    assert all("another rank raised while some had no data left" in text for text in (mute, other))
    assert mute_changed == other_changed == (place != "before clipping")


def fail_in(phase: str, module: nn.Module, inputs: object, output: Tensor) -> None:
    if phase == "forward":
        fail(1)
    output.register_hook(lambda _: fail(1))


def test_after_an_exception_that_has_left_the_joinables_context_ranks_train_on() -> None:
    models = [plain(Plan()) for _ in range(2)]

    def body(group: ThreadCommunicator) -> list[Tensor]:
        model, loss = sharded(Plan(), models[group.rank], group)
        with contextlib.suppress(ZeroDivisionError, RuntimeError), joined_threads(group, model, lambda: None):
            if group.rank == 1:
                with model[2].register_forward_hook(partial(fail_in, "forward")):
                    loss(model, words(1, 0, 0))
        loss(model, words(group.rank, 0, 0)).backward()
        return [chunk.grad for chunk in zero3.get_trainable_chunk(model)]

    assert all(isinstance(gradient, Tensor) for gradients in run_ranks(2, body) for gradient in gradients)


@pytest.mark.parametrize("apart", [False, True])
def test_after_the_joinables_context_a_model_and_its_step_make_no_more_transfers_than_before(apart: bool) -> None:
    """Also if ranks came apart inside, which each of them finds by itself."""
    models = [plain(Plan()) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model, loss = sharded(Plan(), models[group.rank], group)

        def transfers(step: Callable[[], Any]) -> list[Any]:
            begin = len(group.log)
            loss(model, words(group.rank, 0, 0)).backward()
            step()
            return group.log[begin:]

        transfers(lambda: None)  # from here on ranks know the way
        before = transfers(lambda: None)
        expected = pytest.raises(RuntimeError, match="have come apart") if apart else contextlib.nullcontext()
        with expected, joined_threads(group, model, lambda: None) as uneven:
            output = loss(model, words(group.rank, 0, 0))
            if apart and group.rank == 0:
                output = loss(model, words(0, 0, 0))
            output.backward()
            uneven.step()
            if group.rank == 1:
                loss(model, words(1, 1, 0)).backward()
                uneven.step()
        zero3.reset(model)
        transfers(lambda: None)
        assert transfers(uneven.step) == before

    run_ranks(2, body)


def fail_in_the_first_guard(trial: Trial) -> None:
    with zero3.step_guard(trial.model), trial.model[2].register_forward_pre_hook(partial(fail, trial.rank)):
        trial.loss().backward()


def test_a_failure_that_step_guard_can_not_drop_reaches_all() -> None:
    """The first guarded micro-batch of all, in the tail."""
    mute, failed, other = try_on_three(fail_in_the_first_guard)
    assert failed == "ZeroDivisionError: of rank 1"
    for text in (mute, other):
        assert text.startswith("RuntimeError: another rank raised while some had no data left")


def zero_in_a_guard(trial: Trial) -> None:
    with zero3.step_guard(trial.model):
        trial.loss().backward()
        if trial.rank == 1:
            trial.model.zero_grad()


def test_a_mistake_in_a_step_guard_reaches_all() -> None:
    mute, *others = try_on_three(zero_in_a_guard)
    assert mute.startswith("RuntimeError: another rank raised while some had no data left")
    assert all(text.startswith("RuntimeError: rank 1: gradients were zeroed or replaced inside zero3.step_guard") for text in others)


def call_in(trial: Trial, order: dict[int, tuple[int, ...]]) -> None:
    layers = trial.model._layers
    trial.model._layers = tuple(layers[number] for number in order[trial.rank])
    trial.loss()


def test_ranks_that_call_other_layers_are_told() -> None:
    for text in try_on_three(partial(call_in, order={1: (0, 1, 2, 3, 4), 2: (3, 0, 1, 2, 4)})):
        assert "ranks have come apart: one gathers layer '0' (Embedding), another has come to a layer that was not foreseen" in text


def test_what_ranks_with_data_disagree_about_is_raised_by_those_without() -> None:
    texts = try_on_three(partial(call_in, order={1: (1, 0, 2, 3, 4), 2: (3, 0, 1, 2, 4)}))
    assert len(set(texts)) == 1, texts
    assert "ranks differ in the layer called as number 1 of a forward: rank 1: '1'" in texts[0]
    assert "rank 2: '3'" in texts[0]


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (lambda trial: zero3.clip_grad_norm_(trial.model, 1.0), "Clip, unscale and update inside the step function"),
        (lambda trial: zero3.full_state_dict(trial.model), "save, load and read whole parameters after the context"),
        (lambda trial: (trial.loss().backward(), trial.optimizer.step(), trial.loss()), "Call joinable.step() in place of"),
        (lambda trial: (trial.loss().backward(), scale(trial), trial.uneven.step()), "have changed chunks or gradients"),
        (lambda trial: (trial.loss().backward(), trial.model[1].zero_grad(), trial.loss()), "have zeroed only some of the gradients"),
    ],
)
def test_what_ranks_without_data_could_not_follow_is_refused(mistake: Callable[[Trial], Any], text: str) -> None:
    texts = try_on_three(mistake)
    assert all(each.startswith("RuntimeError") for each in texts), texts
    assert any(text in each for each in texts), texts


def scale(trial: Trial) -> None:
    for chunk in trial.model.get_trainable_chunk():
        chunk.grad *= 2


def test_what_is_refused_then_is_possible_while_all_have_data() -> None:
    def everything(trial: Trial) -> None:
        zero3.clip_grad_norm_(trial.model, 1.0)
        zero3.full_state_dict(trial.model)
        with zero3.full_params(trial.model, writeback=True):
            pass
        trial.loss().backward()
        trial.model[1].zero_grad()
        trial.loss()

    assert try_on_three(everything, (4, 4, 4)) == ["", "", ""]


def test_ranks_at_different_points_are_told() -> None:
    def differ(trial: Trial) -> None:
        loss = trial.loss()
        if trial.rank == 2:
            trial.loss()
        loss.backward()

    for text in try_on_three(differ):
        assert "ranks have come apart: 1 in forward and 1 in backward" in text


# -- parameters that no gradient reached


@pytest.mark.parametrize("lengths", [(4, 4, 1), (1, 4, 4), (0, 2, 4)], ids=str)
@pytest.mark.parametrize("make", [unreached.adamw, unreached.sgd])
def test_joinable_leaves_alone_what_no_rank_with_data_has_reached(make: unreached.Make, lengths: tuple[int, ...]) -> None:
    """The last rank alone reaches some: they decay no more when it is out of data. One without data from the first step on steps as
    the others do.
    """
    torch.manual_seed(0)
    reference, models, ranks = unreached.net(), [unreached.net() for _ in lengths], len(lengths)
    optimizer = make(reference.parameters())
    for step in range(max(lengths)):
        with_data = [rank for rank in range(ranks) if lengths[rank] > step]
        for rank in with_data:
            loss = unreached.loss_of(reference, list(reference.blocks), unreached.seldom, (step, 0, rank, ranks))
            (loss / len(with_data)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, unreached.Block, process_group=group)
        optimizer = make(zero3.get_trainable_chunk(model))

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        with joined_threads(group, model, update) as joined:
            for step in range(lengths[group.rank]):
                unreached.loss_of(model, modules, unreached.seldom, (step, 0, group.rank, ranks)).backward()
                joined.step()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(ranks, body, 20):
        assert_close(values, reference.state_dict(), 1e-9, "parameters")
