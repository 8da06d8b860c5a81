"""Several models in one process: right if all ranks use them in one order, and otherwise an error on all ranks, though every
transfer may fit. Without tags, as on NCCL, ranks' transfers are paired by their order alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.inside import states_of
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import run_mesh, run_ranks

WIDTH = 4


def plain() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)  # processes that import this have the same values
    FIRST, SECOND = plain(), plain()


def sharded(model: nn.Module, group: Any, **policy: Any) -> nn.Module:
    return zero3.shard(copy.deepcopy(model), layers=nn.Sequential, process_group=group, policy=zero3.ShardingPolicy(**policy))


def rows(rank: int, step: int) -> Tensor:
    return torch.arange(2.0 * WIDTH).view(2, WIDTH).sin() * (1 + rank) + step / 10


# What a rank does with two models of equal sizes, in a step; `turned`: another way than the other ranks, which differs in
# the order of transfers alone.


def backwards(a: nn.Module, b: nn.Module, x: Tensor, turned: bool) -> None:
    losses = [a(x).sum(), b(x).sum()]
    for loss in reversed(losses) if turned else losses:
        loss.backward()


def forwards(a: nn.Module, b: nn.Module, x: Tensor, turned: bool) -> None:
    with torch.no_grad():
        for model in (b, a) if turned else (a, b):
            model(x)


def norms(a: nn.Module, b: nn.Module, x: Tensor, turned: bool) -> None:
    (a(x).sum() + b(x).sum()).backward()
    for model in (b, a) if turned else (a, b):
        zero3.clip_grad_norm_(model, 1.0)


def one_inside_of_the_other(a: nn.Module, b: nn.Module, x: Tensor, turned: bool) -> None:
    with torch.no_grad():
        h = a[0](x) if turned else a[0](b(x))  # type: ignore[index]
        if turned:
            b(x)
        a[2](a[1](h))  # type: ignore[index]


def one_leaves_out_a_layer(a: nn.Module, b: nn.Module, x: Tensor, turned: bool) -> None:
    """Of a `dynamic` model ranks may, but for this: the other model's transfers come between."""
    with torch.no_grad():
        h = a[0](x)  # type: ignore[index]
        h = h if turned else a[1](h)  # type: ignore[index]
        a[2](b(h))  # type: ignore[index]


def one_cuts_a_graph(a: nn.Module, b: nn.Module, x: Tensor, turned: bool) -> None:
    h = a[0](x)  # type: ignore[index]
    losses = [a[2](a[1](h.detach() if turned else h)).sum(), b(x).sum()]  # type: ignore[index]
    torch.autograd.backward(losses)


DIFFERENCES = [backwards, forwards, norms, one_inside_of_the_other, one_leaves_out_a_layer, one_cuts_a_graph]


@pytest.mark.parametrize("policy", [{}, {"compare_every": 1}, {"prefetch_depth": 0}], ids=str)
@pytest.mark.parametrize(
    ("differ", "mesh"),
    [*((each, False) for each in DIFFERENCES), *((each, True) for each in (backwards, forwards, norms))],
    ids=lambda each: each.__name__ if callable(each) else "mesh" * each,
)
def test_models_used_in_another_order_on_one_rank_are_an_error(differ: Callable[..., None], policy: dict[str, Any], mesh: bool) -> None:
    def body(group: Any) -> None:
        also = {"dynamic": True} if differ is one_leaves_out_a_layer else {}
        a, b = sharded(FIRST, group, **policy, **also), sharded(SECOND, group, **policy)
        for step in range(8):
            begun[group.rank] = step
            turned = group.rank == 0 and step == 3  # orders are learned by then, and nobody asks
            try:
                differ(a, b, rows(group.rank, step), turned)
            except (ValueError, RuntimeError) as error:  # a rank that differs, or that waits for it
                texts.append(str(error))
                raise

    begun: dict[int, int] = {}
    texts: list[str] = []
    with pytest.raises((ValueError, RuntimeError)):
        run_mesh(2, 2, body) if mesh else run_ranks(2, body)
    assert max(begun.values()) <= 5, "in the second forward after it, at the latest"
    if differ in (backwards, forwards, norms):
        assert any(text.startswith(("ranks differ in", "ranks are not at")) for text in texts), texts


