"""full_state_dict and load_full_state_dict: extra state of modules, and rank 0's dict looked through before anything changes."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.checkpoints import assert_same, odd, on_ranks
from tests.support.models import WORLDS
from tests.support.processes import Rank
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group


class Counting(nn.Linear):
    """Keeps numbers and a tensor beside its parameters, and refuses what is not of its kind."""

    def __init__(self, count: int) -> None:
        super().__init__(3, 3, dtype=torch.float64)
        self.kept: Any = {"count": count, "scales": torch.full((2,), float(count)), "rows": [torch.ones(1)], "names": ("a", None)}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise KeyError("count")
        self.kept = state


class Nested(Counting):
    """With a module inside, and a buffer: the extra state comes after what is its own, before what is inside."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.register_buffer("seen", torch.zeros(1))
        self.inside = Counting(count + 1)


def counting(first: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Nested(first), nn.Sequential(Counting(first + 2)), nn.Linear(3, 3, dtype=torch.float64))


def on_counting(world_size: int, body: Callable[[Any, ThreadCommunicator], Any], step: int = 0) -> list[Any]:
    """`body(model, group)` on every rank, whose model counts from `step` times the rank."""
    models = [counting(step * rank) for rank in range(world_size)]  # here: threads share one random generator
    return run_ranks(world_size, lambda group: body(zero3.shard(models[group.rank], [Nested], process_group=process_group(group)), group))


def counts(model: nn.Module) -> list[Any]:
    return [module.kept["count"] for module in model.modules() if isinstance(module, Counting | Nested)]


@WORLDS
def test_full_state_dict_has_extra_state_where_torch_has_it(world_size: int) -> None:
    """Rank 0's, on every rank that keeps the dict: a copy, which modules no longer change."""
    expected = counting(0).state_dict()

    def body(model: Any, group: ThreadCommunicator) -> tuple[Any, Any]:
        found = zero3.full_state_dict(model), zero3.full_state_dict(model, rank0_only=False)
        for module in model.modules():
            if isinstance(module, Counting):
                module.kept["scales"].fill_(-1)
                module.kept["rows"][0].fill_(-1)
        return found

    for rank, (first, every) in enumerate(on_counting(world_size, body, step=10)):
        assert list(every) == list(expected)
        assert_same(every, dict(expected))
        assert_same(first, dict(expected) if rank == 0 else {})


@WORLDS
def test_load_full_state_dict_sets_extra_state_on_every_rank(world_size: int) -> None:
    given = counting(7).state_dict()

    def body(model: Any, group: ThreadCommunicator) -> Any:
        zero3.load_full_state_dict(model, given if group.rank == 0 else None)
        assert counts(model) == [7, 8, 9]
        return zero3.full_state_dict(model, rank0_only=False)

    for found in on_counting(world_size, body):
        assert_same(found, dict(given))


def test_extra_state_is_missing_or_unknown_as_in_torch() -> None:
    given = counting(7).state_dict()
    del given["0.inside._extra_state"]
    given["2._extra_state"] = 3
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.inside\._extra_state(.|\n)*Unexpected key.*2\._extra_state"):
        counting(0).load_state_dict(given)

    def body(model: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"missing: 0\.inside\._extra_state\. unknown: 2\._extra_state"):
            zero3.load_full_state_dict(model, given)
        assert counts(model) == [0, 1, 2]
        zero3.load_full_state_dict(model, given, strict=False)
        assert counts(model) == [7, 1, 9]

    on_counting(2, body)


