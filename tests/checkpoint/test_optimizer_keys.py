"""Loading optimizer state that the optimizer would not keep itself: another class's, or of other options."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.checkpoints import OPTIMIZERS, assert_same, odd, on_ranks, resumed, train
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_close, process_group

pytestmark = pytest.mark.slow

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
MAKE: dict[str, Make] = {
    **OPTIMIZERS,
    "Adam without amsgrad": lambda p: torch.optim.Adam(p, lr=0.01),
    "RMSprop without more": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}
ways = pytest.mark.parametrize("way", ["load_checkpoint", "load_full_optimizer_state_dict"])


def saved_by(name: str, path: Path, steps: int = 2) -> Any:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> Any:
        optimizer = MAKE[name](zero3.get_trainable_chunk(model))
        train(model, optimizer, range(steps))
        zero3.save_checkpoint(path, model, optimizer)
        return zero3.full_optimizer_state_dict(model, optimizer)

    return on_ranks(2, body)[0]


def load(way: str, path: Path, full: Any, model: Any, optimizer: Any) -> None:
    if way == "load_checkpoint":
        zero3.load_checkpoint(path, model, optimizer)
    else:
        zero3.load_full_optimizer_state_dict(model, optimizer, full)


OTHERS = [
    (
        "SGD with momentum",
        "AdamW",
        r"AdamW, as it was made here, keeps exp_avg, exp_avg_sq, step, and .* saved( by SGD)? has momentum_buffer",
    ),
    (
        "AdamW",
        "SGD with momentum",
        r"SGD, as it was made here, keeps momentum_buffer, and .* saved( by AdamW)? has exp_avg, exp_avg_sq, step",
    ),
    ("AdamW", "SGD", r"SGD, as it was made here, keeps nothing, and .* saved( by AdamW)? has exp_avg, exp_avg_sq, step"),
    (
        "Adam",
        "Adam without amsgrad",
        r"Adam, as .* keeps exp_avg, exp_avg_sq, step, and .* saved( by Adam)? has .*max_exp_avg_sq",
    ),
    (
        "Adam without amsgrad",
        "Adam",
        r"Adam, as .* keeps exp_avg, exp_avg_sq, max_exp_avg_sq, step, and .* saved( by Adam)? has exp_avg, exp_avg_sq, s",
    ),
    ("NAdam", "AdamW", r"and the state that was saved( by NAdam)? has exp_avg, exp_avg_sq, mu_product, step"),
    (
        "RMSprop",
        "RMSprop without more",
        r"keeps square_avg, step, and .* saved( by RMSprop)? has grad_avg, momentum_buffer, square_avg, step",
    ),
    ("Adagrad", "Adadelta", r"keeps acc_delta, square_avg, step, and .* saved( by Adagrad)? has step, sum"),
]


@ways
@pytest.mark.parametrize(("saved", "here", "message"), OTHERS, ids=[f"{saved} into {here}" for saved, here, _ in OTHERS])
def test_state_of_another_kind_is_refused(saved: str, here: str, message: str, way: str, tmp_path: Path) -> None:
    """On all ranks alike, before anything changes; and the optimizer goes on with what it had."""
    full = saved_by(saved, tmp_path)

    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> str:
        optimizer = MAKE[here](zero3.get_trainable_chunk(model))
        before = zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)
        with pytest.raises(ValueError, match=rf"nothing was loaded\. .*{message}") as raised:
            load(way, tmp_path, full, model, optimizer)
        assert_same((zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)), before)
        train(model, optimizer, range(1))
        return str(raised.value)

    assert len(set(on_ranks(3, body))) == 1


@ways
@pytest.mark.parametrize("name", [*OPTIMIZERS, "Adafactor"])
@pytest.mark.filterwarnings("ignore:this run does not train as an unsharded one would:UserWarning")
def test_state_of_its_own_kind_is_taken(name: str, way: str, tmp_path: Path) -> None:
    """By an optimizer that has made no step, and by one that has."""
    full = saved_by(name, tmp_path)

    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        for steps in (0, 1):
            optimizer = MAKE[name](zero3.get_trainable_chunk(model))
            train(model, optimizer, range(steps))
            load(way, tmp_path, full, model, optimizer)
            assert_same(zero3.full_optimizer_state_dict(model, optimizer), full if group.rank == 0 else {})

    on_ranks(2, body)


def test_a_run_that_made_no_step_fits_any_optimizer(tmp_path: Path) -> None:
    full = saved_by("AdamW", tmp_path, steps=0)
    on_ranks(2, lambda model, optimizer, group: load("load_checkpoint", tmp_path, full, model, optimizer), optimizer="NAdam")


def test_another_class_that_keeps_the_same_is_taken_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = saved_by("AdamW", tmp_path)
    with caplog.at_level(logging.WARNING, "zero3"):
        on_ranks(2, lambda model, optimizer, group: load("load_checkpoint", tmp_path, full, model, optimizer), optimizer="RAdam")
    assert [r.getMessage() for r in caplog.records if "is loaded into" in r.getMessage()] == [
        "the state of AdamW is loaded into RAdam; options that both have are those that were saved"
    ]


class Stacked(torch.optim.Optimizer):
    """Keeps several moments of a parameter in one tensor, or one."""

    def __init__(self, params: Any, moments: int) -> None:
        super().__init__(params, {"lr": 0.1})
        self.moments = moments

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None):
            shape = (self.moments, *parameter.shape) if self.moments > 1 else parameter.shape
            moment = self.state[parameter].setdefault("moment", torch.zeros(shape, dtype=parameter.dtype))
            moment += parameter.grad
            parameter -= 0.1 * (moment.sum(0) if self.moments > 1 else moment)


@ways
@pytest.mark.parametrize("moments", [1, 2])
def test_state_of_the_same_names_with_another_shape_is_refused(moments: int, way: str, tmp_path: Path) -> None:
    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        parts = zero3.param_groups(model, lambda name, info: {"whole": True})
        optimizer = Stacked(parts, moments)
        train(model, optimizer, range(1))
        zero3.save_checkpoint(tmp_path, model, optimizer)
        full = zero3.full_optimizer_state_dict(model, optimizer)
        load(way, tmp_path, full, model, Stacked(parts, moments))
        with pytest.raises(ValueError, match=r"nothing was loaded\. .*moment is floating.*, expected floating"):
            load(way, tmp_path, full, model, Stacked(parts, 3 - moments))

    on_ranks(2, body)


class Lookahead(torch.optim.Optimizer):
    """Keeps one tensor from its first step on, and another from its sixth; with `shy`, it can't be made but by who knows how."""

    def __init__(self, params: Any, lr: float = 0.1, shy: bool = False) -> None:
        if shy and len([*params]) < 3:
            raise RuntimeError("too few parameters")
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            state = self.state[parameter]
            state["fast"] = state.get("fast", torch.zeros_like(parameter)) + 1
            if bool((state["fast"] > 5).any()):
                state.setdefault("slow", parameter.detach().clone())
            parameter.data -= self.param_groups[0]["lr"] * parameter.grad


