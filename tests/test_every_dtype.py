"""Tensors whose values only move may have any dtype: buffers, frozen parameters, an optimizer's state, what is saved beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.dtypes import ALL, MOVED, NOT_COPIED, bytes_of, values
from tests.support.processes import Rank, on_ranks
from zero3.__main__ import main


def half_of_complex(body: Callable[..., None]) -> Callable[..., None]:
    """Without torch's warning of complex32."""

    @wraps(body)
    def quietly(*arguments: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "B?Complex(Half|32) support is experimental")
            body(*arguments)

    return quietly


class Holder(nn.Module):
    """Has a buffer with and one without dimensions, and a frozen parameter, of each dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.data.fill_(seed)
        self.linear.bias.data.fill_(seed)
        for number, dtype in enumerate(MOVED):
            self.register_buffer(f"buffer{number}", values(seed, dtype, 3, 2))
            self.register_buffer(f"scalar{number}", values(seed + 1, dtype))
            self.register_parameter(f"frozen{number}", nn.Parameter(values(seed + 2, dtype, 7), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Keeper(torch.optim.SGD):
    """Keeps state of each dtype: a tensor as long as the parameter, and one of another shape."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                for at, dtype in enumerate(MOVED):
                    self.state[parameter][f"long{at}"] = values(number, dtype, *parameter.shape)


def flat(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return bytes_of(tensors), tensors.dtype, tuple(tensors.shape)
    if isinstance(tensors, Mapping):
        return {key: flat(value) for key, value in tensors.items()}
    return [flat(value) for value in tensors] if isinstance(tensors, list) else tensors


def trained(seed: int) -> tuple[nn.Module, Keeper]:
    model = zero3.shard(Holder(seed), layers=nn.Linear)
    optimizer = Keeper(zero3.get_trainable_chunk(model), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def frozen_of(model: nn.Module) -> Any:
    return {name: value for name, value in flat(zero3.full_state_dict(model, rank0_only=False)).items() if "linear" not in name}


def all_the_ways(rank: Rank) -> None:
    model, optimizer = trained(0 if rank.number == 0 else 100)  # rank 0's values win
    assert frozen_of(model) == {name: value for name, value in flat(Holder(0).state_dict()).items() if "linear" not in name}
    given = Holder(50).state_dict()
    zero3.load_full_state_dict(model, given if rank.number == 0 else None)
    assert flat(zero3.full_state_dict(model, rank0_only=False)) == flat(given)
    state = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    other, fresh = trained(7)
    zero3.load_full_optimizer_state_dict(other, fresh, state)
    assert flat(zero3.full_optimizer_state_dict(other, fresh, rank0_only=False)) == flat(state)
    extra = {str(dtype): [values(3, dtype, 2, 2), values(4, dtype)] for dtype in MOVED}
    zero3.save_checkpoint(rank.scratch / "saved", model, optimizer, extra=extra, background=rank.world_size > 1).wait()
    check(rank, "saved", extra, flat(given), flat(state))


def check(rank: Rank, name: str, extra: Any, weights: Any, state: Any) -> None:
    model, optimizer = trained(8)
    found = zero3.load_checkpoint(rank.scratch / name, model, optimizer)
    assert flat(found) == flat(extra)
    assert flat(zero3.full_state_dict(model, rank0_only=False)) == weights
    assert flat(zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)) == state


@half_of_complex
def on_another_rank(rank: Rank, directory: Path) -> None:
    here = rank._replace(scratch=directory)
    model, optimizer = trained(9)
    extra = zero3.load_checkpoint(directory / "saved", model, optimizer)
    weights, state = zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)
    for kind in ("dcp", "torch"):
        assert main(["convert", str(directory / "saved"), str(directory / kind), "--to", kind]) == 0
        assert main(["convert", str(directory / kind), str(directory / f"from {kind}")]) == 0
        check(here, f"from {kind}", extra, flat(weights), flat(state))
    assert flat(torch.load(directory / "torch", weights_only=True)["model"]) == flat(weights)
    assert main(["inspect", "--verify", str(directory / "saved")]) == 0
    assert main(["export", str(directory / "saved"), str(directory / "exported")]) == 1  # whose format has no name for some


@half_of_complex
def ways_of_two(rank: Rank, directory: Path) -> None:
    all_the_ways(rank._replace(scratch=directory))


@pytest.mark.slow
def test_tensors_of_every_dtype_go_all_ways(tmp_path: Path) -> None:
    on_ranks(2, ways_of_two, tmp_path)
    on_ranks(1, on_another_rank, tmp_path)


@pytest.mark.parametrize("dtype", [dtype for dtype in NOT_COPIED if "q" not in str(dtype)], ids=str)
def test_shard_refuses_dtypes_that_torch_cant_copy(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("codes", values(0, dtype, 4))
    with pytest.raises(ValueError, match=rf"tensor 'codes' is {dtype}, which torch can't copy: keep its bytes in a tensor of torch.uint8"):
        zero3.shard(model, layers=nn.Linear)


@half_of_complex
def test_every_dtype_of_this_torch_is_known() -> None:
    for dtype in ALL:
        if dtype in MOVED:
            values(0, dtype, 3).clone()
        elif "q" not in str(dtype):
            with pytest.raises(NotImplementedError):
                values(0, dtype, 3).clone()
