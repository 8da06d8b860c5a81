"""DeepSpeed ZeRO-3: what it saves is read, and what is written its engine loads. Its own code takes part where it is installed."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.formats.test_round_trips import Full, convert, fails
from tests.support.checkpoints import assert_same, odd, train
from tests.support.deepspeed_files import write_zero3
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from zero3.checkpoint.lazy import Lazy
from zero3.formats.pickled import Made
from zero3.formats.torch_files import TorchFile

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make deepspeed")


def odd32() -> nn.Module:
    model = odd().float()
    for block in model.blocks:
        block.gain = nn.Parameter(block.gain.detach().view(1))
        del block.empty
        block.empty = torch.zeros(1)  # type: ignore[assignment]
    return model


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": trained[::2], "weight_decay": 0.1}, {"params": trained[1::2], "weight_decay": 0.0}]


def plain_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = odd32()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    train(model, optimizer, range(2), zeros=True)
    return model, optimizer


def by_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: dict(state) for parameter, state in optimizer.state.items()}


def into_zero3(path: Path, world_size: int) -> tuple[Full, Any]:
    models = [odd32() for _ in range(world_size)]
    for model in models:
        for parameter in model.parameters():
            nn.init.zeros_(parameter.data)
    trained = [name for name, parameter in odd32().named_parameters() if parameter.requires_grad]

    def body(group: ThreadCommunicator) -> tuple[Full, Any]:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        decays = {name: 0.0 if place % 2 else 0.1 for place, name in enumerate(trained)}
        optimizer = torch.optim.AdamW(zero3.param_groups(model, lambda name, info: {"weight_decay": decays[name]}), lr=7.0)
        extra = zero3.load_checkpoint(path, model, optimizer)
        return (zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)), extra

    found: tuple[Full, Any] = run_ranks(world_size, body)[0]
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("most", [20, 10**9])
def test_what_deepspeed_saves(ranks: int, world_size: int, most: int, tmp_path: Path) -> None:
    model, optimizer = plain_run()
    write_zero3(tmp_path / "run", model, optimizer, ranks, client={"epoch": 3, "ema": torch.ones(2)}, bf16=most == 20, most=most)
    source = tmp_path / "run" / ("global_step2" if most == 20 else "")
    (found, state), extra = into_zero3(convert(source, tmp_path / "ours"), world_size)
    assert_same(found, {name: value.clone() for name, value in model.state_dict().items() if name in found})
    assert_same(state["state"], {name: by_names(model, optimizer)[name] for name in state["state"]})
    assert set(found) == set(model.state_dict()) and set(state["state"]) == set(by_names(model, optimizer))
    assert all(group["lr"] == 0.01 for group in state["param_groups"])
    assert extra["epoch"] == 3 and extra["ema"].sum() == 2 and extra["deepspeed"]["lr_scheduler"] == {"last_epoch": 2}
    again = convert(convert(tmp_path / "ours", tmp_path / "theirs", "--to", "deepspeed"), tmp_path / "again")
    assert_same(into_zero3(again, world_size), ((found, state), extra))
    for name in ("model", "optim"):
        (first,) = (tmp_path / "run" / "global_step2").glob(f"*zero_pp_rank_0_*{name}_states.pt")
        assert shapes(tmp_path / "theirs" / "global_step2" / f"zero_pp_rank_0_mp_rank_00_{name}_states.pt") == shapes(first)


def shapes(path: Path) -> Any:
    """What is where in a file, without values."""

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shown(held) for key, held in value.items() if key not in ("ds_config", "ds_version", "lr_scheduler")}
        if isinstance(value, list):
            return [shown(item) for item in value]
        return (value.shape, value.dtype) if isinstance(value, Lazy) else (value.name if isinstance(value, Made) else type(value).__name__)

    with FileIO(str(path)) as file:
        return shown(TorchFile(file, str(path)).value)


def test_what_can_not_be_right_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = plain_run()
    write_zero3(tmp_path / "run", model, optimizer, 2, client={})
    step, out = tmp_path / "run" / "global_step2", tmp_path / "out"
    optim = step / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = optim.read_bytes()
    optim.write_bytes(content[:1000])
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt is no file of torch's, or is cut off" in fails(capsys, tmp_path / "run", out)
    optim.unlink()
    assert "lacks files: optim of rank 1" in fails(capsys, tmp_path / "run", out)
    optim.write_bytes(content)
    (step / "zero_pp_rank_0_mp_rank_01_model_states.pt").write_bytes(b"")
    assert "tensor parallelism" in fails(capsys, tmp_path / "run", out)


def test_what_deepspeed_can_not_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "bare")
    assert "has no optimizer" in fails(capsys, tmp_path / "bare", out, "--to", "deepspeed")
    groups = [{"lr": 1.0, "params": ["a", "b"]}]
    steps = {name: {"step": torch.tensor(float(at)), "exp_avg": torch.ones(2)} for at, name in enumerate("ab")}
    torch.save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "optimizer": {"state": steps, "param_groups": groups}}, tmp_path / "two")
    assert "DeepSpeed keeps one state for a to b" in fails(capsys, tmp_path / "two", out, "--to", "deepspeed")
    rows = {"state": {"a": {"row": torch.ones(3)}}, "param_groups": [{"lr": 1.0, "params": ["a"]}]}
    torch.save({"model": {"a": torch.ones(2)}, "optimizer": rows}, tmp_path / "rows")
    assert "DeepSpeed keeps state of the parameters' shapes alone, and here 'row' of a has (3,)" in fails(
        capsys, tmp_path / "rows", out, "--to", "deepspeed"
    )
    half = {"model": {"a": torch.ones(2).half(), "b": torch.ones(2)}, "optimizer": {"state": {}, "param_groups": groups}}
    torch.save(half, tmp_path / "half")
    assert "DeepSpeed's masters are float32, and a is torch.float16" in fails(capsys, tmp_path / "half", out, "--to", "deepspeed")


def engine_of(rank: Rank) -> Any:
    """DeepSpeed's own, without the operations that it would compile."""
    os.environ |= {"RANK": str(rank.number), "LOCAL_RANK": str(rank.number), "WORLD_SIZE": str(rank.world_size), "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # not used: there is a group
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    logging.getLogger("DeepSpeed").setLevel("ERROR")
    model = odd32()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    made = torch.optim.AdamW(groups_of(model), lr=0.01)
    return deepspeed.initialize(model=model, optimizer=made, config=config)[0]


def whole(engine: Any) -> dict[str, list[Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
            found[name] = [value.clone() for value in (safe_get_full_fp32_param(parameter), *moments)]
    return found


def save_by_deepspeed(rank: Rank, directory: str) -> dict[str, list[Tensor]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine_of(rank)
        for step in range(2):
            words = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(step + 10 * rank.number))
            engine.backward(nn.functional.cross_entropy(engine(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()))
            engine.step()
        engine.save_checkpoint(directory, client_state={"epoch": 3})
        return whole(engine)


def load_by_deepspeed(rank: Rank, directory: str) -> tuple[dict[str, list[Tensor]], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine_of(rank)
        words = torch.zeros(4, 6, dtype=torch.long)
        engine.backward(engine(words).sum())
        engine.step()
        _, client = engine.load_checkpoint(directory)
        return whole(engine), (client["epoch"], engine.global_steps)


@needs_deepspeed
@pytest.mark.slow
def test_deepspeed_itself(tmp_path: Path) -> None:
    """Two processes of it save; ours loads that, on one rank and on three; and its engine loads what comes back."""
    expected = on_ranks(2, save_by_deepspeed, str(tmp_path / "run"), debug="OFF", fresh=True)[0]
    ours = convert(tmp_path / "run", tmp_path / "ours")
    for world_size in (1, 3):
        (found, state), extra = into_zero3(ours, world_size)
        assert set(state["state"]) == set(expected)
        for name, (value, first, second) in expected.items():
            assert_same([found[name], state["state"][name]["exp_avg"], state["state"][name]["exp_avg_sq"]], [value, first, second])
        assert extra["epoch"] == 3 and extra["deepspeed"]["global_steps"] == 2
    back = convert(ours, tmp_path / "back", "--to", "deepspeed")
    found_there, client = on_ranks(2, load_by_deepspeed, str(back), debug="OFF", fresh=True)[0]
    assert_same(found_there, expected)
    assert client == (3, 2)


@needs_deepspeed
@pytest.mark.slow
def test_our_likeness_of_its_files_is_one(tmp_path: Path) -> None:
    """The names and shapes of everything in its files are those of `write_zero3`."""
    on_ranks(2, save_by_deepspeed, str(tmp_path / "theirs"), debug="OFF", fresh=True)
    write_zero3(tmp_path / "ours", *plain_run(), 2, client={"epoch": 3})
    for path in sorted((tmp_path / "theirs" / "global_step2").iterdir()):
        assert shapes(tmp_path / "ours" / "global_step2" / path.name) == shapes(path)
