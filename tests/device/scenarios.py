"""What runs on the simulated device: each capability in a short training run. A scenario returns tensors that must not depend on the order
in which streams work.

The same scenario runs with ranks on the CPU, for numbers that no device had a hand in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.device.training import ROWS, WIDTH, Adapted, Block, Caching, Me, Stack, built, in_sequence, loss_of, sgd, sharded, train, values
from zero3 import ShardingPolicy

Scenario = Callable[[Me], Iterable[Tensor]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def _add(name: str, make: Callable[[Me], nn.Module]) -> None:
    SCENARIOS[name] = lambda me: train(make(me), me)


for _depth in range(4):
    _add(f"prefetch_depth_{_depth}", lambda me, depth=_depth: in_sequence(me, prefetch_depth=depth))
_add("shard", sharded)
_add("bf16", lambda me: sharded(me, param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
_add("bf16_sums", lambda me: sharded(me, param_dtype=torch.bfloat16))
_add("grad_dtype", lambda me: sharded(me, param_dtype=torch.bfloat16, grad_dtype=torch.float32))
_add("ignored", lambda me: sharded(me, lambda: Stack().to(me.device), ignored=lambda name, info: name.endswith("norm.weight")))
_add("sums_not_means", lambda me: sharded(me, gradient_reduction="sum"))
_add("checkpoint_reentrant", lambda me: sharded(me, lambda: Stack(lambda: Block(reentrant=True))))
_add("checkpoint_not_reentrant", lambda me: sharded(me, lambda: Stack(lambda: Block(reentrant=False))))
_add(
    "checkpoint_bf16_depth_2",
    lambda me: sharded(me, lambda: Stack(lambda: Block(reentrant=False)), param_dtype=torch.bfloat16, prefetch_depth=2),
)
_add("stage_1", lambda me: sharded(me, stage=1))
_add("stage_2", lambda me: sharded(me, stage=2))
_add("kept_between_forward_and_backward", lambda me: sharded(me, reshard_after_forward=False))
_add("transactional", lambda me: sharded(me, transactional=True))
_add("compare_every_transfer", lambda me: sharded(me, compare_every=1))
_add("separate_backup_group", lambda me: sharded(me, separate_backup_group=True))
_add("lora_on_a_bf16_base", lambda me: sharded(me, lambda: Stack(Adapted)))
for _kind in (zero3.NF4(), zero3.Int8(), zero3.Float8(block=(8, 8)), zero3.MXFP4()):
    _add(f"lora_on_a_base_in_{type(_kind).__name__}", lambda me, kind=_kind: sharded(me, lambda: Stack(Adapted), quantize=kind))
_add(
    "lora_on_a_quantized_base_with_prefetch",
    lambda me: sharded(me, lambda: Stack(Adapted), quantize=zero3.NF4(), prefetch_depth=2, param_dtype=torch.bfloat16),
)


_COMPRESSED = {"gather_format": zero3.Int8(32), "reduce_format": zero3.Int8(32)}
_add("compressed", lambda me: sharded(me, **_COMPRESSED))
_add("compressed_float8", lambda me: sharded(me, gather_format=zero3.Float8(block=(1, 16)), prefetch_depth=2))
_add("compressed_stochastic", lambda me: sharded(me, reduce_format=zero3.Int8(stochastic=True)))
_add("compressed_bf16", lambda me: sharded(me, param_dtype=torch.bfloat16, **_COMPRESSED))
_add("compressed_stage_2", lambda me: sharded(me, stage=2, **_COMPRESSED))
_add("compressed_transactional", lambda me: sharded(me, transactional=True, prefetch_depth=2, **_COMPRESSED))


def on_mesh(me: Me) -> Me:
    """The rank in a mesh of two replicas."""
    names = ("dp_replicate", "dp_shard")
    mesh = me.group or init_device_mesh(me.device.type, (2, me.world_size // 2), mesh_dim_names=names)
    return replace(me, group=mesh)


ON_MESHES = {"mesh", "mesh_bf16_depth_2", "mesh_no_sync", "mesh_an_exception_and_on", "mesh_compressed"}  # they need four ranks
_add("mesh", lambda me: sharded(on_mesh(me)))
_add("mesh_compressed", lambda me: sharded(on_mesh(me), **_COMPRESSED))
_add("mesh_bf16_depth_2", lambda me: sharded(on_mesh(me), param_dtype=torch.bfloat16, reduce_dtype=torch.float32, prefetch_depth=2))


@scenario
def mesh_no_sync(me: Me) -> list[Tensor]:
    """Each step: a micro-batch over all ranks, two inside replicas, and one that brings these to all ranks."""
    model = sharded(on_mesh(me))
    optimizer = sgd(model)
    for step in range(2):
        for micro in range(4):
            with zero3.no_sync(model, replicas_only=True) if micro in (1, 2) else nullcontext():
                loss_of(model, me, 10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@scenario
def mesh_an_exception_and_on(me: Me) -> list[Tensor]:
    return an_exception_and_on(on_mesh(me))


@scenario
def compressed_whole_parameters(me: Me) -> list[Tensor]:
    return param_groups_whole(me, **_COMPRESSED)


@scenario
def compressed_exception_and_on(me: Me) -> list[Tensor]:
    return an_exception_and_on(me, **_COMPRESSED)


@scenario
def no_sync(me: Me) -> list[Tensor]:
    model = sharded(me)
    optimizer = sgd(model)
    for step in range(2):
        for micro in range(3):
            with zero3.no_sync(model) if micro < 2 else nullcontext():
                loss_of(model, me, 10 * step + micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@scenario
def step_guard(me: Me) -> list[Tensor]:
    """Rank 1 fails in a forward and in a backward: both micro-batches are dropped on all ranks."""
    model = sharded(me)
    optimizer = sgd(model)

    def fails(*_: Any) -> None:
        raise ArithmeticError("as told")

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
        optimizer.step()
        optimizer.zero_grad()
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


def _offload_activations(me: Me, make: Callable[[], nn.Module], to: Any = "cpu", backward_inside: bool = False) -> list[Tensor]:
    """In every step one graph is dropped with its tensors on their way out, and one with tensors on their way back."""
    model, offloaded = sharded(me, lambda: Stack(make)), zero3.offload_activations(to, min_bytes=1)
    optimizer = sgd(model)

    def fails(*_: Any) -> None:
        raise ArithmeticError("as told")

    for step in range(3):
        with offloaded:
            loss_of(model, me, step)
            with model.blocks[1].register_forward_hook(lambda module, inputs, output: output.register_hook(fails) and None):
                loss = loss_of(model, me, step)
        with suppress(ArithmeticError):
            loss.backward()
        zero3.reset(model)
        del loss
        with offloaded:
            loss = loss_of(model, me, step)
        with offloaded if backward_inside else nullcontext():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


SCENARIOS["offload_activations"] = lambda me: _offload_activations(me, Block)
SCENARIOS["offload_activations_checkpoint"] = lambda me: _offload_activations(me, lambda: Block(reentrant=False))
SCENARIOS["offload_activations_reentrant"] = lambda me: _offload_activations(me, lambda: Block(reentrant=True), backward_inside=True)
SCENARIOS["offload_activations_to_a_file"] = lambda me: _offload_activations(me, Block, me.directory)


def _offloading(name: str, where: str) -> Scenario:
    return lambda me: SCENARIOS[name](replace(me, offload=where if where == "cpu" else me.directory))


for _name in (
    "shard", "bf16", "sums_not_means", "no_sync", "step_guard", "grad_scaler", "param_groups_whole", "prefetch_depth_2", "transactional",
    "stage_1", "mesh", "mesh_no_sync", "lora_on_a_base_in_NF4",
):  # fmt: skip
    SCENARIOS[f"offload_to_cpu_{_name}"] = _offloading(_name, "cpu")
for _name in ("shard", "bf16", "no_sync", "grad_scaler", "mesh"):
    SCENARIOS[f"offload_to_files_{_name}"] = _offloading(_name, "files")
ON_MESHES |= {name for name in SCENARIOS if name.startswith("offload_to") and "mesh" in name}


@scenario
def offload_optimizer_to_files(me: Me) -> list[Tensor]:
    model = sharded(replace(me, offload=me.directory))
    return train(model, me, optimizer=zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01, foreach=True)))


@scenario
def offload_optimizer_to_files_and_clip(me: Me) -> list[Tensor]:
    """From the second step on, norms are those of landing, and the optimizer multiplies. In the last step somebody looks before it."""
    model = sharded(replace(me, offload=me.directory), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    chunks, seen = zero3.get_trainable_chunk(model), []
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(chunks, lr=0.01, foreach=True))
    for step in range(4):
        loss_of(model, me, step).backward()
        seen.append(zero3.clip_grad_norm_(model, 0.05))
        if step == 3:
            seen += [chunk.grad.clone() for chunk in chunks if chunk.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *values(model)]


def _stepping_in_backward(me: Me, where: str) -> list[Tensor]:
    """The host writes chunks while the device is still in backward."""
    model = sharded(replace(me, offload=where if where == "cpu" else me.directory))
    adamw = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01, foreach=True)
    optimizer, losses = zero3.offload_optimizer(adamw, in_backward=True), []
    for step in range(4):
        loss = loss_of(model, me, step)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return [*losses, *values(model)]


SCENARIOS["offload_optimizer_to_files_in_backward"] = lambda me: _stepping_in_backward(me, "files")
SCENARIOS["offload_optimizer_to_cpu_in_backward"] = lambda me: _stepping_in_backward(me, "cpu")


@scenario
def offload_and_forwards_without_backward(me: Me) -> list[Tensor]:
    """Between a backward and its step comes a forward without one: the host writes the chunks that it has read."""
    model = sharded(replace(me, offload="cpu"))
    optimizer, seen = sgd(model), []
    for step in range(4):
        loss_of(model, me, step).backward()
        with torch.set_grad_enabled(step % 2 == 0):
            seen.append(loss_of(model, me, 10 + step).detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(loss_of(model, me, 20 + step))
            _scale_chunks(model, 0.9)
            with zero3.full_params(model):
                seen += [parameter.sum() for parameter in model.parameters()]
            _scale_chunks(model, 1.1)
    return [*seen, *values(model)]


@scenario
def offload_and_a_frozen_first_layer(me: Me) -> list[Tensor]:
    """No gradient follows that of the layer which a backward comes to last, and the host writes its chunk then, as an average would."""
    layers = [built(Block, number) for number in range(4)]
    layers[0].requires_grad_(False)
    policy = ShardingPolicy(offload="cpu", separate_backup_group=True)  # else the last gradient's way leads past the last gather
    model = zero3.Zero3Sequential([zero3.Zero3Layer(b, device=me.device, process_group=me.group, policy=policy) for b in layers])
    optimizer, seen = sgd(model), []
    for step in range(3):
        x = me.tensor(step, ROWS, WIDTH).requires_grad_()
        model(x).pow(2).mean().backward()
        with torch.no_grad():
            _scale_chunks(model[0], 0.9)
        seen.append(x.grad.clone())  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *values(model)]


@scenario
def offload_and_doors(me: Me) -> list[Tensor]:
    """First values without a file, gradients by name and written back, norms, the optimizer's state out and in."""
    with torch.device("meta"):
        model: nn.Module = Stack()
    zero3.shard(model, device=me.device, process_group=me.group, policy=ShardingPolicy(offload="cpu"))
    zero3.materialize(model, init=lambda module: [nn.init.constant_(p, 0.05) for p in module.parameters(recurse=False)] and None)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
    seen = train(model, me, 1, optimizer)
    loss_of(model, me, 1).backward()
    with zero3.full_gradients(model, writeback=True) as gradients:
        for gradient in gradients.values():
            gradient.mul_(0.5)
    seen += [*zero3.named_gradients(model).values(), *zero3.parameter_norms(model).values()]
    seen += zero3.parameter_norms(model, "param").values()
    zero3.load_full_optimizer_state_dict(model, optimizer, zero3.full_optimizer_state_dict(model, optimizer))
    return [*seen, *train(model, me, 1, optimizer)]


