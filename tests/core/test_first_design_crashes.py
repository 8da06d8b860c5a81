"""What crashed in the first published design of this kind, often with a segmentation fault: right here, or a named error."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import WIDTH, WORLDS, Weights, linear, mlp, rows, seeded, step
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, check_parity, in_place, in_sequence, on_ranks, process_group, sgd

X = rows(6)


@WORLDS
def test_weights_tied_across_layers_are_refused(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        first, second = models[group.rank]
        kept = zero3.Zero3Layer(first, process_group=process_group(group))
        with pytest.raises(ValueError, match=r"'weight' of \w+ is already sharded, as 'weight' of layer Linear"):
            zero3.Zero3Layer(second, process_group=process_group(group))
        del kept

    models = [seeded(linear, linear) for _ in range(world_size)]
    for first, second in models:
        second.weight = first.weight
    run_ranks(world_size, body)


READS: dict[str, Callable[[Any, nn.Parameter], Any]] = {
    "sum": lambda model, p: p.sum(),
    "clone": lambda model, p: p.clone(),
    "deepcopy": lambda model, p: copy.deepcopy(p),
    "deepcopy of the model": lambda model, p: copy.deepcopy(model),
    "state_dict": lambda model, p: model.state_dict(),
    "double": lambda model, p: model.float(),
    "pickle": lambda model, p: pickle.dumps(p),
    "pickle of the model": lambda model, p: pickle.dumps(model),
    "torch.save": lambda model, p: torch.save(model, io.BytesIO()),
    "cat": lambda model, p: torch.cat([p, p]),
    "numpy": lambda model, p: numpy.asarray(p),
    "item": lambda model, p: p[0, 0].item(),
    "to": lambda model, p: p.to(torch.float32),
    "share_memory": lambda model, p: model.share_memory(),
    "data": lambda model, p: p.data,
    "an operator": lambda model, p: 1 + p,
    "an operator of aten": lambda model, p: torch.ops.aten.add(p, 1),
    "a write": lambda model, p: torch.nn.init.zeros_(p),
    "an optimizer from before": lambda model, p: sgd([p]).step(),
}


@WORLDS
@pytest.mark.parametrize("read", READS)
def test_reading_what_is_not_there_is_an_error(world_size: int, read: str) -> None:
    """Through the module, or through an original that the user has kept from before wrapping."""
    kept: list[nn.Parameter] = [None] * world_size  # type: ignore[list-item]

    def shard(model: Any, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
        kept[group.rank if group else 0] = model[1][0].weight
        return in_sequence(model, group, policy)

    def body(model: Any, group: ThreadCommunicator) -> None:
        model(X).sum().backward()
        assert model[1].module[0].weight is kept[group.rank]
        with pytest.raises(RuntimeError, match=r"full_params|full_state_dict|before wrapping"):
            READS[read](model, kept[group.rank])
        assert "released" in repr(kept[group.rank])
        assert "Linear(in_features=5" in str(model)

    on_ranks(world_size, mlp, body, shard)


@WORLDS
def test_a_module_may_be_used_again(world_size: int) -> None:
    class Reuse(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](self[1](self[0](x)))

    check_parity(lambda: Reuse(*mlp(2)), step, world_size=world_size, shard=in_place)


@WORLDS
def test_two_forwards_before_a_backward(world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        loss = model(turn.tensor(3, WIDTH)).pow(2).mean() + model(turn.tensor(2, WIDTH)).pow(2).mean()
        loss.backward()
        return loss

    check_parity(mlp, program, world_size=world_size)


@WORLDS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(world_size: int, use_reentrant: bool) -> None:
    class Recomputed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for child in self:
                x = checkpoint(child, x, use_reentrant=use_reentrant)
            return x

    def program(model: nn.Module, turn: Turn) -> Any:
        loss = model(turn.tensor(3, WIDTH, requires_grad=True)).pow(2).mean()
        loss.backward()
        return loss

    check_parity(lambda: Recomputed(*mlp()), program, world_size=world_size, shard=in_place)


@WORLDS
def test_another_try_after_an_exception(world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        with pytest.raises(RuntimeError, match="shapes"):
            model(turn.tensor(3, WIDTH + 1))
        return step(model, turn)

    check_parity(mlp, program, world_size=world_size)


@WORLDS
def test_retain_graph(world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        loss = model(turn.tensor(3, WIDTH)).pow(2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    check_parity(mlp, program, world_size=world_size)


@WORLDS
def test_an_in_place_operation_first(world_size: int) -> None:
    check_parity(lambda: seeded(linear, lambda: nn.Sequential(nn.ReLU(inplace=True), linear())), step, world_size=world_size)


@WORLDS
@pytest.mark.parametrize(
    "value",
    [torch.tensor(0.7), torch.randn(WIDTH, WIDTH).t(), torch.randn(WIDTH, 2 * WIDTH)[:, ::2]],
    ids=["0-dim", "transposed", "strided"],
)
def test_parameters_of_any_shape_and_stride(world_size: int, value: Tensor) -> None:
    def build() -> nn.Module:
        return seeded(linear, lambda: Weights(lambda m, x: x @ m.w if m.w.dim() else x * m.w, w=value))

    check_parity(build, step, world_size=world_size, same_bits_on_one_rank=False)


@WORLDS
def test_layers_without_parameters(world_size: int) -> None:
    check_parity(lambda: seeded(nn.Tanh, linear, nn.Identity, nn.Flatten, nn.ReLU), step, world_size=world_size)


@WORLDS
def test_mixed_dtypes(world_size: int) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), linear()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x.float()).double())

    def build() -> nn.Module:
        model = seeded(Mixed, linear)
        model[0].first.float()
        return model

    check_parity(build, step, world_size=world_size, tolerance=1e-6)
