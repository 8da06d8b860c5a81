"""What does not belong into a step_guard: one error on all ranks, and gradients, chunks and the next steps as without that micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import mlp
from tests.support.processes import PROMPT, Rank, try_on_ranks
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import TOLERANCE, Turn, assert_at_rest, assert_close, full_gradients, full_parameters, on_ranks, sgd

ZEROED = r"gradients were zeroed or replaced inside zero3\.step_guard, which ranks that fail would not do"
STEPPED = r"an optimizer stepped inside zero3\.step_guard, or a gradient was read there"
PART = r"zero3\.step_guard got only a part of the model: layer '0' .* trains too\. Pass the whole one"
PENALTY = r"a gradient flows straight into a chunk inside zero3\.step_guard"


class LoaderFailed(Exception):
    pass


class Loop:
    """A model and its optimizer on one rank. Micro-batch number n has the data of `Turn(rank, n, 0)`."""

    def __init__(self, model: Any, group: ThreadCommunicator) -> None:
        self.model, self.group, self.chunks = model, group, zero3.get_trainable_chunk(model)
        self.optimizer = sgd(self.chunks)

    def backward(self, number: int, tokens: bool = False) -> None:
        loss = loss_of(self.model, self.group.rank, number)
        zero3.backward(loss, 3, self.model) if tokens else loss.backward()  # type: ignore[func-returns-value]

    def guarded(self, number: int, mistake: Callable[[], Any] = lambda: None, place: str = "", tokens: bool = False) -> bool:
        with zero3.step_guard(self.model) as guard:
            if place == "before":
                mistake()
            loss = loss_of(self.model, self.group.rank, number)
            if place == "between":
                mistake()
            zero3.backward(loss, 3, self.model) if tokens else loss.backward()  # type: ignore[func-returns-value]
            if place == "after":
                mistake()
        return guard.failed


def loss_of(model: nn.Module, rank: int, number: int) -> Tensor:
    return model(Turn(rank, number, 0).tensor(3, 5)).pow(2).sum()


def expected(world_size: int, numbers: list[int], per: float | None = None) -> dict[str, Tensor]:
    """The mean over ranks of the sum over micro-batches, or the mean over `per` tokens."""
    model = mlp()
    for rank in range(world_size):
        for number in numbers:
            (loss_of(model, rank, number) / (per or world_size)).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


MISTAKES: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "zero_grad": (lambda loop: loop.optimizer.zero_grad(), ZEROED),
    "zero_grad, not to None": (lambda loop: loop.optimizer.zero_grad(set_to_none=False), ZEROED),
    "the model's zero_grad": (lambda loop: loop.model.zero_grad(), ZEROED),
    "one gradient set to None": (lambda loop: setattr(loop.chunks[1], "grad", None), ZEROED),
    "one gradient replaced": (lambda loop: setattr(loop.chunks[0], "grad", torch.ones_like(loop.chunks[0])), ZEROED),
    "a step": (lambda loop: loop.optimizer.step(), STEPPED),
    "clipping": (lambda loop: zero3.clip_grad_norm_(loop.model, 1.0), STEPPED),
    "norms": (lambda loop: zero3.parameter_norms(loop.model), STEPPED),
    "a look": (lambda loop: loop.chunks[0].grad.sum(), STEPPED),  # type: ignore[union-attr]
    "scaling": (lambda loop: loop.chunks[0].grad.mul_(0.5), STEPPED),  # type: ignore[union-attr]
    "a penalty": (lambda loop: sum(chunk.pow(2).sum() for chunk in loop.chunks).backward(), PENALTY),  # type: ignore[union-attr]
    "no_sync": (lambda loop: _without_sync(loop.model), r"zero3\.no_sync inside zero3\.step_guard: put no_sync around it"),
    "chunks written": (lambda loop: _keep_values(loop), "an optimizer stepped inside .* or something else wrote into chunks"),
}


def _without_sync(model: nn.Module) -> None:
    with zero3.no_sync(model):
        pass


def _keep_values(loop: Loop) -> None:
    with torch.no_grad():
        loop.chunks[0].add_(0)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("place", ["before", "between", "after"])
@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_raises_one_ranks_mistake_and_gradients_are_what_they_were(name: str, place: str, world_size: int) -> None:
    mistake, text = MISTAKES[name]
    if place == "between" and name == "chunks written":
        place = "after"  # torch itself refuses the backward
    wanted = {"none": expected(world_size, [2]), "reduced": expected(world_size, [0, 2]), "kept": expected(world_size, [0, 2])}

    def body(model: Any, group: ThreadCommunicator) -> None:
        loop, wrong = Loop(model, group), group.rank == world_size - 1
        for _ in range(2):
            loop.guarded(7)
        for earlier, gradients in wanted.items():
            loop.optimizer.zero_grad()
            if earlier != "none":
                with zero3.no_sync(model) if earlier == "kept" else nullcontext():
                    loop.backward(0)
            before = [(chunk.grad, chunk.detach().clone()) for chunk in loop.chunks]
            with pytest.raises(RuntimeError, match=rf"^rank {world_size - 1}: {text}"):
                loop.guarded(1, (lambda: mistake(loop)) if wrong else lambda: None, place)
            for chunk, (gradient, values) in zip(loop.chunks, before, strict=True):
                assert chunk.grad is gradient and torch.equal(chunk, values)
            assert not loop.guarded(2)
            assert_close(full_gradients(model, group), gradients, TOLERANCE, f"gradients after {earlier}")
            assert_at_rest(model)

    on_ranks(world_size, mlp, body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_a_guard_that_another_rank_left_before_it(set_to_none: bool) -> None:
    """The rank that failed had not come to it: gradients of half the ranks would stay."""
    wanted = expected(2, [0])

    def body(model: Any, group: ThreadCommunicator) -> None:
        loop = Loop(model, group)
        for _ in range(2):
            loop.guarded(7)
        loop.optimizer.zero_grad()
        loop.backward(0)

        def zero_or_fail() -> None:
            if group.rank == 0:
                raise LoaderFailed
            loop.optimizer.zero_grad(set_to_none=set_to_none)

        with pytest.raises(RuntimeError, match=rf"^rank 1: {ZEROED}"):
            loop.guarded(1, zero_or_fail, "before")
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")
        loop.optimizer.step()

    on_ranks(2, mlp, body)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_zero_grad_before_a_guard_is_no_mistake(set_to_none: bool, waits: bool, tokens: bool) -> None:
    wanted = expected(2, [1, 2], 12.0 if tokens else None)

    def body(model: Any, group: ThreadCommunicator) -> None:
        loop = Loop(model, group)
        for number in (7, 0):
            with zero3.no_sync(model) if waits else nullcontext():
                loop.backward(number, tokens)
        for number in (1, 2):
            if number == 1:
                loop.optimizer.zero_grad(set_to_none=set_to_none)
            assert not loop.guarded(number, tokens=tokens)
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")
        before = full_parameters(model)
        loop.optimizer.step()
        assert all((before[name] != after).any() for name, after in full_parameters(model).items())

    on_ranks(2, mlp, body)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("waits", [False, True])
def test_transactional_zero_grad_after_a_backward_that_broke_stays(set_to_none: bool, waits: bool) -> None:
    """No guard is open: what was there before the broken backward does not come back over what the caller has done since."""
    wanted = expected(2, [2])

    def shard(model: Any, group: Any, policy: Any) -> nn.Module:
        policy = zero3.ShardingPolicy(transactional=True)
        return zero3.Zero3Sequential([zero3.Zero3Layer(child, policy=policy, process_group=group) for child in model])

    def body(model: Any, group: ThreadCommunicator) -> None:
        loop = Loop(model, group)
        with zero3.no_sync(model) if waits else nullcontext():
            loop.backward(0)
            hook = model[0].module[0].register_forward_hook(_break_backward)
            with pytest.raises(ZeroDivisionError):  # layers 2 and 1 are over by then
                loop.backward(1)
            hook.remove()
        loop.optimizer.zero_grad(set_to_none=set_to_none)
        loop.backward(2)
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")

    on_ranks(2, mlp, body, shard)


def _break_backward(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: 1 / 0)


@pytest.mark.parametrize("earlier", [0, 2])
@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (lambda loop: loop.guarded(1), r"zero3\.step_guard inside another one"),
        (lambda loop: [loop.backward(1, tokens=True) for _ in range(2)], r"a second zero3\.backward inside one zero3\.step_guard"),
    ],
)
def test_a_guard_around_several_micro_batches_is_an_error_and_drops_none(mistake: Callable[[Loop], Any], text: str, earlier: int) -> None:
    """Also where ranks know the rest of the transfers, and could drop it: such a loop would train nothing."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        loop = Loop(model, group)
        for _ in range(earlier):
            loop.guarded(7, tokens=True)
        loop.optimizer.zero_grad()
        with pytest.raises(ValueError, match=rf"^rank \d: {text}"), zero3.step_guard(model):
            mistake(loop)
        assert not loop.guarded(2)
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")

    wanted = expected(2, [2])

    on_ranks(2, mlp, body)


