"""torch.distributed.checkpoint over a sharded model: refused by name, where it would take every rank's slice for the same whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states

import zero3
from tests.support.checkpoints import assert_same, odd, on_ranks, train
from tests.support.processes import Rank
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group

Call = Callable[[Any, torch.optim.Optimizer], object]
CALLS: dict[str, Call] = {
    "get_optimizer_state_dict": lambda model, optimizer: states.get_optimizer_state_dict(model, optimizer),
    "set_optimizer_state_dict": lambda model, optimizer: states.set_optimizer_state_dict(
        model, optimizer, {"state": {}, "param_groups": []}
    ),
    "get_state_dict": lambda model, optimizer: states.get_state_dict(model, optimizer),
    "set_state_dict": lambda model, optimizer: states.set_state_dict(
        model, optimizer, model_state_dict=odd().state_dict(), optim_state_dict={"state": {}, "param_groups": []}
    ),
    "get_model_state_dict": lambda model, optimizer: states.get_model_state_dict(model),
    "set_model_state_dict": lambda model, optimizer: states.set_model_state_dict(model, odd().state_dict()),
    "full": lambda model, optimizer: states.get_optimizer_state_dict(
        model, optimizer, options=states.StateDictOptions(full_state_dict=True)
    ),
    "of a part of the model": lambda model, optimizer: states.get_optimizer_state_dict(model.blocks, optimizer),
    "of a module in a layer": lambda model, optimizer: states.get_optimizer_state_dict(model.blocks[0].module, optimizer),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_torchs_state_dicts_are_refused_before_anything_changes(name: str, world_size: int) -> None:
    """An optimizer that has no state yet would otherwise make a step of its own."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        for trained in (False, True):
            if trained:
                train(model, optimizer, range(1))
            before = zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)
            with pytest.raises(RuntimeError, match=r"get_optimizer_state_dict, set_optimizer_state_dict.*zero3\.full_optimizer_state_dict"):
                CALLS[name](model, optimizer)
            assert_same((zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)), before)
            assert bool(optimizer.state) == trained

    on_ranks(world_size, body)


def test_get_optimizer_state_dict_of_lone_layers_in_a_plain_container() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = torch.nn.Sequential(*(zero3.Zero3Layer(torch.nn.Linear(3, 3), process_group=group) for _ in range(2)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"get_optimizer_state_dict.*every rank's chunk has the same name"):
            states.get_optimizer_state_dict(model, optimizer)

    run_ranks(2, body)


def test_get_model_state_dict_inside_full_params_is_the_whole() -> None:
    expected = odd().state_dict()

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with zero3.full_params(model):
            assert_same(dict(states.get_model_state_dict(model)), dict(expected))

    on_ranks(2, body)


SAVES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "chunks": lambda model: {str(number): chunk for number, chunk in enumerate(zero3.get_trainable_chunk(model))},
    "named_parameters": lambda model: {"model": dict(model.named_parameters())},
    "param_groups": lambda model: {"groups": zero3.param_groups(model, lambda name, info: {"lr": float(info.ndim)})},
}


@pytest.mark.parametrize("how", [dcp.save, dcp.load])
@pytest.mark.parametrize("name", SAVES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_save_and_load_of_chunks(name: str, how: Callable[..., Any], tmp_path: Path) -> None:
    """Torch tells the error as its own, with ours as the cause of each rank's."""

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(odd(), process_group=process_group(group))
        if how is dcp.load:
            told = plainly(SAVES[name](model))
            dcp.save(told, checkpoint_id=tmp_path, no_dist=True)
        with pytest.raises(dcp.api.CheckpointException, match=r"over a sharded model's chunks.*zero3\.save_checkpoint"):
            how(SAVES[name](model), checkpoint_id=tmp_path, no_dist=True)

    run_ranks(1, body)


def plainly(value: Any) -> Any:
    """The same, of copies that know nothing of their layers."""
    if isinstance(value, torch.Tensor):
        return torch.nn.Parameter(value.detach().clone(), requires_grad=False)
    if isinstance(value, dict):
        return {key: plainly(held) for key, held in value.items()}
    return [plainly(item) for item in value] if isinstance(value, list) else value


def _save_on_processes(rank: Rank) -> str:
    model = zero3.shard(odd())
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
    with pytest.raises(RuntimeError, match="get_optimizer_state_dict"):
        states.get_optimizer_state_dict(model, optimizer)
    future = dcp.async_save({"model": dict(model.named_parameters())}, checkpoint_id=rank.scratch / "run")
    with pytest.raises(dcp.api.CheckpointException, match="over a sharded model's chunks") as raised:
        future.result()
    return type(raised.value).__name__


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dcp_async_save_of_chunks_on_processes() -> None:
    assert on_processes(2, _save_on_processes) == ["CheckpointException"] * 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_optimizers_own_state_dict_stays_as_it_is(world_size: int) -> None:
    """One rank's, by numbers: what loops save beside a model that they keep as it is."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        train(model, optimizer, range(2))
        saved = optimizer.state_dict()
        assert list(saved["state"]) == list(range(len(zero3.get_trainable_chunk(model))))
        other = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=7.0)
        other.load_state_dict(saved)
        assert_same(other.state_dict(), saved)

    on_ranks(world_size, body)