def by(make: Make, path: Path, steps: int) -> Callable[[ThreadCommunicator], None]:
    """Saves after so many steps (or loads, for None), and makes one more."""
    models = [odd(), odd()]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        optimizer = make(zero3.get_trainable_chunk(model))
        if steps:
            train(model, optimizer, range(steps))
            zero3.save_checkpoint(path, model, optimizer)
        else:
            zero3.load_checkpoint(path, model, optimizer)
            train(model, optimizer, range(1))

    return body


@pytest.mark.filterwarnings("ignore:this run does not train as an unsharded one would:UserWarning")
def test_what_an_optimizer_keeps_only_later_is_taken(tmp_path: Path) -> None:
    run_ranks(2, by(lambda p: Lookahead(p), tmp_path, 7))
    run_ranks(2, by(lambda p: Lookahead(p), tmp_path, 0))
    with pytest.raises(ValueError, match=r"AdamW, as .* and the state that was saved by Lookahead has fast, slow"):
        run_ranks(2, by(lambda p: torch.optim.AdamW(p), tmp_path, 0))


@pytest.mark.filterwarnings("ignore:this run does not train as an unsharded one would:UserWarning")
def test_an_optimizer_that_can_not_be_tried_out_takes_what_is_saved(tmp_path: Path) -> None:
    def shy(parameters: Iterable[Any]) -> torch.optim.Optimizer:
        made = Lookahead(parameters)
        made.defaults["shy"] = True
        return made

    run_ranks(2, by(shy, tmp_path, 2))
    run_ranks(2, by(shy, tmp_path, 0))


def test_moments_of_another_kind_of_numbers(tmp_path: Path) -> None:
    full = saved_by("AdamW", tmp_path)
    full["state"]["norm.weight"]["exp_avg"] = full["state"]["norm.weight"]["exp_avg"].long()

    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        groups = zero3.param_groups(model, lambda name, info: {"eps": 1e-7} if name == "norm.weight" else {})
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        with pytest.raises(ValueError, match=r"norm\.weight: exp_avg is integer \(int64\), expected floating"):
            zero3.load_full_optimizer_state_dict(model, optimizer, full)

    on_ranks(2, body)


class Forgetful(torch.optim.SGD):
    """Loses its state on one rank."""

    def forget(self) -> None:
        self.state.clear()