@WORLDS
def test_extra_state_that_could_only_be_pickled(world_size: int) -> None:
    """Rank 0 gives it away as torch does; it neither travels nor is loaded."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        before = zero3.full_state_dict(model, rank0_only=False)
        when = datetime.date(2026, 1, 1)
        with pytest.raises(TypeError, match=r"0\._extra_state\['when'\] is a datetime\.date.*never a pickle"):
            zero3.load_full_state_dict(model, {**before, "0._extra_state": {"when": when}})
        assert_same(zero3.full_state_dict(model, rank0_only=False), before)
        model[0].module.kept = {"when": when}
        assert zero3.full_state_dict(model).get("0._extra_state") == ({"when": when} if group.rank == 0 else None)
        if world_size > 1:
            with pytest.raises(TypeError, match=r"rank 0: 0\._extra_state\['when'\] is a datetime\.date"):
                zero3.full_state_dict(model, rank0_only=False)

    on_counting(world_size, body)


def test_a_module_that_refuses_its_extra_state_is_heard_on_every_rank() -> None:
    given = {**counting(7).state_dict(), "0._extra_state": [1]}

    def body(model: Any, group: ThreadCommunicator) -> None:
        with pytest.raises(RuntimeError, match=r"rank 0: KeyError: 'count'"):
            zero3.load_full_state_dict(model, given)

    on_counting(2, body)


@pytest.mark.parametrize("where", ["get_extra_state on rank 0", "get_extra_state on rank 1"])
def test_a_module_that_can_not_tell_its_extra_state(where: str) -> None:
    def fails() -> None:
        raise LookupError("gone")

    def body(model: Any, group: ThreadCommunicator) -> None:
        if where.endswith(str(group.rank)):
            model[0].module.get_extra_state = fails
        with pytest.raises(RuntimeError, match=rf"rank {where[-1]}: LookupError: gone"):
            zero3.full_state_dict(model, rank0_only=False)
        if where.endswith("1"):
            zero3.full_state_dict(model)  # asks rank 0 alone

    on_counting(2, body)


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], type[Exception], str]] = {
    "numpy": (lambda s: {k: v.numpy() for k, v in s.items()}, TypeError, r"can't be read: embed\.weight is a numpy\.ndarray, expected a"),
    "a number": (lambda s: {**s, "norm.weight": 1.5}, TypeError, r"can't be read: norm\.weight is a builtins\.float"),
    "None in it": (lambda s: {**s, "norm.weight": None}, TypeError, r"norm\.weight is a builtins\.NoneType"),
    "meta": (lambda s: {**s, "norm.weight": s["norm.weight"].to("meta")}, ValueError, r"norm\.weight is on the meta device, so it"),
    "sparse": (lambda s: {**s, "norm.weight": s["norm.weight"].to_sparse()}, ValueError, r"norm\.weight is sparse_coo, expected a dense"),
    "integers for weights": (lambda s: {**s, "norm.weight": s["norm.weight"].int()}, ValueError, r"kinds: norm\.weight has integer, exp"),
    "weights for integers": (
        lambda s: {**s, "blocks.0.calls": torch.tensor(1.5)}, ValueError, r"other kinds: blocks\.0\.calls has floating, expected integer",
    ),
    "complex": (lambda s: {**s, "norm.weight": s["norm.weight"] + 1j}, ValueError, r"norm\.weight has complex, expected floating"),
    "a shape": (lambda s: {**s, "norm.weight": torch.zeros(2)}, ValueError, r"other shapes: norm\.weight has \(2,\), expected \(5,\)"),
    "a list": (lambda s: list(s.items()), TypeError, "state_dict must map names to tensors on rank 0, found a list"),
    "nothing": (lambda s: None, TypeError, "state_dict must map names to tensors on rank 0, found a NoneType"),
    "numbers as names": (lambda s: dict(enumerate(s.values())), TypeError, "state_dict must have names as keys, found 0"),
    "a name twice": (
        lambda s: {**s, "_orig_mod.norm.weight": s["norm.weight"] + 1}, ValueError, r"has 'norm\.weight' twice, with and without",
    ),
}  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", WRONG)
def test_load_full_state_dict_of_what_is_none(name: str, strict: bool) -> None:
    """The same error on all ranks, and nothing has changed."""
    change, kind, message = WRONG[name]
    given = change(odd().state_dict())

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> str:
        for chunk in model.parameters():
            chunk.data.fill_(3)
        before = zero3.full_state_dict(model, rank0_only=False)
        with pytest.raises(kind, match=message) as raised:
            zero3.load_full_state_dict(model, given if group.rank == 0 else {}, strict=strict)
        assert_same(zero3.full_state_dict(model, rank0_only=False), before)
        return str(raised.value)

    assert len(set(on_ranks(3, body))) == 1


def test_load_full_state_dict_of_a_model_that_is_sharded_itself() -> None:
    """Its parameters have no values outside of a forward."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        names = dict.fromkeys(odd().state_dict())
        given = {name: model.get_parameter(name) if name.startswith("norm") else torch.zeros(1) for name in names}
        with pytest.raises(ValueError, match=r"norm\.weight is a ReleasedParameter"):
            zero3.load_full_state_dict(model, given)

    on_ranks(2, body)


def _load_numpy(rank: Rank) -> str:
    model = zero3.shard(odd())
    given = {name: np.asarray(value) for name, value in odd().state_dict().items()} if rank.number == 0 else None
    with pytest.raises(TypeError, match=r"is a numpy\.ndarray") as raised:
        zero3.load_full_state_dict(model, given)
    return str(raised.value)


def test_load_full_state_dict_with_a_wrong_value_on_processes() -> None:
    """Real ranks: nobody waits for another."""
    assert len(set(on_processes(2, _load_numpy))) == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_full_state_dict_to_a_dtype_that_would_truncate(dtype: torch.dtype) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=rf"rank 0: .* must be a floating dtype of 16 bits or more, found {dtype}"):
            zero3.full_state_dict(model, dtype=dtype)

    on_ranks(2, body)
