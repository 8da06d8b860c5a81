"""`OptimizerList`: several optimizers behind one. Each step is that of its members."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, WORLDS, mlp, rows
from tests.support.ranks import ThreadCommunicator, run_ranks

Pair = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


def whole(name: str, info: zero3.ParamInfo) -> dict[str, Any]:
    return {"whole": True} if info.ndim == 2 else {"weight_decay": 0.0}


def members(model: nn.Module) -> Pair:
    """Muon for matrices, and AdamW for the rest."""
    groups = zero3.param_groups(model, whole)
    matrices = [group for group in groups if group.get("whole")]
    return torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW([group for group in groups if not group.get("whole")], lr=0.01)


def plain_members(model: nn.Module) -> Pair:
    found = list(model.parameters())
    return (
        torch.optim.Muon([p for p in found if p.ndim == 2], lr=0.1),
        torch.optim.AdamW([{"params": [p for p in found if p.ndim < 2], "weight_decay": 0.0}], lr=0.01),
    )


def schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(model: nn.Module, optimizers: list[Any], schedules: list[Any], steps: int) -> Tensor:
    for _ in range(steps):
        loss = model(rows(4)).pow(2).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for each in schedules:
            each.step()
    return loss.detach()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return zero3.full_state_dict(model, rank0_only=False)


@WORLDS
def test_optimizerlist_trains_as_plain_muon_and_adamw(world_size: int) -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    both = plain_members(plain)
    train(plain, list(both), [schedule(each) for each in both], 4)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        sharded = zero3.shard(copy.deepcopy(model), [nn.Linear], process_group=group)
        one = zero3.OptimizerList(*members(sharded))
        zero3.check_optimizer(sharded, one)
        train(sharded, [one], [schedule(one)], 4)
        return state_of(sharded)

    for found in run_ranks(world_size, body):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("saved", ["list", "members"])
@pytest.mark.parametrize("loaded", ["list", "members"])
def test_checkpoints_of_members_and_of_their_list_load_into_each_other(saved: str, loaded: str, tmp_path: Path) -> None:
    model = mlp()

    def made(sharded: nn.Module, kind: str) -> tuple[Any, list[Any]]:
        both = members(sharded)
        one = zero3.OptimizerList(*both)
        return (one, [one]) if kind == "list" else ([*both], [*both])

    def first(group: ThreadCommunicator) -> dict[str, Tensor]:
        sharded = zero3.shard(copy.deepcopy(model), [nn.Linear], process_group=group)
        given, steps = made(sharded, saved)
        train(sharded, steps, [], 2)
        zero3.save_checkpoint(tmp_path / "checkpoint", sharded, given)
        full = zero3.full_optimizer_state_dict(sharded, given, rank0_only=False)
        assert {name for group in full["param_groups"] for name in group["params"]} == set(dict(model.named_parameters()))
        train(sharded, steps, [], 2)
        return state_of(sharded)

    def second(group: ThreadCommunicator) -> dict[str, Tensor]:
        sharded = zero3.shard(copy.deepcopy(model), [nn.Linear], process_group=group)
        given, steps = made(sharded, loaded)
        zero3.load_checkpoint(tmp_path / "checkpoint", sharded, given)
        train(sharded, steps, [], 2)
        return state_of(sharded)

    expected = run_ranks(2, first)[0]
    for found in run_ranks(3, second):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_its_state_dict_is_torchs_and_comes_back() -> None:
    def made() -> tuple[nn.Sequential, Any]:
        model = mlp()
        return model, zero3.OptimizerList(*plain_members(model))

    model, one = made()
    train(model, [one], [], 2)
    state = one.state_dict()
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    assert numbers == list(range(len(list(model.parameters())))) and set(state["state"]) == set(numbers)
    other, again = made()
    scheduler = schedule(again)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(state))
    assert [id(group) for group in again.param_groups] == [id(group) for member in again.members for group in member.param_groups]
    assert len(again.state) == len(one.state) == len(numbers)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert {key: str(value) for key, value in again.state[mine].items()} == {
            key: str(value) for key, value in one.state[theirs].items()
        }
    again.step()
    before = [group["lr"] for group in again.param_groups]
    scheduler.step()
    assert all(group["lr"] < old for group, old in zip(again.param_groups, before, strict=True)), "schedulers see the new groups"


def test_a_closure_is_called_once_and_hooks_are_called() -> None:
    model = mlp()
    one = zero3.OptimizerList(*plain_members(model))
    seen: list[str] = []
    one.register_step_pre_hook(lambda *_: seen.append("before"))
    one.register_step_post_hook(lambda *_: seen.append("after"))
    one.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append("load"))
    one.register_load_state_dict_post_hook(lambda optimizer: seen.append("loaded"))

    def closure() -> Tensor:
        seen.append("closure")
        loss = model(rows(2)).pow(2).mean()
        loss.backward()
        return loss

    assert one.step(closure) > 0
    one.load_state_dict(one.state_dict())
    assert seen == ["before", "closure", "after", "load", "loaded"]
    one.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert isinstance(one, torch.optim.Optimizer) and "Muon" in repr(one)


def test_a_copy_is_of_its_members() -> None:
    model = mlp()
    one = zero3.OptimizerList(*plain_members(model))
    train(model, [one], [], 1)
    twin = copy.deepcopy(one)
    assert [type(member) for member in twin.members] == [type(member) for member in one.members]
    assert len(twin.state) == len(one.state)


def test_a_list_inside_of_a_list_is_its_members() -> None:
    muon, adamw = plain_members(mlp())
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert zero3.OptimizerList(zero3.OptimizerList(muon, adamw), sgd).members == [muon, adamw, sgd]


def test_scaled_losses_and_a_guard_go_through_a_list() -> None:
    model = mlp()

    def body(group: ThreadCommunicator) -> list[dict[str, Tensor]]:
        found = []
        for listed in (True, False):
            sharded = zero3.shard(copy.deepcopy(model), [nn.Linear], process_group=group)
            both = members(sharded)
            optimizers = [zero3.OptimizerList(*both)] if listed else [*both]
            scaler = zero3.GradScaler("cpu", init_scale=8.0)
            for _ in range(3):
                with zero3.step_guard(sharded):
                    scaler.scale(sharded(rows(2)).pow(2).mean()).backward()
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                zero3.clip_grad_norm_(sharded, 0.1)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                    optimizer.zero_grad()
                scaler.update()
            found.append(state_of(sharded))
        return found

    for listed, apart in run_ranks(2, body):
        assert all(torch.equal(listed[name], value) for name, value in apart.items())


def test_optimizerlist_refuses_what_can_be_no_list() -> None:
    parameter = nn.Parameter(torch.ones(WIDTH))
    held = zero3.OptimizerList(torch.optim.SGD([parameter], lr=0.1, momentum=0.9)).state
    assert parameter not in held and nn.Parameter(torch.ones(1)) not in held and not len(held)
    with pytest.raises(TypeError, match=r"optimizers one by one, found a list: write OptimizerList\(\*optimizers\)"):
        zero3.OptimizerList([torch.optim.SGD([parameter])])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs one optimizer at least"):
        zero3.OptimizerList()
    with pytest.raises(ValueError, match="hold the same parameter"):
        zero3.OptimizerList(torch.optim.SGD([parameter], lr=0.1), torch.optim.AdamW([parameter]))
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer"):
        zero3.OptimizerList(parameter)  # type: ignore[arg-type]
    one = zero3.OptimizerList(torch.optim.SGD([parameter], lr=0.1))
    with pytest.raises(ValueError, match="which of its members"):
        one.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    state = one.state_dict()
    state["param_groups"] = []
    with pytest.raises(ValueError, match="has groups of"):
        one.load_state_dict(state)
