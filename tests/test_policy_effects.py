"""ShardingPolicy: every field has an effect on what is sent, on its dtypes, or on the bytes that a rank holds.

field: what it is set to, and what two ranks see without and with it
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import zero3
from tests.support.ranks import Collective, ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy

WIDTH, BLOCKS = 32, 3  # wide enough for biases to count as adapters
WEIGHT, BIAS = WIDTH * WIDTH, WIDTH  # elements of a block
BLOCK = WEIGHT + BIAS
BF16, FP32, FP64, BYTES = torch.bfloat16, torch.float32, torch.float64, torch.uint8


class Block(nn.Linear):
    """It computes in the dtype of its weight, and notes what it was called with, and what was gathered then."""

    note: Callable[[torch.dtype], None]

    def forward(self, x: Tensor) -> Tensor:
        self.note(x.dtype)
        return linear(x.to(self.weight.dtype), self.weight, self.bias)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(WIDTH, WIDTH) for _ in range(BLOCKS)])
        self.left_out: int | None = None
        self.experts: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = x if number == self.left_out else block(x)
        if self.experts is not None:
            one = torch.ones(1, 1)
            x = x + self.experts(x, one.long(), one)
        return x


class Experts(nn.Module):
    """Two; the input goes to the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 2, nn.Parameter(torch.ones(2, WIDTH, WIDTH))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return torch.einsum("tij,tj->ti", self.weight[top_k_index[:, 0]], hidden_states)


class Life:
    """One rank's model under a policy, and what happens to it."""

    def __init__(self, group: ThreadCommunicator, model: Net, policy: ShardingPolicy) -> None:
        self.group, self.twins = group, list[ThreadCommunicator]()
        self.dtypes: list[torch.dtype] = []
        self.ahead: list[int] = []  # gathers that had begun when each block computed
        for block in model.blocks:
            block.note = self._note
        group.duplicate = self._duplicate  # type: ignore[method-assign]
        self.model = zero3.shard(model, policy=policy, process_group=group)
        self.group.log.clear()

    def _duplicate(self) -> ThreadCommunicator:
        twin = ThreadCommunicator.duplicate(self.group)
        twin.log = []
        self.twins.append(twin)
        return twin

    def _note(self, dtype: torch.dtype) -> None:
        self.dtypes.append(dtype)
        self.ahead.append(len(self.sent("all_gather")))

    def sent(self, *kinds: str) -> list[Collective]:
        return [entry for entry in self.group.log if entry.kind in kinds]

    def forward(self) -> Tensor:
        return self.model(torch.ones(1, WIDTH))

    def step(self) -> None:
        """A forward and a backward, before which nothing of earlier ones is left."""
        for log in (self.group.log, *(twin.log for twin in self.twins)):
            log.clear()
        self.ahead.clear()
        self.forward().sum().backward()

    def steps(self) -> Life:
        """Two steps. Seen is the second one, which has learned the order of layers."""
        self.step()
        self.step()
        return self

    def gradients(self) -> list[Tensor]:
        return [chunk.grad for chunk in zero3.get_trainable_chunk(self.model) if chunk.grad is not None]


def dtypes_of(entries: list[Collective]) -> set[torch.dtype]:
    return {entry.dtype for entry in entries}


def numels_of(entries: list[Collective]) -> list[int]:
    return [entry.numel for entry in entries]


# -- what is seen


def gathered_as(life: Life) -> set[torch.dtype]:
    return dtypes_of(life.steps().sent("all_gather"))


def reduced_as(life: Life) -> set[tuple[str, torch.dtype]]:
    return {(entry.kind, entry.dtype) for entry in life.steps().sent("reduce_scatter", "all_to_all")}


def elements_gathered(life: Life) -> list[int]:
    return numels_of(life.steps().sent("all_gather"))


def elements_reduced(life: Life) -> list[int]:
    return numels_of(life.steps().sent("reduce_scatter"))


def gathered_and_reduced(life: Life) -> tuple[int, int]:
    life.steps()
    return len(life.sent("all_gather")), len(life.sent("reduce_scatter"))


def experts_gathered_and_exchanges(life: Life) -> tuple[int, int]:
    life.steps()
    full, logs = 2 * WEIGHT, (life.group.log, *(twin.log for twin in life.twins))
    return sum(n >= full for n in elements_gathered(life)), sum(entry.kind == "all_to_all" for log in logs for entry in log)


def gathered_before_each_block(life: Life) -> list[int]:
    return life.steps().ahead


def reduced_by_twins(life: Life) -> tuple[int, int]:
    life.steps()
    return len(life.sent("reduce_scatter")), sum(entry.kind == "reduce_scatter" for twin in life.twins for entry in twin.log)


def compared(life: Life) -> tuple[int, int]:
    """How often ranks compare in a step, and how often they tell each other something to look at later."""
    life.step()
    before = life.group.told
    life.step()
    return len(life.sent("exchange")), life.group.told - before


def gathered_where_a_rank_leaves_out_a_layer(life: Life) -> int | str:
    life.model.left_out = 1 if life.group.rank else None
    try:
        return len(life.steps().sent("all_gather"))
    except ValueError as error:
        return "refused" if "ranks differ" in str(error) else str(error)


def output_dtype(life: Life) -> torch.dtype:
    return life.forward().dtype


def input_dtypes(life: Life) -> set[torch.dtype]:
    life.forward()
    return set(life.dtypes)


def gradient_dtypes(life: Life) -> set[torch.dtype]:
    return {gradient.dtype for gradient in life.steps().gradients()}


