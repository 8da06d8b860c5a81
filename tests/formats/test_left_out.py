"""`convert` and what OUT can't hold: it is named with its path and type, the rest goes along, and `--strict` makes it an error."""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zero3
from tests.formats.test_round_trips import convert, fails
from tests.support.checkpoints import assert_same
from tests.support.deepspeed_files import write_zero3
from zero3.formats import torch_files
from zero3.formats.torch_files import Lazy, TorchFile
from zero3.formats.values import mapped, same

KINDS = ["zero3", "torch", "dcp", "deepspeed"]


class Odd:
    """Pickled by its name and its state."""

    def __init__(self) -> None:
        self.lr = 1


ODD: dict[str, tuple[Any, str]] = {
    "an object": (argparse.Namespace(lr=1), "argparse.Namespace"),
    "of a class": (Odd(), f"{__name__}.Odd"),
    "a class": (Odd, f"{__name__}.Odd"),
    "a set": ({1, 2}, "set"),
    "a frozen set": (frozenset({1}), "builtins.frozenset"),
    "bytes": (b"\xff\x00", "bytes"),
    "a dtype": (torch.bfloat16, "torch.bfloat16"),
    "a complex number": (1j, "builtins.complex"),
    "a path": (Path("a"), "pathlib"),
}


def with_odd(odd: Any) -> dict[str, Any]:
    """In a dict, in a dict of a dict, in a list of a list, and beside tensors."""
    schedule = {"last_epoch": 3, "anneal": odd, "lrs": [0.1, (odd, {"a": 1, "b": odd})]}
    return {"args": odd, "schedule": schedule, "random": torch.arange(5, dtype=torch.uint8), "counts": Counter("aab"), "epoch": 2}


KEPT = {
    "schedule": {"last_epoch": 3, "lrs": [0.1, (None, {"a": 1})]},
    "random": torch.arange(5, dtype=torch.uint8),
    "counts": Counter("aab"),
    "epoch": 2,
}
PLACES = ["extra['args']", "extra['schedule']['anneal']", "extra['schedule']['lrs'][1][0]", "extra['schedule']['lrs'][1][1]['b']"]