def make_mistakes_alone(rank: Rank) -> list[str]:
    model = zero3.Zero3Sequential([zero3.Zero3Layer(child) for child in mlp()])
    optimizer, told = sgd(model.get_trainable_chunk()), []
    for mistake in (None, None, optimizer.zero_grad, optimizer.step):
        try:
            with zero3.step_guard(model):
                loss_of(model, rank.number, 0).backward()
                if mistake is not None and rank.number == 1:
                    mistake()
        except RuntimeError as error:
            told.append(str(error))
    optimizer.step()
    return told


def test_in_processes_nobody_waits_for_the_timeout() -> None:
    first, second = try_on_ranks(2, make_mistakes_alone)
    assert first.value == second.value, (first, second)
    assert len(first.value) == 2 and all(text.startswith("rank 1: ") for text in first.value)
    assert max(first.seconds, second.seconds) < PROMPT


@pytest.mark.parametrize("begun", [False, True])
def test_a_guard_around_a_part_of_the_model_is_refused(begun: bool) -> None:
    """The other layers would keep a dropped micro-batch's gradients. Before the first forward nobody knows of them."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        if begun:
            loss_of(model, group.rank, 0).backward()
        with pytest.raises(ValueError, match=PART), zero3.step_guard(model[1]):
            loss_of(model, group.rank, 1).backward()
        model.zero_grad()
        loss_of(model, group.rank, 0).backward()
        with zero3.step_guard(model[1]) as guard:  # what the loss does not reach need not be in it
            loss_of(model[1], group.rank, 0).backward()
        assert not guard.failed
        for chunk in [*model[0].get_trainable_chunk(), *model[2].get_trainable_chunk()]:
            chunk.requires_grad_(False)  # what does not train need not be in it
        model.zero_grad()
        with zero3.step_guard(model[1]):
            loss_of(model, group.rank, 2).backward()
        found = full_gradients(model, group)
        assert found
        assert_close(found, {name: wanted[name] for name in found}, TOLERANCE, "gradients")

    wanted = expected(2, [2])
    on_ranks(2, mlp, body)


@pytest.mark.parametrize("way", [zero3.step_guard, zero3.BatchFinder], ids=["step_guard", "BatchFinder"])
def test_a_guard_around_a_part_of_a_layer_is_refused_at_its_beginning(way: Any) -> None:
    """Its transfers are the layer's. It was refused at its end, by the name of another function, where it had to drop a micro-batch."""

    def body(model: Any, group: ThreadCommunicator) -> None:
        for other in (model[0], model[2]):
            other.get_trainable_chunk()[0].requires_grad_(False)
        with pytest.raises(ValueError, match=rf"{way.__name__} of a Linear inside a layer, .*Sequential.*: .* pass it or the model"):
            way(model[1].module[0]).__enter__()
        model.zero_grad()
        loss_of(model, group.rank, 2).backward()
        found = full_gradients(model, group)
        assert_close(found, {name: wanted[name] for name in found}, TOLERANCE, "gradients")

    wanted = expected(2, [2])
    on_ranks(2, mlp, body)


@pytest.mark.parametrize("fails", ["between", "after"])
def test_a_guard_around_a_list_of_models_drops_the_micro_batch_of_all(fails: str) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        other = zero3.Zero3Layer(mlp(), process_group=group)
        both = nn.ModuleList([model, other])
        for number in range(5):
            bad = number == 3 and group.rank == 1
            with zero3.step_guard(both) as guard:
                loss = loss_of(model, group.rank, number)
                if bad and fails == "between":
                    raise LoaderFailed
                (loss + loss_of(other, group.rank, number)).backward()
                if bad:
                    raise LoaderFailed
            assert guard.failed == (number == 3)
        for each in both:
            assert_close(full_gradients(each, group), wanted, TOLERANCE, "gradients")

    wanted = expected(2, [0, 1, 2, 4])
    on_ranks(2, mlp, body)
