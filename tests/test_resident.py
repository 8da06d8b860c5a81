"""resident(): ranks generate and evaluate at their own pace. Outside of it, those that do not keep step are told of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.processes import Rank, try_on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, assert_at_rest, assert_close, full_gradients, on_two
from tests.support.stacks import Block, Stack, built, loss_of, stack, train, words_of
from zero3 import ShardingPolicy

GENERATING = ["GPT-NeoX", "Llama", "Gemma", "GPT-2", "Mixtral", "T5", "Whisper"]


def prompt(name: str, rank: int) -> dict[str, Tensor]:
    """Another one on every rank, and longer."""
    if name == "Whisper":
        return {"input_features": Turn(rank, 0, 1).tensor(1, 8, 32)}
    return {"input_ids": Turn(rank, 0, 1).integers(90, 1, 4 + 3 * rank) + 3}


def generated(model: Any, name: str, rank: int, length: int) -> Tensor:
    return model.generate(**prompt(name, rank), max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of generation settings
@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_generates_what_the_unsharded_model_does(name: str, world_size: int) -> None:
    architecture = ARCHITECTURES[name]
    plain = architecture.build().eval()
    lengths = [3 + 4 * rank for rank in range(world_size)]
    expected = [(generated(plain, name, rank, lengths[rank]), generated(plain, name, rank, 4)) for rank in range(world_size)]
    plain.train()
    losses = [architecture.loss(plain, Turn(rank, 0, 1)) for rank in range(world_size)]
    models = [architecture.build() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> tuple[Tensor, Tensor, Tensor]:
        model = zero3.shard(models[group.rank], process_group=group).eval()
        with zero3.resident(model):
            before = len(group.log)
            alone = generated(model, name, group.rank, lengths[group.rank])
            assert len(group.log) == before, "no collectives inside"
        assert_at_rest(model)
        in_step = generated(model, name, group.rank, 4)  # the same number of forwards on every rank
        assert_at_rest(model)
        loss = architecture.loss(model.train(), Turn(group.rank, 0, 1))
        assert_at_rest(model)
        return alone, in_step, loss

    for rank, (alone, in_step, loss) in enumerate(run_ranks(world_size, body)):
        assert torch.equal(alone, expected[rank][0])
        assert torch.equal(in_step, expected[rank][1])
        assert_close([loss], [losses[rank]], architecture.tolerance, "the loss of a training step afterwards")


class Bare(Stack):
    """Its root owns no parameter."""

    def __init__(self) -> None:
        super().__init__(Block(7), Block(3))
        self.norm = nn.Identity()


MODELS = {"stack": lambda: stack(), "bare root": lambda: built(Bare), "tied": lambda: stack(tied=True)}


@pytest.mark.parametrize("name", MODELS)
def test_ranks_evaluate_different_numbers_of_times(name: str) -> None:
    plain = MODELS[name]()

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        with zero3.resident(model):
            before = len(group.log)
            for step in range(1 + 3 * group.rank):
                with torch.no_grad():
                    assert torch.equal(loss_of(model, Turn(0, step, 1)), loss_of(plain, Turn(0, step, 1)))
                with torch.inference_mode():
                    model(words_of(Turn(0, step, 1)))
                model.blocks[0](model.embed(words_of(Turn(0, step, 1))))
            assert len(group.log) == before
        assert_at_rest(model)

    on_two(MODELS[name], body)


STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@STAGES
@pytest.mark.parametrize("part", ["a block", "a list of blocks"])
def test_ranks_call_a_resident_part_of_a_model_different_numbers_of_times(stage: Any, part: str) -> None:
    """Other layers are not resident, and a forward of the part must not compare, or note anything that ranks compare later."""
    plain = stack()
    expected = [train(plain, Turn(0, step, 1)) for step in range(4)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], policy=ShardingPolicy(stage=stage), process_group=group)
        for step in (0, 1):
            train(model, Turn(0, step, 1))
        resident = model.blocks[1] if part == "a block" else model.blocks
        with zero3.resident(resident), torch.no_grad():
            before = len(group.log)
            for _ in range(2 * group.rank):
                model.blocks[1](torch.ones(2, 5).double())
            assert len(group.log) == before, "no collectives inside"
        for step in (2, 3):
            assert torch.allclose(train(model, Turn(0, step, 1)), expected[step], rtol=1e-12)
        wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
        zero3.clip_grad_norm_(model, float("inf"))  # at stage 1 it reduces
        assert_close(full_gradients(model, group), wanted, 1e-12, "gradients")

    models = [stack() for _ in range(2)]
    run_ranks(2, body)


@STAGES
@pytest.mark.parametrize("how", ["a sequence", "lone layers"])
def test_a_pass_is_over_on_all_ranks_where_they_enter_resident(stage: Any, how: str) -> None:
    """One rank runs forwards inside, another none. A layer that is called next must not continue the pass on one of them alone."""

    def body(group: ThreadCommunicator) -> None:
        blocks, policy = models[group.rank], ShardingPolicy(stage=stage)
        layers = [zero3.Zero3Layer(block, policy=policy, process_group=group) for block in blocks]
        model = zero3.Zero3Sequential(layers) if how == "a sequence" else nn.Sequential(*layers)
        x = torch.ones(2, 5).double()
        for _ in range(3):
            loss = model(x).pow(2).sum()
            with torch.no_grad():
                with zero3.resident(model):
                    for _ in range(group.rank):
                        model(x)
                layers[1](x)
            loss.backward()
            assert torch.allclose(loss, expected, rtol=1e-12)

    models = [stack().blocks for _ in range(3)]
    expected = nn.Sequential(*models[0])(torch.ones(2, 5).double()).pow(2).sum().detach()
    run_ranks(2, body)


@STAGES
def test_resident_between_the_layers_of_a_plain_container(stage: Any) -> None:
    def body(group: ThreadCommunicator) -> None:
        layers = [zero3.Zero3Layer(block, policy=ShardingPolicy(stage=stage), process_group=group) for block in models[group.rank]]
        model = nn.ModuleList(layers)
        for _ in range(3):
            x = layers[0](torch.ones(2, 5).double())
            with zero3.resident(model), torch.no_grad():
                for _ in range(group.rank):
                    layers[1](x)
            layers[2](layers[1](x)).pow(2).sum().backward()
        zero3.clip_grad_norm_(model, float("inf"))
        assert_close(full_gradients(model, group), wanted, 1e-12, "gradients of three backwards")

    models = [stack().blocks for _ in range(3)]
    plain = nn.ModuleList(models[2])
    (3 * plain[2](plain[1](plain[0](torch.ones(2, 5).double()))).pow(2).sum()).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    run_ranks(2, body)


@pytest.mark.parametrize("where", ["inside", "after"])
def test_a_backward_of_what_was_computed_inside_raises(where: str) -> None:
    plain = stack()
    expected = train(plain, Turn(0, 1, 1))

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        with zero3.resident(model):
            loss = loss_of(model, Turn(0, 0, 1))
            if where == "inside":
                with pytest.raises(RuntimeError, match=r"backward through layer .*resident"):
                    loss.backward()
        if where == "after":
            with pytest.raises(RuntimeError, match=r"backward through layer .*resident"):
                loss.backward()
        model.zero_grad()
        assert torch.allclose(train(model, Turn(0, 1, 1)), expected, rtol=1e-12), "training is right afterwards"
        assert_at_rest(model)

    on_two(stack, body)


@pytest.mark.parametrize("stage", [3, 1])
def test_a_backward_of_parameters_alone_is_reduced(stage: Any) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group, policy=ShardingPolicy(stage=stage))
        with zero3.resident(model):
            (model.head.weight.pow(2).sum() * (1 + group.rank)).backward()
        train(model, Turn(group.rank, 0, 2))
        zero3.clip_grad_norm_(model, float("inf"))
        assert_close(full_gradients(model, group), wanted, 1e-12, "gradients")

    models, plain = [stack() for _ in range(2)], stack()
    for rank in range(2):
        ((plain.head.weight.pow(2).sum() * (1 + rank) + loss_of(plain, Turn(rank, 0, 2))) / 2).backward()
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    run_ranks(2, body)


def test_residents_and_full_params_nest() -> None:
    plain = stack()
    with torch.no_grad():
        expected = plain(words_of(Turn(0, 0, 1)))

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        with zero3.full_params(model.head), zero3.resident(model), zero3.resident(model), zero3.full_params(model):
            before = len(group.log)
            with zero3.full_params(model.blocks[1]), torch.no_grad():
                assert torch.equal(model(words_of(Turn(0, 0, 1))), expected)
            assert torch.equal(model.head.weight, plain.head.weight)
            assert len(group.log) == before
        assert_at_rest(model)
        before = len(group.log)
        loss_of(model, Turn(0, 0, 1)).backward()  # inside it is refused, and gathers nothing
        assert len(group.log) > before

    on_two(stack, body)


def test_an_exception_inside_ends_it() -> None:
    plain = stack()
    expected = train(plain, Turn(0, 0, 1))

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        def fail() -> None:
            with zero3.resident(model):
                model(words_of(Turn(0, 0, 1)))
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            fail()
        assert_at_rest(model)
        with pytest.raises(IndexError), zero3.resident(model):
            model(torch.full((1, 2), 1000))  # no such word
        assert_at_rest(model)
        assert torch.allclose(train(model, Turn(0, 0, 1)), expected, rtol=1e-12)

    on_two(stack, body)


def test_parameters_changed_by_a_step_are_seen() -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> Tensor:
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.5)
        train(model, Turn(0, 0, 1))
        optimizer.step()
        with zero3.resident(model), torch.no_grad():
            return model(words_of(Turn(0, 0, 1)))

    plain = stack()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    train(plain, Turn(0, 0, 1))
    optimizer.step()
    for found in on_two(stack, body):
        assert torch.allclose(found, plain(words_of(Turn(0, 0, 1))), rtol=1e-12)


def out_of_step(rank: Rank) -> None:
    model = zero3.shard(stack()).eval()
    with torch.no_grad():
        for step in range(2):
            model(words_of(Turn(0, step, 1)))
        told = rank.scratch / "told"
        try:
            if rank.number == 1:
                for step in range(2, 4):
                    model(words_of(Turn(0, step, 1)))
        finally:
            if rank.number == 1:
                told.touch()
        while not told.exists():  # alive, but with no more to do
            time.sleep(0.05)


@pytest.mark.slow
def test_ranks_out_of_step_are_told_of_resident() -> None:
    """One rank wants a third forward, the other is done: a timeout, soon and with the way out."""
    outcomes = try_on_ranks(2, out_of_step, fresh=True, group_timeout=3.0)
    assert outcomes[1].error == "RuntimeError"
    assert "rank 1 of 2" in outcomes[1].text and "zero3.resident(model)" in outcomes[1].text, outcomes[1].text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_fast_path_of_an_encoder_gives_zeros_at_padded_positions_inside_resident_alone() -> None:
    """As the FAQ says."""
    model = built(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)).eval()
    x, padded = Turn(0, 0, 1).tensor(2, 5, 8), torch.zeros(2, 5, dtype=torch.bool)
    padded[0, 3:] = True
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padded)
        zero3.shard(model)
        outside = model(x, src_key_padding_mask=padded)
        with zero3.resident(model):
            inside = model(x, src_key_padding_mask=padded)
    torch.testing.assert_close(inside, plain)
    torch.testing.assert_close(outside[~padded], plain[~padded])
    assert not plain[padded].any() and outside[padded].all()
