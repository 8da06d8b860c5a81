"""One rank's bad argument to clip_grad_norm_, parameter_norms or backward: every rank raises it, nobody waits, nothing has changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import states_of
from tests.support.models import WORLDS, mlp
from tests.support.processes import PROMPT, Rank, try_on_ranks
from tests.support.ranks import Collective, ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, assert_close, full_gradients, on_ranks
from zero3.comm.agreement import Members, agree_where_nan
from zero3.optim.token_mean import weigh

NAN, INF = float("nan"), float("inf")
Bad = tuple[dict[str, Any], type[Exception], str]

CLIP: dict[str, Bad] = {
    "max_norm -1": ({"max_norm": -1.0}, ValueError, r"norm_type must be positive and max_norm at least 0, found 2\.0 and -1\.0"),
    "max_norm nan": ({"max_norm": NAN}, ValueError, "found 2.0 and nan"),
    "max_norm None": ({"max_norm": None}, TypeError, r"norm_type and max_norm must be numbers, found 2\.0 and None"),
    "max_norm a list": ({"max_norm": [1.0]}, TypeError, r"found 2\.0 and \[1\.0\]"),
    "max_norm a tensor": ({"max_norm": torch.ones(2)}, TypeError, r"found 2\.0 and tensor\(\[1\., 1\.\]\)"),
    "norm_type 0": ({"norm_type": 0}, ValueError, "found 0.0 and 1.0"),
    "norm_type nan": ({"norm_type": NAN}, ValueError, "found nan and 1.0"),
    "norm_type a word": ({"norm_type": "two"}, TypeError, "found 'two' and 1.0"),
}
NORMS: dict[str, Bad] = {
    "of gradient": ({"of": "gradient"}, ValueError, "of must be .*found 'gradient'"),
    "norm_type -2": ({"norm_type": -2}, ValueError, r"norm_type must be positive, found -2\.0"),
    "norm_type None": ({"norm_type": None}, TypeError, "norm_type must be a number, found None"),
}


def batch(rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def loss_sum(model: nn.Module, rank: int) -> Tensor:
    return model(batch(rank)).pow(2).sum()


def plain_gradients(ranks: int = 2) -> dict[str, Tensor]:
    """One process, the mean over all rows."""
    model = mlp()
    x = torch.cat([batch(rank) for rank in range(ranks)])
    (model(x).pow(2).sum() / len(x)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CLIP)
@WORLDS
def test_clip_grad_norm(name: str, world_size: int) -> None:
    wrong, kind, text = CLIP[name]
    expected = plain_gradients(world_size)

    def body(model: Any, group: ThreadCommunicator) -> None:
        last = group.rank == world_size - 1
        zero3.backward(loss_sum(model, group.rank), 3, model)
        with pytest.raises(kind, match=rf"^rank {world_size - 1}: .*{text}" if world_size > 1 else text):
            zero3.clip_grad_norm_(model, **{"max_norm": 1.0, **(wrong if last else {})})
        assert_close(full_gradients(model, group), expected, TOLERANCE, "gradients after a refused clip")
        total = zero3.clip_grad_norm_(model, INF).item()
        assert total == pytest.approx(torch.cat([g.flatten() for g in expected.values()]).norm().item())
        for _ in range(3):
            zero3.backward(loss_sum(model, group.rank), 3, model)  # the ranks' logs of transfers are still alike

    on_ranks(world_size, mlp, body)


def test_clip_grad_norm_by_the_largest_element() -> None:
    """Bits of integers travel there, and a mistake still wins."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        zero3.backward(loss_sum(model, group.rank), 3, model)
        with pytest.raises(ValueError, match=r"^rank 0: norm_type must be positive and max_norm at least 0, found inf and -1"):
            zero3.clip_grad_norm_(model, 1.0 if group.rank else -1.0, INF)

    on_ranks(2, mlp, body)


@pytest.mark.parametrize("differ", ["max_norm", "norm_type", "error_if_nonfinite"])
def test_clip_grad_norm_by_another_limit_is_told_to_all_at_the_next_comparison(differ: str) -> None:
    """Each is valid, and the all-reduce has no room for them. The log of transfers has."""
    refused = []

    def body(model: Any, group: ThreadCommunicator) -> None:
        def train() -> None:
            for _ in range(4):
                zero3.backward(loss_sum(model, group.rank), 3, model)
                zero3.clip_grad_norm_(model, **{"max_norm": 1.0, differ: 2.0 * group.rank + (differ != "error_if_nonfinite")})

        with pytest.raises(ValueError, match=r"ranks differ in the transfers made before forward.*clipping the gradients to max_norm="):
            train()
        refused.append(group.rank)

    on_ranks(2, mlp, body)
    assert sorted(refused) == [0, 1]


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameter_norms(name: str, world_size: int) -> None:
    wrong, kind, text = NORMS[name]

    def body(model: Any, group: ThreadCommunicator) -> None:
        zero3.backward(loss_sum(model, group.rank), 3, model)
        with pytest.raises(kind, match=rf"^rank 0: .*{text}" if world_size > 1 else text):
            zero3.parameter_norms(model, **(wrong if group.rank == 0 else {}))
        assert all(math.isfinite(norm) for norm in zero3.parameter_norms(model).values())

    on_ranks(world_size, mlp, body)


