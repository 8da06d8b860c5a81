"""On a mesh every rank of every replica holds what one rank alone would hold, however the values came, plain or quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.quantized.test_loading_codes import as_bitsandbytes, in_tiles, save
from tests.support.quantised_bases import FORMATS, WIDTH, Adapted, is_base
from tests.support.ranks import run_mesh
from tests.support.reference import Turn
from zero3 import NF4, Float8, Int8, ShardingPolicy

kinds, few = (
    pytest.mark.parametrize("kind", chosen, ids=lambda kind: kind.name if kind is not None else "plain")
    for chosen in ([None, *FORMATS], [None, NF4(), Int8(block_size=40)])
)
shapes = pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (3, 1)])
ALONE = (1, 1)


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Adapted(torch.float32), nn.BatchNorm1d(WIDTH), Adapted(torch.float32))
        self[1].requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)))


def made(number: int, device: str = "cpu") -> Model:
    """Rank 0's values are those that count. Other ranks' models have others."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(number)
        model = Model()
        if device == "cpu":
            model[1].running_mean.normal_()
        return model


def on_mesh(shape: tuple[int, int], kind: Any, device: str, body: Callable[[Any, Any], Any], **policy: Any) -> list[Any]:
    models = [made(rank, device) for rank in range(shape[0] * shape[1])]
    return run_mesh(
        *shape,
        lambda mesh: body(
            zero3.shard(models[mesh.rank], [Adapted], process_group=mesh, policy=ShardingPolicy(quantize=kind, **policy), device="cpu"),
            mesh,
        ),
    )


def held(model: Any, mesh: Any = None) -> dict[str, Tensor]:
    """What a rank reads of the model, and computes with it."""
    with zero3.full_params(model):
        found = {name: p.detach().clone() for name, p in model.named_parameters() if "chunk" not in name}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    found["output"] = model(Turn(0, 0, 0).tensor(3, WIDTH).float()).detach()
    return found


def assert_as_alone(found: list[dict[str, Tensor]], alone: dict[str, Tensor]) -> None:
    for rank, values in enumerate(found):
        assert values.keys() == alone.keys()
        for name, value in values.items():
            assert torch.equal(value, alone[name]), f"{name} on rank {rank}"


# -- how values come


@few
@shapes
def test_shard_gives_each_replica_the_same_values(kind: Any, replicas: int, shards: int) -> None:
    assert_as_alone(on_mesh((replicas, shards), kind, "cpu", held), on_mesh(ALONE, kind, "cpu", held)[0])


def check_load_pretrained(shape: tuple[int, int], kind: Any, directory: Path, **policy: Any) -> None:
    def load(model: Any, mesh: Any) -> dict[str, Tensor]:
        zero3.load_pretrained(model, directory)
        return held(model)

    assert_as_alone(on_mesh(shape, kind, "meta", load, **policy), on_mesh(ALONE, kind, "cpu", held)[0])


@kinds
@shapes
def test_load_pretrained_quantises_for_each_replica(kind: Any, replicas: int, shards: int, tmp_path: Path) -> None:
    save(made(0).state_dict(), tmp_path)
    check_load_pretrained((replicas, shards), kind, tmp_path)


@pytest.mark.parametrize("offload", ["cpu", "files"])
def test_load_pretrained_quantises_for_each_replica_that_rests_elsewhere(offload: str, tmp_path: Path) -> None:
    save(made(0).state_dict(), tmp_path)
    check_load_pretrained((2, 2), NF4(), tmp_path, offload=offload if offload == "cpu" else tmp_path)


@pytest.mark.parametrize(("kind", "pack"), [(NF4(), as_bitsandbytes), (Float8(), in_tiles)])
@shapes
def test_load_pretrained_stores_codes_as_they_lie_for_each_replica(
    kind: Any, pack: Any, replicas: int, shards: int, tmp_path: Path
) -> None:
    state = made(0).state_dict()
    save(pack(state, [name for name, p in made(0).named_parameters() if is_base(name, p)], kind), tmp_path)
    check_load_pretrained((replicas, shards), kind, tmp_path)


@few
@shapes
def test_materialize_fills_each_replica(kind: Any, replicas: int, shards: int) -> None:
    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape).sin())
        for buffer in module.buffers(recurse=False):
            buffer.fill_(1)

    def draw(model: Any, mesh: Any) -> dict[str, Tensor]:
        zero3.materialize(model, init=init)
        return held(model)

    assert_as_alone(on_mesh((replicas, shards), kind, "meta", draw), on_mesh(ALONE, kind, "meta", draw)[0])


@few
@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 3)), ((1, 2), (3, 1))])
@pytest.mark.parametrize("frozen", [True, False])
def test_checkpoints_of_one_mesh_load_on_another(
    kind: Any, before: tuple[int, int], after: tuple[int, int], frozen: bool, tmp_path: Path
) -> None:
    """With and without the base: hashes of it are the same however many replicas there are."""

    def trained(model: Any, mesh: Any) -> dict[str, Tensor]:
        optimizer = torch.optim.AdamW(zero3.param_groups(model, lambda name, info: {"whole": True}), lr=0.1)
        model(Turn(0, 1, 0).tensor(3, WIDTH).float()).square().sum().backward()
        optimizer.step()
        zero3.save_checkpoint(tmp_path / "saved", model, optimizer, frozen=frozen)
        return held(model)

    def load(model: Any, mesh: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        with torch.no_grad():
            model[1].running_mean.zero_()
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        zero3.load_checkpoint(tmp_path / "saved", model, optimizer)
        state = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"]
        return held(model), {f"{name} {key}": value for name in state for key, value in state[name].items() if key != "step"}

    saved = on_mesh(before, kind, "cpu", trained)
    loaded = on_mesh(after, kind, "cpu", load)
    assert_as_alone([*saved[1:], *(values for values, _ in loaded)], saved[0])
    assert_as_alone([state for _, state in loaded], on_mesh(ALONE, kind, "cpu", load)[0][1])


# -- how values go


@shapes
def test_save_pretrained_on_a_mesh_writes_each_value_once(replicas: int, shards: int, tmp_path: Path) -> None:
    on_mesh((replicas, shards), None, "cpu", lambda model, mesh: zero3.save_pretrained(model, tmp_path))
    found = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
    assert_as_alone([found], made(0).state_dict())