def sum_of_gradients(life: Life) -> float:
    """Relative to the mean over ranks: each of them has the same gradients."""
    life.step()
    found = zero3.parameter_norms(life.model)["blocks.2.bias"].item()
    return round(found / WIDTH**0.5, 5)


def bytes_of_gradients_after_a_failure(life: Life) -> int:
    life.step()
    life.model.blocks[0].register_forward_hook(lambda module, args, output: output.register_hook(lambda gradient: 1 / 0) and None)
    with pytest.raises(ZeroDivisionError):
        life.forward().sum().backward()
    zero3.reset(life.model)
    return sum(gradient.nbytes for gradient in life.gradients())


def bytes_in_files(life: Life) -> bool:
    """Whether there are files in the directory, in which there is room for a rank's chunks and gradients at least."""
    life.steps()
    found = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink() and os.readlink(each).startswith(f"{PLACE}/")]
    return sum(each.stat().st_size for each in found) >= 2 * 4 * BLOCKS * BLOCK // 2


# -- the table

PLACE = os.path.join(os.path.realpath(tempfile.gettempdir()), f"zero3-effects-{os.getpid()}")


@dataclass
class Row:
    value: Any
    see: Callable[[Life], Any]
    without: Any
    with_it: Any
    policy: dict[str, Any] = field(default_factory=dict)  # other fields, both without and with it
    trained: str = ""  # what the names of parameters that train contain
    experts: bool = False


def left_alone(name: str, info: zero3.ParamInfo) -> bool:
    return info.ndim == 1


THERE_AND_BACK = [BLOCK] * (2 * BLOCKS - 1)  # the last block stays for the backward

ROWS = {
    "param_dtype": Row(BF16, gathered_as, {FP32}, {BF16}),
    "reduce_dtype": Row(BF16, reduced_as, {("reduce_scatter", FP32)}, {("reduce_scatter", BF16)}),
    "output_dtype": Row(FP64, output_dtype, FP32, FP64),
    "cast_forward_inputs": Row(False, input_dtypes, {BF16}, {FP32, BF16}, {"param_dtype": BF16}),
    "stage": Row(1, gathered_and_reduced, (2 * BLOCKS - 1, BLOCKS), (0, 0)),
    "dynamic": Row(True, gathered_where_a_rank_leaves_out_a_layer, "refused", 2 * BLOCKS - 1),
    "gradient_reduction": Row("sum", sum_of_gradients, 1.0, 2.0),
    "reshard_after_forward": Row(False, elements_gathered, THERE_AND_BACK, [BLOCK] * BLOCKS),
    "prefetch_depth": Row(0, gathered_before_each_block, [2, 3, 3], [1, 2, 3]),
    "separate_backup_group": Row(True, reduced_by_twins, (BLOCKS, 0), (0, BLOCKS)),
    "transactional": Row(True, bytes_of_gradients_after_a_failure, 0, 4 * BLOCKS * BLOCK // 2),
    "compare_every": Row(1, compared, (0, 1), (2 * BLOCKS - 1, 0)),
    "ignored": Row(left_alone, elements_gathered, THERE_AND_BACK, [WEIGHT] * (2 * BLOCKS - 1)),
    "grad_dtype": Row(BF16, gradient_dtypes, {FP32}, {BF16}),
    "group_adapters": Row(False, elements_reduced, [BLOCKS * (BIAS + 2)], [BIAS + 2] * BLOCKS, trained="bias"),
    "resident_bytes": Row(
        4 * WEIGHT,
        elements_gathered,
        [WEIGHT, BIAS] * (2 * BLOCKS - 1),
        [BIAS, *[WEIGHT, BIAS] * (2 * BLOCKS - 3), BIAS],
        {"group_adapters": False},
        trained="bias",
    ),
    "quantize": Row(zero3.Int8(block_size=8), gathered_as, {FP32}, {FP32, BYTES}, trained="bias"),
    "offload": Row(PLACE, bytes_in_files, False, True),
    "gather_format": Row(zero3.Int8(), gathered_as, {FP32}, {BYTES}),
    "master_dtype": Row(FP64, gradient_dtypes, {FP32}, {FP64}),
    "expert_parallel": Row(True, experts_gathered_and_exchanges, (1, 0), (0, 5), experts=True),
    "reduce_format": Row(zero3.Int8(), reduced_as, {("reduce_scatter", FP32)}, {("all_to_all", BYTES)}),
}


@pytest.mark.parametrize("name", [each.name for each in fields(ShardingPolicy)])
def test_shardingpolicy_each_field_has_an_effect(name: str) -> None:
    row = ROWS[name]  # a new field needs a row
    Path(PLACE).mkdir(exist_ok=True)

    def build() -> Net:
        model = Net()
        model.experts = Experts() if row.experts else None
        for each, parameter in model.named_parameters():
            parameter.requires_grad_(row.trained in each)
        return model

    def seen(**chosen: Any) -> Any:
        models = [build() for _ in range(2)]
        policy = ShardingPolicy(**row.policy, **chosen)
        first, second = run_ranks(2, lambda group: row.see(Life(group, models[group.rank], policy)))
        assert first == second
        return first

    try:
        assert (seen(), seen(**{name: row.value})) == (row.without, row.with_it)
    finally:
        os.rmdir(PLACE)


def test_shardingpolicy_has_no_row_for_a_field_that_is_gone() -> None:
    assert set(ROWS) == {each.name for each in fields(ShardingPolicy)}
