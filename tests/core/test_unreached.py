"""Parameters that no gradient reached since gradients were zeroed are left alone, as plain torch leaves them: no gradient, no decay, no
momentum, no step counted. In one process all ranks' micro-batches are added up.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, ThreadPartsCommunicator, run_ranks
from tests.support.reference import assert_close
from tests.support.unreached import (
    POLICIES,
    STEPS,
    Block,
    Make,
    Plain,
    Use,
    adamw,
    alone,
    apart,
    by_name,
    changing,
    chunks_of,
    compare,
    guarded,
    in_replicas,
    kept,
    loss_of,
    net,
    seldom,
    sgd,
    train,
    whole,
)
from zero3 import Int8, ShardingPolicy
from zero3.core.reached import Reached


@pytest.mark.parametrize("kind", [ThreadCommunicator, ThreadPartsCommunicator], ids=["buffers", "pieces"])
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("world", [(0, 1), (0, 2), (0, 3), (2, 1), (2, 2)], ids=str)
def test_unreached_parameters_are_as_in_plain_torch(world: tuple[int, int], make: Make, kind: Any) -> None:
    compare(world, ShardingPolicy(), seldom, (chunks_of, make), kind=kind)


@pytest.mark.parametrize("groups", [apart, by_name, whole])
@pytest.mark.parametrize("world", [(0, 1), (0, 2), (0, 3), (2, 2)], ids=str)
def test_param_groups_count_the_steps_of_unreached_parameters_apart(world: tuple[int, int], groups: Any) -> None:
    compare(world, ShardingPolicy(), changing, (groups, adamw))


@pytest.mark.parametrize("name", ["stage 2", "stage 1", "transactional", "dynamic", "no prefetch"])
@pytest.mark.parametrize("around", [alone, kept, guarded])
def test_unreached_parameters_under_any_policy(name: str, around: Any) -> None:
    if around is guarded and name in ("stage 2", "stage 1", "dynamic"):
        name = "stage 3"  # the others are refused
    compare((0, 2), ShardingPolicy(**POLICIES[name]), seldom, (chunks_of, adamw), 2, around)


@pytest.mark.parametrize("around", [alone, kept, in_replicas])
@pytest.mark.parametrize("policy", [{}, {"stage": 1}])
def test_unreached_parameters_on_a_mesh_with_micro_batches(around: Any, policy: dict[str, Any]) -> None:
    compare((2, 2), ShardingPolicy(**policy), seldom, (chunks_of, adamw), 2, around)


@pytest.mark.parametrize(("in_backward", "scheduled"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(("groups", "use"), [(chunks_of, seldom), (by_name, changing)])
def test_unreached_parameters_in_files(tmp_path: Path, groups: Any, use: Use, in_backward: bool, scheduled: bool) -> None:
    """A chunk, or a part of one, whose gradient comes to nothing is not stepped inside of backward either, nor after it."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return zero3.offload_optimizer(adamw(parameters), in_backward=in_backward)

    plain = Plain(2, use, adamw)
    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group, policy=ShardingPolicy(offload=tmp_path))
        optimizer = make(groups(model))
        if scheduled:  # it wraps the step
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        assert vars(optimizer)["step"].zero3_leaves_alone  # the step does so itself
        for step in range(STEPS):
            loss_of(model, modules, use, (step, 0, group.rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")


@pytest.mark.parametrize("around", [alone, kept])
@pytest.mark.parametrize("groups", [chunks_of, apart, whole])
def test_compressed_reductions_say_which_slots_were_reached(groups: Any, around: Any) -> None:
    """Codes round, so that numbers differ; which have no gradient does not. Whole parameters make rows of unequal lengths, and a row
    that holds nothing is what ranks say of slots alone.
    """
    plain, models = Plain(3, seldom, sgd, 2), [net() for _ in range(3)]
    policy = ShardingPolicy(reduce_format=Int8(block_size=4))

    def body(group: ThreadCommunicator) -> Any:
        nothing, model, _ = train((group, policy, group.rank, 3), models[group.rank], seldom, (groups, sgd), 2, around)
        return nothing, zero3.full_state_dict(model, rank0_only=False), [chunk.numel() for chunk in zero3.get_trainable_chunk(model)]

    found = run_ranks(3, body)
    assert (len({tuple(numels) for _, _, numels in found}) > 1) is (groups is not chunks_of)
    for nothing, values, _ in found:
        assert nothing == plain.nothing
        for name, value in plain.model.state_dict().items():
            assert torch.allclose(values[name], value, atol=5e-2)
        for name in set.intersection(*plain.nothing):
            assert torch.equal(values[name], plain.model.state_dict()[name])


# -- what is not told, and what is


def test_where_all_parameters_are_reached_nobody_reads_what_others_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Reached) -> Any:
        raise AssertionError("a rank has read a trailer")

    monkeypatch.setattr(Reached, "slots", read)
    compare((0, 2), ShardingPolicy(), lambda *_: {"a", "b"}, (chunks_of, adamw))
    with pytest.raises(AssertionError, match="a rank has read"):
        compare((0, 2), ShardingPolicy(), seldom, (chunks_of, adamw))


def test_unreached_parameters_are_named_once_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "zero3")
    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        train((group, ShardingPolicy(), group.rank, 2), models[group.rank], seldom, (chunks_of, adamw), 1, alone)

    run_ranks(2, body)
    (said,) = [record.getMessage() for record in caplog.records if "no gradient reached" in record.getMessage()]
    assert "b.weight" in said and "blocks.0" in said and "blocks.2" not in said and "param_groups" in said
    caplog.clear()
    compare((0, 2), ShardingPolicy(), lambda *_: {"a", "b"}, (chunks_of, adamw))
    assert not [record for record in caplog.records if "no gradient reached" in record.getMessage()]


