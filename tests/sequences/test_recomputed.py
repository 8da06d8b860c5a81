"""Attentions that a backward recomputes are exchanged again, each in the forward that it is part of."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.sequences.attending import HOWS, Own, own, run
from tests.sequences.texts import WORDS, assert_gradients, batch, made, plain_sum
from tests.support.ranks import run_parts

POLICY = zero3.ShardingPolicy(gradient_reduction="sum")


class Late(Own):
    """Keeps a value on the side, whose graph is run before the output's."""

    aux: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        x = run(self.blocks[0], self.embed(ids), self.how)
        output = self.head(x)
        self.aux = run(self.blocks[1], x, self.how).square().mean(-1)
        return output


class Reading(nn.Module):
    """A layer that reads words, as a whole model of transformers' does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.words = nn.Linear(8, 8), nn.Embedding(WORDS, 8)

    def forward(self, x: Tensor, input_ids: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.words(input_ids)


class Reads(Own):
    def __init__(self, how: str = "attend") -> None:
        super().__init__(how)
        self.reading = Reading()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.all_blocks(run(self.reading, self.embed(ids), self.how, ids)))


def in_place(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    logits /= 2
    return logits.square().sum()


def beside(model: Any, ids: Tensor) -> Tensor:
    return model(ids).square().sum() + model.aux.sum()


def hidden(model: Any, ids: Tensor) -> Tensor:
    """A hidden state alone: the output's graph is not run."""
    seen: list[Tensor] = []
    hook = model.blocks[1].register_forward_hook(lambda module, args, output: seen.append(output))
    model(ids)
    hook.remove()
    return seen[0].square().sum()


def plainly(model: nn.Module, ids: Tensor) -> Tensor:
    return model(ids).square().sum()


def in_threads(loss: Tensor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()


STEPS: dict[str, tuple[type[Own], Callable[[Any, Tensor], Tensor]]] = {
    "its output is changed in place": (Own, in_place),
    "a value on the side": (Late, beside),
    "a hidden state": (Own, hidden),
    "a layer that reads words": (Reads, plainly),
}


def as_plain(kind: type[Own], how: str, loss: Callable[[Any, Tensor], Tensor], backward: Callable[[Tensor], Any] = Tensor.backward) -> None:
    models, plain, whole = [own(how, kind) for _ in range(2)], own("", kind), batch(0, 7)["input_ids"]
    loss(plain, whole).backward()

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group, policy=POLICY)
        backward(loss(mine, zero3.split_sequence(mine, {"input_ids": whole})["input_ids"]))
        with zero3.full_gradients(mine) as found:
            expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                torch.testing.assert_close(found[name], gradient)

    run_parts(1, 2, body)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", HOWS)
def test_wherever_the_backward_comes_from(how: str, step: str) -> None:
    kind, loss = STEPS[step]
    as_plain(kind, how, loss)


@pytest.mark.parametrize("loss", [in_place, hidden])
@pytest.mark.parametrize("how", ["checkpoint", "reentrant"])
def test_two_forwards_of_other_lengths_whose_outputs_tell_nothing(how: str, loss: Callable[[Any, Tensor], Tensor]) -> None:
    """Hooks on outputs are gone."""
    models, plain = [own(how) for _ in range(2)], own("")
    batches = [batch(0, tokens)["input_ids"] for tokens in (7, 11)]
    sum(loss(plain, ids) for ids in batches).backward()  # type: ignore[union-attr]

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group, policy=POLICY)
        parts = [zero3.split_sequence(mine, {"input_ids": ids})["input_ids"] for ids in batches]
        sum(loss(mine, part) for part in parts).backward()  # type: ignore[union-attr]
        with zero3.full_gradients(mine) as found:
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, plain.get_parameter(name).grad)

    run_parts(1, 2, body)


def test_backward_in_another_thread_where_nothing_is_recomputed() -> None:
    as_plain(Own, "attend", plainly, in_threads)


def test_backward_in_another_thread_than_forward() -> None:
    """transformers' attentions are told of their model. Whose one's own are, a note of torch's in the thread says."""
    models, own_models, plain, whole = [made() for _ in range(2)], [own("reentrant") for _ in range(2)], made(), batch(0, 7)
    plain_sum(plain, whole)[0].backward()

    def body(group: Any) -> None:
        policy = zero3.ShardingPolicy(gradient_reduction="sum")
        mine, other = (zero3.shard(each[group.rank], process_group=group, policy=policy) for each in (models, own_models))
        mine.gradient_checkpointing_enable({"use_reentrant": True})
        loss = zero3.causal_lm_loss(mine.train(), reduction="sum", **zero3.split_sequence(mine, whole))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(loss.backward).result()
            assert_gradients(mine, plain)
            loss = other(zero3.split_sequence(other, {"input_ids": whole["input_ids"]})["input_ids"]).sum()
            with pytest.raises(
                RuntimeError, match=r"the forward of the root .Own., .* was made in another thread .*Call backward in the thread"
            ):
                pool.submit(loss.backward).result()

    run_parts(1, 2, body)


