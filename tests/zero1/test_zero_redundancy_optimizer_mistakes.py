"""What ZeroRedundancyOptimizer refuses, on every rank: optimizers that need more than their share, wrong arguments, ranks that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS
from tests.zero1.test_zero_redundancy_optimizer import (
    assert_same_bits,
    assert_same_state_dict,
    give_gradients,
    odd_parameters,
    on_threads,
    train,
    values_of,
)
from tests.zero1.test_zero_redundancy_optimizer_use import ADAMW, ours_on


class _LayerwiseSgd(torch.optim.Optimizer):
    """Layerwise rates: not elementwise."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.norm() * parameter.grad / parameter.grad.norm())


@pytest.mark.parametrize("optimizer_class", [torch.optim.Muon, torch.optim.Adafactor, _LayerwiseSgd])
@WORLDS
def test_optimizers_that_need_matrices_get_whole_ones_or_are_refused(optimizer_class: Any, world_size: int) -> None:
    def matrices() -> list[nn.Parameter]:
        return [
            parameter for parameter in odd_parameters() if parameter.ndim == 2 and parameter.numel() and parameter.dtype == torch.float32
        ]

    plain = matrices()
    optimizer = optimizer_class(plain, lr=0.02)
    expected = train(optimizer, plain, range(3))

    def body(group: Any) -> tuple[list[Tensor], Any]:
        parameters = matrices()
        for options in ({}, {"overlap_with_ddp": True}):
            with pytest.raises(ValueError, match=r"whole=True"):
                zero3.ZeroRedundancyOptimizer(parameters, optimizer_class, group, lr=0.02, **options)
        ours = zero3.ZeroRedundancyOptimizer([{"params": parameters, "whole": True}], optimizer_class, group, lr=0.02)
        found = train(ours, parameters, range(3))
        ours.consolidate_state_dict()
        state = ours.state_dict() if ours.rank == 0 else None
        if state is not None:
            assert sum(len(group["params"]) for group in ours.optim.param_groups) <= 2 or world_size == 1  # each on one rank only
        return found, state

    results = on_threads(world_size, body)
    for found, _ in results:
        assert_same_bits(found, expected)
    assert_same_state_dict(results[0][1], optimizer.state_dict())


ONE = nn.Parameter(torch.ones(4, 4))
OTHER = nn.Parameter(ONE.detach()[1:])


