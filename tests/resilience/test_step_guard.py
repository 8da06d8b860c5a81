"""Micro-batches that fail on one rank, and are dropped on all ranks under `step_guard`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import WIDTH, WORLDS, Broken, fused
from tests.support.processes import PROMPT, Rank, try_on_ranks
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import RanksDisagree, ThreadCommunicator, run_mesh, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_at_rest, assert_close, full_gradients, sgd
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

LAYERS_OF_MODEL = 3


def sharded(group: ThreadCommunicator, build: Callable[[], nn.Module] = fused, **policy: Any) -> Zero3Sequential:
    chosen = ShardingPolicy(**policy)
    process_group = group if group.world_size > 1 else None
    return Zero3Sequential([Zero3Layer(module, policy=chosen, process_group=process_group) for module in build()])


def batch(rank: int, number: int) -> Tensor:
    return Turn(rank, number, 0).tensor(3, WIDTH)


def loss_of(model: nn.Module, rank: int, number: int, reentrant: bool | None = None) -> Tensor:
    x = batch(rank, number)
    if reentrant is None:
        return model(x).pow(2).sum()
    x.requires_grad_()
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=reentrant, preserve_rng_state=False)
    return x.pow(2).sum()


def expected(world_size: int, numbers: list[int]) -> dict[str, Tensor]:
    """The mean over ranks of the sum over micro-batches, by plain torch."""
    model = fused()
    for rank in range(world_size):
        for number in numbers:
            (loss_of(model, rank, number) / world_size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(model: nn.Module, group: ThreadCommunicator, wanted: dict[str, Tensor]) -> None:
    assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")


reentrants = pytest.mark.parametrize("reentrant", [None, False, True])


@pytest.mark.parametrize("policy", [{"stage": 1}, {"stage": 2}, {"dynamic": True}])
def test_step_guard_refuses_what_it_could_not_repeat(policy: dict[str, Any]) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, **policy)
        with pytest.raises(ValueError, match=r"rank \d: zero3.step_guard needs"), zero3.step_guard(model):
            pass
        loss_of(model, group.rank, 0).backward()
        zero3.clip_grad_norm_(model, float("inf"))  # with stage=1, only now are gradients reduced
        check(model, group, wanted)

    wanted = expected(2, [0])
    run_ranks(2, body)


@WORLDS
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("where", range(LAYERS_OF_MODEL))
def test_step_guard_drops_on_all_ranks_the_micro_batch_that_failed_on_one(
    world_size: int, where: int, phase: str, transactional: bool
) -> None:
    def body(group: ThreadCommunicator) -> Any:
        model = sharded(group, transactional=transactional)
        optimizer = sgd(model.get_trainable_chunk())
        for number in range(4):
            fails = number == 2 and group.rank == world_size - 1
            model[where].module.blows = (phase, Broken) if fails else None
            with zero3.step_guard(model) as guarded:
                loss_of(model, group.rank, number).backward()
            assert guarded.errors == ({world_size - 1: "Broken: the fuse"} if number == 2 else {})
            assert guarded.failed == (number == 2)
            assert_at_rest(model)
        check(model, group, wanted)
        optimizer.step()
        return group.log

    wanted = expected(world_size, [0, 1, 3])
    logs = run_ranks(world_size, body)
    assert all(log == logs[0] for log in logs)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("where", range(LAYERS_OF_MODEL))
@pytest.mark.parametrize("depth", [0, 1])
def test_step_guard_where_layers_stay_fetched_by_hand_and_by_resident_bytes(where: int, phase: str, depth: int) -> None:
    """In a failed micro-batch too: the other ranks don't gather them again."""

    def body(group: ThreadCommunicator) -> Any:
        model = sharded(group, build=half_frozen, resident_bytes=10_000, prefetch_depth=depth)
        zero3.fetch(model[1])
        for number in range(6):
            model[where].module.blows = (phase, Broken) if (number, group.rank) in ((2, 1), (4, 0)) else None
            with zero3.step_guard(model) as guarded:
                loss_of(model, group.rank, number).backward()
            assert guarded.failed == (number in (2, 4))
        check(model, group, wanted)
        return group.log

    def half_frozen() -> nn.Sequential:
        model = fused()
        model[2].a.requires_grad_(False)
        return model

    wanted = {name: gradient for name, gradient in expected(2, [0, 1, 3, 5]).items() if not name.startswith("2.a")}
    logs = run_ranks(2, body)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@reentrants
