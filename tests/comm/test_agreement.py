"""agree: all ranks go on, or all raise the same error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ranks import RanksDisagree, ThreadCommunicator, run_ranks
from zero3.comm.agreement import Members, agree, agreeing, tell_all
from zero3.comm.communicator import SoloCommunicator
from zero3.comm.plain_values import unreadable

CPU = torch.device("cpu")


def outcomes(
    subjects: Sequence[str], lines: Sequence[list[str]], errors: Sequence[Exception | None]
) -> tuple[list[Exception | None], list[int]]:
    """What each rank raised, and the bytes that each exchange took."""

    def body(communicator: ThreadCommunicator) -> tuple[Exception | None, list[int]]:
        rank = communicator.rank
        raised: Exception | None = None
        try:
            agree(Members(communicator, CPU), subjects[rank], lines[rank], errors[rank])
        except Exception as error:
            raised = error
        return raised, [entry.numel for entry in communicator.log]

    results = run_ranks(len(subjects), body)
    assert all(sizes == results[0][1] for _, sizes in results)
    return [raised for raised, _ in results], results[0][1]


def same_error(subjects: Sequence[str], lines: Sequence[list[str]], errors: Sequence[Exception | None] = (None, None, None)) -> Exception:
    raised, _ = outcomes(subjects, lines, errors)
    assert len({(type(error), str(error)) for error in raised}) == 1, raised
    assert raised[0] is not None
    return raised[0]


SAME = ["a new layer"] * 3


def test_ranks_that_agree_exchange_sixteen_bytes() -> None:
    raised, sizes = outcomes(SAME, [["one", "two"]] * 3, [None] * 3)
    assert raised == [None] * 3
    assert sizes == [16]


@pytest.mark.parametrize("kind", [ValueError, TypeError, RuntimeError])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_mistake_that_one_rank_sees_is_everybodys(kind: type[Exception], rank: int) -> None:
    errors: list[Exception | None] = [None, None, None]
    errors[rank] = kind("no such device")
    error = same_error(SAME, [["one"], ["one"], ["another"]], errors)
    assert type(error) is kind
    assert str(error) == f"rank {rank}: no such device"


def test_a_mistake_that_all_ranks_see_is_told_as_the_first_ranks() -> None:
    """Equal digests too must not pass for agreement."""
    error = same_error(SAME, [[]] * 3, [ValueError("too big")] * 3)
    assert str(error) == "rank 0: too big"


def test_an_error_without_a_text_is_an_error() -> None:
    assert same_error(SAME, [[]] * 3, [None, ValueError(), None]) is not None


def test_a_subclass_of_a_known_error_travels_as_that() -> None:
    class Special(ValueError):
        pass

    assert type(same_error(SAME, [[]] * 3, [None, Special("x"), None])) is ValueError


def test_an_error_of_another_kind_travels_as_a_runtime_error() -> None:
    assert type(same_error(SAME, [[]] * 3, [None, KeyError("x"), None])) is RuntimeError


def test_the_first_difference_is_told_with_the_ranks() -> None:
    lines = [["policy 1", "weight (2, 3)"], ["policy 1", "weight (2, 4)"], ["policy 1", "weight (2, 3)"]]
    error = same_error(SAME, lines)
    assert isinstance(error, ValueError)
    assert str(error).startswith("ranks differ in a new layer: ranks 0, 2: weight (2, 3); rank 1: weight (2, 4). ")


def test_a_line_too_few_is_a_difference() -> None:
    error = same_error(SAME, [["one", "two"], ["one"], ["one"]])
    assert str(error).startswith("ranks differ in a new layer: rank 0: two; ranks 1, 2: nothing. ")


def test_ranks_at_different_points_are_told_where_each_is() -> None:
    error = same_error(["a new layer", "the backward", "a new layer"], [["one"]] * 3)
    assert isinstance(error, ValueError)
    assert str(error).startswith("ranks are not at the same point: ranks 0, 2: a new layer; rank 1: the backward. ")


@pytest.mark.parametrize("text", ["x" * 100_000, "é 漢字 \N{PARTY POPPER}", " trailing blanks   ", '"quotes" \\ and\nlines'])
def test_any_text_travels_unchanged(text: str) -> None:
    error = same_error(SAME, [[]] * 3, [None, ValueError(text), None])
    assert str(error) == f"rank 1: {text}"


def test_one_rank_raises_its_own_error_and_asks_nobody() -> None:
    mistake = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        agree(Members(SoloCommunicator(), CPU), "a new layer", [], mistake)
    assert caught.value is mistake
    agree(Members(SoloCommunicator(), CPU), "a new layer", ["anything"])


def test_a_rank_that_does_something_else_is_noticed() -> None:
    """By the communicator, not by agree: here another collective meets the exchange."""

    def body(communicator: ThreadCommunicator) -> None:
        if communicator.rank == 0:
            agree(Members(communicator, CPU), "a new layer", [])
        else:
            communicator.all_reduce(torch.zeros(1))

    with pytest.raises(RuntimeError) as caught:
        run_ranks(2, body)
    assert isinstance(caught.value, RanksDisagree) or isinstance(caught.value.__cause__, RanksDisagree)


@pytest.mark.parametrize("kind", [ValueError, OSError, KeyError, ZeroDivisionError])
def test_what_raises_inside_agreeing_raises_on_all_ranks(kind: type[Exception]) -> None:
    """Also an error that `agree` does not know: the other ranks must not wait for a rank that raises alone."""

    def fail(communicator: ThreadCommunicator) -> None:
        with agreeing(Members(communicator, CPU), "a file"):
            if communicator.rank == 1:
                raise kind("no such thing")

    def body(communicator: ThreadCommunicator) -> str:
        with pytest.raises(kind if kind in (ValueError, OSError) else RuntimeError) as raised:
            fail(communicator)
        return str(raised.value)

    texts = run_ranks(3, body)
    assert len(set(texts)) == 1
    assert texts[0].startswith("rank 1: ") and "no such thing" in texts[0]


def test_lines_inside_agreeing_are_compared() -> None:
    def body(communicator: ThreadCommunicator) -> None:
        with agreeing(Members(communicator, CPU), "a file") as lines:
            lines.append("the same")
        differ = pytest.raises(ValueError, match=r"ranks differ in a file: ranks 0, 2: size 0; rank 1: size 1")
        with differ, agreeing(Members(communicator, CPU), "a file") as lines:
            lines.append(f"size {communicator.rank % 2}")

    run_ranks(3, body)


def test_agreeing_on_one_rank_raises_the_very_error() -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match=r"^mine$") as raised, agreeing(Members(SoloCommunicator(), CPU), "a file"):
        raise error
    assert raised.value is error


def test_an_interrupt_inside_agreeing_waits_for_nobody() -> None:
    with pytest.raises(KeyboardInterrupt), agreeing(Members(SoloCommunicator(), CPU), "a file"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (torch.zeros(2), None),
        (nn.Parameter(torch.zeros(2)), None),
        ([1.0], "is a builtins.list, expected a torch.Tensor"),
        (torch.zeros(2, device="meta"), "is on the meta device, so it has no values"),
        (torch.zeros(2).to_sparse(), "is sparse_coo, expected a dense tensor"),
        (torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})), "is a Own: pass a plain torch.Tensor"),
    ],
)
def test_what_can_not_be_read_says_why(value: Any, why: str | None) -> None:
    assert unreadable(value) == why


def test_ranks_whose_transfers_differ_hear_which_of_them_has_failed_before() -> None:
    def body(group: ThreadCommunicator) -> str:
        text = "ArithmeticError: no more numbers" if group.rank == 1 else ""
        with pytest.raises(ValueError, match="ranks have made different transfers by the end") as error:
            tell_all(Members(group, torch.device("cpu")), "the end", text, group.rank, "step_guard")
        return str(error.value)

    first, second = run_ranks(2, body)
    assert first == second and first.endswith("Before that ranks have failed: rank 1: ArithmeticError: no more numbers")
