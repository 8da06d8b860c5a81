"""check: one step sharded and one not agree, or the first parameter that differs is named."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import changed_gradients
from tests.support.models import WIDTH, mlp
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence, process_group
from zero3 import ShardingPolicy
from zero3.diagnose import check as checking


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp())
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.norm(x)


def checked(group: ThreadCommunicator, model: nn.Module, **options: Any) -> zero3.check.CheckReport:  # type: ignore[name-defined]
    batch = Turn(group.rank, 0, group.world_size).tensor(4, WIDTH)
    return zero3.check(model, batch, process_group=process_group(group), **options)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_check_agrees_and_changes_nothing(world_size: int, reduction: Any) -> None:
    torch.manual_seed(0)
    model = mlp() if world_size > 1 else Small()  # dropout draws from one generator for all threads
    before = {name: value.clone() for name, value in model.state_dict().items()}
    policy = ShardingPolicy(gradient_reduction=reduction)
    wrap = (lambda g: lambda m: in_sequence(m, process_group(g), policy)) if world_size > 1 else lambda g: None
    for report in run_ranks(world_size, lambda group: checked(group, model, policy=policy, wrap=wrap(group))):
        assert report.first is None
        assert report.compared == 1 + 2 * len(list(model.parameters()))
        assert report.worst < 1e-9
        assert "agree" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("policy", "frozen"),
    [
        (ShardingPolicy(quantize=zero3.NF4()), "1"),
        (ShardingPolicy(quantize=zero3.Int8()), "1"),
        (ShardingPolicy(ignored=lambda name, info: name.startswith("0.")), "1"),
        (ShardingPolicy(ignored=lambda name, info: name.startswith("0."), gradient_reduction="sum"), ""),
        (ShardingPolicy(quantize=zero3.NF4(), param_dtype=torch.bfloat16), "1"),
    ],
)
def test_check_takes_parameters_of_formats_and_those_that_are_left_alone(policy: ShardingPolicy, frozen: str, world_size: int) -> None:
    def body(group: ThreadCommunicator) -> Any:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        for number, parameter in enumerate(model.parameters()):
            nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(7 * group.rank + number))
        if frozen:
            model[int(frozen)].requires_grad_(False)
        batch = torch.randn(3, 64, generator=torch.Generator().manual_seed(group.rank))

        def wrap(model: nn.Module) -> nn.Module:
            return zero3.shard(model, nn.Linear, policy=policy, process_group=process_group(group))

        return zero3.check(model, batch, lambda model, batch: model(batch).float().square().mean(), wrap=wrap)

    for report in run_ranks(world_size, body):
        assert report.first is None and report.compared == 1 + 6 + (4 if frozen else 6)


def test_check_names_a_parameter_that_nobody_has_wrapped() -> None:
    """It trains on each rank alone."""

    def body(group: ThreadCommunicator) -> Any:
        def wrap(model: nn.Sequential) -> nn.Module:
            model[0] = zero3.Zero3Layer(model[0], process_group=process_group(group))
            return model

        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        batch = torch.randn(3, 8, generator=torch.Generator().manual_seed(group.rank)).double()
        return zero3.check(model, batch, lambda model, batch: model(batch).square().mean(), wrap=wrap)

    for report in run_ranks(2, body):
        assert report.first is not None and report.first.startswith("1.")


def test_check_names_the_first_parameter_that_differs() -> None:
    model = mlp()
    with changed_gradients(lambda name, gradient: gradient * 2 if name.endswith("bias") else gradient):
        reports = run_ranks(2, lambda g: checked(g, model, wrap=lambda m: in_sequence(m, process_group(g), ShardingPolicy())))
    for report in reports:
        assert report.first == "0.0.bias"
        assert {difference.name for difference in report.differences} == {"0.0.bias", "1.0.bias", "2.0.bias"}
        assert "differ in 6 of 13" in str(report) and "gradient 0.0.bias: off by" in str(report)


def lone(group: ThreadCommunicator) -> Callable[[nn.Module], nn.Module]:
    return lambda model: zero3.Zero3Layer(model, process_group=process_group(group))


def test_check_finds_what_differs_beside_an_infinity() -> None:
    def body(group: ThreadCommunicator) -> Any:
        batch = torch.tensor([[torch.inf, 1.0, 2.0]])
        return zero3.check(nn.Linear(3, 2), batch, lambda model, batch: model(batch).sum(), wrap=lone(group))

    assert [report.first for report in run_ranks(2, body)] == [None, None]
    with changed_gradients(lambda name, gradient: gradient * 2):
        assert [report.first for report in run_ranks(2, body)] == ["weight", "weight"]


def test_check_compares_imaginary_parts() -> None:
    def body(group: ThreadCommunicator) -> Any:
        model = nn.Linear(3, 2, dtype=torch.complex128)
        batch = torch.full((1, 3), 1 + 2j, dtype=torch.complex128)
        return zero3.check(model, batch, lambda model, batch: model(batch).abs().sum(), wrap=lone(group))

    assert [report.first for report in run_ranks(2, body)] == [None, None]
    with changed_gradients(lambda name, gradient: gradient.conj().resolve_conj()):
        assert [report.first for report in run_ranks(2, body)] == ["weight", "weight"]


def test_the_worst_is_a_part_of_the_largest_expected() -> None:
    gradients, zero = {"a": torch.tensor([-4.0, 1.0])}, {"a": torch.zeros(1)}
    found = {"gradient": {"a": torch.tensor([-4.0, 3.0])}, "value after the step": zero}
    assert checking._compared({"gradient": gradients, "value after the step": zero}, found, 1e-3).worst == 2.0 / 4.0


def test_the_worst_of_several_is_none_where_one_is_no_number() -> None:
    def worst(*gradients: float) -> float:
        found = {str(n): torch.tensor([each]) for n, each in enumerate(gradients)}
        zero, kinds = dict.fromkeys(found, torch.zeros(1)), ("gradient", "value after the step")
        return checking._compared(dict.fromkeys(kinds, zero), {kinds[0]: found, kinds[1]: zero}, 1e-3).worst

    assert (worst(1.0, 3.0), worst(0.0)) == (3.0, 0.0)
    assert torch.tensor([worst(torch.nan, 1.0), worst(1.0, torch.nan)]).isnan().all()


WRONG: dict[str, tuple[Any, str]] = {
    "raises": (lambda model, batch: model(batch)[0, 99], "IndexError: index 99 is out of bounds"),
    "returns no tensor": (lambda model, batch: model(batch).sum().item(), "AttributeError: 'float' object has no attribute 'backward'"),
    "has no gradient": (lambda model, batch: model(batch).sum().detach(), "element 0 of tensors does not require grad"),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_a_loss_that_fails_on_one_rank_is_told_to_all(name: str) -> None:
    wrong, text = WRONG[name]

    def body(group: ThreadCommunicator) -> None:
        loss = wrong if group.rank else None
        with pytest.raises(RuntimeError, match=f"^rank 1: {text}"):
            checked(group, mlp(), loss=loss, wrap=lambda m: in_sequence(m, process_group(group), ShardingPolicy()))

    run_ranks(2, body, timeout=20)


class WithLoss(nn.Module):
    """As Hugging Face's models: takes names, and gives its loss among other things."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp())

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=x, loss=(x - labels).abs().mean())