def test_step_guard_follows_checkpoints_no_sync_and_the_token_mean(reentrant: bool | None, phase: str) -> None:
    def body(group: ThreadCommunicator) -> Any:
        model = sharded(group)
        for number in range(8):
            last = number % 2 == 1
            fails = number in (4, 5) and group.rank == 1
            model[1].module.blows = (phase, Broken) if fails else None
            with nullcontext() if last else zero3.no_sync(model), zero3.step_guard(model) as guarded:
                zero3.backward(loss_of(model, group.rank, number, reentrant), 3 + number, model)
            assert guarded.failed == (number in (4, 5))
        check(model, group, wanted)
        return group.log

    plain, numbers = fused(), [0, 1, 2, 3, 6, 7]
    for rank in range(2):
        for number in numbers:
            (loss_of(plain, rank, number) / sum(2 * (3 + n) for n in numbers)).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    logs = run_ranks(2, body)
    assert logs[0] == logs[1]


def test_before_any_layer_and_after_all_of_them() -> None:
    """A batch that can't be loaded; a loss that can't be logged."""

    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        for number in range(4):
            with zero3.step_guard(model):
                if number == 1 and group.rank == 0:
                    raise OSError("no such batch")
                loss_of(model, group.rank, number).backward()
                if number == 2 and group.rank == 1:
                    raise ZeroDivisionError
        check(model, group, wanted)

    wanted = expected(2, [0, 3])
    run_ranks(2, body)


def test_step_guard_says_what_it_dropped(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        model[0].module.blows = ("forward", Broken)
        with zero3.step_guard(model):
            loss_of(model, 0, 0)

    run_ranks(1, body)
    assert "dropped on all ranks" in caplog.text and "Broken: the fuse" in caplog.text


def test_what_a_dropped_micro_batch_held_is_let_go() -> None:
    """The error's frames hold activations; from Python 3.12 on they would stay until a collection of garbage."""

    def body(group: ThreadCommunicator) -> None:
        model, failure = sharded(group), Broken("mine")
        with zero3.step_guard(model) as guarded:
            loss_of(model, 0, 0)
            raise failure
        assert guarded.failed and failure.__traceback__ is None

    run_ranks(1, body)


@pytest.mark.parametrize("catch", [3, (ValueError, "x"), [ValueError], int])
def test_step_guard_refuses_what_is_no_exception(catch: Any) -> None:
    model = zero3.shard(nn.Sequential(nn.Linear(2, 2)), layers=nn.Linear)
    with pytest.raises(TypeError, match="catch must be exceptions' classes, found"), zero3.step_guard(model, catch):
        raise ValueError


def test_the_first_micro_batch_of_all_can_not_be_saved() -> None:
    def body(group: ThreadCommunicator) -> str:
        model = sharded(group)
        model[1].module.blows = ("forward", Broken) if group.rank == 1 else None
        try:
            with zero3.step_guard(model):
                loss_of(model, group.rank, 0).backward()
        except (Broken, RanksDisagree, RuntimeError) as error:
            return type(error).__name__
        return "went on"

    with pytest.raises(Broken):
        run_ranks(2, lambda group: _raising(body(group)))


def _raising(name: str) -> None:
    if name == "Broken":
        raise Broken


@WORLDS
def test_other_exceptions_pass_and_leave_no_half_step(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        loss_of(model, group.rank, 0).backward()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
            with zero3.step_guard(model):
                loss_of(model, group.rank, 1).backward()
                raise KeyboardInterrupt
        loss_of(model, group.rank, 2).backward()
        check(model, group, wanted)

    wanted = expected(world_size, [0, 2])
    run_ranks(world_size, body)


def test_an_optimizer_that_steps_inside_is_told_so() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        optimizer = sgd(model.get_trainable_chunk())
        loss_of(model, group.rank, 0).backward()
        loss = loss_of(model, group.rank, 1)
        with pytest.raises(RuntimeError, match=r"rank \d: an optimizer stepped inside zero3.step_guard.*after it"), zero3.step_guard(model):
            optimizer.step()
        assert loss is not None

    run_ranks(2, body)


def train_with_failures(rank: Rank, fails: bool) -> list[float]:
    """Four steps of two micro-batches; with `fails`, rank 1 runs out of memory or divides by zero in extra ones."""
    torch.manual_seed(0)
    model = Zero3Sequential([Zero3Layer(nn.Linear(8, 8)) for _ in range(4)])
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.05)
    losses = []
    for step in range(4):
        for number in range(2 + 2 * (fails and step > 0)):
            with zero3.step_guard(model) as guarded:
                loss = model(torch.full((2, 8), float(step + number + rank.number))).square().mean()
                if rank.number == 1 and number == 2:
                    raise torch.OutOfMemoryError("made up")
                if rank.number == 1 and number == 3:
                    loss.register_hook(lambda gradient: 1 / 0)
                loss.backward()
            assert guarded.failed == (number > 1)
            losses += [] if guarded.failed else [loss.item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_real_ranks_go_on_with_the_same_losses() -> None:
    assert on_processes(2, train_with_failures, True) == on_processes(2, train_with_failures, False)


def fail_alone(rank: Rank, where: str) -> str:
    """Rank 1 fails without a guard, and leaves the group: the other one must not wait for the group's timeout."""
    model = Zero3Sequential([Zero3Layer(nn.Linear(8, 8)) for _ in range(3)])
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    if rank.number == 1 and where == "forward":
        model[1].module.register_forward_hook(lambda *_: 1 / 0)
    loss = model(torch.ones(2, 8)).sum()
    if rank.number == 1:
        loss.register_hook(lambda gradient: 1 / 0)
    loss.backward()
    return "went on"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_on_one_rank_is_a_named_error_on_the_others(where: str) -> None:
    outcomes = try_on_ranks(2, fail_alone, where, fresh=True, debug="OFF")
    assert [outcome.error for outcome in outcomes] == ["RuntimeError", "ZeroDivisionError"]
    assert "rank 0 of 2" in outcomes[0].text and "layer" in outcomes[0].text
    assert max(outcome.seconds for outcome in outcomes) < PROMPT


def test_what_step_guard_could_not_take_back_is_refused() -> None:
    """On all ranks, by name; afterwards they train on."""

    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, transactional=True)
        for wrong, text in (
            (token_means, "a second zero3.backward inside one zero3.step_guard"),
            (penalty, "run that backward after the guard"),
        ):
            with pytest.raises((ValueError, RuntimeError), match=text), zero3.step_guard(model):
                wrong(model, group.rank)
            model.zero_grad()
        with zero3.step_guard(model) as guarded:
            loss_of(model, group.rank, 0).backward()
        assert not guarded.failed
        assert_close(full_gradients(model, group), expected(group.world_size, [0]), TOLERANCE, "gradients")

    run_ranks(2, body)


def token_means(model: nn.Module, rank: int) -> None:
    for number in range(2):
        zero3.backward(loss_of(model, rank, number), 3, model)


def penalty(model: nn.Module, rank: int) -> None:
    (loss_of(model, rank, 0) + sum(chunk.pow(2).sum() for chunk in zero3.get_trainable_chunk(model))).backward()


def test_a_backward_that_broke_under_reentrant_checkpointing_takes_no_later_gradients_with_it() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group)
        model[1].module.blows = ("backward", Broken)
        with pytest.raises(Broken):
            loss_of(model, group.rank, 1, reentrant=True).backward()
        model[1].module.blows = None
        loss_of(model, group.rank, 0).backward()
        model[1].module.blows = ("forward", Broken)
        with pytest.raises(Broken):
            loss_of(model, group.rank, 1)
        model[1].module.blows = None
        loss_of(model, group.rank, 2).backward()
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")

    wanted = expected(2, [0, 2])
    run_ranks(2, body)


