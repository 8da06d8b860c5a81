"""BatchFinder: micro-batches that do not fit on one rank are dropped on all, and every row counts once."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zero3
from tests.support.experts import made, tokens
from tests.support.processes import Rank, on_ranks, try_on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_close
from zero3.resilience.batch_finder import _part, _rows

WIDTH = 5


class Tight(nn.Linear):
    """Has room for so many rows. `error`: what it raises beyond them."""

    room, error = 1 << 30, torch.OutOfMemoryError("made up")

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.room:
            raise self.error
        return torch.tanh(super().forward(x))


def model_of(group: Any = None, **policy: Any) -> nn.Sequential:
    model = nn.Sequential(*(Tight(WIDTH, WIDTH) for _ in range(3))).double()
    generator = torch.Generator().manual_seed(1)  # the default one is shared by threads
    for p in model.parameters():
        nn.init.normal_(p, generator=generator)
    if isinstance(group, str):
        return model
    return zero3.shard(model, Tight, process_group=group, policy=zero3.ShardingPolicy(**policy))


def tighten(model: nn.Module, room: int, layer: int = 1, error: Exception | None = None) -> None:
    block = getattr(model[layer], "module", model[layer])
    block.room, block.error = room, error or torch.OutOfMemoryError("made up")


def batch_of(rank: int, step: int, rows: int) -> Tensor:
    return torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(7 * step + rank))


def expected_of(world: int, rows: int, steps: int) -> dict[str, Tensor]:
    model = model_of("plain")
    for step in range(steps):
        for rank in range(world):
            (model(batch_of(rank, step, rows)).square().mean() / world).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def run_batch(finder: zero3.BatchFinder, batch: Any) -> list[int]:
    """The rows of each micro-batch that counts."""
    rows = []
    for micro in finder.micro_batches(batch):
        with micro:
            (finder.model(micro.data).square().mean() * micro.weight).backward()
        rows += [] if micro.failed else [micro.rows]
    return rows


@settings(max_examples=10)
@given(rows=st.integers(1, 12), rooms=st.lists(st.integers(1, 12), min_size=3, max_size=3), first=st.none() | st.integers(1, 14))
def test_batch_finder_counts_every_row_once(rows: int, rooms: list[int], first: int | None) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = model_of(group)
        finder = zero3.BatchFinder(model, first)
        tighten(model, rooms[group.rank], layer=group.rank)
        cuts = [run_batch(finder, batch_of(group.rank, step, rows)) for step in range(2)]
        assert [sum(cut) for cut in cuts] == [rows, rows]
        assert max(map(max, cuts)) <= min(rooms) and cuts[0][0] == 1
        with zero3.full_gradients(model) as found:
            assert_close({name: found[name] for name in wanted}, wanted, 1e-9, "gradients")

    wanted = expected_of(3, rows, 2)
    run_ranks(3, body)


def test_batch_finder_keeps_its_size_and_what_was_there_before() -> None:
    def body(group: ThreadCommunicator) -> list[Any]:
        model = model_of(group)
        finder = zero3.BatchFinder(model)
        cuts = [run_batch(finder, batch_of(group.rank, 0, 8))]
        tighten(model, 3 if group.rank else 99)
        cuts.append(run_batch(finder, batch_of(group.rank, 1, 8)))
        tighten(model, 99)
        cuts.append(run_batch(finder, batch_of(group.rank, 2, 8)))
        with zero3.full_gradients(model) as found:
            assert_close({name: found[name] for name in wanted}, wanted, 1e-9, "gradients")
        return [finder.batch_size, *cuts]

    wanted = expected_of(2, 8, 3)
    assert run_ranks(2, body) == [[2, [1, 7], [2, 2, 2, 2], [2, 2, 2, 2]]] * 2


def test_what_is_exchanged_between_gathers_is_known_before_a_micro_batch_may_fail() -> None:
    """The very first one gathers layer after layer, and those after it gather ahead."""

    def body(group: ThreadCommunicator) -> list[bool]:
        model = zero3.shard(made(), process_group=group, policy=zero3.ShardingPolicy(expert_parallel=True))
        finder, failed = zero3.BatchFinder(model), []
        for micro in finder.micro_batches(tokens(0, 0)):
            with micro:
                loss = model(micro.data).sum()
                if micro.rows > 1 and group.rank:
                    raise torch.OutOfMemoryError("made up")
                loss.backward()
            failed.append(micro.failed)
        return failed

    assert run_ranks(2, body) == [[False, False, True, False, False]] * 2


def test_batch_finder_with_kept_gradients_and_on_one_rank() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = model_of(group)
        finder = zero3.BatchFinder(model, 4)
        tighten(model, 2 if group.rank else 99)
        with zero3.no_sync(model):
            run_batch(finder, batch_of(group.rank, 0, 6))
        run_batch(finder, batch_of(group.rank, 1, 6))
        with zero3.full_gradients(model) as found:
            assert_close({name: found[name] for name in wanted}, wanted, 1e-9, "gradients")

    wanted = expected_of(2, 6, 2)
    run_ranks(2, body)
    model, wanted = model_of(), expected_of(1, 6, 1)
    tighten(model, 2)
    assert run_batch(zero3.BatchFinder(model), batch_of(0, 0, 6)) == [2, 2, 2]
    with zero3.full_gradients(model) as found:
        assert_close({name: found[name] for name in wanted}, wanted, 1e-9, "gradients")


def test_batch_finder_says_that_one_row_does_not_fit() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = model_of(group)
        finder = zero3.BatchFinder(model)
        run_batch(finder, batch_of(group.rank, 0, 3))
        tighten(model, 0 if group.rank else 99)
        with pytest.raises(RuntimeError, match=r"rank 1: a micro-batch of one row does not fit: OutOfMemoryError"):
            run_batch(finder, batch_of(group.rank, 0, 3))

    run_ranks(2, body)


def test_batch_finder_raises_any_other_exception_on_all_ranks() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = model_of(group)
        finder = zero3.BatchFinder(model)
        run_batch(finder, batch_of(group.rank, 0, 3))
        tighten(model, 0 if group.rank else 99, error=KeyError("mine"))
        with pytest.raises(KeyError if group.rank else RuntimeError, match="mine" if group.rank else "rank 1: KeyError: 'mine'") as raised:
            run_batch(finder, batch_of(group.rank, 0, 3))
        assert not group.rank or raised.traceback[-1].name == "forward"

    run_ranks(2, body)


@pytest.mark.parametrize("policy", [{"stage": 1}, {"stage": 2}, {"dynamic": True}])
def test_batch_finder_refuses_policies_by_its_own_name(policy: dict[str, Any]) -> None:
    def body(group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match="BatchFinder needs"):
            zero3.BatchFinder(model_of(group, **policy))

    run_ranks(2, body)


def test_batch_finder_of_a_part_of_a_layer_on_one_rank_alone_is_told_to_all() -> None:
    def body(group: ThreadCommunicator) -> None:
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
        model = zero3.shard(nn.Sequential(*layers), layers, process_group=group)
        with pytest.raises(ValueError, match=r"^rank 1: BatchFinder of a Linear inside a layer"):
            zero3.BatchFinder(layers[0][0] if group.rank else model)

    run_ranks(2, body)


def test_batch_finder_refuses_batches_by_name() -> None:
    def body(group: ThreadCommunicator) -> None:
        model, rank = model_of(group), group.rank
        for wrong, kind in ((0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError), ("2", TypeError)):
            with pytest.raises(kind, match="rank 1: batch_size must be"):
                zero3.BatchFinder(model, wrong if rank else 2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="ranks differ"):
            zero3.BatchFinder(model, 2 + rank)
        finder = zero3.BatchFinder(model)
        ragged = {"x": torch.zeros(3, 2), "y": [torch.zeros(2 if rank else 3)]}
        with pytest.raises(ValueError, match=r"rank 1: .*different numbers of rows .*batch\['y'\]\[0\]: 2"):
            finder.micro_batches(ragged)
        with pytest.raises(ValueError, match="rank 0: a batch without rows"):
            finder.micro_batches({"x": torch.tensor(1.0), "y": "text"})
        with pytest.raises(ValueError, match="ranks differ"):
            finder.micro_batches(torch.zeros(2 + rank, 3))
        with pytest.raises(RuntimeError, match="was not entered"):
            list(finder.micro_batches(torch.zeros(2, 3)))
        for micro in finder.micro_batches(batch_of(rank, 0, 1)):
            with micro:
                model(micro.data).sum().backward()
        with pytest.raises(RuntimeError, match="was entered twice"), micro:
            pass
        for rows in (-1, 0, 1.5):  # set between two micro-batches
            finder.batch_size = 1
            cut = finder.micro_batches(batch_of(rank, 0, 2))
            with next(cut) as micro:
                model(micro.data).sum().backward()
            finder.batch_size = rows  # type: ignore[assignment]
            with pytest.raises((ValueError, TypeError), match="batch_size must be"):
                next(cut)

    run_ranks(2, body)


@pytest.mark.parametrize(("wrong", "kind"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)])
def test_batch_finder_refuses_a_number_of_rows_that_was_set_later(wrong: Any, kind: type[Exception]) -> None:
    """-1 went over a batch without an end, and 0 took all of it."""

    def body(group: ThreadCommunicator) -> None:
        model = model_of(group)
        finder = zero3.BatchFinder(model)
        assert sum(run_batch(finder, batch_of(group.rank, 0, 3))) == 3
        finder.batch_size = wrong if group.rank else 2
        with pytest.raises(kind, match=f"rank 1: batch_size must be .* found {wrong}"):
            finder.micro_batches(batch_of(group.rank, 1, 3))
        finder.batch_size = 2
        assert run_batch(finder, batch_of(group.rank, 2, 3)) == [2, 1]

    run_ranks(2, body)


class Pair(NamedTuple):
    first: Tensor
    second: Any


@given(rows=st.integers(1, 9), start=st.integers(0, 8))
def test_batch_finder_cuts_any_nesting(rows: int, start: int) -> None:
    x = torch.arange(3.0 * rows).view(rows, 3)
    batch = UserDict({"a": x, "b": [x, (x, 5)], "pair": Pair(x, {"c": x}), "scalar": torch.tensor(2.0), "text": "as it is"})
    assert {number for _, number in _rows(batch, "batch")} == {rows}
    part = _part(batch, start, rows)
    assert type(part) is UserDict and isinstance(part["pair"], Pair) and torch.equal(batch["a"], x)
    for found in (part["a"], part["b"][0], part["b"][1][0], part["pair"].first, part["pair"].second["c"]):
        assert torch.equal(found, x[start:])
    assert part["b"][1][1] == 5 and part["scalar"] == 2 and part["text"] == "as it is"


def test_batch_finder_adds_one_small_exchange_a_batch() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = model_of(group)
        finder = zero3.BatchFinder(model, 2)
        run_batch(finder, batch_of(group.rank, 0, 4))
        group.log.clear()
        run_batch(finder, batch_of(group.rank, 0, 4))
        with_finder = [each for each in group.log if each.kind == "exchange"]
        group.log.clear()
        for start in (0, 2):
            with zero3.step_guard(model):
                (model(batch_of(group.rank, 0, 4)[start : start + 2]).square().mean() / 2).backward()
        assert len(with_finder) == 1 + len([each for each in group.log if each.kind == "exchange"])

    run_ranks(2, body)


def _really(rank: Rank) -> tuple[list[int], float]:
    """The CPU's allocator has no room for so many rows: far more bytes than there are addresses."""
    model = model_of()
    finder = zero3.BatchFinder(model)

    def huge(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if rank.number and len(output) > 2:
            torch.empty(1 << 60)

    cuts = run_batch(finder, batch_of(rank.number, 0, 6))
    model[1].register_forward_hook(huge)
    cuts += run_batch(finder, batch_of(rank.number, 1, 6))
    wanted = expected_of(2, 6, 2)
    with zero3.full_gradients(model) as found:
        return cuts, max(float((found[name] - value).abs().max()) for name, value in wanted.items())


@pytest.mark.slow
def test_batch_finder_in_processes_whose_memory_runs_out() -> None:
    for cuts, error in on_ranks(2, _really):
        assert cuts == [1, 5, 2, 2, 2] and error < 1e-9


def _fails_at_once(rank: Rank) -> None:
    model = model_of()
    tighten(model, 0 if rank.number else 99)
    run_batch(zero3.BatchFinder(model), batch_of(rank.number, 0, 3))


def test_batch_finder_whose_first_row_fails_does_not_hang() -> None:
    outcomes = try_on_ranks(2, _fails_at_once, fresh=True, group_timeout=3.0)
    assert [each.error for each in outcomes] == ["RuntimeError", "OutOfMemoryError"]
