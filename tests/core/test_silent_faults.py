"""Faults that other people's tests found: wrong numbers, or training that does nothing, without a word. Each is right now, or an error."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


def two_layers() -> nn.Sequential:
    return drawn(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))


@torch.no_grad()
def drawn(model: Any) -> Any:
    """By a generator of its own: ranks are threads, which share torch's."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.double().parameters():
        parameter.normal_(0, 0.3, generator=generator)
    return model


def batch(rank: int, step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def plain_mean_gradients(plain: nn.Module, losses: list[Tensor]) -> None:
    """As DDP: every rank's loss counts as much."""
    (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]


@STAGES
@pytest.mark.parametrize("when", ["before backward", "before step"])
@pytest.mark.parametrize("how", ["shard", "lone layers"])
def test_a_layer_called_alone_in_no_grad_before_a_step_leaves_no_stale_parameters(stage: Any, when: str, how: str) -> None:
    """A pass under no_grad is never walked by a backward, and the next forward was taken for its continuation."""

    def body(group: ThreadCommunicator) -> None:
        plain, policy = two_layers(), ShardingPolicy(stage=stage)
        model: Any = copy.deepcopy(plain)
        if how == "shard":
            zero3.shard(model, list(model), policy=policy, process_group=group)
        else:
            model = nn.Sequential(*(Zero3Layer(layer, policy=policy, process_group=group) for layer in model))
        optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        for step in range(3):
            expected = [plain(batch(rank, step)).pow(2).sum() for rank in range(group.world_size)]
            loss = model(batch(group.rank, step)).pow(2).sum()
            assert torch.allclose(loss, expected[group.rank], rtol=1e-12)
            for moment in ("before backward", "before step"):
                if moment == when:
                    with torch.no_grad():
                        model[1](batch(0, 0))
                if moment == "before backward":
                    loss.backward()
            plain_mean_gradients(plain, expected)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2])
def test_optimizer_step_inside_step_guard_is_an_error_in_the_first_micro_batch_too(world_size: int) -> None:
    """Gradients are staged there, and chunks have none yet: an optimizer would step over nothing."""

    def body(group: ThreadCommunicator) -> None:
        model = Zero3Sequential([Zero3Layer(layer, process_group=group) for layer in two_layers()])
        optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=0.1)
        before = [chunk.detach().clone() for chunk in model.get_trainable_chunk()]

        def step_inside() -> None:
            with zero3.step_guard(model):
                model(batch(group.rank, 0)).sum().backward()
                optimizer.step()

        with pytest.raises(RuntimeError, match=r"^rank \d: an optimizer stepped inside zero3.step_guard"):
            step_inside()
        assert all(torch.equal(old, new) for old, new in zip(before, model.get_trainable_chunk(), strict=True))
        with zero3.step_guard(model) as guarded:
            model(batch(group.rank, 0)).sum().backward()
        optimizer.step()
        assert not guarded.failed
        assert not any(torch.equal(old, new) for old, new in zip(before, model.get_trainable_chunk(), strict=True))

    run_ranks(world_size, body)


def test_dynamic_a_failure_at_the_end_of_a_call_leaves_no_forward_refused() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(two_layers(), nn.Linear, policy=ShardingPolicy(dynamic=True), process_group=group)
        last = model[1]._state

        def fail() -> None:
            raise torch.OutOfMemoryError("no room for the last layer")

        model(batch(group.rank, 0)).sum().backward()
        with mock.patch.object(last, "fetch", fail), pytest.raises(torch.OutOfMemoryError):
            model[0](batch(group.rank, 0))
        for _ in range(2):
            model(batch(group.rank, 0)).sum().backward()

    run_ranks(2, body)


def test_resident_with_different_numbers_of_forwards_leaves_lone_layers_in_step() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = nn.Sequential(*(Zero3Layer(layer, process_group=group) for layer in two_layers()))
        for _ in range(2):
            model(batch(group.rank, 0)).sum().backward()
        with zero3.resident(model), torch.no_grad():
            for _ in range(1 + group.rank):
                model[0](batch(group.rank, 1))
        for _ in range(2):
            model(batch(group.rank, 0)).sum().backward()

    run_ranks(3, body)