BACKWARD: dict[str, tuple[Callable[[Any, int], Any], type[Exception], str]] = {
    "a shape": (lambda model, rank: (model(batch(rank)), 3), ValueError, r"loss_sum has shape \(3, \d\)"),
    "no graph": (lambda model, rank: (loss_sum(model, rank).detach(), 3), ValueError, "requires_grad=False"),
    "no tensor": (lambda model, rank: (loss_sum(model, rank).item(), 3), TypeError, "loss_sum is a float"),
    "-1 tokens": (lambda model, rank: (loss_sum(model, rank), -1), ValueError, "num_tokens must be 0 or more, and finite, found -1"),
    "inf tokens": (lambda model, rank: (loss_sum(model, rank), math.inf), ValueError, "0 or more, and finite, found inf"),
    "too many tokens": (lambda model, rank: (loss_sum(model, rank), 10**400), ValueError, "0 or more, and finite, found 1000"),
    "-1 tokens in a tensor": (lambda model, rank: (loss_sum(model, rank), torch.tensor(-1)), ValueError, "0 or more, .*, found -1"),
    "tokens nan in a tensor": (lambda model, rank: (loss_sum(model, rank), torch.tensor(NAN)), ValueError, "0 or more, .*, found nan"),
    "complex tokens": (lambda model, rank: (loss_sum(model, rank), torch.tensor(1j)), TypeError, "num_tokens is torch.complex64"),
    "tokens nan": (lambda model, rank: (loss_sum(model, rank), NAN), ValueError, "num_tokens must be 0 or more, and finite, found nan"),
    "a bool": (lambda model, rank: (loss_sum(model, rank), True), TypeError, "num_tokens is a bool, expected an integer"),
    "a bool in a tensor": (
        lambda model, rank: (loss_sum(model, rank), torch.tensor(True)),
        TypeError,
        "num_tokens is torch.bool, expected",
    ),
    "no tokens": (lambda model, rank: (loss_sum(model, rank), None), TypeError, "num_tokens is a NoneType"),
    "tokens by row": (lambda model, rank: (loss_sum(model, rank), torch.ones(3)), ValueError, r"num_tokens has shape \(3,\)"),
}


@pytest.mark.parametrize("name", BACKWARD)
@WORLDS
@pytest.mark.parametrize("at", ["first", "second"])
def test_backward(name: str, world_size: int, at: str) -> None:
    make, kind, text = BACKWARD[name]
    expected = plain_gradients(world_size)

    def body(model: Any, group: ThreadCommunicator) -> None:
        if at == "second":  # there are gradients already, which must be left as they are
            zero3.backward(loss_sum(model, group.rank), 3, model)
        wrong = make(model, group.rank) if group.rank == world_size - 1 else (loss_sum(model, group.rank), 3)
        with pytest.raises(kind, match=rf"^rank {world_size - 1}: .*{text}" if world_size > 1 else text):
            zero3.backward(*wrong, model)
        zero3.backward(loss_sum(model, group.rank), 3, model)
        assert_close(full_gradients(model, group), expected, TOLERANCE, "gradients")

    on_ranks(world_size, mlp, body)


def test_backward_with_gradients_that_one_rank_alone_has_from_elsewhere() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        zero3.backward(loss_sum(model, group.rank), 3, model)
        if group.rank == 1:
            for chunk in zero3.get_trainable_chunk(model):
                chunk.grad = chunk.grad.clone()  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"^rank 1: there are gradients that loss\.backward\(\) has left"):
            zero3.backward(loss_sum(model, group.rank), 3, model)
        model.zero_grad()
        zero3.backward(loss_sum(model, group.rank), 3, model)

    on_ranks(2, mlp, body)


def test_backward_in_step_guard_drops_the_micro_batch_on_all_ranks() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        for step in range(4):
            with zero3.step_guard(model) as guarded:
                loss = loss_sum(model, group.rank)
                zero3.backward(loss.detach() if step == 2 and group.rank else loss, 3, model)
            assert guarded.failed == (step == 2)
            if guarded.failed:
                assert all("rank 1: loss_sum has shape () and requires_grad=False" in text for text in guarded.errors.values())

    on_ranks(2, mlp, body)