def write(kind: str, path: Path, beside: dict[str, Any]) -> Path:
    """A run of the kind, with something beside its model and optimizer."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **beside}
    if kind == "torch":
        torch.save(tree, path)
    elif kind == "dcp":
        named = {"state": {"weight": optimizer.state[model.weight]}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]}
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            dcp.save(tree | {"optimizer": named}, checkpoint_id=path, no_dist=True)
    else:
        write_zero3(path, model, optimizer, 2, client=beside)
    return path


def content(path: Path, tmp_path: Path) -> Any:
    """Of a checkpoint, as the torch file that it becomes."""
    return torch.load(convert(path, tmp_path / f"{path.name} as a file", "--to", "torch"), weights_only=True)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", KINDS[1:])
def test_convert_names_what_it_leaves_out(kind: str, odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, shown = ODD[odd]
    source = write(kind, tmp_path / "in", with_odd(value))
    for to in KINDS:
        said = fails(capsys, source, tmp_path / "strict", "--to", to, "--strict")
        assert said.startswith("zero3: --strict: ") and all(f"{place} ({shown}" in said for place in PLACES), said
        target = convert(source, tmp_path / to, "--to", to)
        said = capsys.readouterr().err
        assert all(f"{place} ({shown}" in said for place in PLACES) and said.count(shown) == len(PLACES), said
        found = content(target, tmp_path)
        assert_same({key: found[key] for key in found if key not in ("model", "optimizer", "deepspeed")}, KEPT)
        assert ("deepspeed" in found) is (kind == "deepspeed")
        assert capsys.readouterr().err == "", "what OUT has, the next one can have"


WHOLE = {
    "the whole": (lambda odd: odd, "extra", None),
    "in a list": (lambda odd: [1, {"epoch": 3}, odd], "extra[2]", [1, {"epoch": 3}, None]),
    "a key": (lambda odd: {"by": {odd: 1, "a": 2}}, "extra['by'] at a key", {"by": {"a": 2}}),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("where", WHOLE)
def test_convert_of_an_extra_that_is_odd_itself(where: str, odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value, shown = ODD[odd]
    if where == "a key" and type(value).__hash__ in (None, Odd.__hash__):
        return  # neither is a key
    make, place, kept = WHOLE[where]
    torch.save({"model": {"a": torch.ones(2)}, "extra": make(value)}, tmp_path / "file")
    for to in ("zero3", "torch", "dcp"):
        assert f"{place} ({shown}" in fails(capsys, tmp_path / "file", tmp_path / "strict", "--to", to, "--strict")
        ours = convert(convert(tmp_path / "file", tmp_path / to, "--to", to), tmp_path / f"ours of {to}")
        assert capsys.readouterr().err.count(f"{place} ({shown}") == 1
        assert json.loads((ours / "manifest.json").read_text())["extra"] == kept


def test_convert_keeps_the_optimizer_but_for_what_is_odd_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "how": argparse.Namespace(), "each": [1, {2}]}
    group = {"params": ["a"], "lr": torch.tensor(0.1), "betas": (0.9, {3}), "decide": argparse.Namespace()}
    optimizer = {"state": {"a": state}, "param_groups": [group], "scaler": {"scale": 2.0}}
    torch.save({"model": {"a": torch.ones(2), "m._extra_state": {"seen": 1, "by": b"x"}}, "optimizer": optimizer}, tmp_path / "in")
    places = ["state['a']['how'] (argparse.Namespace)", "state['a']['each'][1] (set)", "param_groups[0]['betas'][1] (set)"]
    places += [
        "param_groups[0]['decide'] (argparse.Namespace)",
        "extra_states['m._extra_state']['by'] (bytes)",
        "'scaler' of the optimizer",
    ]
    for to in KINDS:
        said = fails(capsys, tmp_path / "in", tmp_path / "strict", "--to", to, "--strict")
        assert all(place in said for place in places), said
        target = convert(tmp_path / "in", tmp_path / to, "--to", to)
        said = capsys.readouterr().err
        assert all(place in said for place in places), said
        found = content(target, tmp_path)
        assert found["model"]["m._extra_state"] == {"seen": 1}
        assert found["optimizer"]["param_groups"] == [{"lr": torch.tensor(0.1), "betas": (0.9, None), "params": ["a"]}]
        kept = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "each": [1, None]}
        assert_same(found["optimizer"]["state"]["a"], kept)


def test_convert_leaves_out_tensors_only_where_the_format_has_no_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours holds no tensors inside of options and of lists in state."""
    wide, pair = torch.ones(2, dtype=torch.complex128), [torch.ones(3), torch.ones(3)]
    optimizer = {"state": {"a": {"wide": wide, "pair": pair}}, "param_groups": [{"params": ["a"], "scale": torch.ones(2)}]}
    torch.save({"model": {"a": torch.ones(2)}, "optimizer": optimizer, "wide": wide}, tmp_path / "in")
    for to in ("torch", "dcp"):
        convert(tmp_path / "in", tmp_path / to, "--to", to, "--strict")
        found = content(tmp_path / to, tmp_path)
        assert_same([found["wide"], found["optimizer"]["state"]["a"]["pair"]], [wide, pair])
        assert found["optimizer"]["param_groups"][0]["scale"].sum() == 2
    said = fails(capsys, tmp_path / "in", tmp_path / "strict", "--strict")
    found = content(convert(tmp_path / "in", tmp_path / "ours"), tmp_path)
    assert_same([found["wide"], found["optimizer"]["state"]["a"]], [wide, {"wide": wide, "pair": [None, None]}])
    for place in ("state['a']['pair'][0]", "state['a']['pair'][1]", "param_groups[0]['scale']"):
        assert f"{place} (a tensor (" in said, said


class Configuration:
    def to_json_string(self) -> str:
        return '{"model_type": "x"}'


@pytest.mark.parametrize("to", KINDS)
def test_convert_names_what_of_ours_others_do_not_hold(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 2)
    model.config = Configuration()  # type: ignore[assignment]
    layer = zero3.Zero3Layer(model)
    zero3.save_checkpoint(tmp_path / "run", layer, torch.optim.SGD(layer.parameters()))
    said = fails(capsys, tmp_path / "run", tmp_path / "strict", "--to", to, "--strict")
    assert "random generators" in said and ("config (" in said) is (to != "zero3")


