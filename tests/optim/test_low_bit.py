"""Optimizers of bitsandbytes and torchao that keep their state in blocks of eight or four bits."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import zero3
from tests.integrations.test_trainer_optimizers import LOW_BIT
from tests.optim.test_optimizer_use import net
from tests.support import optimizers
from tests.support.blocks import Block, Parts, assert_equal, go, own, together
from tests.support.optimizers import Make
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import launched, llama, logged, trainer_of

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make low-bit")
pytest.importorskip("torchao.optim", reason="torchao is not installed: make low-bit")
made = bitsandbytes.optim

EXACT: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": made.AdamW,
    "AdamW32bit": made.AdamW32bit,
    "Lion": made.Lion,
    "SGD": lambda params: made.SGD(params, lr=0.1, momentum=0.9),
}
EAGER = partial(torch.compiler.set_stance, "force_eager")  # torchao compiles its step, for half a minute

# with the least `align` that is right
IN_BLOCKS: dict[str, tuple[Callable[[Any], optim.Optimizer], int]] = {
    "AdamW, 8 bits": (lambda params: made.AdamW(params, optim_bits=8), 256),
    "AdamW, 8 bits of long tensors": (lambda params: made.AdamW(params, optim_bits=8, min_8bit_size=30_000), 2048),
    "PagedAdamW, 8 bits": (lambda params: made.PagedAdamW(params, optim_bits=8), 256),
    "Lion, 8 bits": (lambda params: made.Lion(params, optim_bits=8), 256),
    "AdEMAMix, 8 bits": (lambda params: made.AdEMAMix(params, optim_bits=8), 256),
    "AdamW8bit": (made.AdamW8bit, 256),
    "Lion8bit": (made.Lion8bit, 256),
}


def check_each(rank: Rank) -> None:
    """In processes: bitsandbytes is not right in two threads at once."""
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    model = zero3.shard(net())
    for make in EXACT.values():
        zero3.check_optimizer(model, make(zero3.get_trainable_chunk(model)))
    for make, align in IN_BLOCKS.values():
        with pytest.raises(ValueError, match=rf"does more than treat each element by itself.*{{\"align\": {align}}}\)"):
            zero3.check_optimizer(model, make(zero3.get_trainable_chunk(model)))
    whole = zero3.param_groups(model, lambda name, info: {"whole": True})
    for make, _ in IN_BLOCKS.values():
        zero3.check_optimizer(model, make(whole))
    for kind, needed in ((made.LARS, '"whole": True'), (made.LARS8bit, '"align": 256')):  # with 8 bits it takes no norms
        with pytest.raises(ValueError, match=rf"does more than treat each element by itself.*{{{needed}}}\)"):
            zero3.check_optimizer(model, kind(zero3.param_groups(model, lambda name, info: {}), lr=0.1, momentum=0.9))
    for cut in (128, 256):
        parts = zero3.param_groups(model, lambda name, info, cut=cut: {"align": cut})
        for make, align in IN_BLOCKS.values():
            if cut >= align or rank.world_size == 1:
                zero3.check_optimizer(model, make(parts))
            else:
                with pytest.raises(ValueError, match=rf"slices cut at multiples of {cut} of parameters.*{{\"align\": {align}}}\)"):
                    zero3.check_optimizer(model, make(parts))


def check_longer_blocks(rank: Rank) -> None:
    """Blocks that are longer than `align`, a rate of 0 at the begin of a warm-up, groups that say what their parameters are not."""
    EAGER()
    low_bit = importlib.import_module("torchao.optim")
    model = zero3.shard(Parts(LENGTHS), layers=Block)
    chunks = zero3.get_trainable_chunk(model)
    for block in (512, 1024):
        optimizer = low_bit.AdamW8bit(chunks, block_size=block)
        optimizer.param_groups[0]["lr"].fill_(0)
        with pytest.raises(ValueError, match=rf"does more than treat each element by itself.*{{\"align\": {block}}}\)"):
            zero3.check_optimizer(model, optimizer)
    with pytest.raises(ValueError, match="has align=256, and one of its parameters is not cut so"):
        zero3.check_optimizer(model, made.AdamW8bit([{"params": chunks, "align": 256}]))
    parts = zero3.param_groups(model, lambda name, info: {"align": 256})
    for block in (512, 1024):
        with pytest.raises(ValueError, match=rf"slices cut at multiples of 256 .*{{\"align\": {block}}}\)"):
            zero3.check_optimizer(model, low_bit.AdamW8bit(parts, block_size=block))
    whole = low_bit.AdamW8bit(zero3.param_groups(model, lambda name, info: {"whole": True}))
    go(model, whole, range(1), own(rank.number, rank.world_size))
    for save in (
        lambda: zero3.full_optimizer_state_dict(model, whole),
        lambda: zero3.save_checkpoint(rank.scratch / "whole", model, whole),
    ):
        with pytest.raises(TypeError, match=r"'exp_avg' of .* is a OptimState8bit, which holds other tensors.*align"):
            save()


@pytest.mark.slow
def test_check_optimizer_sees_blocks_that_are_longer_than_align() -> None:
    on_ranks(2, check_longer_blocks)


def stacks(rank: Rank) -> list[str]:
    """AdEMAMix keeps two moments in one tensor: a checkpoint goes on with the same cuts alone, and a full state dict with all."""

    def made_with(model: Any, options: dict[str, Any]) -> Any:
        return made.AdEMAMix(zero3.param_groups(model, lambda name, info: dict(options)), optim_bits=8)

    told = []
    cuts: list[dict[str, Any]] = [{"whole": True}, {"align": 256}]
    for number, (here, there) in enumerate([tuple(cuts), tuple(reversed(cuts))]):
        model, other = (zero3.shard(Parts(LENGTHS), layers=Block) for _ in range(2))
        optimizer, loads = made_with(model, here), made_with(other, there)
        go(model, optimizer, range(2), own(rank.number, rank.world_size))
        zero3.save_checkpoint(rank.scratch / str(number), model, optimizer)
        with pytest.raises(ValueError, match="does not fit") as error:
            zero3.load_checkpoint(rank.scratch / str(number), other, loads)
        told.append(str(error.value))
        zero3.load_full_state_dict(other, zero3.full_state_dict(model))
        zero3.load_full_optimizer_state_dict(other, loads, zero3.full_optimizer_state_dict(model, optimizer))
        for each, by in ((model, optimizer), (other, loads)):
            go(each, by, range(2, 4), own(rank.number, rank.world_size))
        found, expected = (zero3.full_state_dict(each, rank0_only=False) for each in (other, model))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    return told


@pytest.mark.slow
def test_a_checkpoint_of_stacked_state_names_the_cuts_that_it_was_saved_with() -> None:
    for whole, aligned in on_ranks(2, stacks):
        for told, cut in ((whole, "whole"), (aligned, "aligned")):
            assert f"AdEMAMix held {cut} parameters when it was saved" in told and "load_full_optimizer_state_dict" in told
            assert "expected nothing" not in told and "keeps" not in told


def prepare_with_settings(rank: Rank) -> list[Any]:
    from zero3.integrations.accelerate import Zero3Accelerator

    with launched(rank):
        model = llama()
        model.model.embed_tokens = nn.Embedding(128, 64)  # of more than 4096 elements
        embedding = model.model.embed_tokens.weight
        made.AdamW8bit([embedding]).mng.override_config(embedding, "optim_bits", 32)
        model, optimizer = Zero3Accelerator(cpu=True).prepare(model, made.AdamW8bit(model.parameters()))
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.optimizer.step()
        full = zero3.full_optimizer_state_dict(model, optimizer.optimizer, rank0_only=False)["state"]
        return [full[name]["state1"].dtype for name in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")]


def test_what_bitsandbytes_was_told_of_a_parameter_counts_for_its_parts() -> None:
    for found in on_ranks(2, prepare_with_settings, fresh=True):
        assert found[0] == torch.float32


def prepare_with_places(rank: Rank) -> list[str]:
    """`register_parameters` counts parameters by their places in groups, where parts are others: which have not moved?"""
    from zero3.integrations.accelerate import Zero3Accelerator

    with launched(rank):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        start = {name: value.clone() for name, value in model.state_dict().items()}
        made.AdamW8bit([model[2].weight]).mng.initialize()
        manager = made.AdamW8bit([model[2].weight]).mng
        for block in (0, 2):
            manager.override_config(model[block].weight, "lr", 0.0)
        manager.register_parameters(model.parameters())
        model, optimizer = Zero3Accelerator(cpu=True, layers=nn.Linear).prepare(model, made.AdamW8bit(model.parameters(), lr=1e-2))
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        manager.initialize()
        state = zero3.full_state_dict(model, rank0_only=False)
        return [name for name, value in start.items() if torch.equal(state[name], value)]


def test_what_bitsandbytes_was_told_of_places_counts_for_the_parameters_that_were_there() -> None:
    for found in on_ranks(2, prepare_with_places, fresh=True):
        assert found == ["0.weight", "2.weight"]


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_check_optimizer_tells_8_bit_state_from_32_bit_state(world_size: int) -> None:
    on_ranks(world_size, check_each)


NAMES = [name for name in LOW_BIT.split() if name != "grokadamw"]


def train_by_names(rank: Rank, ours: bool, names: list[str]) -> dict[str, Any]:
    found = {}
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    with launched(rank), torch.compiler.set_stance("force_eager"):
        for name in names:
            trainer = trainer_of(ours, llama(), rank.scratch / name, optim=name, max_steps=3)
            trainer.train()
            found[name] = logged(trainer, "loss", "grad_norm")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[start::3] for start in range(3)], ids=" ".join)
def test_the_trainer_gives_8_bit_optimizers_aligned_parts(names: list[str]) -> None:
    # own processes: bitsandbytes applies what the plain trainer tells it of one optimizer to all later ones, by places in groups
    expected = on_ranks(2, train_by_names, False, names, debug="OFF", fresh=True)[0]
    found = on_ranks(2, train_by_names, True, names)[0]
    for name in names:
        assert len(expected[name]) == 3 and np.allclose(found[name], expected[name], rtol=3e-4), name


def refuse_by_name(rank: Rank) -> None:
    """It clips all gradients together, by the norm of those that a rank has."""
    with launched(rank), pytest.raises(ValueError, match=r"optim='grokadamw': .*GrokAdamW .* does more than treat each"):
        trainer_of(True, llama(), rank.scratch, optim="grokadamw").train()


@pytest.mark.slow
def test_the_trainer_refuses_what_is_exact_in_no_way() -> None:
    on_ranks(2, refuse_by_name)


# -- aligned parts: training, checkpoints and state dicts beside the library's optimizer in one process

LENGTHS = [(160, 128), (101, 96), (50,), (4095,), (4096,), (16_384,), (3, 8192), (8191, 2), (), (0,), (1,)]


def sharded(make: Make) -> tuple[nn.Module, optim.Optimizer]:
    model = zero3.shard(Parts(LENGTHS), layers=Block, policy=zero3.ShardingPolicy(gradient_reduction="sum"))
    return model, make(zero3.param_groups(model, lambda name, info: {"align": 256}))


def plainly(make: Make) -> tuple[nn.Module, optim.Optimizer]:
    model = Parts(LENGTHS)
    return model, make(model.parameters())


def train_as_one_process(rank: Rank, kept: Path) -> None:
    EAGER()
    for name, make in optimizers.low_bit().items():
        model, optimizer = sharded(make)
        plain, reference = plainly(make)
        zero3.check_optimizer(model, optimizer)
        go(model, optimizer, range(3), own(rank.number, rank.world_size))
        go(plain, reference, range(3), together)
        assert_equal(model, plain, name)
        zero3.save_checkpoint(kept / name, model, optimizer)
        # the state dict is the library's own, and goes on there
        full = zero3.full_optimizer_state_dict(model, optimizer)
        if rank.number == 0:
            other, resumed = plainly(make)
            other.load_state_dict(plain.state_dict())
            numbers = {key: number for number, (key, _) in enumerate(other.named_parameters())}
            resumed.load_state_dict(
                {
                    "state": {numbers[key]: state for key, state in full["state"].items()},
                    "param_groups": [{**resumed.state_dict()["param_groups"][0]}],
                }
            )
            go(other, resumed, range(3, 5), together)
            go(plain, reference, range(3, 5), together)
            for (key, value), right in zip(other.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(value, right), f"{name}: {key}"


def go_on_with_others(rank: Rank, kept: Path) -> None:
    EAGER()
    for name, make in optimizers.low_bit().items():
        (before, kept_there), (plain, reference) = plainly(make), plainly(make)
        go(before, kept_there, range(3), together)
        go(plain, reference, range(5), together)
        names = {number: key for number, (key, _) in enumerate(plain.named_parameters())}
        theirs = kept_there.state_dict()
        full = {
            "state": {names[number]: state for number, state in theirs["state"].items()},
            "param_groups": [{**group, "params": list(map(names.__getitem__, group["params"]))} for group in theirs["param_groups"]],
        }
        for source in ("checkpoint", "state dict"):
            model, optimizer = sharded(make)
            if source == "checkpoint":
                zero3.load_checkpoint(kept / name, model, optimizer)
            else:
                zero3.load_full_state_dict(model, before.state_dict())
                zero3.load_full_optimizer_state_dict(model, optimizer, full)
            go(model, optimizer, range(3, 5), own(rank.number, rank.world_size))
            assert_equal(model, plain, f"{name}, {source}")


@pytest.mark.parametrize(
    ("world_size", "then"), [(2, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 4), (3, 1), (4, 2)))]
)
def test_low_bit_optimizers_train_aligned_parts_to_the_bit(world_size: int, then: int, tmp_path: Path) -> None:
    on_ranks(world_size, train_as_one_process, tmp_path)
    on_ranks(then, go_on_with_others, tmp_path)


def refuse_what_does_not_fit(rank: Rank, kept: Path) -> None:
    EAGER()
    model, optimizer = sharded(made.AdamW8bit)
    go(model, optimizer, range(1), own(rank.number, rank.world_size))
    zero3.save_checkpoint(kept / "blocks", model, optimizer)
    model, optimizer = sharded(made.AdamW32bit)
    with pytest.raises(ValueError, match=r"state1 of blocks\.0\.parts\.0\.value is uint8 .*expected float32"):
        zero3.load_checkpoint(kept / "blocks", model, optimizer)
    go(model, optimizer, range(1), own(rank.number, rank.world_size))
    zero3.save_checkpoint(kept / "floats", model, optimizer)
    model, optimizer = sharded(made.AdamW8bit)
    with pytest.raises(ValueError, match=r"state1 of blocks\.0\.parts\.0\.value is float32 .*expected uint8"):
        zero3.load_checkpoint(kept / "floats", model, optimizer)
    low_bit = importlib.import_module("torchao.optim")
    model, optimizer = sharded(low_bit.AdamW8bit)
    go(model, optimizer, range(1), own(rank.number, rank.world_size))
    zero3.save_checkpoint(kept / "256", model, optimizer)
    model, optimizer = sharded(lambda params: low_bit.AdamW8bit(params, block_size=128))
    with pytest.raises(ValueError, match=r"exp_avg\.scale of blocks\.0\.parts\.0\.value is float32 \[80\], expected float32 \[160\]"):
        zero3.load_checkpoint(kept / "256", model, optimizer)


def test_state_of_other_blocks_is_refused_by_name(tmp_path: Path) -> None:
    on_ranks(2, refuse_what_does_not_fit, tmp_path)


@pytest.mark.slow
def test_the_page_has_the_rows_of_these_optimizers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text().splitlines()
    assert [row for row in optimizers.low_bit_rows() if row not in page] == []
