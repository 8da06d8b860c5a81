"""Which parameters a policy quantises, and the errors of those who ask for what can't be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zero3
from tests.support.quantised_bases import WIDTH, Adapted, blocks, quantised_names
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import MXFP4, NF4, Int8, ParamInfo, ShardingPolicy

NF4_POLICY = ShardingPolicy(quantize=NF4())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2
        self.weight, self.bias = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(2, 8))
        self.shared = nn.Parameter(torch.randn(3, 8, 8))


class Groups(nn.Module):
    """Three dimensions, and no experts: maps in groups, and positions as vision models learn them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_groups = 2
        self.weight, self.positions = nn.Parameter(torch.randn(2, 8, 8)), nn.Parameter(torch.randn(2, 64, 8))


class Everything(nn.Module):
    """Whatever may be quantised by default, and may not. Its own parameters stand in the root's own layer."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.linear, self.norm, self.convolution = nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 3)
        self.attention, self.experts, self.trained = nn.MultiheadAttention(8, 2), Experts(), nn.Linear(8, 8)
        self.groups, self.tied = Groups(), nn.Linear(8, 9)
        self.tied.weight = self.embed.weight
        self.half = nn.Linear(8, 8).bfloat16()
        self.requires_grad_(False)
        self.trained.requires_grad_(True)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("tied", [True, False])
def test_quantize_by_default_linear_weights_and_experts(tied: bool) -> None:
    model = zero3.Zero3Layer(Everything(tied), policy=NF4_POLICY)
    assert quantised_names(model) == ["experts.weight", "half.weight", "linear.weight"]
    shown = {name: module.weight.dtype for name, module in model.named_modules() if name in ("half", "linear")}
    assert shown["half"] == torch.bfloat16
    assert shown["linear"] == torch.float32


def test_quantize_what_select_says() -> None:
    seen: dict[str, ParamInfo] = {}

    def select(name: str, info: ParamInfo) -> bool:
        seen[name] = info
        return name == "embed.weight"

    model = zero3.shard(Everything(), [nn.Linear], policy=ShardingPolicy(quantize=MXFP4(select=select)))
    assert quantised_names(model) == ["embed.weight"]
    assert seen == {name: ParamInfo(name, tuple(p.shape), p.numel(), p.dtype, p.ndim) for name, p in Everything().named_parameters()}


def everywhere(name: str, info: ParamInfo) -> bool:
    return True


def raising(name: str, info: ParamInfo) -> bool:
    raise KeyError(name)


@pytest.mark.parametrize("by", [zero3.shard, zero3.Zero3Layer])
@pytest.mark.parametrize(
    ("select", "error", "message"),
    [
        (lambda name, info: False, ValueError, "selects no parameter of this Sequential"),
        (everywhere, ValueError, "selects parameter '0.first', which trains"),
        (raising, ValueError, r"quantize.select\('0.first'\) of the policy has raised KeyError"),
        (lambda name, info: "yes", TypeError, r"quantize.select\('0.first'\) of the policy returned 'yes', expected True or False"),
    ],
)
def test_quantize_select_mistakes_have_names(by: Any, select: Any, error: type[Exception], message: str) -> None:
    """All ranks raise, though one alone may have made the mistake; nothing has changed."""
    models = [blocks(2) for _ in range(2)]
    options = {"layers": Adapted} if by is zero3.shard else {}

    def body(group: ThreadCommunicator) -> None:
        fine = group.rank == 1 and message.startswith("quantize")
        policy = ShardingPolicy(quantize=NF4(select=None if fine else select))
        with pytest.raises(error, match=message):
            by(models[group.rank], policy=policy, process_group=group, **options)
        assert not zero3.is_sharded(models[group.rank])
        models[group.rank](torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()

    run_ranks(2, body)


def test_quantize_where_all_parameters_train() -> None:
    with pytest.raises(ValueError, match=r"selects no parameter of this Linear: weight, bias train; freeze what"):
        zero3.Zero3Layer(nn.Linear(3, 3), policy=NF4_POLICY)


def test_quantize_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"quantize must be zero3.NF4\(\), Int8\(\), Float8\(\), MXFP4\(\) or None, found 'nf4'"):
        ShardingPolicy(quantize="nf4")  # type: ignore[arg-type]


def test_quantize_differently_on_ranks() -> None:
    models = [blocks(2) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        policy = ShardingPolicy(quantize=NF4() if group.rank else Int8())
        with pytest.raises(ValueError, match=r"quantised as int8\(256\)"):
            zero3.shard(models[group.rank], Adapted, policy=policy, process_group=group)

    run_ranks(2, body)


class Computing(nn.Module):
    """A layer that does with its quantised weight whatever a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))
        self.what: Callable[[nn.Parameter, Tensor], Any] = lambda weight, x: None

    def forward(self, x: Tensor) -> Any:
        return self.what(self.linear.weight, x * self.scale)


