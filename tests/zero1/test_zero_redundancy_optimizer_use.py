"""ZeroRedundancyOptimizer in a training script's hands: groups, schedules, loss scaling, closures, views. Ranks are threads."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.zero1.test_zero_redundancy_optimizer import (
    assert_same_bits,
    assert_same_state_dict,
    give_gradients,
    odd_parameters,
    on_threads,
    train,
    values_of,
)
from zero3.zero1.division import LARGE_BYTES

ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def in_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[:3], "lr": 0.05, "name": "first"},
        {"params": (parameter for parameter in parameters[3:5]), "weight_decay": 0.0},
        {"params": parameters[5:]},
    ]


def ours_on(group: Any, params: Any, **options: Any) -> zero3.ZeroRedundancyOptimizer:
    return zero3.ZeroRedundancyOptimizer(params, torch.optim.AdamW, group, **options)


def test_a_step_that_is_interrupted_leaves_no_transfer_pending() -> None:
    def body(group: ThreadCommunicator) -> bool:
        parameter = nn.Parameter(torch.ones(LARGE_BYTES))
        ours = ours_on(group, [parameter], lr=1.0, weight_decay=0.0)
        parameter.grad = torch.ones_like(parameter)
        gathers = ours._opened.gathers
        with mock.patch.object(gathers, "finish", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            ours.step()
        assert not gathers._pending
        parameter.data.fill_(1.0)  # what nobody waited for may be anything
        ours.step()
        return bool((parameter < 1).all())

    assert run_ranks(2, body) == [True, True]


@WORLDS
def test_groups_with_their_own_options_and_a_schedule(world_size: int) -> None:
    def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)  # moves lr and betas
        for step in range(4):
            give_gradients(parameters, step)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return values_of(parameters)

    plain = odd_parameters()
    optimizer = torch.optim.AdamW(in_groups(plain), **ADAMW)
    expected = trained(optimizer, plain)

    def body(group: Any) -> tuple[list[Tensor], Any]:
        parameters = odd_parameters()
        ours = ours_on(group, in_groups(parameters), **ADAMW)
        found = trained(ours, parameters)
        ours.consolidate_state_dict()
        return found, ours.state_dict() if ours.rank == 0 else None

    results = on_threads(world_size, body)
    for found, _ in results:
        assert_same_bits(found, expected)
    assert_same_state_dict(results[0][1], optimizer.state_dict())


@WORLDS
def test_named_parameters(world_size: int) -> None:
    def named(parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
        return [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]

    plain = odd_parameters()
    optimizer = torch.optim.AdamW(named(plain), **ADAMW)
    train(optimizer, plain, range(2))

    def body(group: Any) -> Any:
        parameters = odd_parameters()
        ours = ours_on(group, named(parameters), **ADAMW)
        train(ours, parameters, range(2))
        ours.consolidate_state_dict()
        return ours.state_dict() if ours.rank == 0 else None

    assert_same_state_dict(on_threads(world_size, body)[0], optimizer.state_dict())


@WORLDS
@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket view"])
def test_add_param_group_of_layers_that_are_unfrozen_in_mid_training(world_size: int, view: bool) -> None:
    def trained(optimizer: Any, parameters: list[nn.Parameter]) -> list[Tensor]:
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["lr"] *= 0.1  # a schedule's step
                optimizer.add_param_group({"params": parameters[2:6], "lr": 0.2})
                optimizer.add_param_group({"params": parameters[6:]})
            held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            give_gradients(held, step)
            optimizer.step()
            optimizer.zero_grad()
        return values_of(parameters)

    plain = odd_parameters()
    expected = trained(torch.optim.AdamW(plain[:2], **ADAMW), plain)

    def body(group: Any) -> list[Tensor]:
        parameters = odd_parameters()
        return trained(ours_on(group, parameters[:2], parameters_as_bucket_view=view, **ADAMW), parameters)

    for found in on_threads(world_size, body):
        assert_same_bits(found, expected)


@WORLDS
def test_gradscaler_skips_a_step_on_every_rank(world_size: int) -> None:
    def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[Any]:
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=64.0), []
        for step in range(4):
            give_gradients(parameters, step)
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(scaler.scale(torch.ones(())))
            if step == 1:
                parameters[2].grad[0, 0] = float("inf")  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [*values_of(parameters), torch.tensor(scaler.get_scale())]
        return seen

    def floats() -> list[nn.Parameter]:
        return [parameter for parameter in odd_parameters() if parameter.dtype == torch.float32 and parameter.numel()]

    plain = floats()
    expected = trained(torch.optim.AdamW(plain, **ADAMW), plain)

    def body(group: Any) -> list[Any]:
        parameters = floats()
        return trained(ours_on(group, parameters, **ADAMW), parameters)

    for found in on_threads(world_size, body):
        assert_same_bits(found, expected)


@WORLDS
def test_closures_hooks_and_what_else_plain_optimizers_do(world_size: int) -> None:
    def body(group: Any) -> None:
        weight = nn.Parameter(torch.ones(4, 4))
        ours = ours_on(group, [weight], **ADAMW)
        called = []
        ours.register_step_pre_hook(lambda *_: called.append("before"))
        ours.register_step_post_hook(lambda *_: called.append("after"))

        def closure() -> Tensor:
            called.append("closure")
            ours.zero_grad()
            loss = (weight * 2).sum()
            loss.backward()
            return loss

        assert ours.step(closure).item() == 32
        assert called == ["before", "closure", "after"]
        assert not torch.equal(weight, torch.ones(4, 4))
        loss = (weight**2).sum()
        ours.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        ours.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for group in ours.optim.param_groups for parameter in group["params"])
        assert "weight_decay: 0.1" in repr(ours)

    on_threads(world_size, body)


@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket view"])
def test_parameters_as_bucket_view_whose_data_is_replaced(view: bool) -> None:
    def trained(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
        train(optimizer, parameters, range(2))
        for parameter in parameters:
            parameter.data = parameter.data.clone().mul_(2)
        return train(optimizer, parameters, range(2, 4))

    plain = odd_parameters()
    expected = trained(torch.optim.AdamW(plain, **ADAMW), plain)

    def body(group: Any) -> list[Tensor]:
        parameters = odd_parameters()
        return trained(ours_on(group, parameters, parameters_as_bucket_view=view, **ADAMW), parameters)

    for found in on_threads(2, body):
        assert_same_bits(found, expected)


def test_few_collectives() -> None:
    """One all-gather for all small parameters of a dtype, one for a large one, and one exchange of 16 bytes a rank."""

    def body(group: ThreadCommunicator) -> list[str]:
        parameters = [nn.Parameter(torch.zeros(30)) for _ in range(50)] + [nn.Parameter(torch.zeros(300, 300)) for _ in range(3)]
        ours = ours_on(group, parameters, **ADAMW)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        group.log.clear()
        ours.step()
        assert [entry.numel for entry in group.log if entry.kind == "exchange"] == [16]
        return [entry.kind for entry in group.log]

    for log in on_threads(2, body):
        assert sorted(log) == ["all_gather"] * 4 + ["exchange"]


@pytest.mark.parametrize("view", [False, True])
def test_parameters_as_bucket_view_puts_parameters_of_a_kind_into_one_memory(view: bool) -> None:
    def body(group: Any) -> None:
        parameters = [nn.Parameter(torch.full((size,), float(size))) for size in (3, 5, 2)]
        zero3.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group, lr=0.1, parameters_as_bucket_view=view)
        assert len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == (1 if view else 3)
        assert all(parameter.eq(parameter.numel()).all() for parameter in parameters)

    on_threads(2, body)


@WORLDS
@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket view"])
def test_parameters_that_are_brought_into_another_memory_format(world_size: int, view: bool) -> None:
    """As `model.to(memory_format=...)` does, in mid-training. State stays with its elements."""

    def trained(optimizer: Any, parameters: list[nn.Parameter], alone: bool = False) -> list[Tensor]:
        for step in range(6):
            for parameter in parameters:
                if step in (2, 4) and parameter.dim() == 4:
                    kept = torch.channels_last if step == 2 and not alone else torch.contiguous_format
                    parameter.data = parameter.data.contiguous(memory_format=kept)
            give_gradients(parameters, step, missing=(0,) if step == 2 else ())
            optimizer.step()
        return values_of(parameters)

    def made() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(5)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3, 2, 2), (7,), (64, 16, 8, 9))]

    plain = made()
    expected = trained(torch.optim.AdamW(plain, **ADAMW), plain)

    def body(group: Any) -> list[Tensor]:
        parameters = made()
        ours = ours_on(group, parameters, parameters_as_bucket_view=view, **ADAMW)
        return trained(ours, parameters, alone=ours.rank == 1)  # rank 1 leaves them as they were

    for found in on_threads(world_size, body):
        assert_same_bits(found, expected)


@WORLDS
@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}, {"whole": True}], ids=str)
def test_parameters_that_are_transposed_where_they_lie(world_size: int, options: dict[str, Any]) -> None:
    def trained(optimizer: Any, parameters: list[nn.Parameter]) -> list[Tensor]:
        for step in range(4):
            if step == 2:
                parameters[0].data = parameters[0].data.t()
            give_gradients(parameters, step)
            optimizer.step()
        return values_of(parameters)

    def made() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(5)
        return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 4), (7,))]

    plain = made()
    expected = trained(torch.optim.AdamW(plain, **ADAMW), plain)

    def body(group: Any) -> list[Tensor]:
        parameters = made()
        return trained(ours_on(group, parameters, **options, **ADAMW), parameters)

    for found in on_threads(world_size, body):
        assert_same_bits(found, expected)