def test_check_takes_the_models_own_loss() -> None:
    def body(group: ThreadCommunicator) -> float:
        turn = Turn(group.rank, 0, group.world_size)
        batch = {"x": turn.tensor(4, WIDTH), "labels": torch.zeros(4, WIDTH, dtype=torch.float64)}
        report = zero3.check(model, batch, process_group=process_group(group))
        assert report.first is None
        return report.worst

    model = WithLoss()
    assert max(run_ranks(2, body)) < 1e-9


def test_a_difference_is_how_far_apart_values_are() -> None:
    nan, inf = torch.nan, torch.inf
    for found, expected, largest, scale in (
        ([1.5, -2.0], [1.0, -2.25], 0.5, 2.25),
        ([nan, inf, 1.0], [nan, inf, 1.0], 0.0, 1.0),
        ([inf, 0.5], [inf, 0.25], 0.25, 0.25),
        ([], [], 0.0, 0.0),
    ):
        difference = checking._difference(
            "a", "gradient", torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
        )
        assert (difference.largest, difference.scale) == (largest, scale)
    assert torch.tensor(checking._difference("a", "gradient", torch.tensor([1.0]), torch.tensor([nan])).largest).isnan()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["a layer", "a layer inside", "shard", "a part of a layer"])
def test_check_of_a_model_that_is_sharded_already_says_when_to_call_it(how: str, world_size: int) -> None:
    models = [Small() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model: Any = models[group.rank]
        if how == "a layer":
            model = zero3.Zero3Layer(model, process_group=process_group(group))
        elif how == "shard":
            model = zero3.shard(model, process_group=process_group(group))
        elif how == "a part of a layer":
            models.append(zero3.Zero3Layer(model, process_group=process_group(group)))  # type: ignore[arg-type]
        else:
            model.layers[1] = zero3.Zero3Layer(model.layers[1], process_group=process_group(group))
        before = len(group.log)
        with pytest.raises(ValueError, match=r"is sharded already \(layer .*\): call zero3.check before zero3.shard, with shard's policy="):
            checked(group, model)
        with pytest.raises(ValueError, match="is sharded already"):
            checked(group, model, wrap=lambda model: model)
        assert len(group.log) == before

    run_ranks(world_size, body)
