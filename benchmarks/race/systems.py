"""The systems of the race, unmodified: from a model on the meta device to one that trains on the simulated GPU. Nothing has values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zero3
from benchmarks.race.models import Model
from zero3.access import states_of
from zero3.experts.at_home import _LENGTHS, _NEEDS, _PAIRS, AtHome


@dataclass
class Training:
    model: nn.Module
    parameters: list[nn.Parameter]
    clip: Callable[[], Any]
    around: AbstractContextManager[Any] = field(default_factory=nullcontext)  # a forward


TILE = 4096  # tokens


def _torchs(model: nn.Module) -> Training:
    parameters = [*model.parameters()]
    return Training(model, parameters, lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True))


def _layers(model: Model) -> list[nn.Module]:
    return [model.embedding, *model.blocks, model.readout]


def spread_evenly(home: AtHome) -> None:
    """Calls go on with the counts of tokens that use all experts alike: how many go where depends on values, and there are none here. The
    counts' kernels and their exchange are made, and the host waits for them."""
    find, count, calls = home._find_route, home._count, list[Tensor]()

    def noted(state: Any, inputs: tuple[Tensor, Tensor, Tensor], *, needs: bool) -> Any:
        calls[:] = [inputs[1]]
        return find(state, inputs, needs=needs)

    def told(words: Tensor) -> list[list[int]]:
        count(words)
        route, (*_, length, of_weights) = home._planned(calls[0], needs=True), home._latest
        same = route.pairs // len(words) << _PAIRS | length << _LENGTHS | of_weights << _LENGTHS + 4 | 1 << _NEEDS
        return [[rows | same for rows in each] for each in (route.sent, route.received)]

    home._find_route, home._count = noted, told  # type: ignore[method-assign]


def by_zero3(model: Model, ranks: int, *, long: bool = False, **chosen: Any) -> Training:
    """`long`: all ranks share a sequence; tiles, activations in the host's memory."""
    turns = model.turns  # buffers of rank 0 are sent to all, and a model on meta has none
    model.turns = torch.empty_like(turns, device="cuda")
    policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **chosen)
    for block in model.blocks if long else ():
        zero3.tile(block.mlp, TILE)
    mesh = init_device_mesh("cuda", (1, ranks), mesh_dim_names=("dp_shard", "sp")) if long else None
    zero3.shard(model, _layers(model), device="cuda", policy=policy, process_group=mesh)
    for state in states_of(model):
        for chunk in state.chunks:
            chunk.unloaded.clear()  # values never come
        if isinstance(state.call, AtHome):
            spread_evenly(state.call)
    around = zero3.offload_activations() if long else nullcontext()
    return Training(model, zero3.get_trainable_chunk(model), lambda: zero3.clip_grad_norm_(model, 1.0), around)


def by_fsdp2(model: Model, ranks: int, *, keep_last: bool = False, root_holds_ends: bool = False) -> Training:
    """`keep_last`: the last layer stays between forward and backward. `root_holds_ends`: embedding and head are the root's, and the last
    block stays, as in torchtitan."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    def placed(parameter: nn.Parameter) -> Shard:
        """A stack of fewer experts than ranks is cut inside of each: along the first dimension most ranks would have padding."""
        return Shard(1 if parameter.dim() == 3 and len(parameter) % ranks else 0)

    mesh = init_device_mesh("cuda", (ranks,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [*model.blocks] if root_holds_ends else _layers(model)
    for layer in layers:
        stays = (keep_last or root_holds_ends) and layer is layers[-1]
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=not stays, shard_placement_fn=placed)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    model.to_empty(device="cuda")
    return _torchs(model)


def by_fsdp1(model: Model, ranks: int, *, root_holds_ends: bool = False) -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    layers = {id(layer) for layer in (model.blocks if root_holds_ends else _layers(model))}
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = FullyShardedDataParallel(
        model, auto_wrap_policy=CustomPolicy(lambda module: id(module) in layers), mixed_precision=precision, use_orig_params=True,
        device_id=torch.device("cuda", 0), param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
        limit_all_gathers=True,
    )  # fmt: skip
    parameters = [*wrapped.parameters()]
    return Training(wrapped, parameters, lambda: wrapped.clip_grad_norm_(1.0))


def by_ddp(model: Model, ranks: int) -> Training:
    model.to_empty(device="cuda")
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)

    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = wrapped

        def forward(self, ids: Tensor) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return self.inner(ids)

    return _torchs(Autocast())


def by_plain(model: Model, ranks: int) -> Training:
    """One rank, all in bf16: what a step computes without anybody else."""
    model.to_empty(device="cuda")
    turns = model.turns
    model.to(torch.bfloat16)
    model.turns = turns
    return _torchs(model)


SYSTEMS: dict[str, Callable[..., Training]] = {
    "zero3": by_zero3, "fsdp2": by_fsdp2, "fsdp1": by_fsdp1, "ddp": by_ddp, "plain": by_plain,
}  # fmt: skip
