"""Whatever touches a released parameter raises an error that names it and the remedy. In a process that may die: none does."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn
from tests.support.stacks import Stack, stack, train, words_of

VALUES: dict[str, Callable[[nn.Parameter], object]] = {
    "sum": lambda p: p.sum(),
    "clone": lambda p: p.clone(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "data, written": lambda p: setattr(p, "data", torch.zeros_like(torch.empty(p.shape))),
    "cat": lambda p: torch.cat([torch.zeros(p.shape), p]),
    "stack in a dict": lambda p: torch.stack(tensors=[p, p]),
    "numpy": lambda p: p.detach().numpy(),
    "np.asarray": lambda p: np.asarray(p),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.item(),
    "bool": lambda p: bool(p),
    "float": lambda p: float(p),
    "index": lambda p: p[0],
    "index, written": lambda p: p.__setitem__(0, 1.0),
    "iteration": lambda p: list(p),
    "sum with a number": lambda p: p + 1,
    "number first": lambda p: 2 * p,
    "matmul": lambda p: torch.zeros(3, p.shape[-1]) @ p.T,
    "linear": lambda p: functional.linear(torch.zeros(3, p.shape[-1]), p),
    "equal": lambda p: torch.equal(p, p),
    "==": lambda p: p == 1,
    "norm": lambda p: torch.linalg.vector_norm(p),
    "to": lambda p: p.to(torch.float16),
    "double": lambda p: p.double(),
    "half": lambda p: p.half(),
    "cpu": lambda p: p.cpu(),
    "view": lambda p: p.view(-1),
    "T": lambda p: p.T,
    "data_ptr": lambda p: p.data_ptr(),
    "share_memory_": lambda p: p.share_memory_(),
    "dlpack": lambda p: torch.from_dlpack(p),
    "torch.as_tensor in a list": lambda p: torch.as_tensor([p]),
    "a Parameter of it": lambda p: nn.Parameter(p),
    "empty_like": lambda p: torch.empty_like(p),
    "copy_ into it": lambda p: p.copy_(torch.zeros(p.shape)),
    "copy_ from it": lambda p: torch.zeros(p.shape).copy_(p),
    "mul_": lambda p: torch.no_grad()(p.mul_)(2),
    "fill_": lambda p: torch.no_grad()(p.fill_)(2),
    "normal_": lambda p: nn.init.normal_(p),
    "zeros_": lambda p: nn.init.zeros_(p),
    "xavier_uniform_": lambda p: nn.init.xavier_uniform_(p),
    "kaiming_normal_": lambda p: nn.init.kaiming_normal_(p),
    "deepcopy": lambda p: copy.deepcopy(p),
    "copy": lambda p: copy.copy(p),
    "pickle": lambda p: pickle.dumps(p),
    "torch.save": lambda p: torch.save(p, io.BytesIO()),
    "torch.save in a dict": lambda p: torch.save({"weight": p}, io.BytesIO()),
    "register_hook": lambda p: p.register_hook(lambda gradient: gradient),
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(lambda leaf: None),
    "grad": lambda p: p.grad,
    "grad, written": lambda p: setattr(p, "grad", torch.zeros(p.shape)),
    "backward": lambda p: p.backward(),
    "autograd.grad": lambda p: torch.autograd.grad(torch.zeros((), requires_grad=True), p),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "get_total_norm": lambda p: nn.utils.get_total_norm([p]),
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "an optimizer": lambda p: torch.optim.SGD([p], lr=0.1),
    "an optimizer's group": lambda p: torch.optim.AdamW([{"params": [p], "lr": 1.0}]),
    "add_param_group": lambda p: torch.optim.SGD([torch.zeros(1)], lr=1).add_param_group({"params": [p]}),
}  # fmt: skip


MODULES: dict[str, Callable[[Stack], object]] = {
    "state_dict": lambda m: m.state_dict(),
    "state_dict of a part": lambda m: m.norm.state_dict(),
    "state_dict of a part of a layer": lambda m: m.blocks[1].up.state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(stack().state_dict()),
    "load_state_dict of a part": lambda m: m.norm.load_state_dict(stack().norm.state_dict()),
    "load_state_dict of a part, not strict": lambda m: m.blocks[1].up.load_state_dict({}, strict=False),
    "deepcopy": lambda m: copy.deepcopy(m),
    "deepcopy of a part": lambda m: copy.deepcopy(m.norm),
    "pickle": lambda m: pickle.dumps(m),
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "float": lambda m: m.float(),
    "float of a part": lambda m: m.norm.float(),
    "float of the list": lambda m: m.blocks.float(),
    "float of a part of a layer": lambda m: m.blocks[1].up.float(),
    "to": lambda m: m.to(torch.bfloat16),
    "share_memory": lambda m: m.share_memory(),
    "an optimizer of a part": lambda m: torch.optim.SGD(m.norm.parameters(), lr=1),
    "an optimizer of a part of a layer": lambda m: torch.optim.SGD(m.blocks[1].module.parameters(), lr=1),
    "an average": lambda m: AveragedModel(m),
    "init in a loop": lambda m: m.apply(lambda each: nn.init.zeros_(each.weight) if hasattr(each, "weight") else None),
    "a weight used outside": lambda m: functional.linear(torch.zeros(1, 5).double(), m.head.weight),
    "a called part of a layer": lambda m: m.blocks[1].up(torch.zeros(1, 5).double()),
}  # fmt: skip


def sharded(group: Any = None) -> tuple[Stack, list[nn.Parameter], torch.optim.Optimizer]:
    model = stack()
    kept = list(model.parameters())
    optimizer = torch.optim.SGD(kept, lr=0.1, momentum=0.9)
    return zero3.shard(model, process_group=group), kept, optimizer


def outcome(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def touch_everything(rank: Rank) -> dict[str, tuple[str, str]]:
    model, kept, optimizer = sharded()
    weight = model.blocks[1].up.weight
    assert any(weight is parameter for parameter in kept), "the same object for life"
    found = {f"value: {name}": outcome(functools.partial(action, weight)) for name, action in VALUES.items()}
    found |= {f"module: {name}": outcome(functools.partial(action, model)) for name, action in MODULES.items()}
    found["optimizer from before: step"] = outcome(optimizer.step)
    found["optimizer from before: zero_grad"] = outcome(optimizer.zero_grad)
    found["optimizer on what was kept"] = outcome(lambda: torch.optim.AdamW(kept))
    # none of it has changed anything, and the model trains on
    fresh = stack()
    for step in range(2):
        turn = Turn(0, step, 1)
        plain = train(fresh, turn)
        ours = train(model, Turn(rank.number, step, 1)) if rank.world_size == 1 else train(model, turn)
        assert torch.allclose(ours, plain, rtol=1e-12)
        fresh.zero_grad()
        model.zero_grad()
    return found


@functools.cache
def touched(world_size: int) -> list[dict[str, tuple[str, str]]]:
    return on_ranks(world_size, touch_everything, fresh=True, process_group=world_size > 1)


CASES = [f"value: {name}" for name in VALUES] + [f"module: {name}" for name in MODULES]
CASES += ["optimizer from before: step", "optimizer from before: zero_grad", "optimizer on what was kept"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_whatever_touches_a_released_parameter_raises(case: str, world_size: int) -> None:
    for found in touched(world_size):
        kind, text = found[case]
        assert kind == "RuntimeError", f"{kind or 'nothing'}: {text}"
        assert "layer" in text or "sharded model" in text, text
        assert any(remedy in text for remedy in ("full_params", "full_state_dict", "before wrapping", "before sharding")), text
        if case.startswith("value"):
            assert "'up.weight' of layer 'blocks.1' (Block)" in text, text


METADATA: dict[str, Callable[[nn.Parameter], object]] = {
    "shape": lambda p: (p.shape == (8, 5), p.size(0) == 8, p.ndim == 2, len(p) == 8, p.numel() == 40, p.dim() == 2),
    "dtype": lambda p: (p.dtype is torch.float64, p.is_floating_point(), not p.is_complex(), p.element_size() == 8),
    "device": lambda p: (p.device.type == "cpu", not p.is_cuda, not p.is_meta, p.layout is torch.strided),
    "requires_grad": lambda p: (p.requires_grad, p.requires_grad_(True) is p, p.grad_fn is None),
    "print": lambda p: ("released" in repr(p), "released" in str(p), "released" in f"{p}"),
    "identity": lambda p: (isinstance(p, nn.Parameter), isinstance(p, Tensor), hash(p) == id(p), any(q is p for q in {p: 1})),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata_stays_readable(name: str) -> None:
    model, kept, _ = sharded()
    answers = METADATA[name](model.blocks[1].up.weight)
    assert all(answers), answers
    assert kept[0].shape == model.embed.weight.shape


def test_the_one_constructor_that_asks_nobody_gives_no_garbage() -> None:
    """`torch.tensor` of a tensor copies it without asking its class: NaN, or at one rank the values, and torch warns."""
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Tensor:
        weight = zero3.shard(models[group.rank], process_group=group).blocks[1].up.weight
        return torch.tensor(weight)

    with pytest.warns(UserWarning, match="clone"):
        copies = run_ranks(2, body)
    assert all(each.isnan().all() and each.shape == (8, 5) for each in copies)


def test_a_model_can_be_printed_and_counted() -> None:
    model, _, _ = sharded()
    assert "Zero3Layer" in str(model) and "in_features=5" in str(model)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in stack().parameters())
    assert [name for name, _ in model.norm.named_parameters()] == ["weight", "bias"]
    assert [p.shape for p in model.blocks[1].module.parameters()] == [p.shape for p in stack().blocks[1].parameters()]


def test_a_tied_parameter_is_named_once_or_as_often_as_it_stands() -> None:
    def body(group: ThreadCommunicator) -> None:
        module = modules[group.rank]
        layer = zero3.Zero3Layer(module, process_group=group)
        assert [name for name, _ in layer.module.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
        found = [name for name, _ in layer.module.named_parameters(remove_duplicate=False)]
        assert found == ["0.weight", "0.bias", "1.weight", "1.bias"]

    modules = [nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2)]
    for module in modules:
        module[1].weight = module[0].weight
    run_ranks(2, body)


def test_deepcopy_and_pickle_and_all_else_inside_full_params_is_as_before() -> None:
    model, _, _ = sharded()
    plain = stack()
    with zero3.full_params(model):
        clone = copy.deepcopy(model.norm)
        saved = io.BytesIO()
        torch.save(model.blocks[1].up, saved)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert torch.equal(model.blocks[1].up.weight.sum(), plain.blocks[1].up.weight.sum())
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    x = torch.ones(2, 5).double()
    assert torch.equal(clone(x), plain.norm(x)) and torch.equal(loaded(x), plain.blocks[1].up(x))
    assert clone.float().weight.dtype is torch.float32 and len(list(clone.parameters())) == 2
    assert torch.equal(model(words_of(Turn(0, 0, 1))), plain(words_of(Turn(0, 0, 1)))), "the copies are modules of their own"


def test_requires_grad_of_one_parameter_is_refused_inside_full_params_too() -> None:
    model, _, _ = sharded()
    with (
        pytest.raises(RuntimeError, match=r"requires_grad was changed.*'up.weight' of layer 'blocks.0' \(Block\).*chunk"),
        zero3.full_params(model),
    ):
        model.blocks[0].up.weight.requires_grad_(False)
    train(model, Turn(0, 0, 1))
    assert all(chunk.grad is not None for chunk in zero3.get_trainable_chunk(model))


def test_requires_grad_of_a_whole_chunk_may_be_taken_and_given_again() -> None:
    model, plain = zero3.shard(stack()), stack()
    for frozen in (True, False):
        model.blocks[1].requires_grad_(not frozen)
        plain.blocks[1].requires_grad_(not frozen)
        assert len(zero3.get_trainable_chunk(model)) == (5 if frozen else 6)
        for each in (model, plain):
            each.zero_grad()
            train(each, Turn(0, 0, 1))
        (chunk,) = model.blocks[1].parameters()
        assert (chunk.grad is None) == frozen
        if not frozen:
            assert torch.equal(chunk.grad, torch.cat([p.grad.flatten() for p in plain.blocks[1].parameters()]))
