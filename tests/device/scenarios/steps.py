"""What may stand between one optimizer step and the next."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import zero3
from tests.device.scenarios.policies import COMPRESSED
from tests.device.scenarios.registry import scenario
from tests.device.training import ROWS, WIDTH, Caching, Me, Stack, fails, loss_of, micro_batches, sgd, sharded, train, update, values


@scenario
def no_sync(me: Me) -> list[Tensor]:
    model = sharded(me)
    quiet = partial(zero3.no_sync, model)
    return micro_batches(model, me, [quiet, quiet, nullcontext])


@scenario
def step_guard(me: Me, **policy: Any) -> list[Tensor]:
    """Rank 1 fails in a forward and in a backward: both micro-batches are dropped on all ranks."""
    model = sharded(me, **policy)
    optimizer = sgd(model)
    for step in range(6):
        with zero3.step_guard(model) as guarded, ExitStack() as undone:
            if me.rank == 1 and step == 2:
                undone.callback(model.blocks[2].register_forward_pre_hook(fails).remove)
            loss = loss_of(model, me, step)
            if me.rank == 1 and step == 4:
                loss.register_hook(fails)
            loss.backward()
        assert bool(guarded.failed) == (step in (2, 4))
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return values(model)


@scenario
def dynamic(me: Me) -> list[Tensor]:
    """Ranks leave out different blocks."""
    model = sharded(me, dynamic=True)
    optimizer = sgd(model)
    for step in range(4):
        model.skip = {(me.rank + step) % 4}  # type: ignore[assignment]
        loss_of(model, me, step).backward()
        update(optimizer)
    return values(model)


@scenario
def grad_scaler(me: Me) -> list[Tensor]:
    """Rank 0 overflows in step 1: no rank steps."""
    model = sharded(me)
    optimizer, scaler = sgd(model), zero3.GradScaler(me.device.type, init_scale=256.0, growth_interval=2)
    for step in range(4):
        loss = loss_of(model, me, step) * (float("inf") if (me.rank, step) == (0, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        zero3.clip_grad_norm_(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [*values(model), torch.tensor(scaler.get_scale())]


@scenario
def param_groups_whole(me: Me, **policy: Any) -> list[Tensor]:
    model = sharded(me, **policy)
    groups = zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 2, "weight_decay": 0.1 * (info.ndim == 2)})
    return train(model, me, optimizer=torch.optim.AdamW(groups, lr=0.01, foreach=True))


@scenario
def evaluation_between_steps(me: Me) -> list[Tensor]:
    model = sharded(me, prefetch_depth=2)
    optimizer, seen = sgd(model), []
    for step in range(3):
        seen += train(model, me, 1, optimizer)
        with torch.no_grad():
            seen.append(loss_of(model, me, 50 + step))
    return seen


@scenario
def two_forwards_before_one_backward(me: Me) -> list[Tensor]:
    model = sharded(me)
    optimizer = sgd(model)
    for step in range(3):
        (loss_of(model, me, step) + loss_of(model, me, 10 + step)).backward()
        update(optimizer)
    return values(model)


@scenario
def mean_over_tokens(me: Me) -> list[Tensor]:
    model = sharded(me)
    optimizer = sgd(model)
    for step in range(3):
        count = 3 + 2 * me.rank + step
        loss = model(me.tensor(step, count, WIDTH)).pow(2).sum()
        zero3.backward(loss, torch.tensor(count, device=me.device), model)
        update(optimizer)
    return values(model)


@scenario
def uneven_inputs(me: Me, *, guarded: bool = False, **policy: Any) -> list[Tensor]:
    """`guarded`: each micro-batch is in a step_guard. The last rank fails in a forward while all have data, and alone in a backward."""
    model = sharded(me, **policy)
    optimizer = sgd(model)
    last = me.rank == me.world_size - 1

    def clipped() -> None:
        zero3.clip_grad_norm_(model, 1.0)
        update(optimizer)

    uneven = zero3.joinable(model, clipped)
    with Join([uneven]):
        for step in range(2 + 2 * me.rank):
            with zero3.step_guard(model) if guarded else nullcontext(), ExitStack() as undone:
                if guarded and last and step == 1:
                    undone.callback(model.blocks[2].register_forward_pre_hook(fails).remove)
                loss = loss_of(model, me, step)
                if guarded and last and step == 2 * me.rank:
                    loss.register_hook(fails)
                loss.backward()
            uneven.step()
    return values(model)


@scenario
def uneven_inputs_and_transactional(me: Me) -> list[Tensor]:
    return uneven_inputs(me, transactional=True)


@scenario
def uneven_inputs_and_step_guard(me: Me) -> list[Tensor]:
    return uneven_inputs(me, guarded=True)


@scenario
def several_models(me: Me) -> list[Tensor]:
    """A student learns from a frozen teacher: their layers travel in turn."""
    teacher, student = sharded(me, seed=1), sharded(me, param_dtype=torch.bfloat16)
    optimizer = sgd(student)
    for step in range(3):
        x = me.tensor(step, ROWS, WIDTH)
        with torch.no_grad():
            target = teacher(x)
        (student(x).float() - target).pow(2).mean().backward()
        update(optimizer)
    return [*values(student), *train(teacher, me, 1)]


@scenario
def an_exception_and_on(me: Me, **policy: Any) -> list[Tensor]:
    """A forward and a backward raise on all ranks, while gathers and reductions are under way; the next steps are right."""
    model = sharded(me, **policy)

    def fails_in_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fails)

    seen = train(model, me, 1)
    for register in (model.blocks[2].register_forward_pre_hook, model.blocks[0].register_forward_hook):
        handle = register(fails if register.__name__ == "register_forward_pre_hook" else fails_in_backward)
        with suppress(ArithmeticError):
            loss_of(model, me, 0).backward()
        handle.remove()
        seen += train(model, me, 2)
    return seen


def _breaks_off(model: nn.Module, me: Me, *, in_forward: bool) -> None:
    """All ranks raise in a forward, or at the end of a backward, while transfers of all layers are under way."""
    x = me.tensor(0, ROWS, WIDTH).requires_grad_()
    x.register_hook(fails)
    handle = model.blocks[2].register_forward_pre_hook(fails) if in_forward else None
    with suppress(ArithmeticError):
        model(x * 2).pow(2).mean().backward()
    if handle is not None:
        handle.remove()


@scenario
def gradients_zeroed_after_an_exception(me: Me, **policy: Any) -> list[Tensor]:
    """Their memory is others' at once, although a reduction may have been adding to them."""
    model = sharded(me, **policy)
    optimizer, seen = sgd(model), train(model, me, 1)
    for step in range(2):
        loss_of(model, me, step).backward()
        _breaks_off(model, me, in_forward=False)
        optimizer.zero_grad()
        seen += [me.tensor(number, *chunk.shape) * 2 for number, chunk in enumerate(zero3.get_trainable_chunk(model))]
        seen += train(model, me, 1, optimizer)
    return seen