@pytest.mark.parametrize(
    ("params", "optimizer_class", "options", "error", "text"),
    [
        ([], torch.optim.SGD, {}, ValueError, "no parameters"),
        (torch.zeros(3), torch.optim.SGD, {}, TypeError, "iterable of tensors or dicts, found Tensor"),
        (3, torch.optim.SGD, {}, TypeError, "found int"),
        ([nn.Parameter(torch.zeros(3)), {"params": []}], torch.optim.SGD, {}, TypeError, "found Parameter, dict"),
        ([{"parameters": []}], torch.optim.SGD, {}, ValueError, "has no 'params'"),
        ([nn.Parameter(torch.zeros(3))] * 2, torch.optim.SGD, {}, ValueError, "parameters 0 and 1 of group 0 are the same"),
        ([ONE, OTHER], torch.optim.SGD, {}, ValueError, "'parameter 0 of group 0' and 'parameter 1 of group 0' overlap in memory"),
        ([{"params": [("a", ONE)]}, {"params": [("b", OTHER)]}], torch.optim.SGD, {}, ValueError, "'a' and 'b' overlap in memory"),
        ([torch.zeros(3).to_sparse()], torch.optim.SGD, {}, ValueError, "sparse"),
        ([nn.Parameter(torch.zeros(3))], torch.optim.LBFGS, {}, ValueError, "LBFGS can't be spread over ranks"),
        ([nn.Parameter(torch.zeros(3))], torch.optim.LBFGS, {"whole": True}, ValueError, "LBFGS can't be spread over ranks"),
        ([nn.Parameter(torch.zeros(3))], torch.optim.SparseAdam, {}, ValueError, "SparseAdam can't be spread over ranks"),
        ([nn.Parameter(torch.zeros(3))], lambda groups: groups, {}, ValueError, "torch.optim.Optimizer"),
        ([nn.Parameter(torch.zeros(3))], torch.optim.SGD, {"lr": -1.0}, ValueError, "Invalid learning rate"),
    ],
    ids=range(14),
)  # fmt: skip
def test_mistakes_raise_on_every_rank(
    params: Any, optimizer_class: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Here rank 0 alone makes them: the others would wait for it."""

    def body(group: Any) -> None:
        mine = (params, optimizer_class) if group is None or group.rank == 0 else ([nn.Parameter(torch.zeros(3))], torch.optim.SGD)
        with pytest.raises(error, match=text):
            zero3.ZeroRedundancyOptimizer(*mine, group, **options if mine[0] is params else {})

    on_threads(1, body)
    on_threads(2, body)


def test_a_group_over_the_memory_of_another_one_is_refused_on_every_rank_and_disjoint_views_train_as_plain() -> None:
    def halves() -> list[nn.Parameter]:
        memory = torch.arange(40.0).view(8, 5)
        return [nn.Parameter(memory[:, :2]), nn.Parameter(memory[:4, 2:]), nn.Parameter(memory[4:, 2:])]

    plain = halves()
    expected = train(torch.optim.AdamW(plain, **ADAMW), plain, range(3))

    def body(group: Any) -> None:
        parameters = halves()
        ours = ours_on(group, parameters[:2], **ADAMW)
        with pytest.raises(ValueError, match="rank 1: parameters 'parameter 1 of group 0' and 'parameter 0 of group 1' overlap"):
            ours.add_param_group({"params": nn.Parameter(parameters[1].detach()) if group.rank else parameters[2]})
        ours.add_param_group({"params": parameters[2]})
        assert_same_bits(train(ours, parameters, range(3)), expected)

    on_threads(2, body)


def test_ranks_that_differ_are_told_so() -> None:
    def body(group: Any) -> None:
        with pytest.raises(ValueError, match=r"parameter 0 of group 0: group 0, \(3,\).*rank 1: .*\(4,\)"):
            ours_on(group, [nn.Parameter(torch.zeros(3 + group.rank))])
        with pytest.raises(ValueError, match=r"rank 0: group 0: AdamW, lr 0.1; rank 1: group 0: AdamW, lr 0.2"):
            ours_on(group, [nn.Parameter(torch.zeros(3))], lr=0.2 if group.rank else 0.1)
        made_by = torch.optim.SGD if group.rank else torch.optim.AdamW
        with pytest.raises(ValueError, match=r"rank 0: group 0: AdamW, lr 0.1; rank 1: group 0: SGD, lr 0.1"):
            zero3.ZeroRedundancyOptimizer([nn.Parameter(torch.zeros(3))], made_by, group, lr=0.1)
        parameters = odd_parameters()
        ours = ours_on(group, parameters, **ADAMW)
        give_gradients(parameters, 0, missing=(2,) if group.rank == 1 else ())
        with pytest.raises(ValueError, match="rank 0: parameter 2 of group 0: a gradient; rank 1: parameter 2 of group 0: no gradient"):
            ours.step()
        before = values_of(parameters)
        parameters[0].grad = torch.zeros(5, 7).to_sparse() if group.rank == 1 else parameters[0].grad
        with pytest.raises(RuntimeError, match="rank 1: the gradient of parameter 0 of group 0 is sparse"):
            ours.step()
        assert_same_bits(values_of(parameters), before)
        more = nn.Parameter(torch.zeros(3))
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            ours.add_param_group({"params": [parameters[0] if group.rank == 1 else more]})
        with pytest.raises(ValueError, match=r"rank 0: group 1: .*lr 0.*rank 1: group 1: .*lr 1"):
            ours.add_param_group({"params": [more], "lr": float(group.rank)})
        with pytest.raises(RuntimeError):  # an option without a value
            ours.add_param_group({"params": [more], "lr": torch.tensor(0.1, device="meta")})
        assert len(ours.param_groups) == 1
        ours.add_param_group({"params": more})
        train(ours, [*parameters, more], range(2))

    on_threads(2, body)
