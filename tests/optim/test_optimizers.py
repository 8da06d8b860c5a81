"""docs/optimizers.md says which optimizers are right; here they are run. And what check_optimizer sees."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support import optimizers
from tests.support.models import WORLDS
from tests.support.param_groups import all_whole, as_layers, build, by_name, matrices_whole
from tests.support.ranks import ThreadCommunicator, run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
ENTRIES = [*optimizers.of_torch(), *optimizers.of_others()]


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_page_says_what_happens(entry: optimizers.Entry) -> None:
    row = optimizers.row(entry)
    assert row in PAGE.read_text().splitlines()
    assert "differs" not in row


def test_the_page_has_these_rows_and_no_others() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if " | equal" in line or " | refused |" in line]
    named = [row[0].removeprefix("| ") for row in rows if "align" not in row[1]]
    assert named == [entry.name for entry in ENTRIES]


class Sampled(torch.optim.SGD):
    """One that asks for more than its gradients when it is made."""

    def __init__(self, params: Any, data: object) -> None:
        super().__init__(params, lr=0.1)


class TwoFaced(optimizers.Lamb):
    """A norm in the groups that ask for one, as optimizers do that hold matrices and vectors."""

    def step(self) -> None:
        groups = self.param_groups
        for self.param_groups in [[group] for group in groups]:
            self.kind = self.param_groups[0].get("kind")
            super().step()
        self.param_groups = groups

    def update(self, parameter: Any, gradient: Any, state: Any) -> Any:
        return super().update(parameter, gradient, state) if self.kind == "a" else gradient


class ByItsLoss(torch.optim.SGD):
    """Steps as long as the loss says that it still has to go."""

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        loss = float(closure())
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad.sign(), alpha=0.001 * loss)


def optimizer_over(model: nn.Module, kind: Callable[..., Any], options: Any = None, **arguments: Any) -> torch.optim.Optimizer:
    return kind(zero3.param_groups(model, options) if options is not None else zero3.get_trainable_chunk(model), **arguments)


def stale(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = optimizer_over(model, torch.optim.SGD, lr=0.1)
    zero3.param_groups(model, by_name)
    return optimizer


def half_held(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(zero3.get_trainable_chunk(model)[:2], lr=0.1)


def twice(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [optimizer_over(model, torch.optim.SGD, lr=0.1) for _ in range(2)]


def of_originals(model: nn.Module) -> torch.optim.Optimizer:
    with zero3.full_params(model):
        return torch.optim.SGD(list(model.parameters()), lr=0.1)


RIGHT: dict[str, Callable[[nn.Module], Any]] = {
    "AdamW, fused": lambda model: optimizer_over(model, torch.optim.AdamW, fused=True),
    "SGD by name": lambda model: optimizer_over(model, torch.optim.SGD, by_name, lr=0.1),
    "a schedule that begins at 0": lambda model: optimizer_over(model, torch.optim.Adam, lr=0.0),
    "a rate in a tensor": lambda model: optimizer_over(model, torch.optim.Adam, lr=torch.tensor(0.1), foreach=False),
    "whole where it takes norms": lambda model: optimizer_over(model, TwoFaced, matrices_whole),
    "two that share the work": lambda model: [
        torch.optim.SGD(model.get_trainable_chunk()[:2], lr=0.1),
        torch.optim.Adam(model.get_trainable_chunk()[2:]),
    ],
}

WRONG: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a norm of slices": (lambda model: optimizer_over(model, optimizers.Lamb), "whole"),
    "a norm of slices, by name": (lambda model: optimizer_over(model, optimizers.Lamb, by_name), "whole"),
    "a norm of whole and of flat ones": (lambda model: optimizer_over(model, optimizers.Lamb, matrices_whole), "flat slices"),
    "flat where it takes norms": (
        lambda model: optimizer_over(model, TwoFaced, lambda n, i: {"kind": "a" if i.ndim == 1 else "b"}),
        "whole",
    ),
    "several parameters at once": (lambda model: optimizer_over(model, torch.optim.LBFGS, all_whole), "several parameters at once"),
    "a step by the loss": (lambda model: optimizer_over(model, ByItsLoss, all_whole, lr=0.1), "several parameters at once"),
    "chunks that parts replace": (stale, "zero3.param_groups has replaced since"),
    "not all": (half_held, "no optimizer holds"),
    "some twice": (twice, "hold more than once"),
    "the model before sharding": (of_originals, "of the unsharded model"),
    "can't be made anew": (lambda model: optimizer_over(model, Sampled, data=None), "can't be tried out"),
}


def checked(group: ThreadCommunicator, modules: list[nn.Module], make: Callable[[nn.Module], Any], **options: Any) -> str:
    model = as_layers(group, modules)
    made = make(model)
    try:
        zero3.check_optimizer(model, *(made if isinstance(made, list) else [made]), **options)
    except ValueError as error:
        return str(error)
    return ""


@WORLDS
@pytest.mark.parametrize("name", RIGHT)
def test_check_optimizer_passes_what_is_right(world_size: int, name: str) -> None:
    models = [build(rank) for rank in range(world_size)]
    assert run_ranks(world_size, lambda group: checked(group, models[group.rank], RIGHT[name])) == [""] * world_size


@pytest.mark.parametrize("name", WRONG)
def test_check_optimizer_refuses_what_is_wrong_on_all_ranks(name: str) -> None:
    make, text = WRONG[name]
    models = [build(rank) for rank in range(3)]
    found = run_ranks(3, lambda group: checked(group, models[group.rank], make))
    assert found == [found[0]] * 3
    assert text in found[0]


def test_check_optimizer_may_accept_what_can_not_be_tried_out() -> None:
    models = [build(rank) for rank in range(2)]
    made: Callable[[nn.Module], Any] = WRONG["can't be made anew"][0]
    assert run_ranks(2, lambda group: checked(group, models[group.rank], made, strict=False)) == ["", ""]


def test_check_optimizer_leaves_no_trace() -> None:
    layer = zero3.Zero3Layer(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(layer.get_trainable_chunk())
    before, state = layer.get_trainable_chunk()[0].detach().clone(), torch.random.get_rng_state()
    with torch.no_grad():
        zero3.check_optimizer(layer, optimizer)
    assert torch.equal(before, layer.get_trainable_chunk()[0]) and torch.equal(state, torch.random.get_rng_state())
    assert not optimizer.state and layer.get_trainable_chunk()[0].grad is None


class EightBit(torch.optim.SGD):
    """Keeps the momentum of large tensors in 8 bits, by blocks of 256 elements, as libraries do; that of small ones as it is."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                if parameter.numel() >= 4096 and parameter.numel() % 256 == 0:
                    blocks = momentum.view(-1, 256)
                    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
                    blocks.copy_((blocks / scale).round() * scale)
                parameter.sub_(momentum, alpha=group["lr"])


def test_blocks_of_8_bits_are_seen_though_small_tensors_have_none() -> None:
    models = [build(rank) for rank in range(2)]
    flat = run_ranks(2, lambda group: checked(group, models[group.rank], lambda model: optimizer_over(model, EightBit, lr=0.1)))
    assert "flat slices" in flat[0]
    models = [build(rank) for rank in range(2)]
    whole = run_ranks(2, lambda group: checked(group, models[group.rank], lambda model: optimizer_over(model, EightBit, all_whole, lr=0.1)))
    assert whole == ["", ""]


def test_saving_warns_those_who_did_not_check(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> list[str]:
        model = as_layers(group, models[group.rank])
        optimizer = optimizer_over(model, optimizers.Lamb)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zero3.save_checkpoint(tmp_path, model, optimizer)
            zero3.full_optimizer_state_dict(model, optimizer)
        return [str(warning.message) for warning in caught]

    models = [build(rank) for rank in range(1)]
    found = run_ranks(1, body)[0]  # one rank: what is caught is the process's
    assert len(found) == 2
    assert all("does not train as an unsharded one would" in text and "whole" in text for text in found)
