"""torch.distributed.checkpoint: what FSDP2 saves on two processes is read, and what is written FSDP2 loads.

The processes are fresh: torch keeps the plan of a load in the process, and fails where another group loads there.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zero3
from tests.checkpoint.test_nothing_is_unpickled import Trap
from tests.formats.test_round_trips import Full, convert, fails, loaded
from tests.support.checkpoints import Odd, assert_same, odd, train
from tests.support.models import WORLDS
from tests.support.processes import Rank, on_ranks

pytestmark = pytest.mark.slow
FLAT, FULL = StateDictOptions(flatten_optimizer_state_dict=True), StateDictOptions(full_state_dict=True, cpu_offload=True)


def built() -> Odd:
    """FSDP2 takes neither numbers nor integers for parameters."""
    model = odd()
    for block in model.blocks:
        block.gain, block.empty = nn.Parameter(block.gain.detach().view(1)), nn.Parameter(torch.ones(1, 3).double())
        del block.order
        block.register_buffer("order", torch.arange(5))
    return model


def fsdp2(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def save_by_fsdp2(rank: Rank, directory: str) -> Full:
    model, optimizer = fsdp2(built())
    train(model, optimizer, range(2), zeros=True)  # it can't load what it saved without a state for each parameter
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, optimizer_state = get_state_dict(model, optimizer)
        extra = {"step": 3, "more": {"list": [1, {"ema": torch.ones(2)}], "text": "x"}}
        dcp.save({"model": state, "optimizer": optimizer_state, **extra}, checkpoint_id=f"{directory}/named")
        dcp.save({"app": {"model": state, "optim": get_state_dict(model, optimizer, options=FLAT)[1]}}, checkpoint_id=f"{directory}/flat")
        dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=f"{directory}/numbers")
        dcp.save(model.state_dict(), checkpoint_id=f"{directory}/bare")
        whole, state_by_name = get_state_dict(model, optimizer, options=FULL)
    return {name: value.clone() for name, value in whole.items()}, dict(state_by_name)


def load_by_fsdp2(rank: Rank, directory: str) -> Full:
    model, optimizer = fsdp2(built())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=directory)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        whole, state_by_name = get_state_dict(model, optimizer, options=FULL)
    return dict(whole), dict(state_by_name)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Full]:
    directory = tmp_path_factory.mktemp("fsdp2")
    return directory, on_ranks(2, save_by_fsdp2, str(directory), debug="OFF", fresh=True)[0]


def load_into_zero3(path: Path, world_size: int) -> tuple[Full, Any]:
    from tests.support.ranks import ThreadCommunicator, run_ranks
    from tests.support.reference import process_group

    def body(group: ThreadCommunicator) -> tuple[Full, Any]:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        names = [name for name, parameter in built().named_parameters() if parameter.requires_grad]
        decays = {name: 0.0 if place % 2 else 0.1 for place, name in enumerate(names)}
        groups = zero3.param_groups(model, lambda name, info: {"weight_decay": decays[name]})
        optimizer = torch.optim.AdamW(groups, lr=7.0)
        extra = zero3.load_checkpoint(path, model, optimizer)
        return (zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)), extra

    models = [built() for _ in range(world_size)]
    for model in models:
        for parameter in model.parameters():
            nn.init.zeros_(parameter.data)
    found: tuple[Full, Any] = run_ranks(world_size, body)[0]
    return found


@WORLDS
@pytest.mark.parametrize("kind", ["named", "flat"])
def test_what_fsdp2_saves(kind: str, world_size: int, theirs: tuple[Path, Full], tmp_path: Path) -> None:
    directory, (model, optimizer) = theirs
    (found, state), extra = load_into_zero3(convert(directory / kind, tmp_path / "run"), world_size)
    assert_same(found, {name: model[name] for name in found})
    assert_same(state["state"], {name: optimizer["state"][name] for name in state["state"]})
    assert set(state["state"]) == set(optimizer["state"]) and set(found) == set(model)
    decay = {name: group["weight_decay"] for group in optimizer["param_groups"] for name in group["params"]}
    assert {name: group["weight_decay"] for group in state["param_groups"] for name in group["params"]} == decay
    assert all(group["lr"] == 0.01 for group in state["param_groups"])
    assert_same(extra, {"step": 3, "more": {"list": [1, {"ema": torch.ones(2)}], "text": "x"}} if kind == "named" else None)


def test_what_is_written_fsdp2_loads(theirs: tuple[Path, Full], tmp_path: Path) -> None:
    """By way of ours, and by way of torch's one file."""
    directory, (model, optimizer) = theirs
    ours = convert(directory / "named", tmp_path / "ours")
    one_file = convert(directory / "named", tmp_path / "file", "--to", "torch")
    for number, path in enumerate((ours, one_file)):
        again = convert(path, tmp_path / f"again {number}", "--to", "dcp")
        found, state = on_ranks(2, load_by_fsdp2, str(again), debug="OFF", fresh=True)[0]
        assert_same(found, model)
        assert_same(state["state"], optimizer["state"])
        for group, expected in zip(state["param_groups"], optimizer["param_groups"], strict=True):
            assert_same({**group}, {**expected})


