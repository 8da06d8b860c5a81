"""Lightning's Fabric with our strategy, beside its own DDP on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

lightning = pytest.importorskip("lightning", reason="Lightning is not installed (pip install 'zero3[lightning]')")

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402

import zero3  # noqa: E402
from tests.support.lightnings import Module, Net, Rows, launched, train_rows, trainer  # noqa: E402
from tests.support.processes import Rank, on_ranks  # noqa: E402
from zero3.integrations.lightning import Zero3FabricStrategy  # noqa: E402

pytestmark = pytest.mark.slow


def fabric_of(rank: Rank, kind: str, precision: Any = "32-true") -> Any:
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    strategy = Zero3FabricStrategy() if kind == "zero3" else FabricDDPStrategy()
    plugins: Any = [TorchElasticEnvironment()]
    made = lightning.Fabric(accelerator="cpu", devices=rank.world_size, strategy=strategy, plugins=plugins, precision=precision)
    made.launch()
    return made


def loop(rank: Rank, kind: str, directory: str | None, path: str | None, precision: str = "32-true", wait: bool = False) -> list[float]:
    """Six steps, or the last three of them: norms and values clipped in turn, a checkpoint after three."""
    with launched(rank):
        fabric = fabric_of(rank, kind, precision)
        torch.manual_seed(0)
        model: Any = fabric.setup_module(Net())
        parameters = zero3.get_trainable_chunk(model) if kind == "zero3" else model.parameters()
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(parameters, lr=0.05))
        state = {"model": model, "optimizer": optimizer, "step": 0, "best": [1.5]}
        if path is not None:
            rest = fabric.load(path, state)
            assert rest == {} and state["step"] == 3 and state["best"] == [2.5]
        rows, losses = Rows(48, 0), []
        for step in range(int(state["step"]), 6):  # type: ignore[call-overload]
            each = 8 // rank.world_size
            begin = 8 * step + each * rank.number
            if wait:
                with fabric.no_backward_sync(model):
                    fabric.backward(nn.functional.mse_loss(model(rows.inputs[begin : begin + each]), rows.targets[begin : begin + each]))
            loss = nn.functional.mse_loss(model(rows.inputs[begin : begin + each]), rows.targets[begin : begin + each])
            fabric.backward(loss)
            if step % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.1)
            else:
                fabric.clip_gradients(model, optimizer, clip_val=0.01)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
            if directory is not None and step == 2:
                state |= {"step": 3, "best": [2.5]}
                fabric.save(f"{directory}/run", state)
        return losses


@pytest.mark.parametrize("wait", [False, True])
def test_fabric_beside_ddp(wait: bool) -> None:
    ours, theirs = (on_ranks(2, loop, kind, None, None, "32-true", wait, debug="OFF") for kind in ("zero3", "ddp"))
    assert ours[0] == pytest.approx(theirs[0], abs=2e-6)


def test_fabric_in_bf16_and_its_checkpoints(tmp_path: Path) -> None:
    ours, theirs = (on_ranks(2, loop, kind, None, None, "bf16-mixed", debug="OFF") for kind in ("zero3", "ddp"))
    assert ours[0] == pytest.approx(theirs[0], abs=3e-2)
    whole = on_ranks(2, loop, "zero3", str(tmp_path), None, debug="OFF")[0]
    assert on_ranks(2, loop, "zero3", None, f"{tmp_path}/run", debug="OFF")[0] == whole[3:]
    assert on_ranks(1, loop, "zero3", None, f"{tmp_path}/run", debug="OFF")[0] == pytest.approx(whole[3:], abs=1e-5)


def load_what_is_not_there(rank: Rank) -> None:
    with launched(rank):
        fabric = fabric_of(rank, "zero3")
        model: Any = fabric.setup_module(Net())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.05))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        fabric.save(rank.scratch / "run", {**state, "step": 3})
        fabric.backward(model(Rows(4, 0).inputs).sum())
        optimizer.step()
        before = [chunk.detach().clone() for chunk in zero3.get_trainable_chunk(model)]
        lacking = {**state, "step": 0, **({"best": 1.0} if rank.number else {})}
        with pytest.raises(ValueError, match=r"rank 1: .*run has no best; beside the model it has step. Nothing was loaded"):
            fabric.load(rank.scratch / "run", lacking)
        with pytest.raises(ValueError, match=r"rank 1: .*other is no checkpoint of zero3"):
            fabric.load(rank.scratch / ("other" if rank.number else "run"), state)
        assert lacking["step"] == 0 and len(optimizer.state) == len(before)
        assert all(torch.equal(chunk, value) for chunk, value in zip(zero3.get_trainable_chunk(model), before, strict=True))
        assert fabric.load(rank.scratch / "run", lacking, strict=False) == {} and lacking["step"] == 3
        assert not any(torch.equal(chunk, value) for chunk, value in zip(zero3.get_trainable_chunk(model), before, strict=True))


def test_fabric_load_looks_before_it_fills_anything() -> None:
    on_ranks(2, load_what_is_not_there, debug="OFF")


def refused_by_fabric(rank: Rank) -> None:
    with launched(rank):
        fabric, net = fabric_of(rank, "zero3"), Net()
        early = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"fabric\.setup_module\(model\), make the optimizer from"):
            fabric.setup(net, early)
        model = fabric.setup_module(net)
        for optimizer, told in (
            (early, "SGD holds parameters that are no chunks of a sharded model: call fabric.setup_module first"),
            (torch.optim.Adafactor(model.parameters()), "Adafactor .* does more than treat each element by itself"),
            (torch.optim.SGD([{"params": []}, {"params": list(model.parameters())}], lr=0.1), "group 0 of the SGD .* is empty"),
        ):
            right = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
            with pytest.raises(ValueError, match=f"^rank 1: .*{told}"):  # on all ranks
                fabric.setup_optimizers(optimizer if rank.number else right)
        fabric.setup_optimizers(torch.optim.SGD(zero3.get_trainable_chunk(model)[:1], lr=0.1))  # a part is legal
        other = fabric.setup_module(zero3.shard(Net(), policy=zero3.ShardingPolicy(ignored=lambda name, info: "norm" in name)))
        with pytest.raises(ValueError, match=r"ignored=\.\.\.\) leaves 2 parameters alone that train: norm\.weight, norm\.bias"):
            fabric.setup_optimizers(torch.optim.SGD(other.parameters(), lr=0.1))


def test_fabric_sets_up_the_model_first_and_looks_at_optimizers() -> None:
    on_ranks(2, refused_by_fabric, debug="OFF")


def wrapped(rank: Rank) -> None:
    told = "^DistributedDataParallel around a sharded model"
    with launched(rank):
        with pytest.raises(RuntimeError, match=told):
            trainer(rank, "ddp", rank.scratch, max_steps=1).fit(zero3.shard(Module()), train_rows())
        with pytest.raises(RuntimeError, match=told):
            fabric_of(rank, "ddp").setup_module(zero3.shard(Net()))


def test_their_own_strategies_around_a_sharded_module_are_refused() -> None:
    on_ranks(2, wrapped, debug="OFF")
