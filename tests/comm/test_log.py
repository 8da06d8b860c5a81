"""The log of transfers: the same hash for the same transfers, compared now and then, told by errors."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.processes import PROMPT, Rank, on_ranks, try_on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.routed import Routed, gather_others
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential
from zero3.comm.log import Entry, History, TransferLog


class Layer(NamedTuple):
    label: str


def written(*entries: tuple[str, int]) -> int:
    log = TransferLog(History(), 0)
    for doing, identity in entries:
        log.entries.append(Entry(doing, Layer("a"), 2 * identity + (doing == "gathering")))
    return log.digest


def test_a_hash_tells_transfers_layers_and_orders_apart() -> None:
    different = [
        (),
        (("gathering", 1),),
        (("reducing", 1),),
        (("gathering", 2),),
        (("gathering", 1), ("gathering", 1)),
        (("gathering", 1), ("reducing", 2)),
        (("reducing", 2), ("gathering", 1)),
    ]
    assert len({written(*entries) for entries in different}) == len(different)
    assert written(*different[-1]) == written(*different[-1])


def test_the_log_keeps_the_latest_and_counts_all() -> None:
    log = TransferLog(History(), 0)
    for number in range(10):
        log.entries.append(Entry("gathering", Layer(str(number)), number))
        if number % 3 == 0:
            log.history.fold()
    assert log.count == 10
    assert log.where().endswith("transfer 10; the latest: gathering 6, gathering 7, gathering 8, gathering 9.")
    assert log.count == 10 and not log.entries


def test_compare_every_1_finds_the_first_transfer_that_fits_but_is_another() -> None:
    """Without tags, as on NCCL: both ranks gather twice, but mean other layers of the same size."""

    def body(group: ThreadCommunicator) -> str:
        policy = ShardingPolicy(prefetch_depth=0, compare_every=1)
        model = Zero3Layer(Routed(policy, group), policy=policy, process_group=group)
        try:
            gather_others(model, group.rank)
            for _ in range(4):
                model(torch.ones(2, 4), (0, 1, 2))
        except ValueError as error:
            return str(error)
        return "went on with another layer's weights"

    texts = run_ranks(2, body)
    assert texts[0] == texts[1]
    assert "ranks differ in the transfers made so far: rank 0: " in texts[0]
    assert "gathering" in texts[0] and "rank 1: " in texts[0]


class Fuse(nn.Module):
    """Layers of one size, between which a rank may fail."""

    def __init__(self, group: ThreadCommunicator, **policy: Any) -> None:
        super().__init__()
        chosen = ShardingPolicy(**policy)
        self.layers = nn.ModuleList(Zero3Layer(nn.Linear(4, 4), policy=chosen, process_group=group) for _ in range(4))
        self.blows = False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.blows and number == 2:
                raise KeyError("the fuse")
            x = layer(x)
        return x


@pytest.mark.parametrize("trains", [True, False])
def test_an_exception_that_one_rank_catches_is_told_to_all_within_two_forwards(trains: bool) -> None:
    """Rank 0 begins anew while rank 1 is in the middle: equal sizes meet, and nothing but the log can tell that they are others."""

    def body(group: ThreadCommunicator) -> tuple[int, str]:
        model = Zero3Layer(Fuse(group), process_group=group)
        after = 0
        with nullcontext() if trains else torch.no_grad():
            for _ in range(3):
                y = model(torch.ones(2, 4)).sum()
                if trains:
                    y.backward()
            try:
                model.module.blows = group.rank == 0
                with suppress(KeyError):
                    model(torch.ones(2, 4))
                model.module.blows = False
                for _ in range(6):
                    after += 1
                    model(torch.ones(2, 4))
            except (ValueError, RuntimeError) as error:
                group.world.fail(error)  # its process ends, and the others notice
                return after, str(error)
        return after, "trained on with another layer's weights"

    found = run_ranks(2, body)
    assert all(after <= 2 for after, _ in found), found
    assert any("ranks differ in the transfers made before forward pass" in text and "rank 1: " in text for _, text in found), found
    assert all("ranks differ" in text or "gathering layer" in text for _, text in found), found


@pytest.mark.parametrize("look", ["clip_grad_norm_", "GradScaler", "save_checkpoint"])
def test_the_log_is_looked_at_before_a_step(look: str, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> str:
        model = Zero3Layer(Fuse(group), process_group=group)
        optimizer, scaler = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1), zero3.GradScaler("cpu")
        model._state.log.history.fold()
        if group.rank == 0:
            model._state.log.entries.append(Entry("gathering", Layer("that only rank 0 has"), 77))
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        ways = {
            "clip_grad_norm_": lambda: zero3.clip_grad_norm_(model, 1.0),
            "GradScaler": lambda: scaler.step(optimizer),
            "save_checkpoint": lambda: zero3.save_checkpoint(tmp_path / "saved", model),
        }
        with pytest.raises(ValueError, match="ranks differ in the transfers made before forward pass 1") as caught:
            ways[look]()
        assert not (tmp_path / "saved").exists()
        return str(caught.value)

    texts = run_ranks(2, body)
    assert "gathering that only rank 0 has" in texts[0] and "gathering that only rank 0 has" not in texts[1]


def save_after_other_norms(rank: Rank, policy: dict[str, Any]) -> str:
    model = Zero3Layer(nn.Linear(4, 4), policy=ShardingPolicy(**policy))
    model(torch.ones(2, 4)).sum().backward()
    zero3.clip_grad_norm_(model, 1.0 + rank.number)
    try:
        zero3.save_checkpoint(rank.scratch / "saved", model)
    except ValueError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("policy", [{}, {"compare_every": 0}], ids=str)
def test_a_save_compares_transfers_where_no_comparison_has_come_yet(policy: dict[str, Any]) -> None:
    """On gloo ranks compare them after a thousand, unless they never do."""
    first, second = on_ranks(2, save_after_other_norms, policy)
    assert first == second
    assert first == "saved" if policy else re.match("ranks differ in save_checkpoint: .*max_norm=1.0.*max_norm=2.0", first)


def test_ranks_tell_each_other_once_a_forward_and_never_inside_resident() -> None:
    def body(group: ThreadCommunicator) -> list[int]:
        counts = []
        for options in ({}, {"compare_every": 0}, {"compare_every": 1}):
            model = Zero3Layer(Fuse(group, **options), policy=ShardingPolicy(**options), process_group=group)
            before = group.told
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
            with zero3.resident(model), torch.no_grad():
                model(torch.ones(2, 4))
            counts.append(group.told - before)
        return counts

    assert run_ranks(2, body) == [[3, 0, 0]] * 2


def test_compare_every_leaves_ranks_alone_that_do_the_same() -> None:
    def body(group: ThreadCommunicator) -> list[int]:
        counts = []
        for every in (0, 10, 1):
            policy = ShardingPolicy(compare_every=every)
            model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4), policy=policy, process_group=group) for _ in range(3)])
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
            group.log.clear()
            for _ in range(5):  # 8 transfers each
                model(torch.ones(2, 4)).sum().backward()
            counts.append(sum(entry.kind == "exchange" for entry in group.log))
        return counts

    first, second = run_ranks(2, body)
    assert first == second
    assert first[:2] == [0, 0] and first[2] >= 5 * 5


def stop_on_one_rank(rank: Rank) -> None:
    model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4)) for _ in range(3)])
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
    told = rank.scratch / "told"
    try:
        if rank.number == 0:
            model(torch.ones(2, 4))
    finally:
        if rank.number == 0:
            told.touch()
    while not told.exists():  # alive, but with no more to do
        time.sleep(0.05)


@pytest.mark.slow
def test_a_timeout_tells_the_layer_the_pass_and_what_came_before() -> None:
    waiting, _ = try_on_ranks(2, stop_on_one_rank, group_timeout=3.0, fresh=True, debug="OFF")
    assert waiting.error == "RuntimeError"
    for words in (
        "rank 0 of 2: gathering layer '0' (Linear) failed",
        "in forward pass 3 (or its backward), transfer 1",
        "the latest: ",
        "reducing '0' (Linear)",
    ):
        assert words in waiting.text, waiting.text
    assert waiting.seconds < PROMPT


def test_an_error_tells_the_latest_transfers_and_not_all() -> None:
    """However long the model has trained: what is kept of the past is bounded."""

    def body(group: ThreadCommunicator) -> list[tuple[int, int]]:
        model = Zero3Sequential([Zero3Layer(nn.Linear(3, 3), process_group=group) for _ in range(6)])
        told = []
        for passes in (1, 1, 20, 100):
            for _ in range(passes):
                model(torch.ones(2, 3)).sum().backward()
            group.before = fail
            with pytest.raises(RuntimeError, match=r"gathering layer .* failed: cut off") as error:
                model(torch.ones(2, 3))
            group.before = lambda kind: None
            latest = str(error.value).split("the latest: ")[1]
            told.append((latest.count("gathering") + latest.count("reducing"), len(latest)))
        return told

    def fail(kind: str) -> None:
        raise RuntimeError("cut off")

    for told in run_ranks(2, body):
        assert 1 <= told[0][0] <= 10
        assert len(set(told)) == 1, "the same number of transfers after 1 and after 122 steps"


def test_the_log_stays_short_without_a_forward() -> None:
    """A loop that evaluates inside `resident`, or reads parameters, again and again."""

    def body(group: ThreadCommunicator) -> None:
        model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4), process_group=group) for _ in range(2)])
        for number in range(1, 4):
            with zero3.resident(model):
                pass
            with zero3.full_params(model[0]):
                pass
            zero3.full_state_dict(model)
            log = model[0]._state.log
            assert not log.entries
            assert log.count == 5 * number

    run_ranks(2, body)


def test_what_a_model_logs_says_what_was_done_with_which_layer() -> None:
    def body(group: ThreadCommunicator) -> list[str]:
        layer = zero3.Zero3Layer(modules[group.rank], process_group=group)
        layer(torch.ones(1, 2)).sum().backward()
        return [f"{transfer.doing} {transfer.subject.name}" for transfer in layer._state.log.entries]

    modules = [nn.Linear(2, 2) for _ in range(2)]
    assert run_ranks(2, body) == [["gathering layer Linear", "reducing layer Linear"]] * 2
