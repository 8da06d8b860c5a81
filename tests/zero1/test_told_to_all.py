"""ZeroRedundancyOptimizer: what one rank finds alone is told to all, and a failed exchange says on which rank and what for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import zero3
from tests.support.processes import PROMPT, Rank, try_on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.zero1.test_zero_redundancy_optimizer import give_gradients, odd_parameters, on_threads
from zero3.zero1.ranks import Ranks

FLAGS = ["overlap_with_ddp", "parameters_as_bucket_view"]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_that_differ_between_ranks_are_refused(flag: str) -> None:
    def body(group: Any) -> None:
        parameters = odd_parameters()
        before = [parameter.data_ptr() for parameter in parameters]
        with pytest.raises(ValueError, match=rf"rank 0: .*{flag}=False.*rank 1: .*{flag}=True"):
            zero3.ZeroRedundancyOptimizer(parameters, optim.SGD, group, lr=0.1, **{flag: group.rank == 1})
        assert [parameter.data_ptr() for parameter in parameters] == before

    on_threads(2, body)


@pytest.mark.parametrize("to", [2, -1, "0", None, 0.5])
def test_consolidate_to_no_rank_is_refused_on_every_rank(to: Any) -> None:
    def body(group: Any) -> None:
        ours = zero3.ZeroRedundancyOptimizer(odd_parameters(), optim.SGD, group, lr=0.1)
        with pytest.raises(ValueError, match=r"^rank 1: to=.*, expected a rank from 0 to 1"):
            ours.consolidate_state_dict(to=to if group.rank == 1 else 0)

    on_threads(2, body)


def test_an_optimizer_class_that_fails_on_one_rank_in_any_way_is_told_to_all() -> None:
    def body(group: Any) -> None:
        def odd(groups: Any, **options: Any) -> optim.Optimizer:
            if group.rank == 1:
                raise AttributeError("no such thing")
            return optim.SGD(groups, **options)

        with pytest.raises(RuntimeError, match=r"^rank 1: AttributeError: no such thing"):
            zero3.ZeroRedundancyOptimizer(odd_parameters(), odd, group, lr=0.1)

    on_threads(2, body)


def wrong_on_rank_1(rank: Rank) -> list[str]:
    def model() -> nn.Module:
        return nn.Linear(3, 3)

    own, other = DistributedDataParallel(model()), DistributedDataParallel(model(), find_unused_parameters=rank.number == 1)
    wrong: list[Callable[[], Any]] = [
        lambda: overlapping.hook(own, bf16_compress_hook if rank.number else fp16_compress_hook),
        lambda: overlapping.hook(own, 5 if rank.number else fp16_compress_hook),  # type: ignore[arg-type]
        lambda: zero3.ZeroRedundancyOptimizer(own.parameters(), optim.SGD, "WORLD" if rank.number else None, lr=0.1),
        lambda: overlapping.hook(model() if rank.number else own),
        lambda: overlapping.hook(other if rank.number else own),
        lambda: zero3.ZeroRedundancyOptimizer(other.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1).hook(other),
    ]
    overlapping = zero3.ZeroRedundancyOptimizer(own.parameters(), optim.SGD, overlap_with_ddp=True, lr=0.1)
    told = []
    for attempt in wrong:
        try:
            attempt()
            told.append("accepted")
        except (ValueError, TypeError) as error:
            told.append(str(error))
    return told


def test_a_wrong_group_or_ddp_model_on_one_rank_is_told_to_all() -> None:
    outcomes = try_on_ranks(2, wrong_on_rank_1, debug="OFF")
    assert all(outcome.seconds < PROMPT for outcome in outcomes), "a rank has waited for the timeout"
    for outcome in outcomes:
        reduction, no_hook, group, no_ddp, other, unused = outcome.value
        assert "reduction=fp16_compress_hook; rank 1: hook(), reduction=bf16_compress_hook" in reduction
        assert no_hook.startswith("rank 1: reduction must be a communication hook, found int")
        assert group.startswith("rank 1: process_group must be a torch.distributed.ProcessGroup, a DeviceMesh or None, found str")
        assert no_ddp.startswith("rank 1: hook() takes the DistributedDataParallel model, found a Linear")
        assert other.startswith("rank 1: parameter 0 of group 0 of the optimizer is no parameter of the DistributedDataParallel model")
        assert unused.startswith("rank 1: overlap_with_ddp=True can't be used with find_unused_parameters=True")


class _Gone(Exception):
    pass


def cut_off_at(group: ThreadCommunicator, number: int) -> None:
    """The rank's collective of that number, from now on, does not come."""
    made = 0
    meet, post = group._meet, group._post

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            if made > number:
                raise _Gone
            return function(*arguments)

        return call

    group._meet, group._post = counted(meet), counted(post)  # type: ignore[method-assign]


def step(ours: Any, parameters: list[nn.Parameter]) -> None:
    give_gradients(parameters, 0)
    ours.step()