@pytest.mark.parametrize("way", ["save_checkpoint", "full_optimizer_state_dict"])
def test_ranks_that_kept_different_state(way: str, tmp_path: Path) -> None:
    """A slice without its state would make a checkpoint that nobody can load, or let the others wait."""

    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        optimizer = Forgetful(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9)
        train(model, optimizer, range(1))
        if group.rank == 1:
            optimizer.forget()
        save = partial(zero3.save_checkpoint, tmp_path / "run") if way == "save_checkpoint" else zero3.full_optimizer_state_dict
        with pytest.raises(ValueError, match=r"rank \d: the optimizer keeps .* all ranks must make the same steps"):
            save(model, optimizer)

    on_ranks(2, body)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("way", ["full", "files"])
def test_slices_of_a_chunk_have_one_count_of_steps_whichever_parameters_had_state(way: str, tmp_path: Path) -> None:
    """Where a rank's slice holds none that a gradient had reached, it has no count of its own."""

    def made(group: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch_layer = copy.deepcopy(start)
        model = zero3.Zero3Layer(torch_layer, process_group=group)
        return model, torch.optim.AdamW(model.get_trainable_chunk(), lr=0.1)

    start = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    plain = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for _ in range(3):
        plain[0](torch.ones(1, 4).double()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    state, names = optimizer.state_dict(), [name for name, _ in plain.named_parameters()]
    named = {
        "state": {names[number]: held for number, held in state["state"].items()},
        "param_groups": [{**group, "params": names} for group in state["param_groups"]],
    }

    def body(group: Any) -> tuple[set[float], list[Tensor]]:
        model, optimizer = made(group)
        zero3.load_full_optimizer_state_dict(model, optimizer, copy.deepcopy(named))
        if way == "files":
            zero3.save_checkpoint(tmp_path / f"of {ranks}", model, optimizer)
            model, optimizer = made(group)
            zero3.load_checkpoint(tmp_path / f"of {ranks}", model, optimizer)
        model(torch.ones(1, 4).double()).pow(2).sum().backward()
        optimizer.step()
        with zero3.full_params(model):
            values = [each.detach().clone() for each in model.module.parameters()]
        return {float(held["step"]) for held in optimizer.state.values()}, values

    found = []
    for ranks in (1, 2, 3):
        for steps, values in run_ranks(ranks, body):
            assert steps == {4.0}
            found.append(values)
    for values in found[1:]:
        for one, other in zip(found[0], values, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_ranks_that_have_made_different_numbers_of_steps(tmp_path: Path) -> None:
    """A checkpoint of them could not be loaded."""

    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        train(model, optimizer, range(2))
        if group.rank == 1:
            optimizer.step = lambda: None  # type: ignore[method-assign]
        train(model, optimizer, range(1))
        with pytest.raises(ValueError, match=r"rank 1: the optimizer has made 2 steps .*, and 3 where that begins"):
            zero3.save_checkpoint(tmp_path / "run", model, optimizer)

    on_ranks(2, body)
    assert not (tmp_path / "run").exists()


class Compensated(torch.optim.SGD):
    """Keeps what was lost of updates, for parameters in 16 bits alone, as Kahan's sums of other libraries do."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None and parameter.dtype.itemsize < 4:
                self.state[parameter].setdefault("lost", torch.zeros_like(parameter)).add_(parameter.grad)
                parameter.data.sub_(self.state[parameter]["lost"], alpha=0.01)


MAKE["Compensated"] = Compensated


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.complex128) for name in (*OPTIMIZERS, "Compensated")),
        *((name, dtype) for name in ("AdamW", "Compensated") for dtype in (torch.complex64, torch.float64, torch.bfloat16)),
    ],
    ids=str,
)
def test_state_goes_on_whose_keys_or_kinds_are_as_the_parameters_dtype(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also that of complex parameters, on another number of ranks: as in plain torch."""

    class Map(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            drawn = torch.randn((3, 5), dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
            self.weight = nn.Parameter((drawn if dtype.is_complex else drawn.real).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    def steps(model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> None:
        for number in numbers:
            optimizer.zero_grad()
            x = torch.randn((4, 5), dtype=torch.float64, generator=torch.Generator().manual_seed(number)).to(dtype)
            model(x).abs().square().sum().backward()
            optimizer.step()

    def shard(model: nn.Module, group: ThreadCommunicator) -> Any:
        sharded = zero3.Zero3Layer(model, process_group=process_group(group))
        return sharded, make(sharded.get_trainable_chunk())

    plain, make = Map(), MAKE[name]
    steps(plain, make(plain.parameters()), range(5))
    bound = 3e-2 if dtype is torch.bfloat16 else 1e-5 if dtype is torch.complex64 else 1e-12
    assert_close(resumed(tmp_path, Map, shard, steps), plain.state_dict(), bound, "five steps")
