"""DDP, DataParallel, FSDP1, fully_shard, DeepSpeed, Accelerator around a sharded model: refused by name, and nothing has changed."""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint_activation
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel

import zero3
from tests.support.processes import Rank, on_ranks

CPU = torch.device("cpu")
Wrap = Callable[[nn.Module], Any]


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Named(nn.Module):
    """Passes on its model's parameters under other names, as some wrappers of users do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in self.model.named_parameters(*args, **kwargs):
            yield name.removeprefix("model."), parameter

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def plain() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block(), nn.LayerNorm(6)).double()


def sharded(kind: str) -> nn.Module:
    if kind == "shard":
        return zero3.shard(plain(), [Block])
    layers = [zero3.Zero3Layer(child) for child in plain()]
    return zero3.Zero3Sequential(layers) if kind == "Zero3Sequential" else nn.Sequential(*layers)


def a_layer(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if isinstance(module, zero3.Zero3Layer))


PLACES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "the model": lambda model: model,
    "a part of what is wrapped": lambda model: nn.Sequential(nn.Linear(6, 6).double(), model),
    "under names of its own": lambda model: Named(model),
    "a layer": a_layer,
    "inside a layer": lambda model: a_layer(model).module,  # type: ignore[return-value]
}


def wrappers() -> dict[str, tuple[Wrap, str]]:
    mesh = init_device_mesh("cpu", (2,))
    return {
        "DDP": (DistributedDataParallel, "DistributedDataParallel"),
        "DDP, unused": (lambda m: DistributedDataParallel(m, find_unused_parameters=True, init_sync=False), "DistributedDataParallel"),
        "FSDP1": (lambda m: FullyShardedDataParallel(m, device_id=CPU), r"FullyShardedDataParallel \(FSDP1\)"),
        "FSDP1, wrapping by itself": (
            lambda m: FullyShardedDataParallel(m, device_id=CPU, use_orig_params=True, auto_wrap_policy=lambda **_: True),
            r"FullyShardedDataParallel \(FSDP1\)",
        ),
        "fully_shard": (lambda m: fully_shard(m, mesh=mesh), r"fully_shard \(FSDP2\)"),
        "fully_shard of a list": (lambda m: fully_shard([m], mesh=mesh), r"fully_shard \(FSDP2\)"),
        "replicas": (lambda m: nn.parallel.replicate(m, [0, 1]), "DataParallel"),
        "distribute_module": (lambda m: distribute_module(m, mesh), r"distribute_module \(tensor parallelism\)"),
    }  # fmt: skip


def step(model: nn.Module, rank: int) -> list[Tensor]:
    """One step's output, and the chunks after it."""
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    output = model(torch.full((2, 6), 1.0 + rank, dtype=torch.float64))
    output.pow(2).sum().backward()
    optimizer.step()
    return [output.detach(), *(chunk.detach().clone() for chunk in zero3.get_trainable_chunk(model))]


def refused_everywhere(rank: Rank, kind: str) -> list[str]:
    expected = step(sharded(kind), rank.number)
    accepted = []
    for name, (wrap, wrapper) in wrappers().items():
        for place, around in PLACES.items():
            if name == "distribute_module" and place == "inside a layer":
                continue  # it sees no parameter there
            model = sharded(kind)
            try:
                wrap(around(model))
                accepted.append(f"{name} around {place}")
            except RuntimeError as error:
                told = str(error)
                if not (told.startswith(wrapper.replace("\\", "")) and "Train the model without the wrapper" in told):
                    accepted.append(f"{name} around {place}: {told}")
            found = step(model, rank.number)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                accepted.append(f"{name} around {place} has changed the model")
    return accepted


