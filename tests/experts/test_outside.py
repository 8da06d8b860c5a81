"""Experts at home, outside of compute: all of them are shown, saved and loaded as ever. And what is refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.experts import Model, Training, made, tokens
from tests.support.ranks import run_ranks

HOME = zero3.ShardingPolicy(expert_parallel=True)


@pytest.mark.parametrize("other", [True, False])
def test_checkpoints_load_with_the_option_and_without(other: bool, tmp_path: Any) -> None:
    def body(group: Any) -> None:
        before = Training(group, HOME).train(2)
        zero3.save_checkpoint(tmp_path / "one", before.model, before.optimizer)
        state = zero3.full_state_dict(before.model, rank0_only=False)
        moments = zero3.full_optimizer_state_dict(before.model, before.optimizer, rank0_only=False)
        for way in ("checkpoint", "state dicts"):
            after = Training(group, zero3.ShardingPolicy(expert_parallel=other))
            if way == "checkpoint":
                zero3.load_checkpoint(tmp_path / "one", after.model, after.optimizer)
            else:
                zero3.load_full_state_dict(after.model, state)
                zero3.load_full_optimizer_state_dict(after.model, after.optimizer, moments)
            after.model(tokens(group.rank, 5)).square().sum().backward()
            zero3.clip_grad_norm_(after.model, 0.3)
            after.optimizer.step()
            if way == "checkpoint":
                before.micro(5)
                before.step()
            after.plain = before.plain
            after.check()

    run_ranks(2, body)


def test_a_profile_counts_experts_that_full_params_brings_together() -> None:
    def body(group: Any) -> tuple[int, int]:
        model = Training(group, HOME).model
        group.log.clear()
        with zero3.profile(model) as found, zero3.full_params(model):
            pass
        gathers = [each for each in group.log if each.kind == "all_gather"]
        return found.nbytes, sum(each.numel * each.dtype.itemsize for each in gathers)

    (told, moved), (other, _) = run_ranks(2, body)
    assert told < other and told + other == moved, "the first has 3 of 5 experts"


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 1)])
def test_checkpoints_load_on_another_number_of_ranks(saved: int, loaded: int, tmp_path: Any) -> None:
    """Three ranks have 2, 2 and 1 experts, two have 3 and 2."""

    def save(group: Any) -> None:
        training = Training(group, HOME).train(2)
        zero3.save_checkpoint(tmp_path / "one", training.model, training.optimizer)
        if group.rank == 0:
            kept.append(training)

    def load(group: Any) -> None:
        training = Training(group, HOME)
        zero3.load_checkpoint(tmp_path / "one", training.model, training.optimizer)
        training.plain.load_state_dict(kept[0].plain.state_dict())
        training.of_plain.load_state_dict(copy.deepcopy(kept[0].of_plain.state_dict()))  # else ranks share it
        training.check().train(2, first=4).check()

    kept: list[Training] = []
    run_ranks(saved, save)
    run_ranks(loaded, load)


def test_full_params_and_resident_show_all_experts() -> None:
    def body(group: Any) -> None:
        training = Training(group, HOME).train(1)
        first, plain = next(training.experts()), training.plain.blocks[0].experts
        with zero3.full_params(training.model, writeback=True), torch.no_grad():
            assert first.up.shape == plain.up.shape
            first.up.mul_(2)
        with torch.no_grad():
            plain.up.mul_(2)
        with zero3.full_params(training.model):
            with torch.no_grad():
                torch.testing.assert_close(training.model(tokens(0, 3)), training.plain(tokens(0, 3)))
            with pytest.raises(RuntimeError, match="expert_parallel"):
                training.model(tokens(0, 3))
        exchanged = len(group.log)
        with zero3.resident(training.model), torch.no_grad():
            for number in range(group.rank):  # at its own pace
                torch.testing.assert_close(training.model(tokens(0, number)), training.plain(tokens(0, number)))
        assert "all_to_all" not in {each.kind for each in group.log[exchanged:]}
        zero3.reset(training.model)
        training.train(2, first=1).check()

    run_ranks(2, body)


def test_gradients_are_told_by_name() -> None:
    def body(group: Any) -> None:
        training = Training(group, HOME)
        training.micro(1)
        with zero3.full_gradients(training.model) as gradients:
            for name, parameter in training.plain.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad)
        own = zero3.named_gradients(training.model)["blocks.0.experts.up"]
        assert own.numel() == (3 if group.rank == 0 else 2) * training.plain.blocks[0].experts.up[0].numel()

    run_ranks(2, body)


@pytest.mark.parametrize("whole", [True, False])
def test_param_groups_give_each_rank_its_own_experts(whole: bool) -> None:
    def body(group: Any) -> None:
        training = Training(group, HOME)
        groups = zero3.param_groups(training.model, lambda name, info: {"lr": 0.01 if info.ndim == 3 else 0.02, "whole": whole})
        training.optimizer = torch.optim.AdamW(groups)
        by_size = [[p for p in training.plain.parameters() if (p.ndim == 3) == large] for large in (True, False)]
        training.of_plain = torch.optim.AdamW([{"params": p, "lr": lr} for p, lr in zip(by_size, (0.01, 0.02), strict=True)])
        training.train(2).check()
        if whole:
            shapes = {tuple(p.shape) for group in groups for p in group["params"] if p.ndim == 3}
            own = 3 if group.rank == 0 else 2
            assert shapes == {(own, 8, 6), (own, 6, 8)}
        zero3.check_optimizer(training.model, training.optimizer)

    run_ranks(2, body)


@pytest.mark.parametrize("path", ["blocks.0.experts", "blocks.0.experts.norm", ""], ids=["experts", "their norm", "the model"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_set_trainable_leaves_experts_at_home(path: str, ranks: int) -> None:
    """It divides chunks of others alone."""

    def trains(name: str) -> bool:
        return name.endswith(("norm.bias", "up", "last.weight"))

    def body(group: Any) -> None:
        training, before = Training(group, HOME), f"{path}." if path else ""
        zero3.set_trainable(training.model.get_submodule(path), lambda name, info: trains(before + name))
        names = {id(p): name for name, p in training.plain.named_parameters()}
        for p in training.plain.get_submodule(path).parameters():
            p.requires_grad_(trains(names[id(p)]))
        training.optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(training.model), lr=0.02)
        training.of_plain = torch.optim.AdamW([p for p in training.plain.parameters() if p.requires_grad], lr=0.02)
        training.train(2).check()

    run_ranks(ranks, body)


class Failure(ArithmeticError):
    pass


@contextmanager
def failing(training: Training, where: str) -> Any:
    block = training.model.blocks[1].module
    mine = block if where == "block" else next(training.experts()) if where == "experts" else None
    if mine is not None and training.rank == 1:
        mine.fails = True
    yield
    if mine is not None:
        mine.fails = False


@pytest.mark.parametrize("checkpoints", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("where", ["block", "experts", "between"])
def test_a_micro_batch_that_fails_on_one_rank_is_dropped(where: str, checkpoints: str) -> None:
    def prepare(model: Model) -> None:
        model.checkpoints = checkpoints

    def body(group: Any) -> None:
        training = Training(group, HOME, prepare=prepare)
        for number in range(4):
            with zero3.step_guard(training.model) as guarded:
                training.micro(number)
            assert not guarded.failed, guarded.errors
            with failing(training, where if number == 2 else ""), zero3.step_guard(training.model) as guarded:
                loss = training.model(tokens(group.rank, number)).square().sum()
                if where == "between" and number == 2 and group.rank == 1:
                    raise Failure
                loss.backward()
            assert sorted(guarded.errors) == ([1] if number == 2 else [])
            if number != 2:
                for rank in range(2):
                    (training.plain(tokens(rank, number)).square().sum() / 2).backward()
            training.step()
        training.check()

    run_ranks(2, body)


def exchanges(entries: list[Any]) -> list[str]:
    return [each.doing for each in entries if "token" in each.doing or "gradients to" in each.doing or "gradients from" in each.doing]


@pytest.mark.parametrize(("checkpoints", "count"), [("", 5), ("not reentrant", 7), ("reentrant", 8)])
def test_a_block_makes_so_many_exchanges(checkpoints: str, count: int) -> None:
    """Recomputation stops before rows are sent back, where blocks are recomputed as they should be."""

    def body(group: Any) -> None:
        training = Training(group, HOME, prepare=lambda model: setattr(model, "checkpoints", checkpoints))
        log = training.model.blocks[0]._state.log
        for number in (1, 2):
            log.history.fold()
            training.model(tokens(group.rank, number)).square().sum().backward()
        assert len(exchanges(log.entries)) == 2 * count

    run_ranks(3, body)


def sharded(group: Any, policy: Any = HOME, model: nn.Module | None = None) -> Any:
    model = model or made()
    return zero3.shard(model, [*model.blocks], policy=policy, process_group=group)  # type: ignore[misc]


class Single(nn.Module):
    """Its experts take one argument, as those of some models."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.num_experts = 2
        self.up = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no experts": (lambda group: sharded(group, model=Single()), "expert_parallel=True finds no experts"),
    "ignored": (
        lambda group: sharded(group, zero3.ShardingPolicy(expert_parallel=True, ignored=lambda name, info: name.endswith("up"))),
        "ignored.*expert_parallel",
    ),
    "align": (lambda group: zero3.param_groups(sharded(group), lambda name, info: {"align": 2}), "align.*expert_parallel"),
    "joinable": (lambda group: zero3.joinable(sharded(group), print), r"joinable: layer .*experts.*expert_parallel=True.*empty batch"),
    "joinable of a part": (
        lambda group: zero3.joinable(zero3.shard(made(), nn.Linear, policy=HOME, process_group=group).last, print),
        r"joinable: layer .*experts.*expert_parallel=True.*empty batch",
    ),
    "quantize": (
        lambda group: sharded(
            group, zero3.ShardingPolicy(expert_parallel=True, quantize=zero3.NF4()), made(dtype=torch.float32).requires_grad_(False)
        ),
        "quantize.*experts.*expert_parallel",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_is_refused_by_name_on_all_ranks(what: str) -> None:
    call, words = REFUSED[what]

    def body(group: Any) -> str:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call(group)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert re.search(words, text), text


def test_policies_by_name_choose_the_experts_at_home() -> None:
    def body(group: Any) -> None:
        def policy(name: str, module: nn.Module) -> zero3.ShardingPolicy:
            return zero3.ShardingPolicy(expert_parallel=name.startswith("blocks.1"))

        model = sharded(group, policy)
        kinds = [isinstance(block.experts, zero3.Zero3Layer) for block in model.blocks]
        assert kinds == [False, True]
        assert zero3.report(model).experts == ((3 if group.rank == 0 else 2), 5)
        assert "of 5 experts stay here" in str(zero3.report(model))

    run_ranks(2, body)


def test_a_lone_layer_makes_its_experts_layers() -> None:
    def body(group: Any) -> None:
        plain, model = made(), zero3.Zero3Layer(made(), policy=HOME, process_group=group)
        assert len(zero3.report(model).chunks) and zero3.report(model).experts[1] == 10
        model(tokens(group.rank, 1)).square().sum().backward()
        for rank in range(2):
            (plain(tokens(rank, 1)).square().sum() / 2).backward()
        with zero3.full_gradients(model) as found:
            for name, parameter in plain.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad)
        with pytest.raises(ValueError, match="expert_parallel"):
            zero3.Zero3Layer(nn.Linear(3, 3), policy=HOME, process_group=group)

    run_ranks(2, body)


