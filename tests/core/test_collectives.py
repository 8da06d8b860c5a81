"""What ranks do together passes conductors that wrap each other, and each of them sees all of it."""

from __future__ import annotations

import ast
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.distributed.algorithms.join import Join

import zero3
from tests.support.inside import states_of
from tests.support.models import Broken, fused, mlp, rows
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential
from zero3.core.collectives import Activity, Collective, Conductor, Gather, Reduce, Round, Straight, Use, chain, without


def test_every_collective_says_what_it_does() -> None:
    """Who refuses one, or shows the latest, prints it: a text, and no object's address."""
    for file in (Path(zero3.__file__).parent).rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and {"perform", "take_part"} & (names := {getattr(each, "name", "") for each in node.body}):
                assert "__str__" in names or node.name == "Collective", f"{file}: {node.name}"


class Seeing:
    """Notes what passes."""

    def __init__(self, seen: list[Collective], inner: Conductor) -> None:
        self.seen, self.inner = seen, inner

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        self.seen.append(what)
        return self.inner.conduct(what, absent=absent)


def sharded(group: Any, model: nn.Sequential, **policy: Any) -> Zero3Sequential:
    return Zero3Sequential([Zero3Layer(each, policy=ShardingPolicy(**policy), process_group=group) for each in model])


def seen_by(model: nn.Module) -> list[Collective]:
    seen: list[Collective] = []
    for state in states_of(model):
        state.conducted_by(Seeing(seen, state.conductor))
    return seen


@given(some.integers(0, 6).flatmap(lambda count: some.permutations(range(count))))
def test_a_conductor_is_taken_out_of_a_chain_wherever_it_stands(order: list[int]) -> None:
    outer: Conductor = Straight()
    for _ in order:
        outer = Seeing([], outer)
    wraps = [each for each in chain(outer) if isinstance(each, Seeing)]
    left = list(wraps)
    for number in order:
        outer = without(wraps[number], outer)
        left.remove(wraps[number])
        assert list(chain(outer))[:-1] == left and isinstance(list(chain(outer))[-1], Straight)


@pytest.mark.parametrize("policy", [{}, {"stage": 2}, {"resident_bytes": 10**6}, {"compare_every": 1}, {"compare_every": 3}], ids=str)
@pytest.mark.parametrize("mesh", [False, True])
def test_every_transfer_of_a_step_is_conducted_between_its_marks(mesh: bool, policy: dict[str, Any]) -> None:
    def body(group: Any) -> None:
        model = sharded(group, mlp(), **policy)
        seen, told, optimizer = seen_by(model), 0, torch.optim.SGD(zero3.get_trainable_chunk(model))
        for turn in range(3):
            model(rows(2 + turn)).sum().backward()
            log = states_of(model)[0].log
            told = log.count
            optimizer.step()
            optimizer.zero_grad()
        moved = [what for what in seen if isinstance(what, Gather | Reduce)]
        assert len(moved) == told >= 3 + 3 * 3
        assert not [what for what in seen if isinstance(what, Use)], "nobody listens to steps"
        marks = [(what.activity, what.begins) for what in seen if isinstance(what, Round)]
        assert marks == 3 * [(each, begins) for each in (Activity.FORWARD, Activity.BACKWARD) for begins in (True, False)]
        at = [number for number, what in enumerate(seen) if isinstance(what, Round)]
        assert not [what for number, what in enumerate(seen) if what.moves and sum(place < number for place in at) % 2 == 0]

    if mesh:
        run_mesh(2, 2, body)
    else:
        run_ranks(2, body)


def test_a_failed_rank_repeats_what_the_others_make() -> None:
    """Whoever is inside of the guard's conductor sees it; and the chain is as it was when the guard is over."""

    def body(group: ThreadCommunicator) -> list[str]:
        model, seen = sharded(group, fused()), []
        for turn in range(3):
            seen = seen_by(model)
            with zero3.step_guard(model) as guarded:
                model[1].module.blows = ("forward", Broken) if turn == 2 and group.rank == 0 else None
                model(rows(2)).sum().backward()
            assert guarded.failed == (turn == 2)
        assert [type(each) for each in chain(states_of(model)[0].conductor)] == [Seeing] * 3 + [Straight]
        return [str(what) for what in seen if isinstance(what, Gather | Reduce)]

    first, second = run_ranks(2, body)
    assert first == second and len(first) == 3 * 3 - 1  # the last layer stays from forward to backward


def leaves_one_before_the_other(rank: Rank, left_first: str) -> None:
    model = sharded(None, mlp())
    uneven = zero3.joinable(model, lambda: None)
    with ExitStack() as profiling, ExitStack() as joining:
        found = profiling.enter_context(zero3.profile(model))
        joining.enter_context(Join([uneven]))
        for number in range(2 + rank.number):
            model(rows(2)).sum().backward()
            uneven.step()
            if left_first == "profile" and not number:
                profiling.close()
        joining.close()
        model(rows(2)).sum().backward()
    assert {transfer.kind for transfer in found.transfers} == {"fetch", "backup"}
    assert all(isinstance(state.conductor, Straight) for state in states_of(model))


@pytest.mark.parametrize("left_first", [pytest.param("profile", marks=pytest.mark.slow), "join"])
def test_conductors_are_left_in_any_order(left_first: str) -> None:
    """`Join` ends inside of a profile, or a profile inside of `Join`: both have seen what was theirs, and nothing of them stays."""
    on_ranks(2, leaves_one_before_the_other, left_first)
