"""set_trainable: parameters frozen and thawed between steps, against plain torch with the same requires_grad."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support import processes
from tests.support.inside import states_of
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_at_rest, assert_close, process_group
from tests.support.stacks import loss_of, stack, train
from zero3 import ParamInfo, ShardingPolicy
from zero3.build.host import memory_for
from zero3.optim import whole_parameters

Select = Callable[[str, ParamInfo], bool]


def drawn(seed: int) -> Select:
    """Each parameter by a coin, whole blocks by another; never nothing at all."""

    def select(name: str, info: ParamInfo) -> bool:
        block = random.Random(f"{seed} {name.split('.')[:2]}").random()
        return name == "embed.weight" or block < 0.3 or (block < 0.8 and random.Random(f"{seed} {name}").random() < 0.5)

    return select


PHASES: dict[str, list[Select]] = {
    "the head, then all": [lambda name, info: name.startswith(("head", "norm")), lambda name, info: True],
    "biases, then matrices": [lambda name, info: info.ndim == 1, lambda name, info: info.ndim == 2],
    "by layers": [lambda name, info: "blocks.1" in name, lambda name, info: "blocks.1" not in name, lambda name, info: "blocks" in name],
    **{f"drawn {seed}": [drawn(10 * seed + phase) for phase in range(4)] for seed in range(4)},
}
POLICIES = [ShardingPolicy(), ShardingPolicy(stage=2), ShardingPolicy(reshard_after_forward=False, transactional=True)]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


def selected(model: nn.Module, select: Select) -> list[nn.Parameter]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(select(name, ParamInfo(name, tuple(parameter.shape), parameter.numel(), parameter.dtype, parameter.ndim)))
        parameter.grad = None
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@WORLDS
@pytest.mark.parametrize("name", PHASES)
@pytest.mark.parametrize("tied", [False, True])
def test_set_trainable_trains_exactly_what_is_selected(name: str, world_size: int, tied: bool) -> None:
    policy = POLICIES[len(name) % 3]
    models, plain = [stack(tied=tied) for _ in range(world_size)], stack(tied=tied)
    for model in models if "drawn" in name else ():
        selected(model, drawn(99))  # so that what was frozen when it was sharded trains later
    expected: list[dict[str, Tensor]] = []
    for select in PHASES[name]:
        optimizer = adam(selected(plain, select))
        for step in range(2):
            optimizer.zero_grad()
            for rank in range(world_size):
                (loss_of(plain, Turn(rank, step, world_size)) / world_size).backward()
            optimizer.step()
        expected.append({name: parameter.detach().clone() for name, parameter in plain.named_parameters()})

    def body(group: ThreadCommunicator) -> list[dict[str, Tensor]]:
        model = zero3.shard(models[group.rank], process_group=process_group(group), policy=policy)
        found = []
        for select in PHASES[name]:
            zero3.set_trainable(model, select)
            optimizer = adam(zero3.get_trainable_chunk(model))
            for step in range(2):
                optimizer.zero_grad()
                train(model, Turn(group.rank, step, world_size))
                with zero3.full_gradients(model) as gradients:
                    assert set(gradients) == {n for n, p in plain_names(tied).items() if select(n, p)}
                optimizer.step()
            optimizer.zero_grad()
            found.append(zero3.full_state_dict(model, rank0_only=False))
        if policy.stage == 3:
            assert_at_rest(model)
        for state in states_of(model):
            kinds = [(chunk.shard.requires_grad, chunk.shard.dtype) for chunk in state.chunks]
            assert len(set(state.chunks.names())) == len(state.chunks) >= len(set(kinds))
        return found

    for found in run_ranks(world_size, body):
        for phase, values in enumerate(expected):
            assert_close({n: found[phase][n] for n in values}, values, 1e-10, f"phase {phase}")


def plain_names(tied: bool) -> dict[str, ParamInfo]:
    return {n: ParamInfo(n, tuple(p.shape), p.numel(), p.dtype, p.ndim) for n, p in stack(tied=tied).named_parameters()}


def sharded(models: list[Any], group: ThreadCommunicator, policy: ShardingPolicy = ShardingPolicy()) -> Any:
    return zero3.shard(models[group.rank], process_group=process_group(group), policy=policy)


@WORLDS
def test_an_optimizer_made_before_goes_on_where_whole_layers_are_frozen(world_size: int) -> None:
    models, plain = [stack() for _ in range(world_size)], stack()
    optimizer = adam(plain.parameters())
    for phase in range(2):
        train(plain, Turn(0, phase, 1))
        optimizer.step()
        optimizer.zero_grad()
        plain.blocks[1].requires_grad_(False)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = sharded(models, group)
        optimizer, before = adam(zero3.get_trainable_chunk(model)), len(group.log)
        for phase in range(2):
            train(model, Turn(0, phase, 1))
            optimizer.step()
            optimizer.zero_grad()
            before = len(group.log)
            zero3.set_trainable(model, lambda name, info: "blocks.1" not in name)
            assert not [entry for entry in group.log[before:] if entry.kind == "all_gather"], "nothing was cut"
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(world_size, body):
        assert_close(found, plain.state_dict(), 1e-10, "after the freeze")


@WORLDS
@pytest.mark.parametrize("grouped", [False, True], ids=["chunks", "param_groups"])
@pytest.mark.parametrize("change", ["thaw", "divide"])
def test_an_optimizer_made_before_raises_where_it_would_leave_something_out(world_size: int, change: str, grouped: bool) -> None:
    models = [stack() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model = sharded(models, group)
        if change == "thaw":
            zero3.set_trainable(model, lambda name, info: "blocks.1" not in name)
        parameters: Any = zero3.get_trainable_chunk(model)
        if grouped:
            parameters = zero3.param_groups(model, lambda name, info: {"weight_decay": 0.1 if info.ndim > 1 else 0.0})
        optimizer = adam(parameters)
        train(model, Turn(0, 0, 1))
        optimizer.step()
        optimizer.zero_grad()
        zero3.set_trainable(model, lambda name, info: change == "thaw" or "up.bias" not in name)
        train(model, Turn(0, 0, 1))
        with pytest.raises(RuntimeError, match=r"set_trainable has put others"):
            optimizer.step()
        new = adam(zero3.get_trainable_chunk(model))
        zero3.check_optimizer(model, new)
        new.step()

    run_ranks(world_size, body)


@pytest.mark.parametrize("align", [4, 0], ids=["aligned", "anywhere"])
def test_an_optimizer_made_before_raises_on_ranks_that_hold_parts_of_other_chunks_too(align: int) -> None:
    models = [stack() for _ in range(3)]

    def body(group: ThreadCommunicator) -> list[int]:
        model = sharded(models, group)
        zero3.set_trainable(model, lambda name, info: name in ("blocks.1.down.bias", "blocks.2.up.bias"))
        groups = zero3.param_groups(model, lambda name, info: {"lr": 0.1, **({"align": align} if align else {})})
        optimizer = torch.optim.AdamW(groups)
        held = [parameter.numel() for made in groups for parameter in made["params"]]
        zero3.set_trainable(model, lambda name, info: name.startswith("blocks.1."))
        train(model, Turn(0, 0, 1))
        with pytest.raises(RuntimeError, match=r"set_trainable has put others"):
            optimizer.step()
        return held

    held = run_ranks(3, body)
    assert not align or held == [[5], [9], [0]], "two ranks have no part of the chunk that is cut anew"


def test_set_trainable_keeps_the_state_of_an_optimizer_by_names() -> None:
    models, plain = [stack() for _ in range(2)], stack()
    optimizer = adam(plain.parameters())
    for _ in range(2):
        train(plain, Turn(0, 0, 1))
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_("bias" not in name)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = sharded(models, group)
        optimizer = adam(zero3.get_trainable_chunk(model))
        train(model, Turn(0, 0, 1))
        optimizer.step()
        optimizer.zero_grad()
        state = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        zero3.set_trainable(model, lambda name, info: "bias" not in name)
        optimizer = adam(zero3.get_trainable_chunk(model))
        state["state"] = {name: value for name, value in state["state"].items() if "bias" not in name}
        for each in state["param_groups"]:
            each["params"] = [name for name in each["params"] if "bias" not in name]
        zero3.load_full_optimizer_state_dict(model, optimizer, state)
        train(model, Turn(0, 0, 1))
        optimizer.step()
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(2, body):
        assert_close(found, plain.state_dict(), 1e-10, "with its state")


@WORLDS
@pytest.mark.parametrize("fails", ["the memory", "select"])
def test_set_trainable_that_fails_on_one_rank_leaves_the_model_as_it_was(
    world_size: int, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, plain = [stack() for _ in range(world_size)], stack()
    optimizer = adam(selected(plain, drawn(99)))
    for _ in range(2):
        train(plain, Turn(0, 0, 1))
        optimizer.step()
        optimizer.zero_grad()
    last = threading.local()

    def no_room(*args: Any) -> Tensor:
        if last.rank == world_size - 1:
            raise MemoryError("no room")
        return memory_for(*args)

    monkeypatch.setattr(whole_parameters, "memory_for", no_room if fails == "the memory" else memory_for)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        last.rank = group.rank
        selected(models[group.rank], drawn(99))
        model = sharded(models, group)
        optimizer = adam(zero3.get_trainable_chunk(model))
        for _ in range(2):
            before = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
            with pytest.raises((MemoryError, RuntimeError, KeyError), match="no room" if fails == "the memory" else "blocks.1"):
                zero3.set_trainable(model, fickle if fails == "select" else lambda name, info: info.ndim == 1)
            after = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
            assert [(n, id(p), trains) for n, p, trains in after] == [(n, id(p), trains) for n, p, trains in before]
            train(model, Turn(0, 0, 1))
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    def fickle(name: str, info: ParamInfo) -> bool:
        if last.rank == world_size - 1 and name.startswith("blocks.1"):
            raise KeyError(name)
        return info.ndim == 1

    for found in run_ranks(world_size, body):
        assert_close(found, plain.state_dict(), TOLERANCE, "as if it had not been called")


@WORLDS
def test_set_trainable_freezes_and_thaws_complex_parameters(world_size: int) -> None:
    def complex_model() -> Any:
        model = nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64), nn.Linear(4, 2, dtype=torch.complex64))
        model[1].requires_grad_(False)
        return model

    torch.manual_seed(0)
    plain = complex_model()
    models = [complex_model() for _ in range(world_size)]
    models[0].load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, dtype=torch.complex64)
    plain[1].bias.requires_grad_(True)
    plain(x).abs().sum().backward()

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], layers=nn.Linear, process_group=process_group(group))
        zero3.set_trainable(model, lambda name, info: name != "1.weight")
        model(x).abs().sum().backward()
        with zero3.full_gradients(model) as gradients:
            return {name: gradient.clone() for name, gradient in gradients.items()}

    for found in run_ranks(world_size, body):
        assert_close(found, {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}, 1e-6, "gradients")


MISTAKES: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "no function": (lambda rank: "head", TypeError, "select must be a function"),
    "no bool": (lambda rank: lambda name, info: None, TypeError, r"select\('.*'\) returned None"),
    "different": (lambda rank: lambda name, info: bool(rank), ValueError, "ranks differ in set_trainable"),
    "raises": (lambda rank: lambda name, info: {}[name] if rank else True, RuntimeError, "rank 1: KeyError"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_set_trainable_tells_all_ranks_of_a_mistake(mistake: str) -> None:
    select, kind, says = MISTAKES[mistake]
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = sharded(models, group)
        before = zero3.get_trainable_chunk(model)
        with pytest.raises(kind, match=says):
            zero3.set_trainable(model, select(group.rank))
        assert all(one is other for one, other in zip(before, zero3.get_trainable_chunk(model), strict=True))
        train(model, Turn(0, 0, 1))
        with pytest.raises(RuntimeError, match=r"set_trainable while layer .* has gradients"):
            zero3.set_trainable(model, lambda name, info: True)

    run_ranks(2, body)


@pytest.mark.parametrize(
    "cut_anew",
    [
        lambda model: zero3.set_trainable(model, lambda name, info: info.ndim == 2),
        lambda model: zero3.param_groups(model, lambda name, info: {"lr": 0.1 * info.ndim}),
    ],
    ids=["set_trainable", "param_groups"],
)
@pytest.mark.parametrize("policy", [ShardingPolicy(), ShardingPolicy(stage=2), ShardingPolicy(transactional=True)], ids=str)
@WORLDS
def test_chunks_are_cut_anew_after_kept_gradients_were_zeroed(world_size: int, policy: ShardingPolicy, cut_anew: Any) -> None:
    models, plain = [stack() for _ in range(world_size)], stack()
    train(plain, Turn(0, 1, 1))
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def body(group: ThreadCommunicator) -> None:
        model = sharded(models, group, policy)
        with zero3.no_sync(model):
            train(model, Turn(0, 0, 1))
        with pytest.raises(RuntimeError, match="has gradients"):
            cut_anew(model)
        model.zero_grad()
        cut_anew(model)
        train(model, Turn(0, 1, 1))
        with zero3.full_gradients(model) as found:
            assert found.keys() <= expected.keys()
            assert_close(found, {name: expected[name] for name in found}, TOLERANCE, "gradients")

    run_ranks(world_size, body)


def on_a_process(rank: processes.Rank) -> dict[str, Tensor]:
    model = zero3.shard(stack(), policy=ShardingPolicy(param_dtype=torch.float64))
    for select in PHASES["drawn 1"]:
        zero3.set_trainable(model, select)
        optimizer = adam(zero3.get_trainable_chunk(model))
        train(model, Turn(0, 0, 1))
        optimizer.step()
        optimizer.zero_grad()
    return zero3.full_state_dict(model, rank0_only=False)


def test_set_trainable_on_processes() -> None:
    plain = stack()
    for select in PHASES["drawn 1"]:
        optimizer = adam(selected(plain, select))
        train(plain, Turn(0, 0, 1))
        optimizer.step()
    for found in processes.on_ranks(2, on_a_process):
        assert_close(found, plain.state_dict(), TOLERANCE * 100, "after four choices")
