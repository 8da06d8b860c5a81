"""tile(): modules that compute a few tokens at a time give the same numbers, of one gather and one reduction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.live import LiveBytes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.stacks import WIDTH, built


class Mlp(nn.Module):
    def __init__(self, times: int = 3, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, times * width), nn.Linear(times * width, width), nn.Dropout(dropout)

    def forward(self, hidden: Tensor, scale: float = 1.0) -> Tensor:
        return self.down(self.dropout(torch.tanh(self.up(hidden)))) * scale


class Residual(nn.Module):
    def __init__(self, mlp: Mlp) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(hidden=x, scale=0.5)


class Model(nn.Module):
    """Blocks, and a module outside of them."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(Mlp(3 + i, dropout=dropout)) for i in range(2))
        self.last = Mlp(2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()


class Mlps(Model):
    """Its blocks are the MLPs themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(3 + i) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x, scale=0.5)
        return self.last(x).square().mean()


def tiled(model: Any, length: int | None) -> Any:
    for block in model.blocks:
        zero3.tile(block.mlp if isinstance(block, Residual) else block, length)
    assert zero3.tile(model.last, length) is model.last
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [Model, Mlps])
def test_tile_keeps_numbers_and_transfers(kind: Any, when: str) -> None:
    """Before sharding and after it; a module in a layer, the layer itself, and one in the root's own."""
    x = [torch.randn(2, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    models = [[built(kind) for _ in range(3)] for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        mine, whole, plain = models[group.rank]
        if when == "before":
            tiled(mine, 3)
        layers = [Residual] if kind is Model else lambda name, module: name.startswith("blocks.") and isinstance(module, Mlp)
        logs = []
        for each in (whole, mine):
            zero3.shard(each, layers, process_group=group)
            if when == "after" and each is mine:
                tiled(mine, 3)
            for _ in range(2):
                group.log.clear()
                each.zero_grad()
                each(x[group.rank]).backward()
            logs.append(list(group.log))
        assert logs[0] == logs[1]
        for rank in range(2):
            (plain(x[rank]) / 2).backward()
        with zero3.full_gradients(mine) as found:
            for name, p in plain.named_parameters():
                torch.testing.assert_close(found[name], p.grad, rtol=1e-9, atol=1e-12)
        tiled(mine, None)
        assert not any(type(getattr(vars(m).get("forward"), "around", None)).__name__ == "_Tiled" for m in mine.modules())
        with torch.no_grad():
            torch.testing.assert_close(mine(x[group.rank]), plain(x[group.rank]))

    run_ranks(2, body)


def test_tile_holds_one_tiles_activations() -> None:
    """16 tiles of an MLP 32 times as wide: at most a quarter of its peak."""
    x = torch.randn(1, 4096, 32, requires_grad=True)

    def peak(length: int | None) -> int:
        model = zero3.tile(Mlp(32, width=32), length)
        with LiveBytes() as live:
            return live.peak_of(lambda: model(x).sum().backward()) - live.now

    assert 4 * peak(256) <= peak(None)


def test_tile_adds_gradients_up_in_the_reduce_dtype() -> None:
    """In bfloat16 the sum over many tiles would lose digits."""
    torch.manual_seed(0)
    x = torch.randn(1, 512, 8)
    exact = Mlp(width=8)
    policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    errors = []
    for length in (None, 2):
        model = Mlp(width=8)
        model.load_state_dict(exact.state_dict())
        zero3.shard(model, [nn.Linear], policy=policy)  # the MLP's own parameters: none
        for layer in (model.up, model.down):
            zero3.tile(layer, length)
        model(x).square().sum().backward()
        with zero3.full_gradients(model) as found:
            errors.append({name: gradient.clone() for name, gradient in found.items()})
    exact(x).square().sum().backward()
    whole, tiles = (max(((g[n] - p.grad).norm() / p.grad.norm()).item() for n, p in exact.named_parameters()) for g in errors)
    assert tiles <= 1.5 * whole


@pytest.mark.parametrize("outer", [None, True, False], ids=["no", "reentrant", "not-reentrant"])
def test_tile_recomputes_the_same_dropout(outer: bool | None) -> None:
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)

    def gradients(model: Any) -> list[Tensor]:
        torch.manual_seed(3)
        if outer is None:
            model(x).backward()
        else:
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=outer).backward()
        return [p.grad for p in model.parameters()]

    model = tiled(built(lambda: Model(dropout=0.5)), 6)  # one tile draws what the whole draws
    for found, expected in zip(gradients(model), gradients(built(lambda: Model(dropout=0.5))), strict=True):
        torch.testing.assert_close(found, expected)
    model = tiled(built(lambda: Model(dropout=0.5)), 2)
    assert all(g.isfinite().all() for g in gradients(model))


class Mixing(nn.Module):
    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    def forward(self, x: Tensor) -> Any:
        return self.found(x)


@pytest.mark.parametrize("found", [lambda x: (x, x), lambda x: x.mean(1), lambda x: x[:, :1], lambda x: None])
def test_tile_refuses_what_is_not_token_wise(found: Any) -> None:
    with pytest.raises(ValueError, match="token-wise"):
        zero3.tile(Mixing(found), 2)(torch.ones(2, 6, 3))


def test_tile_refuses_bad_arguments() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        zero3.tile(nn.Linear(2, 2), 0)
    for length in (True, 2.0, "3"):
        with pytest.raises(TypeError, match="integer"):
            zero3.tile(nn.Linear(2, 2), length)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Module"):
        zero3.tile(3, 2)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"tensor \[\.\.\., S, H\]"):
        zero3.tile(nn.Linear(2, 2), 2)(torch.ones(2))
    with pytest.raises(ValueError, match="layers inside"):
        zero3.tile(zero3.shard(built(Model), [Residual]), 2)


def test_a_module_that_has_got_layers_inside_since_it_was_tiled_is_refused() -> None:
    """Each tile would gather them, and experts at home would exchange for each."""
    mlp = zero3.tile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), 2)
    model = zero3.shard(nn.Sequential(mlp), [mlp[0]])
    with pytest.raises(ValueError, match="layers inside"):
        model(torch.ones(1, 6, 4))


def test_activations_that_rest_elsewhere_come_back_in_order(tmp_path: Path) -> None:
    """Tiles of a batch of several rows do not lie in order in memory; those that were stored do."""
    x = torch.randn(2, 6, WIDTH, dtype=torch.float64, requires_grad=True)
    mine, plain = Mlp().double(), Mlp().double()
    plain.load_state_dict(mine.state_dict())
    zero3.tile(mine, 1)
    with zero3.offload_activations(tmp_path, min_bytes=1):
        loss = mine(x).square().mean()
    loss.backward()
    plain(x).square().mean().backward()
    for found, expected in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)