@pytest.mark.parametrize(
    "ask",
    [lambda model: list(zero3.stream_weights(model)), lambda model: zero3.full_optimizer_state_dict(model, adamw(model))],
    ids=["stream_weights", "full_optimizer_state_dict"],
)
def test_ranks_that_ask_different_models_are_told(ask: Callable[[nn.Module], Any]) -> None:
    def body(group: Any) -> None:
        models = [sharded(model, group) for model in (FIRST, SECOND)]
        with pytest.raises(ValueError, match=r"ranks differ in .*rank 0: the model of .*; rank 1: the model of "):
            ask(models[group.rank])

    run_ranks(2, body)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(zero3.get_trainable_chunk(model))


def test_all_ranks_raise_at_the_same_forward_and_begin_anew_with_other_models() -> None:
    def body(group: Any) -> list[tuple[int, int]]:
        raised = []
        for turned in range(2):
            models = [sharded(model, group) for model in (FIRST, SECOND)]
            try:
                for step in range(6):
                    for count, model in enumerate(reversed(models) if group.rank == 0 and step == turned else models):
                        at = (step, count)
                        with torch.no_grad():
                            model(rows(0, step))
            except ValueError:
                raised.append(at)
        good = [sharded(model, group) for model in (FIRST, SECOND)]
        for step in range(4):
            backwards(*good, rows(group.rank, step), turned=False)
        return raised

    first, second = run_ranks(2, body)
    assert first == second and len(first) == 2


@pytest.mark.parametrize(("models", "pending"), [(1, 1), (2, 2), (3, 3), (6, 4)])
def test_no_forward_waits_for_what_another_model_has_just_told(models: int, pending: int) -> None:
    def body(group: Any) -> int:
        made = [sharded(FIRST, group) for _ in range(models)]
        for step in range(4):
            for model in made:
                forwards(model, model, rows(group.rank, step), turned=False)
        return len(states_of(made[0])[0].log.history.told)

    assert run_ranks(2, body) == [pending] * 2


USES = {
    "a trains": lambda a, b, x: a(x).pow(2).sum().backward(),
    "both in one loss": lambda a, b, x: (a(x) * b(x)).sum().backward(),
    "a teaches b": lambda a, b, x: (b(x) - a(x).detach()).pow(2).sum().backward(),
    "a of b": lambda a, b, x: a(b(x)).sum().backward(),
    "b between a's layers": lambda a, b, x: a[2](b(a[1](a[0](x)))).sum().backward(),
    "b in a checkpoint, then a": lambda a, b, x: a(checkpoint(b, x, use_reentrant=False)).sum().backward(),
    "two losses": lambda a, b, x: [loss.backward() for loss in [a(x).sum(), b(x).sum()]],
    "a's norm": lambda a, b, x: zero3.clip_grad_norm_(a, 1e9) if isinstance(a[0], zero3.Zero3Layer) else None,
    "a looks": lambda a, b, x: torch.no_grad()(a)(x),
}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(USES)), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([{}, {"compare_every": 1}, {"prefetch_depth": 0}, {"dynamic": True}]),
    st.sampled_from([{}, {"stage": 2}]),
    st.booleans(),
)
def test_two_models_used_in_one_order_train_as_plain_ones(
    program: list[tuple[str, bool]], first: dict[str, Any], second: dict[str, Any], mesh: bool
) -> None:
    def train(models: list[Any], chunks: list[nn.Parameter], xs: list[Tensor]) -> None:
        optimizer = torch.optim.SGD(chunks, lr=0.01)
        for use, turned in program:
            for x in xs:
                USES[use](*(reversed(models) if turned else models), x)
            for chunk in chunks if len(xs) > 1 else ():  # plain torch takes the mean over all ranks' rows
                chunk.grad = None if chunk.grad is None else chunk.grad / len(xs)
            optimizer.step()
            optimizer.zero_grad()

    ranks = 4 if mesh else 2
    plain_ones = [copy.deepcopy(model).double() for model in (FIRST, SECOND)]
    parameters = [each for model in plain_ones for each in model.parameters()]
    train(plain_ones, parameters, [rows(rank, 1).double() for rank in range(ranks)])

    def body(group: Any) -> list[Tensor]:
        models = [sharded(copy.deepcopy(model).double(), group, **policy) for model, policy in ((FIRST, first), (SECOND, second))]
        train(models, [chunk for model in models for chunk in zero3.get_trainable_chunk(model)], [rows(group.rank, 1).double()])
        with zero3.full_params(models[0]), zero3.full_params(models[1]):
            return [each.detach().clone() for model in models for each in model.parameters()]

    for found in run_mesh(2, 2, body) if mesh else run_ranks(2, body):
        for ours, theirs in zip(found, parameters, strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-12)