@STAGES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_token_mean_backward_goes_with_zero_grad_set_to_none(stage: Any, set_to_none: bool) -> None:
    def body(group: ThreadCommunicator) -> None:
        plain, model = two_layers(), two_layers()
        zero3.shard(model, nn.Linear, policy=ShardingPolicy(stage=stage), process_group=group)
        optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        for step in range(3):
            rows = [2 + rank + step for rank in range(group.world_size)]
            all_tokens = torch.cat([batch(rank, step, count) for rank, count in enumerate(rows)])
            expected = plain(all_tokens).pow(2).sum() / len(all_tokens)
            expected.backward()
            mine = model(batch(group.rank, step, rows[group.rank])).pow(2).sum()
            assert torch.allclose(zero3.backward(mine, rows[group.rank], model), expected, rtol=1e-10)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)

    run_ranks(2, body)


@STAGES
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_penalty_over_model_parameters_adds_to_the_gradients(stage: Any, apart: bool, accumulate: bool) -> None:
    """It flows into chunks past all layers. At stage 1, and under no_sync, their gradients are deferred by then."""

    def body(group: ThreadCommunicator) -> None:
        plain, model = two_layers(), two_layers()
        zero3.shard(model, nn.Linear, policy=ShardingPolicy(stage=stage), process_group=group)
        optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        for step in range(2):
            losses = [plain(batch(rank, step)).pow(2).sum() for rank in range(group.world_size)]
            plain_mean_gradients(plain, losses)
            sum(p.pow(2).sum() for p in plain.parameters()).backward()  # type: ignore[union-attr]
            with zero3.no_sync(model) if accumulate else nullcontext():
                penalty = sum(p.pow(2).sum() for p in model.parameters())
                loss = model(batch(group.rank, step)).pow(2).sum()
                if apart:
                    loss.backward()
                    penalty.backward()  # type: ignore[union-attr]
                else:
                    (penalty + loss).backward()
            if accumulate:  # a backward that reduces, and adds nothing
                (0 * model(batch(group.rank, step)).sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        weights = zero3.full_state_dict(model, rank0_only=False)
        for name, value in plain.state_dict().items():
            assert torch.allclose(weights[name], value, rtol=1e-10), name

    run_ranks(2, body)


@STAGES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_no_sync_kept_though_a_penalty_comes_first(stage: Any, set_to_none: bool) -> None:
    def body(group: ThreadCommunicator) -> None:
        plain, model = two_layers(), two_layers()
        zero3.shard(model, nn.Linear, policy=ShardingPolicy(stage=stage), process_group=group)
        optimizers = torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
        with zero3.no_sync(model):
            model(batch(group.rank, 7)).sum().backward()
        optimizers[1].zero_grad(set_to_none=set_to_none)
        sum(p.pow(2).sum() for p in plain.parameters()).backward()  # type: ignore[union-attr]
        sum(p.pow(2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        plain_mean_gradients(plain, [plain(batch(rank, 0)).pow(2).sum() for rank in range(group.world_size)])
        model(batch(group.rank, 0)).pow(2).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        weights = zero3.full_state_dict(model, rank0_only=False)
        for name, value in plain.state_dict().items():
            assert torch.allclose(weights[name], value, rtol=1e-10), name

    run_ranks(2, body)


@STAGES
def test_hooks_on_chunks_fire_once_a_step(stage: Any) -> None:
    def body(group: ThreadCommunicator) -> list[str]:
        fired: list[str] = []
        model = zero3.shard(two_layers(), nn.Linear, policy=ShardingPolicy(stage=stage), process_group=group)
        chunks = zero3.get_trainable_chunk(model)
        chunks[0].register_hook(lambda gradient: fired.append("hook"))
        chunks[0].register_post_accumulate_grad_hook(lambda chunk: fired.append("post"))
        optimizer = torch.optim.SGD(chunks, lr=0.1)
        for step in range(2):
            model(batch(group.rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return fired

    assert run_ranks(2, body) == [["hook", "post"] * 2] * 2


class Borrows(nn.Module):
    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.own, self.lender = nn.Linear(5, 5).double(), [lender]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) @ self.lender[0].weight


@STAGES
@pytest.mark.parametrize("lender_comes", ["first", "last"])
def test_another_layers_parameter_used_in_a_forward_is_a_named_error(stage: Any, lender_comes: str) -> None:
    """At stages 1 and 2 the other layer stays fetched, and the use was found in backward, by an error of torch's that names nothing."""

    def body(group: ThreadCommunicator) -> None:
        lender = nn.Linear(5, 5)
        modules = drawn(nn.Sequential(*((lender, Borrows(lender)) if lender_comes == "first" else (Borrows(lender), lender))))
        policy = ShardingPolicy(stage=stage)
        model = Zero3Sequential([Zero3Layer(module, policy=policy, process_group=group) for module in modules])
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'weight' of layer .* is released"):
                model(batch(group.rank, 0))

    run_ranks(2, body)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("operation", [torch.cat, lambda gradients: torch._foreach_add(gradients, 1.0)], ids=["cat", "foreach"])
def test_an_operation_on_reduced_and_on_kept_gradients_is_refused(operation: Any, turned: bool) -> None:
    """Whichever comes first among its arguments. It read what stands for the gradients that are kept."""

    def body(group: ThreadCommunicator) -> None:
        model = two_layers()
        zero3.shard(model, list(model), process_group=group)
        with zero3.no_sync(model[1]):
            model(batch(group.rank, 0)).sum().backward()
        gradients = [chunk.grad for chunk in zero3.get_trainable_chunk(model)]
        with pytest.raises(RuntimeError, match=r"this gradient is not known yet.*zero3\.reduce_gradients"):
            operation(gradients[::-1] if turned else gradients)
        zero3.reduce_gradients(model)
        assert operation([chunk.grad for chunk in zero3.get_trainable_chunk(model)]) is not None

    run_ranks(2, body)


KEPT: dict[str, Any] = {  # what is done to a gradient that is kept
    "a keyword": lambda kept: torch.add(input=torch.ones(kept.shape, dtype=kept.dtype), other=kept),
    "out": lambda kept: torch.add(torch.ones(kept.shape, dtype=kept.dtype), 1.0, out=kept),
    "foreach by keyword": lambda kept: torch._foreach_add(self=[kept], scalar=1.0),
    "another class": lambda kept: kept.as_subclass(Tensor).clone(),
    "its memory": lambda kept: torch.tensor(kept),  # asks nobody
}


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
def test_whoever_reads_a_kept_gradient_gets_it_reduced_or_an_error_or_nan(how: str, stage: Any) -> None:
    """At stage 1 the first read reduces; under `no_sync` it is an error. What reads memory without asking finds no number."""

    def body(group: ThreadCommunicator) -> Tensor | None:
        model = two_layers()
        zero3.shard(model, list(model), policy=ShardingPolicy(stage=stage), process_group=group)
        with zero3.no_sync(model) if stage == 3 else nullcontext():
            model(batch(group.rank, 0)).sum().backward()
        kept: Any = zero3.get_trainable_chunk(model)[0].grad
        if how == "its memory":
            assert KEPT[how](kept).isnan().all()
            return None
        if stage == 1:
            KEPT[how](kept)
            return kept if how != "out" else None
        with pytest.raises(RuntimeError, match="this gradient is not known yet"):
            KEPT[how](kept)
        zero3.reduce_gradients(model)
        return kept

    found = run_ranks(2, body)
    plain = two_layers()
    plain_mean_gradients(plain, [plain(batch(rank, 0)).sum() for rank in range(2)])
    if all(each is not None for each in found):
        expected = torch.cat([parameter.grad.flatten() for parameter in (plain[0].weight, plain[0].bias)])
        assert torch.allclose(torch.cat([each.as_subclass(Tensor) for each in found])[:30], expected, rtol=1e-12)
