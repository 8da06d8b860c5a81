"""full_optimizer_state_dict and its inverse, against torch's own get_optimizer_state_dict over unsharded, and FSDP2, models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import zero3
from tests.support.checkpoints import OPTIMIZERS, assert_same, odd, on_ranks, plain, reached, train
from tests.support.models import WORLDS
from tests.support.processes import Rank
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import assert_close

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def trained(name: str, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = plain(name)
    train(model, optimizer, range(steps))
    return model, optimizer


def reference(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As torch writes it, of a copy (it makes a step with zeros where there is no state yet)."""
    model, optimizer = deepcopy((model, optimizer))
    return dict(get_optimizer_state_dict(model, optimizer, options=FULL))


def numbers(found: dict[str, Any]) -> dict[str, Tensor]:
    return {f"{name}/{key}": v for name, of in found["state"].items() for key, v in of.items() if isinstance(v, Tensor)}


def shape_of(value: Any) -> Any:
    """A state dict with its values forgotten."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.device
    return {key: shape_of(held) for key, held in value.items()} if isinstance(value, dict) else type(value)


@WORLDS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_full_optimizer_state_dict_is_what_torch_gives_for_the_unsharded_model(name: str, world_size: int) -> None:
    expected = reference(*trained(name))

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Any]:
        train(model, optimizer, range(3))
        return zero3.full_optimizer_state_dict(model, optimizer)

    found, *others = on_ranks(world_size, body, optimizer=name)
    assert others == [{}] * (world_size - 1)
    assert shape_of(reached(found)["state"]) == shape_of(reached(expected)["state"])
    assert_close(numbers(reached(found)), numbers(reached(expected)), 1e-12 if world_size > 1 else 0.0, "state")
    assert_same(found["param_groups"], expected["param_groups"])


@WORLDS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_load_full_optimizer_state_dict_takes_a_run_from_plain_torch_to_zero3_and_back(name: str, world_size: int) -> None:
    first = trained(name)
    model_state, optimizer_state = deepcopy(first[0].state_dict()), reached(reference(*first))
    train(*first, range(3, 7))
    last = plain(name)

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> tuple[Any, Any]:
        own = (model_state, optimizer_state) if group.rank == 0 else (None, None)
        zero3.load_full_state_dict(model, own[0])
        zero3.load_full_optimizer_state_dict(model, optimizer, own[1])
        loaded = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        assert_same(reached(loaded), optimizer_state)
        train(model, optimizer, range(3, 5))
        return zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)

    model_state, optimizer_state = on_ranks(world_size, body, optimizer=name)[0]
    last[0].load_state_dict(model_state)
    if numbers(optimizer_state):  # torch's function fails on a state without tensors
        set_optimizer_state_dict(*last, optimizer_state, options=StateDictOptions(full_state_dict=True))
    train(*last, range(5, 7))
    tolerance = 1e-10 if name == "NAdam" else 1e-12  # torch casts its mu_product to the parameter's dtype when it loads one
    assert_close(dict(last[0].named_parameters()), dict(first[0].named_parameters()), tolerance, "seven steps, two of them sharded")


def test_load_full_optimizer_state_dict_keeps_the_options_of_groups() -> None:
    """Two groups of layers, one of them frozen in part; a learning rate that has moved."""

    def grouped(model: Any, parameters: Callable[[nn.Module], Any]) -> torch.optim.Optimizer:
        first, *rest = [parameters(block) for block in model.blocks]
        return torch.optim.SGD([{"params": first, "lr": 0.5}, {"params": [p for block in rest for p in block]}], lr=0.1, momentum=0.9)

    model = odd()
    optimizer = grouped(model, lambda block: [p for p in block.parameters() if p.requires_grad])
    optimizer.param_groups[1]["lr"] = 0.25
    train(model, optimizer, range(2))
    expected = reference(model, optimizer)

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Any]:
        optimizer = grouped(model, zero3.get_trainable_chunk)
        zero3.load_full_optimizer_state_dict(model, optimizer, expected if group.rank == 0 else None)
        assert [options["lr"] for options in optimizer.param_groups] == [0.5, 0.25]
        return zero3.full_optimizer_state_dict(model, optimizer)

    assert_same(reached(on_ranks(2, body)[0]), expected)


def broken(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    found = reference(*trained("AdamW"))
    change(found)
    return found


def _forget(found: dict[str, Any]) -> None:
    found["param_groups"][0]["params"].remove("norm.weight")
    del found["state"]["norm.weight"]


def _regroup(found: dict[str, Any]) -> None:
    group = found["param_groups"][0]
    group["params"].remove("blocks.0.linear.weight")
    found["param_groups"].append({**group, "weight_decay": 0.0, "params": ["blocks.0.linear.weight"]})


def _all(found: dict[str, Any], key: str, value: Any) -> None:
    for state in found["state"].values():
        state[key] = value


MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (_forget, r"missing: norm\.weight"),
    "unknown": (lambda d: d["param_groups"][0]["params"].append("no.such"), r"unknown: no\.such"),
    "unknown state": (lambda d: d["state"].update({"no.such": {"step": torch.tensor(1.0)}}), r"unknown: no\.such"),
    "shape": (
        lambda d: d["state"]["norm.bias"].update(exp_avg=torch.zeros(4)),
        r"exp_avg of norm\.bias has \(4,\), expected \(5,\)",
    ),
    "a number for a tensor": (lambda d: _all(d, "exp_avg", 3.0), r"exp_avg is number \(no tensor of its shape\), expected floating"),
    "a tensor of one number": (lambda d: _all(d, "exp_avg", torch.tensor(3.0)), r"exp_avg is number"),
    "a text for a tensor": (lambda d: _all(d, "exp_avg", "x"), r"exp_avg is text \(no tensor of its shape\), expected floating"),
    "a text for a number": (lambda d: _all(d, "step", "x"), r"step is text \(no tensor of its shape\), expected number"),
    "other steps": (lambda d: d["state"]["norm.bias"].update(step=torch.tensor(9.0)), r"norm\.bias.* had different state"),
    "other options": (_regroup, r"embed\.weight and blocks\.0\.linear\.weight are in one group here .* had different options"),
    "numbers": (lambda d: d["param_groups"][0].update(params=[0, 1, 2]), r"expected parameters' names"),
    "not a state dict": (lambda d: d.clear(), r"expected a dict with 'state' and 'param_groups'"),
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_load_full_optimizer_state_dict_names_mistakes_on_every_rank_and_changes_nothing(mistake: str, world_size: int) -> None:
    change, message = MISTAKES[mistake]
    given = broken(change)

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> str:
        train(model, optimizer, range(1))
        before = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        with pytest.raises(ValueError, match=message) as raised:
            zero3.load_full_optimizer_state_dict(model, optimizer, given if group.rank == 0 else None)
        assert_same(zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False), before)
        return str(raised.value)

    assert len(set(on_ranks(world_size, body))) == 1


def test_load_full_optimizer_state_dict_tells_several_mistakes_in_one_error() -> None:
    def spoil(found: dict[str, Any]) -> None:
        _forget(found)
        found["param_groups"][0]["params"].append("no.such")

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"missing: norm\.weight\. unknown: no\.such"):
            zero3.load_full_optimizer_state_dict(model, optimizer, broken(spoil))

    on_ranks(2, body)


def test_full_optimizer_state_dict_refuses_an_optimizer_of_another_model() -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        others = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
        with pytest.raises(ValueError, match=r"rank 1: group 0 of the SGD has a parameter \(3,\) that is not of this model"):
            zero3.full_optimizer_state_dict(model, others if group.rank == 1 else optimizer)
        with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, or several in a list or a dict, found list"):
            zero3.full_optimizer_state_dict(model, [])  # type: ignore[arg-type]

    on_ranks(2, body)


def beside_fsdp2(rank: Rank) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Three steps under FSDP2, two under zero3; and five under FSDP2."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def sharded() -> nn.Module:
        model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 7)).double()
        for layer in (model[1], model[3]):
            fully_shard(layer)
        return fully_shard(model)

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    torch.manual_seed(0)
    theirs = sharded()
    theirs_optimizer = OPTIMIZERS["AdamW"](theirs.parameters())
    train(theirs, theirs_optimizer, range(3))
    model_state = get_model_state_dict(theirs, options=FULL)
    optimizer_state = deepcopy(get_optimizer_state_dict(theirs, theirs_optimizer, options=FULL))  # its steps are the optimizer's own
    train(theirs, theirs_optimizer, range(3, 5))

    plain_model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 7)).double()
    ours = zero3.shard(plain_model, nn.Linear)
    optimizer = OPTIMIZERS["AdamW"](zero3.get_trainable_chunk(ours))
    zero3.load_full_state_dict(ours, model_state)
    zero3.load_full_optimizer_state_dict(ours, optimizer, optimizer_state)
    train(ours, optimizer, range(3, 5))
    found = zero3.full_optimizer_state_dict(ours, optimizer)
    again = sharded()
    again_optimizer = OPTIMIZERS["AdamW"](again.parameters())
    set_options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(again, again_optimizer, deepcopy(found), options=set_options)
    back = get_optimizer_state_dict(again, again_optimizer, options=FULL)
    return zero3.full_state_dict(ours), get_model_state_dict(theirs, options=FULL), found, back


@pytest.mark.slow
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="gloo of torch 2.11 can't gather FSDP2's state")
def test_load_full_optimizer_state_dict_takes_a_run_from_fsdp2_to_zero3_and_back() -> None:
    ours, theirs, found, back = on_processes(2, beside_fsdp2)[0]
    assert_close(ours, dict(theirs), 1e-12, "five steps")
    assert_same({name: dict(state) for name, state in back["state"].items()}, found["state"])
    for options in (back["param_groups"][0], found["param_groups"][0]):
        options["betas"] = list(options["betas"])  # which torch makes a list of on its way
    assert back["param_groups"] == found["param_groups"]


def first_moment(state: dict[str, Any], change: Callable[[Tensor], Any]) -> dict[str, Any]:
    values = state["state"]["norm.weight"]
    return {**state, "state": {**state["state"], "norm.weight": {**values, "exp_avg": change(values["exp_avg"])}}}


def groups(state: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**state, "param_groups": [{**group, **changed} for group in state["param_groups"]]}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "nothing": (lambda s: None, TypeError, "expected a dict with 'state' and 'param_groups' on rank 0, found a NoneType"),
    "a list": (lambda s: list(s.items()), TypeError, "expected a dict with 'state' and 'param_groups' on rank 0, found a list"),
    "no groups": (lambda s: {"state": s["state"]}, ValueError, r"found the keys \['state'\]"),
    "groups in a dict": (lambda s: {**s, "param_groups": {"0": {}}}, TypeError, "param_groups must be a list of dicts, found a dict"),
    "a group that is a list": (lambda s: {**s, "param_groups": [[]]}, TypeError, "param_groups must be a list of dicts"),
    "a group without params": (
        lambda s: {**s, "param_groups": [{"lr": 0.1}]}, ValueError, r"param_groups\[0\] has no 'params'.*it has \['lr'\]",
    ),
    "params that are a text": (lambda s: groups(s, params="norm.weight"), TypeError, r"'params' of param_groups\[0\] must be a list of"),
    "params that are numbers": (lambda s: groups(s, params=[0, 1]), ValueError, r"param_groups\[0\] has \[0, 1\] as params; expected par"),
    "params twice": (lambda s: {**s, "param_groups": s["param_groups"] * 2}, ValueError, r"param_groups name these parameters twice"),
    "state that is a list": (lambda s: {**s, "state": list(s["state"].items())}, TypeError, "state must be a dict with a dict for each"),
    "state that is numbered": (lambda s: {**s, "state": dict(enumerate(s["state"].values()))}, ValueError, r"state has \[0, 1, 2\]"),
    "state of a name that is a tensor": (
        lambda s: {**s, "state": {**s["state"], "norm.weight": torch.zeros(2)}}, TypeError, "state must be a dict with a dict for each",
    ),
    "a moment on meta": (lambda s: first_moment(s, lambda m: m.to("meta")), ValueError, r"exp_avg of norm\.weight is on the meta device"),
    "a moment of numpy": (lambda s: first_moment(s, lambda m: m.numpy()), TypeError, r"'exp_avg' of norm\.weight is a numpy\.ndarray"),
    "a moment that is sparse": (lambda s: first_moment(s, lambda m: m.to_sparse()), ValueError, r"exp_avg of norm\.weight is sparse_coo"),
    "a moment of another shape": (lambda s: first_moment(s, lambda m: m[:2]), ValueError, r"exp_avg of norm\.weight has \(2,\), exp"),
    "an option that could only be pickled": (lambda s: groups(s, lr=object()), TypeError, r"'lr' of param_groups\[0\] is a builtins"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_load_full_optimizer_state_dict_of_what_is_none(name: str) -> None:
    """The same error on all ranks, and nothing has changed."""
    change, kind, message = WRONG[name]

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> str:
        train(model, optimizer, range(1))
        before = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        given = change(deepcopy(before)) if group.rank == 0 else None
        with pytest.raises(kind, match=message) as raised:
            zero3.load_full_optimizer_state_dict(model, optimizer, given)
        assert_same(zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False), before)
        return str(raised.value)

    assert len(set(on_ranks(3, body))) == 1


def _load_a_moment_on_meta(rank: Rank) -> str:
    model, optimizer = plain("AdamW")
    model = zero3.shard(model)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
    train(model, optimizer, range(1))
    full = zero3.full_optimizer_state_dict(model, optimizer)
    given = first_moment(full, lambda moment: moment.to("meta")) if rank.number == 0 else None
    with pytest.raises(ValueError, match="is on the meta device") as raised:
        zero3.load_full_optimizer_state_dict(model, optimizer, given)
    return str(raised.value)


@pytest.mark.slow
def test_load_full_optimizer_state_dict_with_a_wrong_value_on_processes() -> None:
    """Real ranks: nobody waits for another."""
    assert len(set(on_processes(2, _load_a_moment_on_meta))) == 1