def norms_of_two_models(rank: Rank) -> list[str]:
    a, b = (sharded(model, None) for model in (FIRST, SECOND))
    texts = []
    for measure in (
        lambda model: zero3.clip_grad_norm_(model, 1.0),
        lambda model: zero3.clip_grad_norm_(model, 1.0, norm_type=float("inf")),
        zero3.parameter_norms,
        lambda model: zero3.parameter_norms(model, norm_type=float("inf")),
    ):
        (a(rows(rank.number, 0)).sum() + b(rows(rank.number, 0)).sum()).backward()
        for model in (a, b):
            measure(model)
        with pytest.raises(ValueError, match="the model of") as caught:
            measure(a if rank.number else b)
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("ranks", [2, 3])
def test_gloo_takes_no_norm_of_another_model(ranks: int) -> None:
    first, *others = on_ranks(ranks, norms_of_two_models)
    assert all(each == first for each in others) and all("rank 0: the model of" in text for text in first)


def test_two_models_that_share_a_module_are_one_list() -> None:
    def body(group: Any) -> None:
        first, second = copy.deepcopy(FIRST), copy.deepcopy(SECOND)
        second[1] = first[1]
        alone = copy.deepcopy(nn.ModuleList([first, second]))
        zero3.shard(alone[0], layers=nn.Sequential, process_group=group)
        with pytest.raises(ValueError, match=r"is already sharded.*if two models share it, zero3.shard\(nn.ModuleList\("):
            zero3.shard(alone[1], layers=nn.Sequential, process_group=group)
        both = zero3.shard(nn.ModuleList([first, second]), layers=nn.Linear, process_group=group)
        torch.autograd.backward([model(rows(group.rank, 0)).sum() for model in both])
        both.zero_grad()
        assert all(chunk.grad is None for chunk in zero3.get_trainable_chunk(both))

    run_ranks(2, body)


def test_a_part_of_a_model_has_no_gradients_to_zero() -> None:
    def body(group: Any) -> None:
        model = sharded(FIRST, group)
        model(rows(group.rank, 0)).sum().backward()
        with pytest.raises(RuntimeError, match="A part of a sharded model has no zero_grad\\(\\) of its own"):
            model[0].module.zero_grad()

    run_ranks(2, body)


def over(kind: str, rank: int) -> Any:
    if kind == "a mesh":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    lists = {"twins": [[0, 1, 2, 3]], "alone": [[0], [1], [2], [3]], "pairs": [[0, 1], [2, 3]], "other pairs": [[0, 2], [1, 3]]}[kind]
    groups = [dist.new_group(ranks) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if rank in ranks)


ALL_OF_THEM: dict[str, Callable[[nn.Module, Rank], Any]] = {
    "clip_grad_norm_": lambda model, _: zero3.clip_grad_norm_(model, 1.0),
    "parameter_norms": lambda model, _: zero3.parameter_norms(model),
    "save_checkpoint": lambda model, rank: zero3.save_checkpoint(rank.scratch / "checkpoint", model),
    "save_pretrained": lambda model, rank: zero3.save_pretrained(model, rank.scratch / "pretrained"),
    "full_gradients": lambda model, _: zero3.full_gradients(model).__enter__(),
    "param_groups": lambda model, _: zero3.param_groups(model, lambda name, info: {"whole": info.ndim > 1}),
    "step_guard": lambda model, _: zero3.step_guard(model).__enter__(),
}