@pytest.mark.slow
@pytest.mark.parametrize("use", ["step", "consolidate"])
@pytest.mark.parametrize("whole", [False, True])
def test_every_exchange_that_fails_names_the_rank_and_what_it_was_for(use: str, whole: bool) -> None:
    def body(group: ThreadCommunicator, number: int) -> None:
        parameters = odd_parameters()
        ours = zero3.ZeroRedundancyOptimizer(parameters, optim.AdamW, group, lr=0.1, whole=whole)
        step(ours, parameters) if use == "consolidate" else None
        if group.rank == 1:
            cut_off_at(group, number)
        try:
            step(ours, parameters) if use == "step" else ours.consolidate_state_dict(to=0)
        except RuntimeError as error:
            told.append(str(error))

    number, subjects = 0, set()
    while True:
        told: list[str] = []
        try:
            run_ranks(2, lambda group, number=number: body(group, number))
            break
        except _Gone:
            pass
        own = [text for text in told if text.startswith("rank 0 of 2: ")]
        assert len(own) == 1 and "ZeroRedundancyOptimizer" in own[0] and "failed: rank 0 waited for the others" in own[0], told
        assert "resident" not in own[0], "advice for another purpose"
        subjects.add(own[0].split(" failed: ")[0].removeprefix("rank 0 of 2: "))
        number += 1
    expected = "bringing together the state 'exp_avg' of parameter " if use == "consolidate" else "gathering parameter 0 of group 0 to "
    expected = "broadcasting parameter 2 of group 0 of ZeroRedundancyOptimizer, which rank 0 " if use == "step" and whole else expected
    assert len(subjects) > 2 and any(subject.startswith(expected) for subject in subjects), subjects


def leave_before_a_step(rank: Rank) -> None:
    parameters = odd_parameters()
    ours = zero3.ZeroRedundancyOptimizer(parameters, optim.AdamW, lr=0.1)
    step(ours, parameters)
    if rank.number == 1:
        os._exit(3)
    step(ours, parameters)


def test_a_step_that_a_dead_rank_leaves_alone_says_so() -> None:
    alone, dead = try_on_ranks(2, leave_before_a_step, fresh=True, debug="OFF")
    assert dead.error == "killed" and alone.error == "RuntimeError" and alone.seconds < PROMPT
    assert alone.text.startswith("rank 0 of 2: comparing with the other ranks what a step of ZeroRedundancyOptimizer updates failed: ")
    assert "Most often another rank died" in alone.text


def test_what_other_ranks_pass_beside_the_source_does_not_matter() -> None:
    def body(group: ThreadCommunicator) -> dict[str, Any]:
        values = {"lr": 0.5, "betas": (0.9, 0.99)} if group.rank == 1 else {"lr": object()}
        return Ranks({torch.device("cpu"): group}).tell(values, 1, "options")

    assert run_ranks(3, body) == [{"lr": 0.5, "betas": (0.9, 0.99)}] * 3


def test_groups_that_are_none_are_refused() -> None:
    ours = zero3.ZeroRedundancyOptimizer(odd_parameters(), optim.SGD, None, lr=0.1)
    before = len(ours.param_groups)
    with pytest.raises(TypeError, match="a parameter group must be a dict, found list"):
        ours.add_param_group([nn.Parameter(torch.zeros(2))])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="set"):
        ours.add_param_group({"params": {nn.Parameter(torch.zeros(2))}})
    with pytest.raises(ValueError, match="parameters on meta can't be added: the first ones were on cpu"):
        ours.add_param_group({"params": [nn.Parameter(torch.zeros(2, device="meta"))]})
    assert len(ours.param_groups) == before


def test_torchs_own_hook_is_refused() -> None:
    ours = zero3.ZeroRedundancyOptimizer(odd_parameters(), optim.SGD, None, lr=0.1)
    with pytest.raises(RuntimeError, match=r"ddp.register_comm_hook\(None, optimizer.hook\(ddp\)\)"):
        _ = ours._overlap_with_ddp


