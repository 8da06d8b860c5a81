"""DeepSpeed's ZeRO-3 checkpoints, as `save_checkpoint` of its engine lays them out.

latest                                           the name of the newest step's directory
global_step2/zero_pp_rank_0_mp_rank_00_model_states.pt   names, shapes and buffers, and a rank's
                                                         pieces of frozen parameters
global_step2/zero_pp_rank_0_mp_rank_00_optim_states.pt   a rank's pieces of what trains, and of its
                                                         state

A parameter is cut into equal pieces, one a rank, the last one padded. A rank's pieces of the
parameters of one sub-group lie one after another in one flat tensor, a parameter of the optimizer;
`param_shapes` says which, in which order.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import file_operations
from ..checkpoint.lazy import Lazy, as_lazy, joined
from ..checkpoint.saved_optimizer import NamedState, sorted_out
from ..modules import own_name
from . import torch_files
from .pickled import Global, Made
from .run import Holds, Run
from .values import mapped, same, small

__all__: list[str] = []

HOLDS = Holds(nested=False, empty=False)
_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(model|optim)_states\.pt")
_MANAGED = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments",
)  # fmt: skip
_HEADER = (
    "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples",
    "checkpoint_parallel_dimensions",
    "ds_config", "ds_version", "sparse_tensor_module_names", "dp_world_size", "mp_world_size",
)  # fmt: skip
_OPTIMIZER = (
    "zero_stage", "loss_scaler", "dynamic_loss_scale", "overflow", "partition_count",
    "optimizer_state_dict", "fp32_flat_groups",
)  # fmt: skip
_OURS = "converted_by_zero3"  # its value is `extra`, where that did not come from DeepSpeed
_KEY = "deepspeed"  # in `extra`: what of the header a run needs to go on
# in it: dicts of one such key stand for what `extra` can't hold
_SET, _DTYPE = "builtins.set", "torch.dtype"
_SUB_GROUP = 1_000_000_000  # elements of a rank, DeepSpeed's default
_SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"


def is_one(path: Path) -> bool:
    return any(_FILE.fullmatch(name) for name in file_operations.names_in(_step_of(path)))


def _step_of(path: Path) -> Path:
    if (latest := path / "latest").is_file() and latest.stat().st_size < 256:
        name = latest.read_text(errors="replace").strip()
        return path / name if name and os.path.basename(name) == name else path
    return path


def read(path: Path, opened: ExitStack, _: Callable[[int], object]) -> Run:
    step = _step_of(path)
    files: dict[tuple[str, int], Any] = {}
    left_out = []
    for name in file_operations.names_in(step):
        if (match := _FILE.fullmatch(name)) is None:
            left_out += [f"the file {name}"] if name.endswith(".pt") else []
            continue
        if int(match[2]):
            raise ValueError(
                f"{step / name}: models that are cut by tensor parallelism can't be converted"
            )
        file = opened.enter_context(FileIO(os.fspath(step / name)))
        files[match[3], int(match[1])] = torch_files.TorchFile(file, str(step / name)).value
    ranks = range(max(rank for _, rank in files) + 1)
    wanted = [(kind, rank) for rank in ranks for kind in ("model", "optim")]
    if missing := [f"{kind} of rank {rank}" for kind, rank in wanted if (kind, rank) not in files]:
        raise ValueError(f"{step} lacks files: {', '.join(missing[:6])}")
    optimizers = [files["optim", rank]["optimizer_state_dict"] for rank in ranks]
    models = [files["model", rank] for rank in ranks]
    run = _RankFiles(step, Run("deepspeed", {}, ranks=len(ranks)), models, optimizers).filled()
    inner = optimizers[0]["optimizer_state_dict"]
    for what, found, known in (
        ("optim_states.pt", files["optim", 0], ("optimizer_state_dict", "ds_config", "ds_version")),
        ("optimizer_state_dict", optimizers[0], _OPTIMIZER),
        ("optimizer", inner, ("state", "param_groups")),
    ):
        left_out += [f"{key!r} of {what}" for key in found if key not in known]
    left_out += [] if models[0].get("optimizer") is None else ["'optimizer' of model_states.pt"]
    left_out += [
        f"{key} of rank {rank}, which differs from rank 0's"
        for rank in ranks[1:]
        for key in _differing(models[0], models[rank])
    ]
    return replace(run, left_out=left_out)


def _differing(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Of what each rank has, and not a piece of."""
    missing = object()
    beside = [key for key in {**first, **other} if key not in _MANAGED]
    own = [
        key
        for key in first["module"]
        if key in first["buffer_names"] or key.rpartition(".")[2] == "_extra_state"
    ]
    mine, theirs = first["module"], other["module"]
    return [
        repr(key) for key in beside if not same(first.get(key, missing), other.get(key, missing))
    ] + [key for key in own if not same(mine[key], theirs.get(key))]


