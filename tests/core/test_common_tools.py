"""What people use around a model: optimizers, schedulers, clipping, scalers, hooks. Each is right, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.training import SGD, Optimizer, difference, joined, loss_of, odd_model, sentences, train_plain, train_sharded
from zero3 import Zero3Layer, Zero3Sequential


def sharded(seed: int = 0, dtype: torch.dtype = torch.float64) -> Zero3Sequential:
    return Zero3Sequential([Zero3Layer(module) for module in odd_model(dtype, seed)])


# -- optimizers: whatever works on elements works on chunks

OPTIMIZERS = {
    f"{kind}, {way}": Optimizer(kind, {**options, way: True} if way != "loop" else {**options, "foreach": False})
    for kind, options, ways in [
        ("SGD", {"lr": 0.3, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, ("foreach", "fused", "loop")),
        ("AdamW", {"lr": 0.01, "amsgrad": True}, ("foreach", "fused", "loop")),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}, ("foreach", "fused", "loop")),
        ("Adagrad", {"lr": 0.1}, ("foreach", "loop")),
        ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}, ("foreach", "loop")),
        ("Adadelta", {"lr": 1.0}, ("foreach", "loop")),
        ("Adamax", {"lr": 0.01}, ("foreach", "loop")),
        ("NAdam", {"lr": 0.01}, ("foreach", "loop")),
        ("RAdam", {"lr": 0.01}, ("foreach", "loop")),
        ("ASGD", {"lr": 0.1}, ("foreach", "loop")),
        ("Rprop", {"lr": 0.01}, ("foreach", "loop")),
    ]
    for way in ways
}


def train(rank: Rank, optimizer: Optimizer) -> Any:
    return train_sharded(sharded(rank.number), optimizer, rank.number, rank.world_size, steps=6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_elements_steps_as_it_does_unsharded(name: str) -> None:
    found = joined(on_ranks(2, train, OPTIMIZERS[name]))
    assert difference(found, train_plain(odd_model(torch.float64), OPTIMIZERS[name], steps=6)) < 1e-11


def build_muon(rank: Rank) -> str:
    with pytest.raises(ValueError, match="2D") as caught:
        torch.optim.Muon(sharded().get_trainable_chunk())
    return str(caught.value)


def test_muon_refuses_flat_chunks_by_itself() -> None:
    assert "2D" in on_ranks(2, build_muon)[0]


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "one cycle, momentum too": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=7),
    "warm-up, then steps": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)],
        [2],
    ),
}


def scheduled(rank: Rank, name: str) -> tuple[list[float], list[float]]:
    """Losses on one batch, by chunks and by plain torch."""
    results = []
    for model in (sharded(), nn.Sequential(*odd_model(torch.float64))):
        optimizer = SGD.build(model.parameters())
        scheduler, losses = SCHEDULERS[name](optimizer), []
        for step in range(6):
            loss = loss_of(model, sentences(step))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    return results[0], results[1]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_is_followed(name: str) -> None:
    for found, expected in on_ranks(2, scheduled, name):
        assert found == pytest.approx(expected, rel=1e-12)


# -- clipping by torch's own functions

NORMS: dict[str, Callable[[nn.Module], object]] = {
    "clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_norm_, one by one": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False),
    "clip_grad_norm_, inf": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf")),
    "get_total_norm": lambda model: torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]),
    "a sum of squared norms": lambda model: sum(p.grad.detach().data.norm(2).item() ** 2 for p in model.parameters() if p.grad is not None),
    "vector_norm": lambda model: [torch.linalg.vector_norm(p.grad) for p in model.parameters() if p.grad is not None],
}


def norm_refused(rank: Rank, name: str) -> str:
    model = sharded()
    loss_of(model, sentences(0)).backward()
    before = [chunk.grad.clone() for chunk in model.get_trainable_chunk()]
    with pytest.raises(RuntimeError) as caught:
        NORMS[name](model)
    assert all(torch.equal(chunk.grad, was) for chunk, was in zip(model.get_trainable_chunk(), before, strict=True))
    return str(caught.value)


@pytest.mark.parametrize("name", NORMS)
def test_torchs_clip_grad_norm_of_one_ranks_slices_is_refused(name: str) -> None:
    for text in on_ranks(2, norm_refused, name):
        assert "one rank's slice" in text
        assert "zero3.clip_grad_norm_" in text


def clipped(rank: Rank, how: str) -> list[tuple[float, float]]:
    """Losses by chunks and by plain torch, clipped in the same way."""
    pairs = []
    models = (sharded(), nn.Sequential(*odd_model(torch.float64)))
    optimizers = [SGD.build(model.parameters()) for model in models]
    for step in range(4):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = loss_of(model, sentences(step))
            loss.backward()
            if how == "by value":
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            elif how == "by norm":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        pairs.append((losses[0], losses[1]))
    return pairs


def test_torchs_clip_grad_value_works_on_slices() -> None:
    for pairs in on_ranks(2, clipped, "by value"):
        assert [found for found, _ in pairs] == pytest.approx([expected for _, expected in pairs], rel=1e-12)
        assert pairs != on_ranks(1, clipped, "not")[0], "it clipped nothing"


def test_torchs_clip_grad_norm_works_on_one_rank() -> None:
    # not to the bit: a norm of norms rounds by how many there are
    pairs = on_ranks(1, clipped, "by norm", process_group=False)[0]
    assert [found for found, _ in pairs] == pytest.approx([expected for _, expected in pairs], rel=1e-12)


# -- loss scaling


def scaled(rank: Rank, infinite_on: int | None, way: str) -> tuple[list[bool], list[float], bool]:
    """Whether each step was skipped, the scales, and whether training equals plain torch's with the same scaler."""
    torch.manual_seed(0)
    plain, model = nn.Linear(5, 3), Zero3Sequential([Zero3Layer(nn.Linear(5, 3))])
    with zero3.full_params(model, writeback=True):
        model[0].module.load_state_dict(plain.state_dict())
    skipped, scales, close = [], [], True
    options = {way: True} if way != "loop" else {"foreach": False}
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, **options) for m in (model, plain)]
    scalers = [torch.amp.GradScaler("cpu", 1024.0, growth_interval=3) for _ in range(2)]
    for step in range(6):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        for m, optimizer, scaler in zip((model, plain), optimizers, scalers, strict=True):
            # the plain one sees what all ranks see together
            bad = step == 2 and infinite_on is not None and (m is plain or rank.number == infinite_on)
            loss = m(x).square().mean() * (float("inf") if bad else 1.0)
            scaler.scale(loss).backward()
            before = [p.detach().clone() for p in m.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if m is model:
                skipped.append(all(torch.equal(a, b) for a, b in zip(before, m.parameters(), strict=True)))
                scales.append(scaler.get_scale())
        assert scalers[0].get_scale() == scalers[1].get_scale()
    state = zero3.full_state_dict(model, rank0_only=False)
    close = all(torch.allclose(state["0." + name], value, rtol=1e-5, atol=1e-7) for name, value in plain.state_dict().items())
    return skipped, scales, close


@pytest.mark.parametrize("way", ["foreach", "fused", "loop"])
@pytest.mark.parametrize("infinite_on", [None, 0, 1])
def test_torchs_gradscaler_skips_the_same_steps_on_all_ranks(infinite_on: int | None, way: str) -> None:
    first, second = on_ranks(2, scaled, infinite_on, way)
    assert first == second
    skipped, scales, close = first
    assert skipped == [step == 2 and infinite_on is not None for step in range(6)]
    assert close
    assert (scales[2] < 1024.0) == (infinite_on is not None)


# -- hooks


def hooked(rank: Rank) -> tuple[list[str], float, float]:
    """What a user's hooks saw, and how far the gradient is from what they should have made of it."""
    torch.manual_seed(0)
    module, x, seen = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, 5, requires_grad=True), []
    plain = copy.deepcopy(module)
    for model in (module, plain):
        model[0].weight.register_hook(lambda gradient: gradient * 2)
        model[2].bias.register_hook(lambda gradient: torch.full_like(gradient, 0.5))
    module[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(f"grad of shape {tuple(p.grad.shape)}"))
    module[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    plain[2].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    module[1].register_full_backward_hook(lambda m, inputs, outputs: seen.append("inside"))
    layer = Zero3Layer(module)
    layer.register_forward_hook(lambda m, args, output: output * 3)
    layer.register_full_backward_hook(lambda m, inputs, outputs: seen.append("around"))
    found, expected = layer(x), plain(x) * 3
    found.sum().backward()
    expected.sum().backward()
    with zero3.full_params(layer):
        names = [name for name, _ in layer.module.named_parameters()]
    flat = torch.cat([dict(plain.named_parameters())[slot.name].grad.flatten() for slot in layer._state.chunks[0].layout.slots])
    assert sorted(names) == sorted(slot.name for slot in layer._state.chunks[0].layout.slots)
    mine = layer.get_trainable_chunk()[0].grad.as_subclass(Tensor)
    flat = torch.cat([flat, flat.new_zeros(mine.numel() * rank.world_size - flat.numel())])
    return seen, (found - expected).abs().max().item(), (mine - flat.view(rank.world_size, -1)[rank.number]).abs().max().item()


@pytest.mark.parametrize("world_size", [1, 2])
def test_register_hook_and_register_forward_hook_go_on_working(world_size: int) -> None:
    for seen, output_error, gradient_error in on_ranks(world_size, hooked):
        assert sorted(seen) == ["around", "grad of shape (4,)", "inside"]
        assert output_error < 1e-6
        assert gradient_error < 1e-5


# -- what follows modules by hooks on all of them: afterwards none is left


TRACKERS: dict[str, Callable[[], Any]] = {
    "CommDebugMode": CommDebugMode,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "ModuleTracker": ModuleTracker,
}
SHARDED: dict[str, Callable[[nn.Module], Any]] = {
    "shard": lambda model: zero3.shard(model, [*model.blocks, model.head]),
    "Zero3Layer": Zero3Layer,
    "layers in layers": lambda model: zero3.shard(model, [model.blocks, *model.blocks]),
}


class Alike(nn.Module):
    """Blocks of one kind, with modules of one kind, which a tracker could take for one another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


@pytest.mark.parametrize("how", SHARDED)
@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_of_modules_leaves_a_model_as_it_was(name: str, how: str) -> None:
    plain = Alike()
    model = SHARDED[how](copy.deepcopy(plain))
    x = torch.randn(3, 4, requires_grad=True)
    with TRACKERS[name]():
        model(x).sum().backward()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in all_modules(model))
    model.zero_grad()
    model(x).sum().backward()
    plain(x).sum().backward()
    with zero3.full_gradients(model) as gradients:
        assert all(torch.equal(gradients[name], parameter.grad) for name, parameter in plain.named_parameters())


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Layers, and the modules that they stand for."""
    return [each for module in model.modules() for each in (module, *([module.module] if isinstance(module, zero3.Zero3Layer) else []))]