@pytest.mark.parametrize("world_size", [1, 2])
def test_clip_grad_norm_counts_unreached_parameters_as_nothing(world_size: int) -> None:
    plain, models = net(), [net() for _ in range(world_size)]
    for rank in range(world_size):
        (loss_of(plain, list(plain.blocks), seldom, (0, 0, rank, world_size)) / world_size).backward()
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)

    def body(group: ThreadCommunicator) -> Tensor:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        loss_of(model, modules, seldom, (0, 0, group.rank, world_size)).backward()
        return zero3.clip_grad_norm_(model, 0.1)

    for norm in run_ranks(world_size, body):
        assert torch.equal(norm, wanted) if world_size == 1 else torch.allclose(norm, wanted, rtol=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_decides_since_when_a_parameter_is_reached(set_to_none: bool, stage: int) -> None:
    """A gradient that is zeroed in place stays one, also in plain torch: it decays."""
    use: Use = lambda block, step, rank, ranks: {"a", "b"} if step == 0 else {"a"}  # noqa: E731
    plain, models = net(), [net() for _ in range(2)]
    optimizer = sgd(plain.parameters())
    for step in range(2):
        for rank in range(2):
            (loss_of(plain, list(plain.blocks), use, (step, 0, rank, 2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group, policy=ShardingPolicy(stage=stage))
        optimizer = sgd(zero3.get_trainable_chunk(model))
        for step in range(2):
            loss_of(model, modules, use, (step, 0, group.rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.state_dict(), 1e-9, "parameters")


def test_a_penalty_over_chunks_reaches_all_of_their_elements() -> None:
    plain, models = net(), [net() for _ in range(2)]
    optimizer = sgd(plain.parameters())
    for step in range(2):
        for rank in range(2):
            (loss_of(plain, list(plain.blocks), seldom, (step, 0, rank, 2)) / 2).backward()
        sum(p.pow(2).sum() for p in plain.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = sgd(model.parameters())
        for step in range(2):
            loss_of(model, modules, seldom, (step, 0, group.rank, 2)).backward()
            sum(p.pow(2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.state_dict(), 1e-9, "parameters")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_closure_of_step_runs_the_backward_that_leaves_parameters_unreached(stage: int) -> None:
    plain, models = Plain(2, seldom, sgd), [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group, policy=ShardingPolicy(stage=stage))
        optimizer = sgd(zero3.get_trainable_chunk(model))
        for step in range(STEPS):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, modules, seldom, (step, 0, group.rank, 2))  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")


def test_a_hook_of_a_chunk_that_no_gradient_reached_is_not_called() -> None:
    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> list[int]:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        called: list[int] = []
        for number, chunk in enumerate(zero3.get_trainable_chunk(model)):
            chunk.register_post_accumulate_grad_hook(lambda _, number=number: called.append(number))
        loss_of(model, modules, seldom, (0, 0, group.rank, 2)).backward()
        return sorted(called)

    assert run_ranks(2, body) == [[0, 2, 3]] * 2


# -- the optimizer's state


def test_state_of_unreached_parameters_is_saved_and_loaded(tmp_path: Path) -> None:
    """Steps differ between parameters, and one has no state; other ranks go on with them."""
    plain = Plain(2, changing, adamw)
    models = [net() for _ in range(2)]

    def save(group: ThreadCommunicator) -> Any:
        _, model, optimizer = train((group, ShardingPolicy(), group.rank, 2), models[group.rank], changing, (apart, adamw), 1, alone)
        zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
        return zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)

    state = run_ranks(2, save)[0]
    names = [name for name, _ in plain.model.named_parameters()]
    wanted = {name: plain.optimizer.state[p] for name, p in plain.model.named_parameters() if p in plain.optimizer.state}
    assert state["state"].keys() == wanted.keys() != set(names)
    for name, values in wanted.items():
        assert_close(state["state"][name], dict(values), 1e-9, name)

    reference, optimizer = copy.deepcopy(plain.model), adamw(plain.model.parameters())
    optimizer.load_state_dict(plain.optimizer.state_dict())
    for rank in range(3):
        (loss_of(plain.model, list(plain.model.blocks), lambda *_: {"a", "b"}, (9, 0, rank, 3)) / 3).backward()
    optimizer.step()
    others = [net() for _ in range(3)]

    def load(group: ThreadCommunicator) -> Any:
        model, modules = others[group.rank], list(others[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = adamw(apart(model))
        zero3.load_checkpoint(tmp_path / "saved", model, optimizer)
        assert_close(zero3.full_state_dict(model, rank0_only=False), reference.state_dict(), 1e-9, "loaded")
        loss_of(model, modules, lambda *_: {"a", "b"}, (9, 0, group.rank, 3)).backward()
        optimizer.step()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(3, load):
        assert_close(values, plain.model.state_dict(), 1e-9, "after a step")


@pytest.mark.parametrize(
    "make", [sgd, lambda given: torch.optim.Rprop(given, lr=0.01), lambda given: Averaging(given)], ids=["sgd", "rprop", "averaging"]
)
def test_chunks_take_the_state_of_plain_torch_where_a_parameter_has_none(make: Make) -> None:
    never: Use = lambda block, step, rank, ranks: {"a"}  # noqa: E731
    plain = Plain(2, never, make)
    names = [name for name, _ in plain.model.named_parameters()]
    numbered = copy.deepcopy(plain.optimizer.state_dict())
    state = {
        "state": {names[number]: each for number, each in numbered["state"].items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]],
    }
    values = copy.deepcopy(plain.model.state_dict())
    for rank in range(2):
        (loss_of(plain.model, list(plain.model.blocks), lambda *_: {"a", "b"}, (9, 0, rank, 2)) / 2).backward()
    plain.optimizer.step()
    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = make(zero3.get_trainable_chunk(model))
        zero3.load_full_state_dict(model, values)
        zero3.load_full_optimizer_state_dict(model, optimizer, state)
        loss_of(model, modules, lambda *_: {"a", "b"}, (9, 0, group.rank, 2)).backward()
        optimizer.step()
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(2, body):
        assert_close(found, plain.model.state_dict(), 1e-9, "after a step")


class Averaging(torch.optim.Optimizer):
    """Keeps an average of the values, which begins as a copy of them, and decays."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "weight_decay": 0.3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    mean = state.setdefault("mean", p.clone())
                    p.sub_(group["lr"] * (p.grad + group["weight_decay"] * p))
                    mean.lerp_(p, 0.5)
                    p.copy_(mean)


def strongly(given: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(given, lr=0.05, momentum=0.9, weight_decay=0.6)  # momentum is nearer to the values than to 0


@pytest.mark.parametrize("make", [Averaging, strongly, lambda given: torch.optim.Rprop(given, lr=0.01)], ids=["an average", "SGD", "Rprop"])
def test_state_that_a_step_makes_for_unreached_elements_is_as_an_optimizer_begins(make: Make) -> None:
    use: Use = lambda block, step, rank, ranks: {"a", "b"} if step > 1 else {"a"}  # noqa: E731
    compare((0, 2), ShardingPolicy(), use, (chunks_of, make))