class _RankFiles:
    def __init__(self, step: Path, run: Run, models: list[Any], optimizers: list[Any]) -> None:
        self._step, self._run, self._models, self._optimizers = step, run, models, optimizers

    def filled(self) -> Run:
        run, model, optimizer = self._run, self._models[0], self._optimizers[0]
        stage = optimizer["zero_stage"]
        number = stage.arguments[0] if isinstance(stage, Made) else stage
        if number != 3 or int(model["dp_world_size"]) != run.ranks:
            raise ValueError(
                f"{self._step} is of stage {stage!r:.80} and {model['dp_world_size']} ranks, "
                f"expected 3 and {run.ranks}"
            )
        trained, names = self._trained()
        for name, shape in (model["frozen_param_shapes"] or {}).items():
            parts = [each["frozen_param_fragments"][name] for each in self._models]
            trained[name] = joined(parts[0].dtype, shape, parts)
        run.buffers.update(own_name(name) for name in model["buffer_names"])
        shared = model.get("shared_params") or {}
        for name, value in model["module"].items():
            if name.rpartition(".")[2] == "_extra_state":
                run.extra_states[own_name(name)] = value
            elif name in shared:
                run.also.setdefault(own_name(shared[name]), []).append(own_name(name))
            else:
                run.tensors[own_name(name)] = (
                    value if name in model["buffer_names"] else trained.pop(name)
                )
        if trained:
            raise ValueError(
                f"{self._step}: the model has no {', '.join(list(trained)[:6])}, which the "
                "optimizer has"
            )
        inner = optimizer["optimizer_state_dict"]
        groups = []
        for group in inner["param_groups"]:
            listed = [own_name(name) for number in group["params"] for name in names[number]]
            groups.append({**group, "params": listed})
        return replace(run, groups=groups, extra=self._extra(model, optimizer))

    def _trained(self) -> tuple[dict[str, Lazy], list[list[str]]]:
        """Each parameter from its pieces, its state likewise; and the names of each sub-group."""
        trained: dict[str, Lazy] = {}
        shapes, ranks = self._models[0]["param_shapes"], range(self._run.ranks)
        flats = [each["fp32_flat_groups"] for each in self._optimizers]
        states = [each["optimizer_state_dict"]["state"] for each in self._optimizers]
        if any(len(each) != len(shapes) for each in flats):
            raise ValueError(
                f"{self._step}: {len(shapes)} lists of names for {[len(each) for each in flats]} "
                "flat tensors of the ranks"
            )
        for number, named in enumerate(shapes):
            offset = 0
            for name, shape in named.items():
                length = -(-math.prod(shape) // self._run.ranks)
                whole = partial(self._whole, offset, offset + length, shape)
                trained[name] = whole([flats[rank][number] for rank in ranks])
                state = {}
                for key, value in states[0].get(number, {}).items():
                    if isinstance(value, Lazy) and value.shape:
                        value = whole([states[rank][number][key] for rank in ranks])
                    state[key] = small(value)
                if number in states[0]:
                    self._run.state[own_name(name)] = state
                offset += length
        return trained, [list(named) for named in shapes]

    def _whole(self, begin: int, end: int, shape: tuple[int, ...], parts: list[Lazy]) -> Lazy:
        if any(part.numel < end for part in parts):
            raise ValueError(
                f"{self._step}: flat tensors of {[part.numel for part in parts]} elements, {end} "
                "expected"
            )
        return joined(parts[0].dtype, shape, [part.part(begin, end) for part in parts])

    def _extra(self, model: dict[str, Any], optimizer: dict[str, Any]) -> Any:
        # else DeepSpeed has saved it again, with a header of its own
        if _OURS in model and "ds_version" not in model:
            return model[_OURS]
        scaler = optimizer["loss_scaler"]
        header = {key: model[key] for key in _HEADER if key in model}
        header["loss_scaler"] = [scaler.name, scaler.state]
        beside = {key: value for key, value in model.items() if key not in (*_MANAGED, *_HEADER)}
        return beside | {_KEY: mapped(header, _told)}


def _told(leaf: Any) -> Any:
    """Sets and dtypes, which each header of DeepSpeed has, as `extra` can hold them."""
    if isinstance(leaf, set):
        return {_SET: sorted(leaf, key=repr)}
    if isinstance(leaf, Global) and isinstance(
        getattr(torch, leaf.name.removeprefix("torch."), None), torch.dtype
    ):
        return {_DTYPE: leaf.name}
    return leaf


def _as_told(value: Any) -> Any:
    """The inverse, for `pickled.write`."""
    if isinstance(value, list | tuple):
        return type(value)(map(_as_told, value))
    if not isinstance(value, dict):
        return value
    if [*value] == [_SET]:
        return Made(_SET, (value[_SET],))
    if [*value] == [_DTYPE]:
        return Global(value[_DTYPE])
    return {key: _as_told(held) for key, held in value.items()}


class _SubGroup(NamedTuple):
    group: int
    names: list[str]


def write(run: Run, path: Path, advance: Callable[[int], object]) -> None:
    """For as many ranks as were asked for, or as there were: DeepSpeed loads at the number of ranks
    that saved.
    """
    if run.groups is None:
        raise ValueError(
            "DeepSpeed ZeRO-3 keeps what trains in the optimizer's files, and this checkpoint "
            "has no optimizer"
        )
    header = run.extra.get(_KEY) if isinstance(run.extra, dict) else None
    # it may not be DeepSpeed's, or what stands beside it would stand in the place of its own
    if (
        not isinstance(header, dict)
        or not {*header} <= {*_HEADER, "loss_scaler"}
        or {*run.extra} & {*_MANAGED, *_HEADER}
    ):
        header = {}
    ranks = run.ranks_asked_for or int(header.get("dp_world_size", run.ranks))
    run = replace(run, ranks=ranks)
    subs = list(_sub_groups(run, header))
    trained = {name for sub in subs for name in sub.names}
    if other := [name for name in trained if run.tensors[name].dtype != torch.float32]:
        raise ValueError(
            f"DeepSpeed's masters are float32, and {min(other)} is {run.tensors[min(other)].dtype}"
        )
    found = [values.get("step") for values in run.state.values()]
    steps = max((int(step) for step in found if isinstance(step, Tensor | int | float)), default=0)
    tag = f"global_step{header.get('global_steps', steps)}"
    writer = _Writer(run, subs, trained, header, steps)
    file_operations.make_directory(path / tag)
    for rank in range(ranks):
        for kind, content in (("model", writer.model(rank)), ("optim", writer.optimizer(rank))):
            name = f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
            with file_operations.writing(path / tag / name) as file:
                torch_files.write(file, 0, content, advance)
    with file_operations.writing(path / "latest") as file:
        file_operations.write(file, [memoryview(tag.encode())])
    for directory in (path / tag, path):
        file_operations.sync_directory(directory)


def _sub_groups(run: Run, header: dict[str, Any]) -> Iterator[_SubGroup]:
    """As DeepSpeed cuts the optimizer's groups: a sub-group ends with the parameter that
    fills it.
    """
    zero = (header.get("ds_config") or {}).get("zero_optimization") or {}
    most = int(zero.get("sub_group_size", _SUB_GROUP))
    for number, group in enumerate(run.groups or ()):
        names = [name for name in group["params"] if run.tensors[name].numel]
        ends, size = [0], 0
        for at, name in enumerate(names):
            size += -(-run.tensors[name].numel // run.ranks)
            if size >= most or at == len(names) - 1:
                ends.append(at + 1)
                size = 0
        for begin, end in pairwise(ends):
            yield _SubGroup(number, names[begin:end])


class _Writer:
    def __init__(
        self, run: Run, subs: list[_SubGroup], trained: set[str], header: dict[str, Any], steps: int
    ) -> None:
        self._run, self._subs, self._header, self._steps = run, subs, header, steps
        self._named = sorted_out(run.state, run.shapes, Tensor | Lazy)
        # the others don't know buffers from frozen parameters: those are taken for buffers
        tells = run.kind in ("zero3", "deepspeed")
        untrained = [name for name in run.tensors if name not in trained]
        self._frozen = [name for name in untrained if tells and name not in run.buffers]
        self._buffers = [name for name in untrained if not tells or name in run.buffers]

    def _piece(self, lazy: Lazy, rank: int) -> Lazy:
        length = -(-lazy.numel // self._run.ranks)
        return lazy.part(rank * length, (rank + 1) * length)

    def model(self, rank: int) -> dict[str, Any]:
        run = self._run
        module: dict[str, Any] = {}
        for name, lazy in run.tensors.items():
            shown = lazy if name in self._buffers else torch.empty(0, dtype=lazy.dtype)
            module |= dict.fromkeys([name, *run.also.get(name, ())], shown)
        content: dict[str, Any] = {
            "module": module | run.extra_states,
            "buffer_names": self._buffers,
            "optimizer": None,
            "param_shapes": [{name: self._size(name) for name in sub.names} for sub in self._subs],
            "frozen_param_shapes": {name: self._size(name) for name in self._frozen},
            "frozen_param_fragments": {
                name: self._piece(run.tensors[name], rank) for name in self._frozen
            },
            "shared_params": {alias: name for name, others in run.also.items() for alias in others},
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": 0,
            "global_steps": self._steps,
        }
        content |= {key: _as_told(value) for key, value in self._header.items() if key in _HEADER}
        content |= {"dp_world_size": run.ranks, "mp_world_size": 1}
        if self._header:
            return content | {key: value for key, value in run.extra.items() if key != _KEY}
        return content | {_OURS: run.extra}

    def _size(self, name: str) -> Made:
        return Made("torch.Size", (self._run.tensors[name].shape,))

    def optimizer(self, rank: int) -> dict[str, Any]:
        scaler, scale = self._header.get(
            "loss_scaler", (_SCALER, {"cur_scale": 1.0, "dynamic": False})
        )
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self._run.groups or ()]
        for number, sub in enumerate(self._subs):
            groups[sub.group]["params"].append(number)
        states = {number: self._state(sub, rank) for number, sub in enumerate(self._subs)}
        state = {number: found for number, found in states.items() if found}
        content = {
            "partition_count": self._run.ranks,
            "overflow": False,
            "dynamic_loss_scale": bool(scale.get("dynamic")),
            "zero_stage": Made("deepspeed.runtime.zero.config.ZeroStageEnum", (3,)),
            "loss_scaler": Made(scaler, (), _as_told(scale), new=True),
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": [
                self._flat([self._run.tensors[name] for name in sub.names], rank)
                for sub in self._subs
            ],
        }
        return {"optimizer_state_dict": content}

    def _flat(self, lazies: list[Lazy], rank: int) -> Lazy:
        pieces = [self._piece(lazy, rank) for lazy in lazies]
        if len({piece.dtype for piece in pieces}) > 1:
            raise ValueError(
                "the state of parameters that DeepSpeed keeps in one tensor has several dtypes"
            )
        return joined(pieces[0].dtype, (sum(piece.numel for piece in pieces),), pieces)

    def _state(self, sub: _SubGroup, rank: int) -> dict[str, Any]:
        """Of one parameter of DeepSpeed's optimizer: it has one step."""
        states = [self._run.state.get(name, {}) for name in sub.names]
        described = {name: self._named.get(name, NamedState()) for name in sub.names}
        for name, each in described.items():
            for key, (_, shape) in each.whole.items():
                raise ValueError(
                    "DeepSpeed keeps state of the parameters' shapes alone, and here "
                    f"{key!r} of {name} has {tuple(shape)}"
                )
        first = described[sub.names[0]]
        if other := [name for name, each in described.items() if each != first]:
            raise ValueError(
                f"DeepSpeed keeps one state for {sub.names[0]} to {sub.names[-1]}, and here that "
                f"is {first} for {sub.names[0]} and {described[other[0]]} for {other[0]}"
            )
        return {key: states[0][key] for key in first.scalars} | {
            key: self._flat([as_lazy(state[key]) for state in states], rank)
            for key in first.elements
        }
