"""Ranks as threads that call towers from 0 to 3 times, in other orders: the numbers of one plain process with all ranks' data."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.ranks import run_mesh, run_ranks
from tests.support.towers import (
    HIDDEN,
    PIXELS,
    POLICIES,
    PREPARED,
    TOWERS,
    Block,
    TowersLife,
    batch,
    check_life,
    drawn_life,
    seeing,
    trained,
)

NONE: tuple[str, ...] = ()
V, A = ("vision",), ("audio",)
MIXED = [
    [[NONE, V]],  # text on one rank, an image on another
    [[V + V, A]],  # an image and a video, a sound
    [[NONE, NONE]],
    [[V + A, A + V]],  # in opposite orders
    [[V + A + V, A + A + V]],
    [[A, NONE]],
]
THREE = [[[NONE, V, A]], [[V + A, A + V, NONE]], [[NONE] * 3], [[V, V + V, V + V + V]]]
TWO_MICROS = [[[V, NONE], [NONE, A]], [[NONE, NONE], [A + V, V]], [[V, V], [NONE, NONE]]]


@pytest.mark.parametrize("prepared", PREPARED)
def test_what_trains_and_what_is_checkpointed(prepared: str) -> None:
    check_life(TowersLife(MIXED, prepare=PREPARED[prepared]))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str) -> None:
    check_life(TowersLife(THREE, zero3.ShardingPolicy(**POLICIES[policy])))


@pytest.mark.parametrize("ranks", [1, 4])
def test_one_rank_and_four(ranks: int) -> None:
    check_life(TowersLife([[[V, NONE, A + V, V + V][:ranks]], [[NONE] * ranks], [[A + V, V, NONE, A][:ranks]]]))


@pytest.mark.parametrize("how", ["accumulated", "no_sync", "together", "clipped"])
def test_several_micro_batches(how: str) -> None:
    check_life(TowersLife(TWO_MICROS, keeps=how == "no_sync", together=how == "together", clip=0.1 if how == "clipped" else None))


@pytest.mark.parametrize("first", [True, False], ids=["in the first call", "in a later call"])
def test_a_rank_that_raises_in_a_tower_is_an_error_on_all_and_the_next_step_is_right(first: bool) -> None:
    calls = [[[V, V]], [[NONE, A + V]], [[A, A]], [[V, V]]]
    check_life(TowersLife(calls, fails={(0 if first else 1, 0): (1, "body.vision")}))


ANOTHER = {
    "before": lambda model, other, given: other(given) * model(*given),
    "after": lambda model, other, given: model(*given) * other(given),
    "in two losses": lambda model, other, given: torch.cat([other(given), model(*given)]),
}


@pytest.mark.parametrize("how", ANOTHER)
@pytest.mark.parametrize("frozen", ["nothing", "biases"])
@pytest.mark.parametrize("towers", [False, True], ids=["a plain one", "one with towers"])
def test_another_model_in_the_loss(how: str, frozen: str, towers: bool) -> None:
    """A gradient comes to each rank's embedding. Where none does, ranks come apart, and `shard` of both as one model is for that."""
    torch.manual_seed(0)
    pair = seeing(), seeing() if towers else nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.Linear(HIDDEN, 3)).double()
    for model in pair:
        for name, p in model.named_parameters():
            p.requires_grad_(frozen == "nothing" or not name.endswith("bias"))
    life = TowersLife([[[V, NONE]], [[NONE, A + V]], [[NONE, NONE]], [[V, V]]])

    def loss(model: nn.Module, other: nn.Module, step: int, rank: int) -> torch.Tensor:
        words, calls = batch(life, step, 0, rank)
        read = (lambda given: other(given[0], given[1][::-1])) if towers else lambda given: other(torch.eye(3, PIXELS).double() + rank)
        return ANOTHER[how](model, read, (words, calls)).square().sum()

    def train(models: Any, trained: list[nn.Parameter], ranks: list[int]) -> None:
        optimizer = torch.optim.AdamW(trained, 0.02)
        for step in range(len(life.calls)):
            for rank in ranks:
                (loss(*models, step, rank) / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    copies = [copy.deepcopy(pair) for _ in range(2)]

    def body(group: Any) -> list[dict[str, torch.Tensor]]:
        for model, kinds in zip(copies[group.rank], ([Block, nn.Embedding], [Block, nn.Embedding] if towers else nn.Linear), strict=True):
            zero3.shard(model, kinds, optional=TOWERS if isinstance(kinds, list) else None, process_group=group)
        train(copies[group.rank], [c for model in copies[group.rank] for c in zero3.get_trainable_chunk(model)], [group.rank])
        return [zero3.full_state_dict(model, rank0_only=False) for model in copies[group.rank]]

    everyone = run_ranks(2, body, 20)
    train(pair, [p for model in pair for p in model.parameters() if p.requires_grad], [0, 1])
    for found in everyone:
        for model, state in zip(pair, found, strict=True):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("formats", [
    {"gather_format": zero3.Int8()}, {"reduce_format": zero3.Int8()}, {"quantize": zero3.NF4(), "reduce_format": zero3.Int8()},
    {"gather_format": zero3.Float8(), "offload": "cpu"}, {"quantize": zero3.Int8(), "stage": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("mesh", [False, True])
def test_formats_have_the_bits_of_ranks_that_all_call_the_tower(formats: dict[str, Any], mesh: bool) -> None:
    """A rank that attends gives zeros, and so does one that calls the tower and multiplies by 0."""
    torch.manual_seed(0)
    model = seeing().float()
    for name, p in model.named_parameters():
        p.requires_grad_("quantize" not in formats or "weight" not in name)
    calls = [[V, NONE, NONE, V], [NONE, V, NONE, NONE], [NONE] * 4]
    life = TowersLife([[[V] * 4]] * len(calls))
    seen: list[list[dict[str, torch.Tensor]]] = []

    def body(group: Any, all_call: bool) -> dict[str, torch.Tensor]:
        mine = copies[group.rank]
        zero3.shard(mine, [Block, nn.Embedding], optional=TOWERS, policy=zero3.ShardingPolicy(**formats), process_group=group)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(mine), 0.05)
        for step, ranks in enumerate(calls):
            words, [(name, image)] = batch(life, step, 0, group.rank)
            mine.body.see = partial(weighed, mine.body, float(ranks[group.rank] == V))
            output = mine(words, [(name, image.float())] if all_call or ranks[group.rank] == V else [])
            output.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(mine, rank0_only=False)

    for all_call in (False, True):
        copies = [copy.deepcopy(model) for _ in range(4 if mesh else 2)]
        run = partial(body, all_call=all_call)
        seen.append(run_mesh(2, 2, run, 20) if mesh else run_ranks(2, run, 20))
    for some, everyone in zip(*seen, strict=True):
        assert all(torch.equal(some[name], value) for name, value in everyone.items())
    assert not all(torch.equal(value, model.state_dict()[name]) for name, value in some.items() if "vision" in name), "it trains"


def weighed(body: Any, weight: float, calls: Any, alone: bool, x: torch.Tensor) -> torch.Tensor:
    for name, image in calls:
        x = x + weight * getattr(body, name)(image).mean(0)
    return x


@pytest.mark.parametrize("part", ["body.vision", "body.vision.blocks.1"])
@pytest.mark.parametrize("to", ["cpu", "files"])
def test_a_parked_part_of_a_tower(part: str, to: str, tmp_path: Path) -> None:
    """Texts go on; an image on one rank is an error by name on all, and afterwards training has plain torch's numbers."""
    torch.manual_seed(0)
    model = seeing()
    copies = [copy.deepcopy(model) for _ in range(2)]
    life, texts = TowersLife([[[V, NONE]], [[NONE, V]]]), TowersLife([[[NONE, NONE]]])

    def body(group: Any) -> dict[str, torch.Tensor]:
        mine = zero3.shard(copies[group.rank], [Block, nn.Embedding], optional=TOWERS, process_group=group)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(mine), 0.02, weight_decay=0.1)
        for step in range(2):
            with zero3.parked(mine.get_submodule(part), to=to if to == "cpu" else tmp_path), torch.no_grad():
                mine(*batch(texts, 0, 0, group.rank))
                with pytest.raises(RuntimeError, match=r"the model (gathers|computes in) layer 'body.vision.* inside zero3.parked"):
                    mine(*batch(life, step, 0, group.rank))
            mine(*batch(life, step, 0, group.rank)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(mine, rank0_only=False)

    everyone = run_ranks(2, body, 20)
    expected = trained(life, model)
    for found in everyone:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("seed", range(12))
def test_drawn_lives(seed: int) -> None:
    check_life(drawn_life(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 108))
def test_more_drawn_lives(seed: int) -> None:
    for number in range(25):
        check_life(drawn_life(1000 * seed + number))


@pytest.mark.parametrize("ranks", [2, 3])
def test_named_gradients_leave_out_a_tower_that_nobody_called_on_every_rank(ranks: int) -> None:
    """A rank has no elements of most of its parameters, of which a call before has reached all but one."""
    torch.manual_seed(0)
    plain = seeing()
    for tower in (plain.body.vision, plain.body.audio):
        tower.spare = nn.Parameter(torch.ones(3, dtype=torch.float64))
    copies = [copy.deepcopy(plain) for _ in range(ranks)]
    life = TowersLife([[[V] + [NONE] * (ranks - 1)], [[NONE] * ranks], [[A] * ranks]])

    def body(group: Any) -> list[list[str]]:
        model = zero3.shard(copies[group.rank], [Block, nn.Embedding], optional=TOWERS, process_group=group)
        seen = []
        for step in range(len(life.calls)):
            model(*batch(life, step, 0, group.rank)).square().sum().backward()
            seen.append(list(zero3.named_gradients(model)))
            for chunk in zero3.get_trainable_chunk(model):
                chunk.grad = None
        return seen

    expected = []
    for step in range(len(life.calls)):
        for rank in range(ranks):
            plain(*batch(life, step, 0, rank)).square().sum().backward()
        expected.append([name for name, parameter in plain.named_parameters() if parameter.grad is not None])
        plain.zero_grad()
    for seen in run_ranks(ranks, body, 20):
        assert seen == expected
