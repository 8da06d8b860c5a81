"""Two replicas of a model that is sharded over two ranks."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.device.scenarios.policies import COMPRESSED
from tests.device.scenarios.registry import add, scenario
from tests.device.scenarios.steps import (
    a_model_deleted_after_an_exception,
    an_exception_and_on,
    gradients_zeroed_after_an_exception,
    step_guard,
    uneven_inputs,
)
from tests.device.training import Me, fails, loss_of, micro_batches, sgd, sharded, update, values


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
def mesh_step_guard(me: Me) -> list[Tensor]:
    return step_guard(on_mesh(me), prefetch_depth=2)


@scenario
def mesh_step_guard_no_sync(me: Me) -> list[Tensor]:
    """Steps of three micro-batches, the first inside replicas. In each but the first step the first two fail, on one rank after another."""
    model = sharded(on_mesh(me))
    optimizer = sgd(model)
    for number in range(12):
        fails_somewhere = number > 2 and number % 3 < 2
        inside = nullcontext() if number % 3 else zero3.no_sync(model, replicas_only=True)
        with inside, zero3.step_guard(model) as guarded, ExitStack() as undone:
            if fails_somewhere and me.rank == number % me.world_size:
                undone.callback(model.blocks[number % 4].register_full_backward_pre_hook(fails).remove)
            loss_of(model, me, number).backward()
        assert guarded.failed == fails_somewhere
        if number % 3 == 2:
            update(optimizer)
    return values(model)


@scenario
def mesh_uneven_inputs(me: Me) -> list[Tensor]:
    return uneven_inputs(on_mesh(me))


@scenario
def mesh_uneven_inputs_and_step_guard(me: Me) -> list[Tensor]:
    return uneven_inputs(on_mesh(me), guarded=True, transactional=True, prefetch_depth=2)


@scenario
def mesh_an_exception_and_on(me: Me) -> list[Tensor]:
    return an_exception_and_on(on_mesh(me))


@scenario
def mesh_gradients_zeroed_after_an_exception(me: Me) -> list[Tensor]:
    return gradients_zeroed_after_an_exception(on_mesh(me))


@scenario
def mesh_a_model_deleted_after_an_exception(me: Me) -> list[Tensor]:
    return a_model_deleted_after_an_exception(on_mesh(me))