def test_what_is_nan_on_all_ranks_costs_one_exchange_and_is_no_error() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        zero3.backward(loss_sum(model, group.rank), 3, model)
        zero3.get_trainable_chunk(model)[0].grad[0] = NAN  # type: ignore[index]
        group.log.clear()
        assert math.isnan(zero3.clip_grad_norm_(model, 1.0))
        assert group.log == [Collective("all_reduce", 1, torch.float64), Collective("exchange", 16, torch.uint8)]

    on_ranks(2, mlp, body)


def test_on_an_accelerator_the_host_does_not_look() -> None:
    """The rank that is wrong raises, and the others have NaN."""

    def body(group: ThreadCommunicator) -> None:
        group.log.clear()
        result, wrong = torch.tensor(NAN), ValueError("wrong") if group.rank == 1 else None
        if wrong is None:
            agree_where_nan(Members(group, torch.device("cuda")), "", result, None)
        else:
            with pytest.raises(ValueError, match="wrong"):
                agree_where_nan(Members(group, torch.device("cuda")), "", result, wrong)
        assert group.log == []

    run_ranks(2, body)


def one_after_another(rank: Rank) -> list[str]:
    """With DETAIL's checks of every collective."""
    model = zero3.Zero3Sequential([zero3.Zero3Layer(child) for child in mlp()])
    alone, told = rank.number == 1, []
    zero3.backward(loss_sum(model, rank.number), 3, model)
    for attempt in (
        lambda: zero3.clip_grad_norm_(model, -1.0 if alone else 1.0),
        lambda: zero3.clip_grad_norm_(model, 1.0, "x" if alone else 2.0),  # type: ignore[arg-type]
        lambda: zero3.parameter_norms(model, "weights" if alone else "grad"),  # type: ignore[arg-type]
        lambda: zero3.backward(loss_sum(model, rank.number), -1 if alone else 3, model),
    ):
        try:
            attempt()
        except (ValueError, TypeError) as error:
            told.append(str(error))
    zero3.backward(loss_sum(model, rank.number), 3, model)
    return told


def test_in_processes_nobody_waits_for_the_timeout() -> None:
    first, second = try_on_ranks(2, one_after_another)
    assert first.value == second.value, (first, second)
    assert len(first.value) == 4 and all(text.startswith("rank 1: ") for text in first.value)
    assert max(first.seconds, second.seconds) < PROMPT


def test_backward_of_a_part_of_the_model_on_one_rank() -> None:
    """Its layers' earlier gradients would be weighed anew, and those of the others not."""
    expected = plain_gradients()

    def body(model: Any, group: ThreadCommunicator) -> None:
        part = model[1] if group.rank else model
        with pytest.raises(ValueError, match=r"^rank 1: zero3.backward got only a part of the model: layer '0' .* trains too"):
            zero3.backward(loss_sum(model, group.rank), 3, part)
        for chunk in model[2].get_trainable_chunk():
            chunk.requires_grad_(False)  # what does not train need not be in it
        model.zero_grad()
        zero3.backward(loss_sum(model, group.rank), 3, nn.ModuleList([model[0], model[1]]))
        found = full_gradients(model, group)
        assert_close(found, {name: expected[name] for name in found}, TOLERANCE, "gradients")

    on_ranks(2, mlp, body)


def test_tokens_that_are_wrong_on_an_accelerator_give_nan_and_no_zeros() -> None:
    """The host does not look at them there."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        states = states_of(model)
        for wrong in (-1.0, NAN, INF):
            weights = weigh(states, torch.tensor(wrong if group.rank else 3.0), 1.0)
            assert math.isnan(weights.share) and math.isnan(weights.total)
        assert weigh(states, 0, 0.0).share == 0

    on_ranks(2, mlp, body)


def test_parameter_norms_of_other_things_on_each_rank_are_told_at_the_next_comparison() -> None:
    """With frozen parameters there would be more norms of one kind than of the other, and gloo ends the process if sizes differ."""
    refused = []

    def body(group: ThreadCommunicator) -> None:
        frozen = mlp()
        frozen[1].requires_grad_(False)
        model: Any = zero3.Zero3Sequential([zero3.Zero3Layer(child, process_group=group) for child in frozen])

        def train() -> None:
            for _ in range(4):
                zero3.backward(loss_sum(model, group.rank), 3, model)
                zero3.parameter_norms(model, "param" if group.rank else "grad")

        with pytest.raises(ValueError, match=r"ranks differ in the transfers made before forward.*measuring the (grads|params)' norms 2"):
            train()
        refused.append(group.rank)

    run_ranks(2, body)
    assert sorted(refused) == [0, 1]
