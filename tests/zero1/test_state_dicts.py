"""state_dict, load_state_dict and consolidate_state_dict of ZeroRedundancyOptimizer. Ranks are threads."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.live import LiveBytes, LonelyCommunicator
from tests.zero1.test_zero_redundancy_optimizer import (
    assert_same_bits,
    assert_same_state_dict,
    odd_parameters,
    on_threads,
    train,
    values_of,
)
from tests.zero1.test_zero_redundancy_optimizer_use import ADAMW, in_groups, ours_on


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (2, 2)])
def test_load_state_dict_from_any_world_size_and_from_plain_optimizers(before: int, after: int) -> None:
    """Saved to bytes and read again in between, as a checkpoint is."""
    plain = odd_parameters()
    optimizer = torch.optim.AdamW(in_groups(plain), **ADAMW)
    train(optimizer, plain, range(2))
    half = values_of(plain)
    expected = train(optimizer, plain, range(2, 4))

    def first(group: Any) -> Any:
        parameters = odd_parameters()
        ours = ours_on(group, in_groups(parameters), **ADAMW)
        train(ours, parameters, range(2))
        ours.consolidate_state_dict()
        return ours.state_dict() if ours.rank == 0 else None

    file = io.BytesIO()
    torch.save(on_threads(before, first)[0], file)

    def state() -> Any:
        return torch.load(io.BytesIO(file.getvalue()))  # ranks are threads: each reads a file of its own

    def set_to(parameters: list[nn.Parameter]) -> None:
        with torch.no_grad():
            for parameter, value in zip(parameters, half, strict=True):
                parameter.copy_(value)

    def second(group: Any) -> list[Tensor]:
        parameters = odd_parameters()
        set_to(parameters)
        ours = ours_on(group, in_groups(parameters), lr=77)
        given = state()
        kept = copy.deepcopy(given)
        ours.load_state_dict(given)
        assert_same_state_dict(given, kept)  # torch's own empties what it is given
        assert [g["lr"] for g in ours.param_groups] == [0.05, 0.01, 0.01]
        return train(ours, parameters, range(2, 4))

    for found in on_threads(after, second):
        assert_same_bits(found, expected)
    again = odd_parameters()
    set_to(again)
    into_plain = torch.optim.AdamW(in_groups(again), lr=77)
    into_plain.load_state_dict(state())
    assert_same_bits(train(into_plain, again, range(2, 4)), expected)


def test_load_state_dict_that_does_not_fit_changes_nothing_on_any_rank() -> None:
    def body(group: Any) -> list[Tensor]:
        parameters = odd_parameters()
        ours = ours_on(group, parameters, **ADAMW)
        train(ours, parameters, range(2))
        ours.consolidate_state_dict(to=1)
        given = ours.state_dict() if ours.rank == 1 else {"state": {}, "param_groups": copy.deepcopy(ours.param_groups)}
        if ours.rank == 1:
            given["state"][2]["exp_avg"] = torch.zeros(3, 4)
            given["param_groups"][0]["lr"] = 123.0
        with pytest.raises(
            ValueError, match=r"rank 1: the state 'exp_avg' of parameter 2 of group 0 has shape \(3, 4\), expected \(257, 257\)"
        ):
            ours.load_state_dict(given)
        assert ours.param_groups[0]["lr"] == 0.01
        with pytest.raises(ValueError, match="different number of parameter groups"):
            ours.load_state_dict({"state": {}, "param_groups": []})
        whole = {"state": {}, "param_groups": copy.deepcopy(ours.param_groups)}
        with pytest.raises(ValueError, match="rank 1: not found: 'param_groups'"):  # a KeyError of torch's, of one rank alone
            ours.load_state_dict({} if ours.rank == 1 else whole)
        return train(ours, parameters, range(2, 4))

    plain = odd_parameters()
    expected = train(torch.optim.AdamW(plain, **ADAMW), plain, range(4))
    for found in on_threads(2, body):
        assert_same_bits(found, expected)


def test_consolidate_state_dict_is_never_out_of_date() -> None:
    def body(group: Any) -> None:
        parameters = odd_parameters()
        ours = ours_on(group, parameters, **ADAMW)
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            ours.state_dict()
        train(ours, parameters, range(1))
        ours.consolidate_state_dict(to=0)
        assert ours.rank != 0 or len(ours.state_dict()["state"]) == len(parameters)
        train(ours, parameters, range(1, 2))
        with pytest.raises(RuntimeError, match="changed since"):
            ours.state_dict()
        with pytest.raises(ValueError, match="to=2, expected a rank from 0 to 1"):
            ours.consolidate_state_dict(to=2)
        with pytest.raises(ValueError, match=r"consolidate_state_dict\(to=0\).*consolidate_state_dict\(to=1\)"):
            ours.consolidate_state_dict(to=ours.rank)
        for spoil in (copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="can't be copied or pickled"):
                spoil(ours)

    on_threads(2, body)


def test_consolidate_state_dict_takes_one_tensor_on_all_ranks_but_one() -> None:
    """Issue 68181 of torch's own: consolidating ran out of memory."""
    world_size, numel = 4, 10 * 256 * 512

    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(256, 512)) for _ in range(10)]

    held, peaks = [], []
    for rank in range(world_size):
        with LiveBytes() as live:
            given = parameters()
            ours = zero3.ZeroRedundancyOptimizer(given, torch.optim.Adam, LonelyCommunicator(world_size, rank), lr=0.1)
            for parameter in given:
                parameter.grad = torch.ones_like(parameter)
            before = live.now
            ours.step()
            held.append(live.now - before)
            before = live.now
            peaks.append(live.peak_of(lambda optimizer=ours: optimizer.consolidate_state_dict(to=0)) - before)
        assert sum(parameter.numel() for group in ours.optim.param_groups for parameter in group["params"]) == numel / world_size
    ideal = 2 * 4 * numel / world_size
    assert max(held) <= ideal * 1.001 + 1000
    assert max(peaks[1:]) <= 4 * 256 * 512 / world_size + 10_000  # a part of one tensor
    assert peaks[0] >= 2 * 4 * numel  # all of it, which is asked for


class _Sums(torch.optim.SGD):
    """Keeps two numbers a parameter."""

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sums"] = torch.zeros(2)


def test_consolidate_state_dict_refuses_state_without_a_place_in_the_whole() -> None:
    def body(group: Any) -> None:
        parameters = odd_parameters()
        ours = zero3.ZeroRedundancyOptimizer(parameters, _Sums, group, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        ours.step()
        with pytest.raises(ValueError, match=r"has shape \(2,\) for \d+ of its elements: .* Use whole=True for this group"):
            ours.consolidate_state_dict()

    on_threads(2, body)


def test_load_state_dict_without_newer_options_gets_them_as_the_plain_optimizer_does() -> None:
    def body(group: Any) -> None:
        parameters = odd_parameters()
        plain = torch.optim.SGD(odd_parameters(), lr=0.3)
        saved = plain.state_dict()
        for option in ("maximize", "foreach", "differentiable", "fused"):
            del saved["param_groups"][0][option]
        ours = zero3.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group, lr=0.1)
        for optimizer in (plain, ours):
            optimizer.load_state_dict(saved)
        options = [{key: value for key, value in each.param_groups[0].items() if key != "params"} for each in (plain, ours)]
        assert options[0] == options[1] and "maximize" in options[1]

    on_threads(2, body)