def models_over_other_ranks(rank: Rank, one: str, other: str) -> list[str]:
    """What functions say of two models at once. Of each by itself, gradients and their norm are those of plain torch."""
    groups = [over(one, rank.number), over(other, rank.number)]
    models = [sharded(copy.deepcopy(each).double(), group) for each, group in zip((FIRST, SECOND), groups, strict=True)]
    both, shares = nn.ModuleDict(dict(zip("ab", models, strict=True))), [shared(kind, rank.number) for kind in (one, other)]
    torch.autograd.backward([model(rows(rank.number, 0).double()).sum() for model in models])
    told = []
    for use in ALL_OF_THEM.values():
        with pytest.raises(ValueError, match=r"other ones, expected the same for all layers of a call") as caught:
            use(both, rank)
        told.append(str(caught.value))
    assert not list(rank.scratch.glob("checkpoint*")) and not list(rank.scratch.glob("pretrained*"))
    for model, plain_one, ranks in zip(models, (FIRST, SECOND), shares, strict=True):
        torch.testing.assert_close(zero3.clip_grad_norm_(model, 1e9).item(), plain_norm([plain_one], ranks))
    return told


def shared(kind: str, rank: int) -> list[int]:
    lists = {"alone": [[rank]], "pairs": [[0, 1], [2, 3]], "other pairs": [[0, 2], [1, 3]]}.get(kind, [[0, 1, 2, 3]])
    return next(ranks for ranks in lists if rank in ranks)


def plain_norm(models: list[nn.Sequential], ranks: list[int]) -> float:
    plain_ones = [copy.deepcopy(model).double() for model in models]
    for rank in ranks:
        for model in plain_ones:
            (model(rows(rank, 0).double()).sum() / len(ranks)).backward()
    return torch.nn.utils.get_total_norm([p.grad for model in plain_ones for p in model.parameters() if p.grad is not None]).item()


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (("twins", "a mesh"), "over 1 x 4 ranks (replicas x shards), and layer '0' (Sequential) over 2 x 2 other ones"),
        (("a mesh", "twins"), "over 2 x 2 ranks (replicas x shards), and layer '0' (Sequential) over 1 x 4 other ones"),
        (("alone", "twins"), "over 1 x 1 ranks (replicas x shards), and layer '0' (Sequential) over 1 x 4 other ones"),
        (("pairs", "other pairs"), "over 1 x 2 ranks (replicas x shards), and layer '0' (Sequential) over 1 x 2 other ones"),
    ],
    ids=str,
)
def test_models_over_other_ranks_are_refused_in_one_call(kinds: tuple[str, str], says: str) -> None:
    """The ranks of the first one would sum, gather and write for both, in silence."""
    first, *others = on_ranks(4, models_over_other_ranks, *kinds)
    assert all(told == first for told in others) and all(says in text for text in first)


def models_over_the_same_ranks(rank: Rank) -> None:
    groups = [over("twins", rank.number), over("twins", rank.number), None]
    models = [sharded(copy.deepcopy(FIRST).double(), group) for group in groups]
    both = nn.ModuleList(models)
    torch.autograd.backward([model(rows(rank.number, 0).double()).sum() for model in models])
    torch.testing.assert_close(zero3.clip_grad_norm_(both, 1e9).item(), plain_norm([FIRST] * 3, [0, 1, 2, 3]))
    zero3.save_checkpoint(rank.scratch / "checkpoint", both)
    zero3.load_checkpoint(rank.scratch / "checkpoint", both)


def test_models_over_two_groups_of_the_same_ranks_are_used_together() -> None:
    on_ranks(4, models_over_the_same_ranks)


def chunks_without_a_group(rank: Rank) -> int:
    models = nn.ModuleList(sharded(model, over("twins", rank.number)) for model in (FIRST, SECOND))
    dist.destroy_process_group()
    return len(zero3.get_trainable_chunk(models))


def test_what_moves_nothing_goes_on_when_groups_are_destroyed() -> None:
    assert on_ranks(4, chunks_without_a_group) == [6] * 4