@pytest.mark.parametrize(
    "kind", ["shard", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Zero3Sequential", "layers in a plain module"))]
)
def test_ddp_fsdp_and_their_like_are_refused_before_anything_changes(kind: str) -> None:
    assert on_ranks(2, refused_everywhere, kind) == [[], []]


def test_data_parallel_is_refused_where_it_would_make_replicas() -> None:
    """On a machine without GPUs it only calls the model."""
    model = zero3.shard(plain(), [Block])
    wrapped = DataParallel(model)
    x = torch.ones(2, 6, dtype=torch.float64)
    if not wrapped.device_ids:
        assert torch.equal(wrapped(x), model(x))
        wrapped.device_ids, wrapped.src_device_obj = [0, 1], CPU
        wrapped.scatter = lambda inputs, kwargs, ids: ([inputs, inputs], [kwargs, kwargs])  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"DataParallel around a sharded model \(the root \(Sequential\)\)"):
        wrapped(x)


ASKING = """
def initialize(model):
    module_names = {module: name for name, module in model.named_modules()}
def broadcast(model):
    for name, parameter in list(model.named_parameters()):
        parameter.data.zero_()
def profile(model):
    return sum(parameter.numel() for parameter in model.parameters())
"""


def library(name: str) -> Any:
    module = types.ModuleType(name)
    exec(compile(ASKING, f"{name}.py", "exec"), vars(module))
    return module


@pytest.mark.parametrize("where", ["deepspeed.utils.debug", "deepspeed.runtime.engine", "deepspeed.runtime.zero.partition_parameters"])
@pytest.mark.parametrize("place", ["the model", "a part of what is wrapped", "a layer"])
def test_deepspeed_is_known_by_where_it_asks_from(where: str, place: str) -> None:
    model = zero3.shard(plain(), [Block])
    before = [chunk.detach().clone() for chunk in zero3.get_trainable_chunk(model)]
    for ask in (library(where).initialize, library(where).broadcast, library(where).profile):
        with pytest.raises(RuntimeError, match="DeepSpeed around a sharded model"):
            ask(PLACES[place](model))
    assert all(torch.equal(a, b) for a, b in zip(before, zero3.get_trainable_chunk(model), strict=True))
    for other in ("deepspeed.profiling.flops_profiler", "deepspeed_like", "my.torch.nn.parallel.distributed"):
        assert library(other).profile(PLACES[place](model)) > 0


def with_deepspeed(rank: Rank) -> list[str]:
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": str(rank.number), "LOCAL_RANK": str(rank.number), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import deepspeed
    from deepspeed.comm.torch import TorchBackend

    TorchBackend.__init__.__globals__["build_shm_op"] = lambda: None  # it would compile for a minute
    told, config = [], {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    for place in ("the model", "a part of what is wrapped"):
        model = zero3.shard(plain(), [Block])
        try:
            deepspeed.initialize(model=PLACES[place](model), config=config)
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_deepspeed_itself() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: make deepspeed")
    for told in on_ranks(2, with_deepspeed):
        assert len(told) == 2 and all(text.startswith("DeepSpeed around a sharded model") for text in told)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(6, 18)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unsqueeze(1) for each in self.all(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v)[:, 0]


def within_context_parallel(rank: Rank, parts: bool) -> bool:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "sp"))
    model = zero3.shard(nn.Sequential(Attends(), Attends()), [Attends], process_group=mesh if parts else None)
    x = torch.ones(2, 8, 6)
    with (
        context_parallel(mesh["sp"], buffers=[x], buffer_seq_dims=[1]),
        pytest.raises(RuntimeError, match=r"context_parallel.*sequence_parallel"),
    ):
        model(x)
    if not parts:
        model(x).sum().backward()  # nothing has changed
    return True


def test_a_model_whose_configuration_has_several_texts_is_no_model_with_an_attention_of_deepspeed() -> None:
    """Such as MusicGen's: an encoder's and a decoder's."""

    class Config:
        def get_text_config(self) -> None:
            raise ValueError("Multiple valid text configs were found in the model config: ['decoder', 'text_encoder']")

    model: Any = plain()
    model.config = Config()
    assert zero3.get_trainable_chunk(zero3.shard(model, [Block]))


def test_context_parallel_around_a_sharded_model_is_refused() -> None:
    for parts in (False, True):
        assert on_ranks(2, within_context_parallel, parts) == [True, True]