def _scale_chunks(model: nn.Module, factor: float) -> None:
    for chunk in model.parameters():
        chunk.mul_(factor)


@scenario
def offload_and_accumulate(me: Me) -> list[Tensor]:
    """Micro-batches are added up on the host, in gradients that are zeroed and not dropped."""
    model = sharded(replace(me, offload="cpu"), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    optimizer = sgd(model)
    for step in range(2):
        for micro in range(3):
            loss_of(model, me, 10 * step + micro).backward()
        zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return values(model)


@scenario
def save_and_load(me: Me) -> list[Tensor]:
    """A checkpoint, written while training goes on; another model goes on from it."""
    model = sharded(me)
    optimizer = sgd(model)
    train(model, me, 2, optimizer)
    saved = zero3.save_checkpoint(me.directory / "checkpoint", model, optimizer, background=True)
    went_on = train(model, me, 2, optimizer)
    saved.wait()
    other = sharded(me, seed=1)
    optimizer = sgd(other)
    zero3.load_checkpoint(me.directory / "checkpoint", other, optimizer)
    return [*went_on, *train(other, me, 2, optimizer)]


@scenario
def full_params_and_load(me: Me) -> list[Tensor]:
    model = sharded(me)
    train(model, me, 1)
    with zero3.full_params(model, writeback=True), torch.no_grad():
        model.first.weight.mul_(0.5)  # type: ignore[operator,union-attr]
    state = zero3.full_state_dict(model)
    zero3.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
    return train(model, me, 2)


@scenario
def resident(me: Me) -> list[Tensor]:
    """Ranks evaluate as often as they like, between two steps."""
    model = sharded(me)
    seen = train(model, me, 1)
    with zero3.resident(model), torch.no_grad():
        seen += [loss_of(model, me, step) for step in range(20, 21 + me.rank)]
    return [*seen, *train(model, me, 1)]


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
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@scenario
def mean_over_tokens(me: Me) -> list[Tensor]:
    model = sharded(me)
    optimizer = sgd(model)
    for step in range(3):
        count = 3 + 2 * me.rank + step
        loss = model(me.tensor(step, count, WIDTH)).pow(2).sum()
        zero3.backward(loss, torch.tensor(count, device=me.device), model)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@scenario
def uneven_inputs(me: Me) -> list[Tensor]:
    model = sharded(me)
    optimizer = sgd(model)

    def update() -> None:
        zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    uneven = zero3.joinable(model, update)
    with Join([uneven]):
        for step in range(2 + 2 * me.rank):
            loss_of(model, me, step).backward()
            uneven.step()
    return values(model)


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
        optimizer.step()
        optimizer.zero_grad()
    return [*values(student), *train(teacher, me, 1)]


@scenario
def an_exception_and_on(me: Me, **policy: Any) -> list[Tensor]:
    """A forward and a backward raise on all ranks, while gathers and reductions are under way; the next steps are right."""
    model = sharded(me, **policy)

    def fails(*_: Any) -> None:
        raise ArithmeticError("as told")

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
def a_view_that_escapes(me: Me) -> list[Tensor]:
    """It has the values of its forward for ever: the next fetches take another buffer."""
    model = sharded(me, lambda: Stack(Caching))
    optimizer, seen = sgd(model), []
    for _ in range(3):
        seen += train(model, me, 1, optimizer)
        seen += [block.cache for block in model.blocks]
    return seen


@scenario
def by_hand(me: Me) -> list[Tensor]:
    model = sharded(me)
    optimizer = sgd(model)
    zero3.set_forward_order(model, list(model.blocks))
    for step in range(3):
        zero3.fetch(model.blocks[step])
        for micro in range(2):
            with zero3.no_sync(model):
                loss_of(model, me, 10 * step + micro).backward()
        zero3.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        zero3.release(model)
    return values(model)


@scenario
def set_trainable(me: Me) -> list[Tensor]:
    model = sharded(me)
    seen = train(model, me, 1)
    zero3.set_trainable(model, lambda name, info: "norm" in name or "blocks.3" in name)
    seen += train(model, me, 2)
    zero3.set_trainable(model, lambda name, info: True)
    return [*seen, *train(model, me, 1)]
