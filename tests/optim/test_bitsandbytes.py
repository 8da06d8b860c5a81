"""check_optimizer on bitsandbytes' optimizers: 8-bit state by its class, or by an argument that is in no group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import optim

import zero3
from tests.optim.test_optimizer_use import net
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.trainers import launched, llama, trainer_of

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make bitsandbytes")
made = bitsandbytes.optim
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

EXACT: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": made.AdamW,
    "AdamW32bit": made.AdamW32bit,
    "Lion": made.Lion,
    "SGD": lambda params: made.SGD(params, lr=0.1, momentum=0.9),
}
IN_BLOCKS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW, 8 bits": lambda params: made.AdamW(params, optim_bits=8),
    "AdamW, 8 bits of long tensors": lambda params: made.AdamW(params, optim_bits=8, min_8bit_size=30_000),
    "PagedAdamW, 8 bits": lambda params: made.PagedAdamW(params, optim_bits=8),
    "Lion, 8 bits": lambda params: made.Lion(params, optim_bits=8),
    "AdEMAMix, 8 bits": lambda params: made.AdEMAMix(params, optim_bits=8),
    "AdamW8bit": made.AdamW8bit,
    "Lion8bit": made.Lion8bit,
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_check_optimizer_tells_8_bit_state_from_32_bit_state(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group if world_size > 1 else None)
        for make in EXACT.values():
            zero3.check_optimizer(model, make(zero3.get_trainable_chunk(model)), strict=False)
        for make in IN_BLOCKS.values():
            with pytest.raises(ValueError, match=r"does more than treat each element by itself.*\"whole\": True"):
                zero3.check_optimizer(model, make(zero3.get_trainable_chunk(model)))
        whole = zero3.param_groups(model, lambda name, info: {"whole": True})
        for make in IN_BLOCKS.values():
            zero3.check_optimizer(model, make(whole))

    models = [net() for _ in range(world_size)]
    run_ranks(world_size, body)


def refuse_in_the_trainer(rank: Rank) -> None:
    with launched(rank):
        for name in ("adamw_8bit", "lion_8bit", "paged_adamw_8bit", "ademamix_8bit"):
            with pytest.raises(ValueError, match=rf"^optim='{name}': .*\"whole\": True.*optimizers=\(optimizer, None\)"):
                trainer_of(True, llama(), rank.scratch, optim=name).train()
        trainer_of(True, llama(), rank.scratch, optim="lion_32bit", max_steps=1).train()


def test_the_trainer_refuses_8_bit_optimizers_by_name() -> None:
    on_ranks(1, refuse_in_the_trainer)