@pytest.mark.parametrize(("routes", "share"), [("one", 2.0), ("", None)])
def test_profile_tells_how_many_rows_the_busiest_rank_gets(routes: str, share: float | None) -> None:
    """Over the mean: two, if one of two ranks gets all."""

    def prepare(model: Model) -> None:
        for block in model.blocks:
            block.routes = routes

    def body(group: Any) -> None:
        training = Training(group, HOME, prepare=prepare)
        training.train(1)
        with zero3.profile(training.model) as found:
            training.train(2, first=1)
        assert [*found.busiest] == [*found.loads] == [f"layer 'blocks.{number}.experts' (Experts)" for number in range(2)]
        assert share is None or all(each > 1 if group.rank == 0 else each == 0 for each in found.loads.values())
        assert all(1 <= each <= 2 if share is None else each == share for each in found.busiest.values())
        assert all(f"{layer}: the busiest rank gets {each:.2f} x the mean" in str(found) for layer, each in found.busiest.items())

    run_ranks(2, body)


def test_report_counts_experts_also_of_quantised_ones() -> None:
    """Two experts have a row of bytes together."""

    def body(group: Any) -> None:
        kind = zero3.NF4(block_size=32, select=lambda name, info: name.endswith(("experts.up", "experts.down")))
        model = sharded(group, zero3.ShardingPolicy(expert_parallel=True, quantize=kind), made(4).requires_grad_(False))
        report = zero3.report(model)
        assert report.experts == (2 * 2, 2 * 4)
        assert "4 of 8 experts stay here, tokens travel" in str(report) and "nf4(32, double)" in str(report)

    run_ranks(2, body)


def test_report_counts_no_full_buffer_for_experts_at_home() -> None:
    def body(group: Any) -> tuple[int, str, int]:
        report = zero3.report(sharded(group, HOME))
        return sum(report.gathered.values()), report.largest_layer, report.largest_layer_bytes

    experts = re.compile(r"experts\.(up|down|bias)$")
    others = [(name, parameter.nbytes) for name, parameter in made().named_parameters() if not experts.search(name)]
    padding = 8 * 2 * len(others)  # at most one element of eight bytes a parameter and rank
    own = [(name, nbytes) for name, nbytes in others if "experts" not in name]
    blocks = [sum(nbytes for name, nbytes in own if name.startswith(f"blocks.{number}.")) for number in range(2)]
    for gathered, layer, nbytes in run_ranks(2, body):
        total = sum(nbytes for _, nbytes in others)
        assert total <= gathered <= total + padding
        assert "experts" not in layer and max(blocks) <= nbytes <= max(blocks) + padding