@scenario
def a_model_deleted_after_an_exception(me: Me, **policy: Any) -> list[Tensor]:
    """Its memory is others' at once, although transfers of it were under way."""
    seen = []
    for in_forward in (True, False):
        model = sharded(me, prefetch_depth=2, **policy)
        shapes = [parameter.shape for parameter in model.parameters()] + [chunk.shape for chunk in zero3.get_trainable_chunk(model)]
        train(model, me, 1)
        loss_of(model, me, 0).backward()
        _breaks_off(model, me, in_forward=in_forward)
        del model
        seen += [me.tensor(number, *shape) * 2 for number, shape in enumerate(shapes * 3)]
    return seen


@scenario
def another_path(me: Me) -> list[Tensor]:
    """All ranks leave out blocks that are on their way already."""
    model = sharded(me, prefetch_depth=2)
    optimizer, seen = sgd(model), []
    for skip in (set(), set(), {2, 3}, {1}, set(), {2, 3}):
        model.skip = skip  # type: ignore[assignment]
        seen += train(model, me, 1, optimizer)
    return seen


@scenario
def memory_after_another_path(me: Me) -> list[Tensor]:
    """That of full buffers which nobody needed is others' at once, although they were on their way."""
    model = sharded(me, prefetch_depth=2)
    seen = train(model, me, 2)
    sizes = [chunk.numel() * me.world_size for chunk in zero3.get_trainable_chunk(model)]
    for skip in ({2, 3}, {3}):
        model.skip = skip  # type: ignore[assignment]
        with torch.no_grad():
            seen.append(loss_of(model, me, 50))
        seen += [me.tensor(number, size) * 2 for number, size in enumerate(sizes)]
    return seen


@scenario
def a_view_that_escapes(me: Me) -> list[Tensor]:
    """It has the values of its forward for ever: the next fetches take another buffer."""
    model = sharded(me, lambda: Stack(Caching))
    optimizer, seen = sgd(model), []
    for _ in range(3):
        seen += train(model, me, 1, optimizer)
        seen += [block.cache for block in model.blocks]
    return seen


@scenario
def compressed_whole_parameters(me: Me) -> list[Tensor]:
    return param_groups_whole(me, **COMPRESSED)


@scenario
def compressed_exception_and_on(me: Me) -> list[Tensor]:
    return an_exception_and_on(me, **COMPRESSED)
