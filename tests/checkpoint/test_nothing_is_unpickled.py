"""What ranks tell each other, and what is on the disk, are plain values and tensors: nothing that could run code is sent or taken."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.checkpoints import on_ranks, train
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from tests.zero1.test_zero_redundancy_optimizer import assert_same_state_dict


class Trap:
    """What a hostile pickle is made of: who unpickles it runs what it names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> Any:
        return Path.touch, (self.directory / "sprung",)


class DictTrap(dict[str, int], Trap):
    """One that passes for a plain value; its contents are one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(a=1)
        self.directory = directory


def test_the_trap_works(tmp_path: Path) -> None:
    for trap in (Trap(tmp_path), DictTrap(tmp_path)):
        pickle.loads(pickle.dumps(trap))
        (tmp_path / "sprung").unlink()


class Keeping(torch.optim.SGD):
    """Plain descent that keeps something for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1, kept: Callable[[], Any] = int) -> None:
        super().__init__(params, lr=lr)
        self.kept = kept

    def step(self) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["kept"] = self.kept()


def replicated(group: Any, kept: Callable[[], Any] = int, **options: Any) -> tuple[list[nn.Parameter], zero3.ZeroRedundancyOptimizer]:
    parameters = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 3))]
    made = zero3.ZeroRedundancyOptimizer([{"params": parameters, **options}], lambda p, **o: Keeping(p, kept=kept, **o), group, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    return parameters, made


@pytest.mark.parametrize("guilty", [0, 1])
def test_consolidate_state_dict_refuses_a_trap_in_the_state_on_every_rank(guilty: int, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> str:
        _, ours = replicated(group, (lambda: Trap(tmp_path)) if group.rank == guilty else int)
        ours.step()
        with pytest.raises(
            TypeError, match=r"Keeping's 'kept' of parameter \d of group 0 is a tests\.[\w.]+\.Trap: .* never a pickle"
        ) as raised:
            ours.consolidate_state_dict()
        return str(raised.value)

    first, second = run_ranks(2, body)
    assert first == second and first.startswith(f"rank {guilty}: ")
    assert not (tmp_path / "sprung").exists()


def test_a_trap_in_the_groups_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Options travel when a rank has run out of data."""

    def body(group: ThreadCommunicator) -> list[Tensor]:
        parameters, ours = replicated(group)
        ours.param_groups[0]["callback"] = Trap(tmp_path)
        with pytest.raises(TypeError, match=r"\['options'\]\[0\]\['callback'\] is a tests\.[\w.]+\.Trap"):
            ours.step() if group.rank == 0 else ours.join_hook().main_hook()
        del ours.param_groups[0]["callback"]
        ours.step() if group.rank == 0 else ours.join_hook().main_hook()
        return [parameter.detach() for parameter in parameters]

    for found in run_ranks(2, body):
        assert all(torch.equal(each, torch.full_like(each, 0.9)) for each in found)
    assert not (tmp_path / "sprung").exists()


class Hostile(ThreadCommunicator):
    """A rank that sends pickles where others send text."""

    payload = b""

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        if len(payload) == 8:  # the length of what follows
            self.announced = len(self.payload)
            payload = self.announced.to_bytes(8, "little")
        elif len(payload) > 16:
            payload = self.payload
        return super().exchange(payload, device)


def test_a_pickle_that_another_rank_sends_is_not_opened(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        if group.rank == 1:
            group = Hostile(group.world, 1)
            group.payload = pickle.dumps(Trap(tmp_path), protocol=0).ljust(4096)
        _, ours = replicated(group)
        ours.step()
        with pytest.raises(ValueError, match=r"Expecting value|Extra data"):
            ours.consolidate_state_dict()

    run_ranks(2, body)
    assert not (tmp_path / "sprung").exists()


KEPT: dict[str, Callable[[], Any]] = {
    "numbers": lambda: {"none": None, "whole": 2**70, "real": 0.1, "big": float("inf"), "yes": True, "text": "ä\n", "items": [1, (2, "3")]},
    "keys": lambda: {1: 2, (1, 2): [3], "$tensor": 4, "nested": {2.5: Counter(a=1)}},
    "a count": lambda: torch.tensor(3, dtype=torch.int64),
    "a count in bf16": lambda: torch.tensor(0.1, dtype=torch.bfloat16),
    "counts": lambda: [torch.tensor(0.1), {"b": torch.tensor(True)}],
    "a bound": lambda: -float("inf"),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("world_size", [2, 3])
def test_consolidate_state_dict_brings_other_state_as_it_was(name: str, world_size: int) -> None:
    plain = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 3))]
    optimizer = Keeping(plain, kept=KEPT[name])
    for parameter in plain:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def body(group: ThreadCommunicator) -> Any:
        _, ours = replicated(group, KEPT[name])
        ours.step()
        ours.consolidate_state_dict()
        return ours.state_dict() if group.rank == 0 else None

    assert_same_state_dict(run_ranks(world_size, body)[0]["state"], optimizer.state_dict()["state"])


def test_options_arrive_as_they_were() -> None:
    options = {"lr": torch.tensor(0.3, dtype=torch.float64), "betas": (0.9, float("nan")), "note": {"a": [None, True]}, "name": "last"}

    def body(group: ThreadCommunicator) -> Any:
        _, ours = replicated(group, **{key: None for key in options if key != "lr"})
        if group.rank == 0:  # a scheduler's work, which a rank without data does not do
            ours.param_groups[0].update(options)
        ours.step() if group.rank == 0 else ours.join_hook().main_hook()
        return {key: ours.param_groups[0][key] for key in options}

    for found in run_ranks(2, body):
        assert torch.equal(found["lr"], options["lr"]) and found["lr"].dtype == torch.float64  # type: ignore[call-overload, arg-type]
        assert repr({**found, "lr": 0}) == repr({**options, "lr": 0})


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


SETTINGS: dict[str, Callable[[torch.optim.Optimizer, Any], Any]] = {
    "state": lambda optimizer, trap: state_of(optimizer).update(trap=trap),
    "group": lambda optimizer, trap: optimizer.param_groups[0].update(trap=trap),
    "inside": lambda optimizer, trap: optimizer.param_groups[0].update(trap=[{"a": (1, trap)}]),
}


@pytest.mark.parametrize("place", [*SETTINGS, "extra"])
def test_save_checkpoint_writes_no_trap(place: str, tmp_path: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        train(model, optimizer, range(1))
        extra = None
        if place == "extra":
            extra = {"schedule": Trap(tmp_path)}
        else:
            SETTINGS[place](optimizer, Trap(tmp_path))
            with pytest.raises(TypeError, match=r"is a tests\.[\w.]+\.Trap: .* never a pickle"):
                zero3.full_optimizer_state_dict(model, optimizer)
        with pytest.raises(TypeError, match=r"is a tests\.[\w.]+\.Trap: .* never a pickle"):
            zero3.save_checkpoint(tmp_path / "run", model, optimizer, extra=extra)

    on_ranks(2, body)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize("place", ["state", "group"])
def test_load_full_optimizer_state_dict_does_not_deal_out_a_trap(place: str, tmp_path: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        train(model, optimizer, range(1))
        given = zero3.full_optimizer_state_dict(model, optimizer)
        if group.rank == 0:
            (given["state"]["norm.weight"] if place == "state" else given["param_groups"][0])["trap"] = Trap(tmp_path)
        with pytest.raises(TypeError, match=r"rank 0: 'trap' of .* is a tests\.[\w.]+\.Trap"):
            zero3.load_full_optimizer_state_dict(model, optimizer, given)

    on_ranks(2, body)
    assert not list(tmp_path.rglob("*"))


def test_save_checkpoint_takes_what_passes_for_a_dict_as_one(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> Any:
        model = zero3.shard(models[group.rank], nn.Linear, process_group=process_group(group))
        zero3.save_checkpoint(tmp_path / "run", model, extra=DictTrap(tmp_path))
        return zero3.load_checkpoint(tmp_path / "run", model)

    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    for extra in run_ranks(2, body):
        assert type(extra) is dict and extra == {"a": 1}
    assert not (tmp_path / "sprung").exists()
