"""Chunks, gradients, optimizer state and activations that rest on the host or in files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import zero3
from tests.device.scenarios.registry import SCENARIOS, Scenario, scenario
from tests.device.training import ROWS, WIDTH, Block, Me, Stack, built, fails, loss_of, sgd, sharded, train, update, values
from zero3 import ShardingPolicy
from zero3.comm.communicator import SoloCommunicator


def _offload_activations(me: Me, make: Callable[[], nn.Module], to: Any = "cpu", backward_inside: bool = False) -> list[Tensor]:
    """In every step one graph is dropped with its tensors on their way out, and one with tensors on their way back."""
    model, offloaded = sharded(me, lambda: Stack(make)), zero3.offload_activations(to, min_bytes=1)
    optimizer = sgd(model)
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
        update(optimizer)
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


def _other_memory_for_a_while(me: Me, offload: str | None = None) -> list[Tensor]:
    """Averages of weights are evaluated in each step, between a backward and its step, and the values come back."""
    model = sharded(replace(me, offload=offload))
    groups = zero3.param_groups(model, lambda name, info: {"weight_decay": 0.1 * (info.ndim > 1)})
    optimizer, seen, changed = torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True), list[Tensor](), list[Tensor]()
    for step in range(3):
        loss_of(model, me, step).backward()
        kept = [(part, part.data, part.detach().clone()) for part in zero3.get_trainable_chunk(model)]
        for part, held, _ in kept:
            part.data = 0.5 * held
        with torch.no_grad():
            seen.append(loss_of(model, me, 10 + step))
        for part, held, _ in kept:
            part.data = held
        changed += [(held != before).any() for _, held, before in kept]
        update(optimizer)
    assert not any(changed)
    return [*seen, *values(model)]


SCENARIOS["other_memory_for_a_while"] = _other_memory_for_a_while
SCENARIOS["offload_to_cpu_and_other_memory_for_a_while"] = lambda me: _other_memory_for_a_while(me, "cpu")
SCENARIOS["offload_to_files_and_other_memory_for_a_while"] = lambda me: _other_memory_for_a_while(me, me.directory)


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
        update(optimizer)
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
        update(optimizer)
        with torch.no_grad():
            seen.append(loss_of(model, me, 20 + step))
            _scale_chunks(model, 0.9)
            with zero3.full_params(model):
                seen += [parameter.sum() for parameter in model.parameters()]
            _scale_chunks(model, 1.1)
    return [*seen, *values(model)]


def _by_hand(model: nn.Module, optimizer: Any, me: Me) -> None:
    with torch.no_grad():
        _scale_chunks(model, 0.5)


def _as_data(model: nn.Module, optimizer: Any, me: Me) -> None:
    for chunk in model.parameters():
        chunk.data.mul_(0.5)


def _as_an_average(model: nn.Module, optimizer: Any, me: Me) -> None:
    """Takes the values out, and puts another average in place, as averages of weights do, many chunks at a time."""
    chunks = [chunk.detach() for chunk in model.parameters()]
    torch._foreach_lerp_(chunks, [torch.zeros_like(chunk) for chunk in chunks], 0.5)


def _by_gradients(model: nn.Module, optimizer: Any, me: Me) -> None:
    for chunk in model.parameters():
        chunk.grad = torch.full(chunk.shape, 0.01, device="cpu")
    update(optimizer)


def _by_a_state(model: nn.Module, optimizer: Any, me: Me) -> None:
    state = zero3.full_state_dict(model)
    zero3.load_full_state_dict(model, {name: value * 0.5 for name, value in state.items()})


def _by_a_checkpoint(model: nn.Module, optimizer: Any, me: Me) -> None:
    """That of the run's first steps."""
    zero3.load_checkpoint(me.directory / "first", model, optimizer)


def _by_full_params(model: nn.Module, optimizer: Any, me: Me) -> None:
    with zero3.full_params(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def _by_another_cut(model: nn.Module, optimizer: Any, me: Me) -> None:
    zero3.set_trainable(model, lambda name, info: "norm" not in name)
    optimizer.param_groups[0]["params"] = zero3.get_trainable_chunk(model)
    _by_hand(model, optimizer, me)


WRITERS = (_by_hand, _as_data, _as_an_average, _by_gradients, _by_a_state, _by_a_checkpoint, _by_full_params, _by_another_cut)


@scenario
def offload_and_a_forward_that_nobody_walks(
    me: Me, prepare: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer
) -> list[Tensor]:
    """An evaluation without `no_grad`, after gradients were dropped. What comes next writes chunks, and the evaluation is read last."""
    model = sharded(replace(me, offload="cpu"))
    optimizer = prepare(sgd(model))
    zero3.save_checkpoint(me.directory / "first", model, optimizer)
    seen = []
    for step, write in enumerate(WRITERS):
        loss_of(model, me, step).backward()
        update(optimizer)
        loss = loss_of(model, me, 10 + step)
        write(model, optimizer, me)
        seen.append(loss.detach())
    return [*seen, *values(model)]


@scenario
def offload_optimizer_and_a_forward_that_nobody_walks(me: Me) -> list[Tensor]:
    return offload_and_a_forward_that_nobody_walks(me, zero3.offload_optimizer)


@scenario
def offload_and_a_forward_that_nobody_walks_on_one_rank(me: Me) -> list[Tensor]:
    """Loads then write chunks themselves, without a scatter."""
    return offload_and_a_forward_that_nobody_walks(replace(me, group=SoloCommunicator(), directory=me.directory / str(me.rank)))


@scenario
def offload_and_pieces_after_a_forward_that_nobody_walks(me: Me) -> list[Tensor]:
    """The optimizer's parameters are parts of chunks, and share their memory. Whole ones do not, and are sent into chunks."""
    model = sharded(replace(me, offload="cpu"))
    groups = zero3.param_groups(model, lambda name, info: {"whole": "up" in name, "weight_decay": 0.1 * (info.ndim == 2)})
    optimizer, seen = torch.optim.AdamW(groups, lr=0.01, foreach=True), []
    for step, write in enumerate((_by_hand, _as_data, _as_an_average)):
        loss_of(model, me, step).backward()
        update(optimizer)
        loss = loss_of(model, me, 10 + step)
        write(model, optimizer, me)
        seen.append(loss.detach())
    return [*seen, *values(model)]


@scenario
def offload_and_a_write_after_a_backward_that_raised(me: Me) -> list[Tensor]:
    """It raises before it has reduced anything. Then chunks are written, and the forward's output is read last."""
    model = sharded(replace(me, offload="cpu"))
    seen = train(model, me, 2)  # afterwards ranks have no more to compare
    model.blocks[2].register_forward_hook(lambda module, inputs, output: output.register_hook(fails) and None)
    for step in range(3):
        loss = loss_of(model, me, step)
        with suppress(ArithmeticError):
            loss.backward()
        zero3.reset(model)
        _by_hand(model, None, me)
        seen.append(loss.detach())
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
        update(optimizer)
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