def test_the_metadata_is_what_torch_itself_writes(tmp_path: Path) -> None:
    """Names, shapes, blocks and the places of values: all but in which order and where in the file they lie."""
    model = {"a": torch.ones(2, 3), "b": torch.arange(5).to(torch.bfloat16)}
    tree = {"model": model, "epoch": 3, "more": {"list": [1, {"c": torch.ones(())}]}}
    torch.save(tree, tmp_path / "file")
    convert(tmp_path / "file", tmp_path / "ours", "--to", "dcp")
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save(tree, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ours, theirs = (pickle.loads((tmp_path / name / ".metadata").read_bytes()) for name in ("ours", "theirs"))
    assert type(ours) is type(theirs) and ours.version == theirs.version
    assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.planner_data == theirs.planner_data
    assert {index: where.relative_path for index, where in ours.storage_data.items()} == {
        index: where.relative_path for index, where in theirs.storage_data.items()
    }


def test_models_without_optimizers(theirs: tuple[Path, Full], tmp_path: Path) -> None:
    directory, (model, _) = theirs
    whole = torch.load(convert(directory / "bare", tmp_path / "file", "--to", "torch"), weights_only=True)
    assert list(whole) == ["model"]
    assert_same(whole["model"], {name: model[name] for name in whole["model"]})


def test_a_tie_that_is_none_is_not_loaded(theirs: tuple[Path, Full], tmp_path: Path) -> None:
    """torch.distributed.checkpoint stores a tied weight under both of its names; here they say different things."""
    (model, optimizer) = theirs[1]
    torch.save({"model": {**model, "head.weight": model["head.weight"] + 1}, "optimizer": optimizer}, tmp_path / "file")
    with pytest.raises(Exception, match=r"embed.weight and head.weight are one parameter here, and have different values there"):
        loaded(convert(tmp_path / "file", tmp_path / "run"), 2, "AdamW", built)


def test_what_can_not_be_right_is_refused(theirs: tuple[Path, Full], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert "state is by numbers" in fails(capsys, theirs[0] / "numbers", out)
    broken = Path(shutil.copytree(theirs[0] / "named", tmp_path / "broken"))
    (broken / "__1_0.distcp").write_bytes((broken / "__1_0.distcp").read_bytes()[:5000])
    assert "__1_0.distcp is no file of torch's, or is cut off" in fails(capsys, broken, out)
    (broken / "__1_0.distcp").unlink()
    assert "__1_0.distcp" in fails(capsys, broken, out)
    metadata = (broken / ".metadata").read_bytes()
    (broken / ".metadata").write_bytes(metadata[: len(metadata) // 2])
    assert ".metadata is no pickle that can be read" in fails(capsys, broken, out)
    (broken / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path)))
    assert "the metadata of torch.distributed.checkpoint has Made(name='pathlib.Path.touch'" in fails(capsys, broken, out)
    (broken / ".metadata").write_bytes(metadata.replace(b"__1_0.distcp", b"../1_0distcp"))
    assert "names the file '../1_0distcp', expected one beside it" in fails(capsys, broken, out)
    assert not (tmp_path / "sprung").exists()