REFUSED: dict[str, Callable[[Any, Tensor], Any]] = {
    "sum": lambda weight, x: weight.sum(),
    "mul": lambda weight, x: weight * 2,
    "data": lambda weight, x: weight.data,
    "clone": lambda weight, x: weight.t().clone(),
    "add_": lambda weight, x: weight.add_(1),
    "indexing with a tensor of indices": lambda weight, x: weight[torch.tensor([0, 1])],
    "matmul of 3 with fewer dimensions": lambda weight, x: x.view(1, 1, 2, 2, 2) @ weight.view(2, 2, 2, 8)[..., :2].expand(2, 2, 2, 2)[0],
    "tolist": lambda weight, x: weight.tolist(),
    "conv1d": lambda weight, x: functional.conv1d(x.view(1, 8, -1), weight.unsqueeze(2)),
    "requires_grad_": lambda weight, x: weight.requires_grad_(),
    "moving to meta": lambda weight, x: weight.to("meta"),
    "deepcopy": lambda weight, x: copy.deepcopy(weight),
    "pickle": lambda weight, x: pickle.dumps(weight),
}


@pytest.mark.parametrize("what", REFUSED)
def test_quantized_parameter_refuses_by_name(what: str) -> None:
    model = zero3.Zero3Layer(Computing(), policy=NF4_POLICY)
    model.module.what = REFUSED[what]
    found = rf"{what.replace('matmul of 3', '.*')}: 'linear.weight' of layer Computing is quantised as nf4\(64, double\)"
    with pytest.raises(RuntimeError, match=found):
        model(torch.ones(8))


ALLOWED: dict[str, Callable[[Any, Tensor], Any]] = {
    "shape": lambda weight, x: weight.shape == (8, 8) and weight.t().shape == (8, 8),
    "dtype": lambda weight, x: weight.dtype == torch.float32 and x.to(weight.dtype).dtype == torch.float32,
    "repr": lambda weight, x: repr(weight) == "QuantizedParameter(nf4(64, double), shape=(8, 8), dtype=torch.float32)" == f"{weight}",
    "requires_grad": lambda weight, x: not weight.requires_grad and weight.requires_grad_(False) is weight,
    "type": lambda weight, x: isinstance(weight, nn.Parameter) and x.type_as(weight).dtype == x.dtype,
    "leaf": lambda weight, x: weight.is_leaf and weight.grad is None and len(weight) == 8 and weight.stride() == (0, 0),
    "to": lambda weight, x: weight.to(torch.float32) is weight and weight.bfloat16().dtype == torch.bfloat16,
}


@pytest.mark.parametrize("what", ALLOWED)
def test_quantized_parameter_tells_of_itself(what: str) -> None:
    model = zero3.Zero3Layer(Computing(), policy=NF4_POLICY)
    model.module.what = ALLOWED[what]
    assert model(torch.ones(8)) is True


def test_a_view_of_a_quantized_parameter_that_escapes() -> None:
    """It is no view of memory that is gone: it has no values of its own."""
    model = zero3.Zero3Layer(Computing(), policy=NF4_POLICY)
    kept: list[Any] = []
    model.module.what = lambda weight, x: kept.append(weight.t()) or functional.linear(x, weight)
    model(torch.ones(8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"'linear.weight' of layer Computing is released"):
        torch.ones(8) @ kept[0]
    with pytest.raises(RuntimeError, match="is released, its values lie in chunks"):
        model.module.linear.weight.sum()
