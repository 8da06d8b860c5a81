"""What a checkpoint leaves out: frozen parameters, buffers that are made anew, and models whose memory holds nothing before the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.checkpoints import LINEAR, assert_same, odd, on_ranks, train
from tests.support.ranks import ThreadCommunicator, run_ranks


def test_save_checkpoint_may_leave_frozen_parameters_out(tmp_path: Path) -> None:
    """They stay as they are; a model where they have other values, or are trained, is refused."""

    def save_without(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Tensor]:
        train(model, optimizer, range(2))
        zero3.save_checkpoint(tmp_path, model, optimizer, frozen=False)
        return zero3.full_state_dict(model)

    def load_without(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> dict[str, Tensor]:
        zero3.load_checkpoint(tmp_path, model, optimizer)
        return zero3.full_state_dict(model)

    def with_other_biases() -> nn.Module:
        model = odd()
        for block in model.blocks:
            nn.init.constant_(block.linear.bias, 3.0)
        return model

    def thawed() -> nn.Module:
        model = odd()
        model.blocks[1].linear.bias.requires_grad_(True)
        return model

    def another_base(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"over another base .* 3 of 6 frozen parameters .*: blocks\.0\.linear\.bias"):
            zero3.load_checkpoint(tmp_path, model, optimizer)

    def refused(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"without frozen parameters, .* trained here: blocks\.1\.linear\.bias"):
            zero3.load_checkpoint(tmp_path, model)

    saved = on_ranks(2, save_without)[0]
    data = b"".join(path.read_bytes() for path in tmp_path.rglob("*.safetensors"))
    assert b"linear.weight" in data and b"linear.bias" not in data and b"order" not in data
    assert_same(on_ranks(3, load_without)[0], saved)
    on_ranks(3, another_base, build=with_other_biases)
    on_ranks(2, refused, build=thawed)


def test_load_checkpoint_fills_a_model_on_meta(tmp_path: Path) -> None:
    """Buffers that no checkpoint holds come from the model's own initialiser; a missing one is named by the first forward."""

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return built()

    def built() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))

    def save_it(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> Tensor:
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(group.rank)))
        zero3.save_checkpoint(tmp_path, model)
        return model.eval()(torch.ones(1, 5)).detach()

    def load_it(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> Tensor:
        zero3.load_checkpoint(tmp_path, model)
        return model.eval()(torch.ones(1, 5)).detach()

    def refused(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(RuntimeError, match=r"0\.weight.*have no values yet"):
            zero3.save_checkpoint(tmp_path, model)

    saved = on_ranks(2, save_it, build=built, layers=LINEAR)
    assert not torch.equal(saved[0], saved[1]), "each rank has seen other batches"
    for rank, found in enumerate(on_ranks(2, load_it, build=on_meta, layers=LINEAR)):
        assert torch.equal(found, saved[rank]), "buffers are each rank's own"
    assert torch.equal(on_ranks(3, load_it, build=on_meta, layers=LINEAR)[2], saved[0])
    on_ranks(2, refused, build=on_meta, layers=LINEAR)


def test_load_checkpoint_into_an_optimizer_that_holds_frozen_chunks_too(tmp_path: Path) -> None:
    """Of those nothing was saved, and nothing is needed."""

    def body(group: ThreadCommunicator) -> None:
        layer = zero3.Zero3Layer(modules[group.rank], process_group=group)
        saving_one = torch.optim.SGD(layer.get_trainable_chunk(), lr=0.5, momentum=0.9)
        layer(torch.ones(1, 2)).sum().backward()
        saving_one.step()
        zero3.save_checkpoint(tmp_path / "a", layer, saving_one)
        loading_one = torch.optim.SGD(list(layer.parameters()), lr=0.1, momentum=0.9)
        zero3.load_checkpoint(tmp_path / "a", layer, loading_one)
        assert loading_one.param_groups[0]["lr"] == 0.5 and len(loading_one.state) == 1

    modules = [nn.Linear(2, 2) for _ in range(2)]
    for module in modules:
        module.bias.requires_grad_(False)
    run_ranks(2, body)


def test_what_a_checkpoint_leaves_out_stays_unloaded(tmp_path: Path) -> None:
    """Memory that nothing was written into must not be computed with."""

    def body(group: ThreadCommunicator) -> None:
        saved, empty = (zero3.Zero3Layer(module, process_group=group) for module in models[group.rank])
        zero3.save_checkpoint(tmp_path / "a", saved, frozen=False)
        zero3.load_checkpoint(tmp_path / "a", empty)
        with pytest.raises(RuntimeError, match="bias"):
            empty(torch.ones(1, 2))

    models = [(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")) for _ in range(2)]
    for pair in models:
        for module in pair:
            module.bias.requires_grad_(False)
    run_ranks(2, body)