@pytest.mark.parametrize("theirs", HOWS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("first", [True, False], ids=["other-first", "other-last"])
def test_another_model_in_the_same_backward_attends_for_itself(how: str, theirs: str, first: bool) -> None:
    """Also where it is recomputed, after or before this one."""
    models, others, plain, whole = [own(how) for _ in range(2)], [own(theirs) for _ in range(2)], own(), batch(0, 8)["input_ids"]
    plain(whole).square().sum().backward()
    expected = [own() for _ in range(2)]

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group, policy=zero3.ShardingPolicy(gradient_reduction="sum"))
        other, alone = others[group.rank], expected[group.rank]
        part = zero3.split_sequence(mine, {"input_ids": whole})["input_ids"]
        alone(part).square().sum().backward()
        losses = [model(part).square().sum() for model in ((other, mine) if first else (mine, other))]
        sum(losses).backward()  # type: ignore[attr-defined]
        assert_gradients(mine, plain, 1e-9)
        for ours, theirs in zip(other.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    run_parts(1, 2, body)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("kind", "how"), [*(("own", how) for how in HOWS), ("transformers", "attend"), ("transformers", "checkpoint")])
def test_the_whole_model_in_a_checkpoint(kind: str, reentrant: bool, how: str) -> None:
    """Two forwards, with other positions and masks."""

    def make() -> Any:
        return own(how) if kind == "own" else made()

    def outputs(model: nn.Module, part: dict[str, Tensor], scale: Tensor) -> Tensor:
        found = model(part["input_ids"]) if kind == "own" else model(**part).logits
        return found * scale

    models, plain = [make() for _ in range(2)], own() if kind == "own" else made()
    batches = [batch(0, 7, "" if kind == "own" else "left"), batch(0, 7, step=1)]
    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    for each in batches:
        del each["labels"]
        outputs(plain, each, one).square().sum().backward()

    def body(group: Any) -> None:
        mine = zero3.shard(models[group.rank], process_group=group, policy=zero3.ShardingPolicy(gradient_reduction="sum"))
        if kind != "own" and how != "attend":
            mine.gradient_checkpointing_enable({"use_reentrant": False})
        mine.train()
        parts = [zero3.split_sequence(mine, each) for each in batches]
        losses = [checkpoint(outputs, mine, part, one.detach().requires_grad_(), use_reentrant=reentrant).square().sum() for part in parts]
        sum(losses).backward()  # type: ignore[attr-defined]
        assert_gradients(mine, plain)

    run_parts(1, 2, body)


class Taught(Own):
    """Calls another model inside of its own forward."""

    teacher: list[nn.Module]  # which is no part of it
    ids: Tensor

    def forward(self, ids: Tensor) -> Tensor:
        self.ids = ids
        return super().forward(ids)

    def all_blocks(self, x: Tensor) -> Tensor:
        x = run(self.blocks[0], x, self.how)
        return run(self.blocks[1], x + self.teacher[0](self.ids).mean(-1, keepdim=True), self.how)


def taught(how: str, teacher: nn.Module) -> Any:
    model = own(how, Taught)
    model.teacher = [teacher]
    return model


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("how", HOWS)
def test_attend_in_a_model_that_calls_another_one(how: str, trains: bool) -> None:
    teachers, whole = [own(how).requires_grad_(trains) for _ in range(3)], batch(0, 7)["input_ids"]
    models = [taught(how, teacher) for teacher in teachers]
    plain, teacher = models.pop(), teachers.pop()
    plain(whole).square().sum().backward()

    def body(group: Any) -> None:
        policy = zero3.ShardingPolicy(gradient_reduction="sum")
        zero3.shard(teachers[group.rank], process_group=group, policy=policy)
        mine = zero3.shard(models[group.rank], process_group=group, policy=policy)
        part = zero3.split_sequence(mine, {"input_ids": whole})
        mine(part["input_ids"]).square().sum().backward()
        assert_gradients(mine, plain, 1e-9)
        if trains:
            assert_gradients(teachers[group.rank], teacher, 1e-9)

    run_parts(1, 2, body)


def test_step_guard_drops_what_one_rank_alone_cannot_compute_in_one_checkpoint() -> None:
    """The other one recomputes all of it, and is told how long the parts are, again."""
    models, batches = [made() for _ in range(2)], [batch(0, 8, step=number)["input_ids"] for number in range(4)]

    def fail(*_: Any) -> None:
        raise ValueError("broken")

    def body(group: Any) -> list[bool]:
        mine = zero3.shard(models[group.rank], process_group=group, policy=POLICY)
        mine.gradient_checkpointing_enable({"use_reentrant": False})
        mine.train()
        failed = []
        for number, whole in enumerate(batches):
            fails = (number, group.rank) == (2, 1)
            hook = mine.model.layers[0].mlp.register_forward_pre_hook(fail) if fails else None
            part, one = zero3.split_sequence(mine, {"input_ids": whole}), torch.ones((), dtype=torch.float64, requires_grad=True)
            with zero3.step_guard(mine) as guard:
                checkpoint(lambda scale, given=part: mine(**given).logits * scale, one, use_reentrant=False).square().sum().backward()
            failed.append(guard.failed)
            if hook is not None:
                hook.remove()
        return failed

    assert run_parts(1, 2, body) == [[False, False, True, False]] * 2
