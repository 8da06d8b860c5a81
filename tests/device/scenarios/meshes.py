"""Two replicas of a model that is sharded over two ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.device.scenarios.policies import COMPRESSED
from tests.device.scenarios.registry import add, scenario
from tests.device.scenarios.steps import a_model_deleted_after_an_exception, an_exception_and_on, gradients_zeroed_after_an_exception
from tests.device.training import Me, micro_batches, sharded


def on_mesh(me: Me) -> Me:
    """The rank in a mesh of two replicas."""
    names = ("dp_replicate", "dp_shard")
    mesh = me.group or init_device_mesh(me.device.type, (2, me.world_size // 2), mesh_dim_names=names)
    return replace(me, group=mesh)


add("mesh", lambda me: sharded(on_mesh(me)))
add("mesh_compressed", lambda me: sharded(on_mesh(me), **COMPRESSED))
add("mesh_bf16_depth_2", lambda me: sharded(on_mesh(me), param_dtype=torch.bfloat16, reduce_dtype=torch.float32, prefetch_depth=2))


@scenario
def mesh_no_sync(me: Me) -> list[Tensor]:
    """Each step: a micro-batch over all ranks, two inside replicas, and one that brings these to all ranks."""
    model = sharded(on_mesh(me))
    inside = partial(zero3.no_sync, model, replicas_only=True)
    return micro_batches(model, me, [nullcontext, inside, inside, nullcontext])


@scenario
def mesh_an_exception_and_on(me: Me) -> list[Tensor]:
    return an_exception_and_on(on_mesh(me))


@scenario
def mesh_gradients_zeroed_after_an_exception(me: Me) -> list[Tensor]:
    return gradients_zeroed_after_an_exception(on_mesh(me))


@scenario
def mesh_a_model_deleted_after_an_exception(me: Me) -> list[Tensor]:
    return a_model_deleted_after_an_exception(on_mesh(me))