def with_accelerate(rank: Rank, mixed_precision: str) -> list[str]:
    os.environ |= {"RANK": str(rank.number), "LOCAL_RANK": str(rank.number), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # there is a process group already
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision)
        model = zero3.shard(plain().float(), [Block])
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        x = torch.ones(2, 6)
        expected = model(x)
        evaluated = accelerator.prepare_model(zero3.shard(plain().float(), [Block]), evaluation_mode=True)
        torch.testing.assert_close(evaluated(x), expected, rtol=0.02, atol=0.02)  # not wrapped, but for autocast
        try:
            accelerator.prepare(model, optimizer)
        except RuntimeError as error:
            told.append(str(error))
        optimizer = accelerator.prepare(optimizer)  # without the model
        accelerator.backward(model(x).sum())
        optimizer.step()
    return told


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerator_prepare_is_refused_and_works_without_the_model(mixed_precision: str) -> None:
    pytest.importorskip("accelerate")
    for told in on_ranks(2, with_accelerate, mixed_precision, fresh=True):
        assert len(told) == 1 and told[0].startswith("DistributedDataParallel around a sharded model")


def around_a_wrapper(rank: Rank) -> list[str]:
    made: list[Callable[[], nn.Module]] = [
        lambda: DistributedDataParallel(plain()),
        lambda: nn.Sequential(DataParallel(plain())),
        lambda: FullyShardedDataParallel(plain(), device_id=CPU, use_orig_params=True),
        lambda: nn.Sequential(Block(), fully_shard(Block(), mesh=init_device_mesh("cpu", (2,)))),
    ]
    told = []
    for make in made:
        for shard in (zero3.Zero3Layer, lambda module: zero3.shard(module, [Block])):
            try:
                shard(make())
                told.append("accepted")
            except ValueError as error:
                told.append(str(error))
    return told


def test_zero3_around_ddp_fsdp_and_their_like_is_refused_too() -> None:
    names = ["DistributedDataParallel", "DataParallel at '0'", "FullyShardedDataParallel (FSDP1)", "fully_shard (FSDP2) at '1'"]
    for told in on_ranks(2, around_a_wrapper, debug="OFF"):  # DDP dies of torch's debug mode here
        for name, texts in zip(names, zip(told[::2], told[1::2], strict=True), strict=True):
            layer, model = (text.startswith(f"rank 0: the module is, or holds, {name}: pass the model that was wrapped") for text in texts)
            assert layer and (model or "'1.up.weight' is a DTensor" in texts[1]), texts


def test_parameters_that_deepspeed_has_partitioned_are_refused() -> None:
    model = plain()
    model[0].up.weight.ds_id = 3  # type: ignore[union-attr, assignment]
    for shard in (zero3.Zero3Layer, lambda module: zero3.shard(module, [Block])):
        with pytest.raises(ValueError, match=r"parameter '0\.up\.weight' of .* has been partitioned by DeepSpeed \(zero\.Init\)"):
            shard(model)


def legal(rank: Rank) -> bool:
    model = nn.ModuleDict({"base": zero3.shard(plain(), [Block]), "head": nn.Linear(6, 2).double()})
    head = DistributedDataParallel(model["head"])  # a part that holds no sharded layer
    checkpoint_activation.checkpoint(model["base"])
    assert len(list(model.parameters())) == len(list(model["base"].parameters())) + 2
    x = torch.full((2, 6), 1.0 + rank.number, dtype=torch.float64)
    head(model["base"](x)).sum().backward()
    twin = nn.ModuleDict({"base": plain(), "head": nn.Linear(6, 2).double()})
    twin["head"].load_state_dict(model["head"].state_dict())
    both = torch.cat([torch.full((2, 6), 1.0 + number, dtype=torch.float64) for number in range(2)])
    (twin["head"](twin["base"](both)).sum() / 2).backward()
    torch.testing.assert_close(model["head"].weight.grad, twin["head"].weight.grad)
    expected = torch.cat([p.grad.flatten() for p in twin["base"].parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(zero3.clip_grad_norm_(model["base"], 100.0), expected)
    return True


def test_ddp_beside_a_sharded_part_and_composable_checkpointing_are_right() -> None:
    assert on_ranks(2, legal, debug="OFF") == [True, True]