def test_what_a_rank_that_has_joined_finds_in_its_own_gradients_does_not_matter() -> None:
    """Not even gradients that could not be used; and they are left as they are."""

    def body(group: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        parameter = nn.Parameter(torch.zeros(3))
        ours = zero3.ZeroRedundancyOptimizer([parameter], optim.SGD, group, lr=1.0)
        given = torch.full((3,), 1.0 + group.rank)
        for gradient in (given, given.to_sparse() if group.rank == 1 else given):
            parameter.grad = gradient.clone()
            ours._opened.step(ours.param_groups, {}, joined=group.rank == 1)
        return parameter.detach(), given if parameter.grad is None else parameter.grad.to_dense()

    for rank, (value, gradient) in enumerate(run_ranks(2, body)):
        assert value.tolist() == [-2.0] * 3 and gradient.tolist() == [1.0 + rank] * 3


def _grown(parameters: list[nn.Parameter]) -> None:
    parameters[1].data = torch.cat([parameters[1].data, torch.ones(5)])


DIFFERENCES: dict[str, Callable[[Any, list[nn.Parameter], bool], object]] = {
    "lr": lambda ours, _, wrong: ours.param_groups[0].update(lr=0.5) if wrong else None,
    "lr in a tensor": lambda ours, _, wrong: ours.param_groups[1]["lr"].fill_(0.5) if wrong else None,
    "keywords": lambda ours, _, wrong: ours.step(scale=2.0 if wrong else 1.0),
    "no closure": lambda ours, _, wrong: ours.step(5 if wrong else None),
    "shape": lambda ours, parameters, wrong: _grown(parameters) if wrong else None,
    "an added group": lambda ours, _, wrong: ours.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5 if wrong else 0.1}),
    "state of a parameter": lambda ours, _, wrong: ours.load_state_dict(_state(without=2 if wrong else None)),
    "numbers of steps": lambda ours, _, wrong: ours.load_state_dict(_state(steps=7 if wrong else 1)),
}


class Scaled(optim.SGD):
    """Its step takes a keyword."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad * group["lr"] * scale)
                    self.state[parameter]["step"] = torch.tensor(1.0)


def _state(steps: int = 1, without: int | None = None) -> dict[str, Any]:
    parameters = odd_parameters()
    plain = Scaled(_groups(parameters), lr=0.1)
    give_gradients(parameters, 0)
    plain.step()
    state = plain.state_dict()
    state["state"] = {number: {"step": torch.tensor(float(steps))} for number in state["state"] if number != without}
    return state


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_what_differs_on_one_rank_after_construction_is_told_to_all_before_anything_changes(difference: str) -> None:
    def body(group: Any) -> None:
        parameters, wrong = odd_parameters(), group.rank == 1
        ours = zero3.ZeroRedundancyOptimizer(_groups(parameters), Scaled, group, lr=0.1)
        for step in range(2):
            give_gradients(parameters, step)
            ours.step()
        before = [parameter.detach().clone() for parameter in parameters]
        give_gradients(parameters, 2)

        def differ_and_step() -> None:
            DIFFERENCES[difference](ours, parameters, wrong)
            ours.step()

        with pytest.raises((ValueError, TypeError), match=r"ranks differ in|rank 1: "):
            differ_and_step()
        assert all(torch.equal(now[: len(old)] if now.dim() else now, old) for now, old in zip(parameters, before, strict=True))

    on_threads(2, body)


def test_what_the_local_optimizer_changes_itself_may_differ() -> None:
    """Some count steps in groups that hold anything, and a rank may have no share of one."""

    class Counting(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                if group["params"]:
                    group["steps"] = group.get("steps", 0) + 1
                    group["counted"] = group.get("counted", torch.zeros(1)) + 1
            return super().step()

    def body(group: Any) -> None:
        parameters = [nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(()))]
        ours = zero3.ZeroRedundancyOptimizer([{"params": [each]} for each in parameters], Counting, group, lr=0.1)
        for step in range(3):
            give_gradients(parameters, step)
            ours.step()
            ours.param_groups[0]["lr"] *= 0.5
            ours.param_groups[0]["seconds"] = time.monotonic()  # the caller's own
            ours.param_groups[1]["lr"] = np.float64(0.5) if group.rank else 0.5

    on_threads(2, body)


def test_state_whose_keys_are_of_several_types() -> None:
    def body(group: Any) -> None:
        state = _state()
        state["state"] = {number: {0: torch.ones(()), **held} for number, held in state["state"].items()}
        ours = zero3.ZeroRedundancyOptimizer(_groups(odd_parameters()), Scaled, group, lr=0.1)
        ours.load_state_dict(state)
        ours.consolidate_state_dict()

    on_threads(2, body)


def _groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:5]}, {"params": parameters[5:], "lr": torch.tensor(0.1)}]


@pytest.mark.parametrize("lies", ["channels last", "with gaps"])
def test_a_parameter_that_lies_in_memory_in_another_order_on_one_rank_is_refused(lies: str) -> None:
    def body(group: Any) -> None:
        parameter = nn.Parameter(torch.ones(2, 3, 4, 4))
        if group.rank == 1:
            parameter.data = (
                parameter.data.contiguous(memory_format=torch.channels_last)
                if lies == "channels last"
                else torch.ones(2, 3, 4, 8)[..., ::2]
            )
        with pytest.raises(ValueError, match=r"ranks differ in .* with strides \("):
            zero3.ZeroRedundancyOptimizer([parameter], optim.SGD, group, lr=0.1)

    on_threads(2, body)


def test_a_set_of_parameters_is_refused() -> None:
    def body(group: Any) -> None:
        with pytest.raises(TypeError, match="an ordered iterable of tensors or dicts, found set"):
            zero3.ZeroRedundancyOptimizer(set(odd_parameters()), optim.SGD, group, lr=0.1)

    on_threads(2, body)
