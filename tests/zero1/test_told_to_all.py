"""ZeroRedundancyOptimizer: what one rank finds alone is told to all, and a failed exchange says on which rank and what for."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
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
        group, no_ddp, other, unused = outcome.value
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
    assert alone.text.startswith(
        "rank 0 of 2: comparing with the other ranks which parameters of ZeroRedundancyOptimizer have gradients failed: "
    )
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