@pytest.mark.parametrize("by", ["zero3", "torch", "dcp"])
def test_convert_carries_the_header_of_an_fp16_run_of_deepspeed(by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a dtype, and sets: they come back as such."""
    model = nn.Linear(2, 1)
    header = {"sparse_tensor_module_names": {"embed", "head"}, "ds_config": {"fp16": {"dtype": torch.float16}}}
    write_zero3(tmp_path / "in", model, torch.optim.AdamW(model.parameters()), 2, client=header, fp16=True)
    convert(tmp_path / "in", tmp_path / "there", "--to", by, "--strict")
    convert(tmp_path / "there", tmp_path / "back", "--to", "deepspeed", "--strict")
    assert not capsys.readouterr().err
    first, back = (read(tmp_path / name / "global_step2") for name in ("in", "back"))
    for key in ("sparse_tensor_module_names", "ds_config", "lr_scheduler", "global_samples", "ds_version"):
        assert same(first["model"][key], back["model"][key]), key
    scalers = [each["optim"]["optimizer_state_dict"]["loss_scaler"] for each in (first, back)]
    assert same(*scalers) and scalers[1].state["dtype"].name == "torch.float16"


def read(step: Path, rank: int = 0) -> dict[str, Any]:
    found = {}
    for kind in ("model", "optim"):
        with FileIO(str(step / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")) as file:
            found[kind] = TorchFile(file, kind).value
    return found


def test_convert_names_what_of_deepspeed_it_does_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other ranks' client state and buffers, entries that nobody knows, files beside."""
    step = write("deepspeed", tmp_path / "in", {"seen": torch.ones(3), "same": [1, torch.ones(2), float("nan")]}) / "global_step2"
    convert(tmp_path / "in", tmp_path / "nothing is said", "--strict")
    (step / "layer_0_expert_0_mp_rank_00_model_states.pt").touch()
    change(step / "zero_pp_rank_1_mp_rank_00_model_states.pt", lambda found: found | {"seen": torch.zeros(3), "more": 1})
    change(
        step / "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        lambda found: {"optimizer_state_dict": found["optimizer_state_dict"] | {"clipped": 2.0}, "groups": 3},
    )
    said = fails(capsys, tmp_path / "in", tmp_path / "strict", "--strict")
    for what in (
        "'seen' of rank 1",
        "'more' of rank 1",
        "the file layer_0_expert_0",
        "'clipped' of optimizer_",
        "'groups' of optim_states",
    ):
        assert what in said, said
    assert "same" not in said


def change(path: Path, how: Callable[[Any], Any]) -> None:
    """Pickles that name DeepSpeed's classes can't be loaded here, and are read and written as data."""
    with FileIO(str(path)) as file:
        value = mapped(TorchFile(file, "").value, lambda leaf: torch_files.as_lazy(leaf.tensor()) if isinstance(leaf, Lazy) else leaf)
    path.unlink()
    with FileIO(str(path), "x") as file:
        torch_files.write(file, 0, how(value), lambda nbytes: None)


def test_convert_takes_what_deepspeed_saved_again(tmp_path: Path) -> None:
    """An `extra` of ours went through DeepSpeed, and it put its own header and client state beside that."""
    write("deepspeed", tmp_path / "in", {"converted_by_zero3": {"epoch": 3}, "seen": 5})
    found = content(convert(tmp_path / "in", tmp_path / "ours", "--strict"), tmp_path)
    assert found["converted_by_zero3"] == {"epoch": 3} and found["seen"] == 5 and found["deepspeed"]["lr_scheduler"] == {"last_epoch": 2}


@pytest.mark.parametrize("extra", [{"deepspeed": {"mine": 1}}, {"deepspeed": {"global_steps": 4}, "module": 2, "ds_version": 3}])
def test_convert_carries_an_extra_that_only_looks_like_deepspeeds(extra: dict[str, Any], tmp_path: Path) -> None:
    source = write("torch", tmp_path / "in", {"extra": extra})
    back = convert(convert(source, tmp_path / "theirs", "--to", "deepspeed", "--strict"), tmp_path / "back", "--strict")
    assert json.loads((back / "manifest.json").read_text())["extra"] == extra


def test_convert_names_parameters_without_elements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": ["a", "none"], "lr": 1.0}]}
    torch.save({"model": {"a": torch.ones(2), "none": torch.ones(0)}, "optimizer": optimizer}, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "ours", "--strict")
    assert "none of param_groups[0] (a parameter without" in fails(capsys, tmp_path / "in", tmp_path / "x", "--to", "deepspeed", "--strict")