READS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "clip": lambda model, optimizer: zero3.clip_grad_norm_(model, 1.0),
    "step": lambda model, optimizer: optimizer.step(),
    "parameter_norms": lambda model, optimizer: zero3.parameter_norms(model),
    "full_gradients": lambda model, optimizer: zero3.full_gradients(model).__enter__(),
}


@pytest.mark.parametrize("replicas_only", [None, False, True])
@pytest.mark.parametrize("reads", READS)
def test_step_guard_that_dropped_the_micro_batch_that_was_to_reduce_says_reduce_gradients(
    reads: str, replicas_only: bool | None, tmp_path: Path
) -> None:
    """And what it says is right: the gradients are those of the micro-batches that stayed."""

    def body(group: Any) -> None:
        model = sharded(group)
        optimizer = sgd(model.get_trainable_chunk())
        for number in range(6):
            model[1].module.blows = ("backward", Broken) if number == 5 and group.rank == 1 else None
            waits = number in (2, 3, 4)
            with zero3.no_sync(model, replicas_only=bool(replicas_only)) if waits else nullcontext(), zero3.step_guard(model):
                loss_of(model, group.rank, number).backward()
            if number < 2:
                optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"zero3.step_guard has dropped .* Call zero3\.reduce_gradients\(model\) on every"):
            READS[reads](model, optimizer)
        zero3.save_checkpoint(tmp_path, model, optimizer)
        zero3.reduce_gradients(model)
        if reads not in ("clip", "step"):
            READS[reads](model, optimizer)
        check(model, group, wanted)
        optimizer.step()
        zero3.load_checkpoint(tmp_path, model, optimizer)

    wanted = expected(2 if replicas_only is None else 4, [2, 3, 4])
    run_ranks(2, body) if replicas_only is None else run_mesh(2, 2, body)
