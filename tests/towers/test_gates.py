"""What ranks tell each other at gates, what that costs, and what goes wrong in one error on all."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.towers import TOWERS, Block, Calls, Seeing, TowersLife, batch, seeing, trained, trained_sharded
from tests.support.uneven import joined_threads

NONE: Calls = ()
V, A = ("vision",), ("audio",)


def on_ranks(ranks: int, body: Callable[[ThreadCommunicator, Seeing], Any], optional: Any = TOWERS, **policy: Any) -> list[Any]:
    torch.manual_seed(0)
    model = seeing()
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def run(group: ThreadCommunicator) -> Any:
        own = models[group.rank]
        zero3.shard(own, [Block, nn.Embedding], optional=optional, policy=zero3.ShardingPolicy(**policy), process_group=group)
        return body(group, own)

    return run_ranks(ranks, run, 20)


def step(model: Seeing, calls: list[Calls], rank: int) -> None:
    life = TowersLife([[calls]])
    model(*batch(life, 0, 0, rank)).square().sum().backward()


def counted(group: ThreadCommunicator, model: Seeing, calls: list[Calls]) -> tuple[int, int, int]:
    """The exchanges of a step, the bytes of the longest, and the elements that other transfers move."""
    begin = len(group.log)
    step(model, calls, group.rank)
    exchanged = [each.numel for each in group.log[begin:] if each.kind == "exchange"]
    return len(exchanged), max(exchanged, default=0), sum(each.numel for each in group.log[begin:] if each.kind != "exchange")


def test_text_everywhere_moves_no_byte_of_a_tower_and_tells_little() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> Any:
        step(model, [V, A], group.rank)
        step(model, [NONE, NONE], group.rank)
        exchanges, longest, moved = counted(group, model, [NONE, NONE])
        states = {id(inner) for name in TOWERS for inner in model.get_submodule(name).modules()}
        trunk = [p for name, p in zero3.full_state_dict(model, rank0_only=False).items() if not name.startswith(TOWERS)]
        assert states
        return exchanges, longest, moved, sum(p.numel() for p in trunk)

    for exchanges, longest, moved, trunk in on_ranks(2, body):
        assert 0 < exchanges <= 4
        assert longest <= 16
        # gathers of forward and backward, and reductions: no more than thrice what the trunk holds, its padding and its slots' notes
        assert moved <= 3 * trunk + 60 < 3 * trunk + 150  # a tower has some 170


def test_one_image_anywhere_moves_as_much_as_images_everywhere() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> Any:
        step(model, [V, V], group.rank)
        return counted(group, model, [V, NONE]), counted(group, model, [V, V]), counted(group, model, [V, V])

    for one, _, everywhere in on_ranks(2, body):
        assert one[2] == everywhere[2]
        assert one[0] <= 5  # one more for the call


def test_a_model_without_towers_moves_what_it_moved() -> None:
    """`optional=()` is the model as it was; None chooses towers for models of transformers alone."""

    def body(group: ThreadCommunicator, model: Seeing) -> Any:
        for _ in range(3):
            step(model, [V, V], group.rank)
        return group.log, zero3.report(model).towers

    nothing, chosen = on_ranks(2, body, optional=()), on_ranks(2, body, optional=None)
    assert nothing[0][0] == chosen[0][0] and nothing[0][1] == chosen[0][1] == ()


def test_a_step_of_a_model_without_towers_makes_no_exchange() -> None:
    """Each layer is gathered at most twice, and reduced once, and nothing else travels."""

    def body(group: ThreadCommunicator, model: Seeing) -> tuple[Counter[str], int]:
        for _ in range(2):
            step(model, [V + A, V + A], group.rank)
        begin = len(group.log)
        step(model, [V + A, V + A], group.rank)
        layers = sum(isinstance(module, zero3.Zero3Layer) for module in model.modules())
        return Counter(each.kind for each in group.log[begin:]), layers + 1  # the model's own

    for kinds, layers in on_ranks(2, body, optional=()):
        assert set(kinds) == {"all_gather", "reduce_scatter"}
        assert kinds["reduce_scatter"] == layers and kinds["all_gather"] <= 2 * layers


def test_numbers_and_names_are_those_of_a_model_without_towers() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> Any:
        step(model, [V, A + V], group.rank)
        with zero3.full_gradients(model) as whole:
            gradients = {name: value.clone() for name, value in whole.items()}
        return gradients, zero3.full_state_dict(model, rank0_only=False)

    (gradients, values), _ = on_ranks(2, body)
    torch.manual_seed(0)
    plain = seeing()
    for rank, calls in enumerate([V, A + V]):
        (plain(*batch(TowersLife([[[V, A + V]]]), 0, 0, rank)).square().sum() / 2).backward()
        assert calls
    assert list(values) == list(plain.state_dict())
    for name, p in plain.named_parameters():
        if p.grad is None:
            assert name not in gradients
        else:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-12, atol=1e-12)


def test_what_no_layer_of_a_tower_holds_is_the_tower_s_own() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> Any:
        names = [layer._state.label for layer in model.modules() if isinstance(layer, zero3.Zero3Layer)]
        held = [sharded.sites.name for sharded in model._zero3_root.parameters]  # type: ignore[union-attr]
        alone = model.body.vision.norm(torch.ones(6, dtype=torch.float64)) if group else None  # entered by way of a module in it
        return names, held, alone

    for names, held, alone in on_ranks(2, body):
        assert "'body.vision' (Tower)" in names and "'body.audio' (Tower)" in names
        assert held == ["head.weight", "head.bias"]
        assert alone is not None and not alone.isnan().any()


def test_ranks_at_different_gates_are_an_error_on_all_that_names_both() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> str:
        step(model, [NONE, NONE], group.rank)
        words, calls = batch(TowersLife([[[NONE, NONE]]]), 0, 0, group.rank)
        if group.rank:  # it runs no language model
            model.body.language.forward = lambda x: x
        with pytest.raises(ValueError, match="ranks are not at the same point") as caught:
            model(words, calls)
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "is optional, too: name it in optional=" in text
        assert ("rank 0: the call of 'body.language'" in text and "rank 1: the call of 'head'" in text) or "the end of" in text


def test_ranks_that_call_a_tower_s_layers_in_other_orders_in_its_first_call_are_an_error_on_all() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> str:
        model.body.vision.leaves_out = {group.rank}
        with pytest.raises(ValueError, match="ranks are not at the same point") as caught:
            step(model, [V, V], group.rank)
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "rank 0: the begin of layer 'body.vision.blocks.1'" in text and "rank 1: the begin of layer 'body.vision.blocks.0'" in text


def test_a_call_may_leave_out_layers_and_calls_no_others() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> str:
        step(model, [V, V], group.rank)
        model.body.vision.leaves_out = {group.rank}
        step(model, [V, V], group.rank)
        model.body.audio.leaves_out = {1}
        step(model, [A, A], group.rank)
        model.body.audio.leaves_out = set()
        with pytest.raises(ValueError if group.rank else RuntimeError) as caught:
            step(model, [NONE, A], group.rank)
        step(model, [V, V], group.rank)
        return str(caught.value)

    for text in on_ranks(2, body):
        assert "layer 'body.audio.blocks.1' (Block) is called in 'body.audio', which is optional" in text


def test_step_guard_and_batch_finder_refuse_towers() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> list[str]:
        with pytest.raises(ValueError, match="step_guard") as guarded, zero3.step_guard(model):
            pass
        with pytest.raises(ValueError, match="BatchFinder") as cut:
            zero3.BatchFinder(model, 4)
        return [str(guarded.value), str(cut.value)]

    for texts in on_ranks(2, body):
        assert all("optional" in text and "optional=()" in text and "body.vision" in text for text in texts)


def test_profile_shows_waits_at_gates() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> tuple[int, int, str]:
        step(model, [V, A], group.rank)
        with zero3.profile(model) as found:
            before = sum(each.kind == "exchange" for each in group.log)
            step(model, [V, NONE], group.rank)
        return len(found.gates), sum(each.kind == "exchange" for each in group.log) - before, str(found)

    for gates, exchanges, text in on_ranks(2, body):
        assert gates == exchanges > 0
        assert f"{gates} gates of towers" in text


def test_inside_of_resident_ranks_go_at_their_own_pace() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> int:
        with zero3.resident(model):
            before = len(group.log)
            for _ in range(group.rank + 1):
                with torch.no_grad():
                    model(*batch(TowersLife([[[V, A + V]]]), 0, 0, group.rank))
            return len(group.log) - before

    assert on_ranks(2, body) == [0, 0]


def test_outside_of_the_model_s_forward_all_ranks_call_a_tower() -> None:
    def body(group: ThreadCommunicator, model: Seeing) -> torch.Tensor:
        return model.body.vision(torch.ones(2, 4, dtype=torch.float64)).detach()

    first, second = on_ranks(2, body)
    assert torch.equal(first, second)


@pytest.mark.parametrize("batches", [(3, 1), (0, 2), (2, 0, 3)])
def test_joinable_ranks_without_data_take_part_in_gates(batches: tuple[int, ...]) -> None:
    """And afterwards all ranks train on, with a tower that some have not heard of."""
    torch.manual_seed(0)
    plain, ranks = seeing(), len(batches)
    calls = [[[A, V + A, V]] * ranks, [[V, NONE, A]] * ranks, [[NONE, V, NONE]] * ranks]
    life = TowersLife([[[row[(rank + number) % 3] for rank in range(ranks)] for number, row in enumerate(rows)] for rows in calls])
    models = [copy.deepcopy(plain) for _ in batches]

    def body(group: ThreadCommunicator) -> dict[str, torch.Tensor]:
        model, rank = models[group.rank], group.rank
        zero3.shard(model, [Block, nn.Embedding], optional=TOWERS, process_group=group)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), 0.1)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        with joined_threads(group, model, update) as rounds:
            for micro in range(batches[rank]):
                model(*batch(life, micro, 0, rank)).square().sum().backward()
                rounds.step()
        for micro in range(2):
            model(*batch(life, micro, 0, rank)).square().sum().backward()
            update()
        return {name: value.clone() for name, value in zero3.full_state_dict(model, rank0_only=False).items()}

    found = run_ranks(ranks, body, 20)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    steps = [(micro, [rank for rank in range(ranks) if batches[rank] > micro]) for micro in range(max(batches))]
    for micro, present in [*steps, *((micro, [*range(ranks)]) for micro in range(2))]:
        for rank in present:
            (plain(*batch(life, micro, 0, rank)).square().sum() / len(present)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for each in found:
        for name, value in plain.named_parameters():
            torch.testing.assert_close(each[name], value.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("replicas", [(2, 1), (2, 2)])
def test_replicas(replicas: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model = seeing()
    ranks = replicas[0] * replicas[1]
    life = TowersLife([[[V, NONE, A + V, V][:ranks]], [[NONE] * ranks], [[A + V, V, NONE, A][:ranks]]])
    models = [copy.deepcopy(model) for _ in range(ranks)]
    found = run_mesh(*replicas, lambda group: trained_sharded(life, models[group.rank], group), 20)
    for name, value in trained(life, model).items():
        for each in found:
            torch.testing.assert_close(each[name], value, rtol=1e-9, atol=1e-9)
