"""Training on a quantised base: the numbers of one process whose weights are what the format makes of them, and a graph without weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.live import LiveBytes
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, as_one_layer, check_parity, in_sequence, nested, process_group
from zero3 import MXFP4, NF4, Float8, Int8, ShardingPolicy
from zero3.access import states_of
from zero3.quantized.formats import Format

pytestmark = pytest.mark.slow

FORMATS = [NF4(), NF4(double_quant=False), Int8(), Float8(block=(8, 8)), MXFP4()]
WIDTH, INNER = 24, 40
formats = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)


class Adapted(nn.Module):
    """A frozen block with adapters, as peft makes them: the base's modules are plain linear layers."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, dtype=dtype), nn.Linear(INNER, WIDTH, bias=False, dtype=dtype)
        self.requires_grad_(False)
        self.first, self.second = nn.Parameter(torch.randn(3, WIDTH, dtype=dtype) / 5), nn.Parameter(torch.randn(INNER, 3, dtype=dtype) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) + x @ self.first.t() @ self.second.t()))


class Experts(nn.Module):
    """Weights of several experts in one parameter, used as libraries do: by index, as a batch, and in groups."""

    def __init__(self, how: str, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH, dtype=dtype) / 5, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = (x.reshape(-1, WIDTH) * self.scale)[:6]
        if self.how == "index":
            made = [rows[2 * i : 2 * i + 2] @ self.weight[torch.tensor(i) if i == 1 else i].t() for i in range(3)]
        elif self.how == "unbind":
            made = [functional.linear(rows[2 * i : 2 * i + 2], weight) for i, weight in enumerate(self.weight.unbind())]
        elif self.how == "iterate":
            made = [functional.linear(rows[2 * i : 2 * i + 2], weight) for i, weight in enumerate(self.weight)]
        elif self.how == "halves":
            made = [rows @ half.t() for half in self.weight[1].chunk(2)]
        elif self.how == "bmm":
            made = [torch.bmm(rows.view(3, 2, WIDTH), self.weight.transpose(1, 2))]
        elif self.how == "baddbmm":
            made = [torch.baddbmm(rows.view(3, 2, WIDTH), rows.view(3, 2, WIDTH), self.weight.mT)]
        elif self.how == "added":
            made = [torch.bmm(rows.view(3, 2, WIDTH), self.weight + self.scale)]
        elif self.how == "peft":  # as peft folds an adapter into experts
            made = [
                torch.bmm(rows.view(3, 2, WIDTH), torch.baddbmm(self.weight, self.scale.expand(3, 1, -1).mT, self.scale.expand(3, 1, -1)))
            ]
        else:
            ends = torch.tensor([2, 3, 6], dtype=torch.int32)
            made = [functional.grouped_mm(rows, self.weight.transpose(-2, -1), offs=ends)]
        return torch.cat([each.reshape(-1) for each in made])


class Ways(nn.Module):
    """Ways to multiply with a matrix, and an embedding."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 5, requires_grad=False)
        self.words = nn.Embedding(7, WIDTH, dtype=dtype).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        x, w = x * self.scale, self.weight
        found = x @ w + functional.linear(x, w.T) + torch.matmul(x, w.transpose(0, 1)) + (w @ x.mT).mT
        flat = x.reshape(-1, WIDTH)
        found = found + (torch.mm(flat, w.permute(1, 0)) + torch.addmm(flat, flat, w[:, :]) + flat.mm(w.float().to(w.dtype))).view_as(x)
        return found + self.words(torch.arange(5, device=x.device) % 7).mean(0) * self.scale + torch.matmul(x, w.unsqueeze(0)[0].detach())


def seeded(make: Callable[[], nn.Module], kind: Format, where: Callable[[str, Tensor], bool]) -> Callable[[], nn.Module]:
    """Builds the model with what `kind` makes of its weights. It keeps the weights themselves for `quantizing`."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
        originals = {name: p.detach().clone() for name, p in model.named_parameters() if where(name, p)}
        for name, values in originals.items():
            model.get_parameter(name).data.copy_(kind.dequantize(kind.quantize(values), values.dtype))
        model.__dict__["originals"] = originals
        return model

    return build


def quantizing(shard: Any) -> Any:
    """Shards the model that `seeded` has built, with its weights as they were. Other ranks than 0 have others, which don't count."""

    def sharded(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        if group is None or group.rank == 0:
            for name, values in model.__dict__["originals"].items():
                model.get_parameter(name).data.copy_(values)
        del model.__dict__["originals"]
        return shard(model, group, policy)

    return sharded


def is_base(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and not parameter.requires_grad


def blocks(count: int = 3) -> nn.Module:
    return nn.Sequential(*[Adapted() for _ in range(count)])


def program(model: nn.Module, turn: Turn) -> Tensor:
    x = turn.tensor(2, 5, WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return torch.cat([loss.view(1), x.grad.flatten()])


def by_shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
    return zero3.shard(model, [type(child) for child in model.children()], policy=policy, process_group=group)


@WORLDS
@formats
@pytest.mark.parametrize("shard", [in_sequence, as_one_layer, nested, by_shard], ids=lambda shard: shard.__name__)
def test_quantized_base_trains_as_its_dequantized_values_do(world_size: int, kind: Format, shard: Any) -> None:
    """One rank to the bit, several to the order of sums."""
    build = seeded(blocks, kind, is_base)
    check_parity(build, program, world_size=world_size, shard=quantizing(shard), policy=ShardingPolicy(quantize=kind))


@pytest.mark.parametrize("shard", [in_sequence, by_shard], ids=lambda shard: shard.__name__)
def test_quantized_base_on_a_mesh(shard: Any) -> None:
    check_parity(
        seeded(blocks, NF4(), is_base), program, world_size=4, replicas=2, shard=quantizing(shard), policy=ShardingPolicy(quantize=NF4())
    )


@WORLDS
def test_quantized_base_with_offload_activations(world_size: int, tmp_path: Path) -> None:
    def offloading(model: nn.Module, turn: Turn) -> Tensor:
        x = turn.tensor(2, 5, WIDTH, requires_grad=True)
        with zero3.offload_activations(tmp_path, min_bytes=1):
            loss = model(x).square().mean()
        loss.backward()
        return torch.cat([loss.view(1), x.grad.flatten()])  # type: ignore[union-attr]

    build = seeded(blocks, NF4(), is_base)
    check_parity(build, offloading, world_size=world_size, shard=quantizing(by_shard), policy=ShardingPolicy(quantize=NF4()))


@WORLDS
@pytest.mark.parametrize(
    "options",
    [{"stage": 1}, {"stage": 2}, {"reshard_after_forward": False}, {"prefetch_depth": 0}, {"transactional": True}, {"dynamic": True}],
    ids=str,
)
def test_quantized_base_under_policies(world_size: int, options: dict[str, Any]) -> None:
    kind = NF4()

    def shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        return quantizing(in_sequence)(model, group, policy)

    build = seeded(blocks, kind, is_base)
    expected = plain_losses(build)

    def body(group: ThreadCommunicator) -> list[float]:
        model = shard(models[group.rank], process_group(group), ShardingPolicy(quantize=kind, **options))
        return sharded_losses(model)

    models = [build() for _ in range(world_size)]
    for found in run_ranks(world_size, body):
        assert found == pytest.approx(expected, rel=1e-12)
        assert world_size > 1 or found == expected


def plain_losses(build: Callable[[], nn.Module]) -> list[float]:
    model = build()
    return _losses(model, [p for p in model.parameters() if p.requires_grad])


def sharded_losses(model: nn.Module) -> list[float]:
    return _losses(model, zero3.get_trainable_chunk(model))


def _losses(model: nn.Module, parameters: list[nn.Parameter]) -> list[float]:
    optimizer, losses = torch.optim.SGD(parameters, lr=0.5), []
    dtype = next(p.dtype for p in parameters)
    for step in range(3):
        loss = model(Turn(0, step, 1).tensor(2, 5, WIDTH).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] != losses[-1]
    return losses


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Adapted(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@WORLDS
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [True, False])
def test_quantized_base_with_checkpoint(world_size: int, reentrant: bool, around: bool) -> None:
    """Inside layers, and around them."""
    kind = NF4()

    def make() -> nn.Module:
        return nn.Sequential(*[Checkpointed(reentrant) for _ in range(3)])

    def shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        return zero3.shard(model, Adapted if around else Checkpointed, policy=policy, process_group=group)

    check_parity(seeded(make, kind, is_base), program, world_size=world_size, shard=quantizing(shard), policy=ShardingPolicy(quantize=kind))


@WORLDS
@pytest.mark.parametrize("how", ["index", "unbind", "iterate", "halves", "bmm", "baddbmm", "added", "peft"])
@pytest.mark.parametrize("kind", [NF4(), Float8(block=(16, 8)), Int8(block_size=7)], ids=lambda kind: kind.name)
def test_quantized_experts(world_size: int, how: str, kind: Format) -> None:
    check_parity(
        seeded(lambda: nn.Sequential(Experts(how)), kind, is_base), program, world_size=world_size, shard=quantizing(in_sequence),
        policy=ShardingPolicy(quantize=kind),
    )  # fmt: skip


@WORLDS
def test_quantized_experts_in_groups(world_size: int) -> None:
    build = seeded(lambda: nn.Sequential(Experts("groups", torch.bfloat16)), NF4(), is_base)
    check_parity(
        build, lambda model, turn: program(_in_bf16(model), turn), world_size=world_size, shard=quantizing(in_sequence),
        policy=ShardingPolicy(quantize=NF4(), reduce_dtype=torch.float32), tolerance=1e-2,
    )  # fmt: skip


def _in_bf16(model: nn.Module) -> Any:
    return lambda x: model(x.bfloat16()).double()


@WORLDS
def test_quantized_matrix_in_every_operation(world_size: int) -> None:
    kind = NF4(select=lambda name, info: info.ndim == 2)
    check_parity(
        seeded(lambda: nn.Sequential(Ways(), Ways()), kind, is_base), program, world_size=world_size, shard=quantizing(in_sequence),
        policy=ShardingPolicy(quantize=kind),
    )  # fmt: skip


@WORLDS
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["param_dtype", "autocast"])
def test_quantized_base_in_bf16(world_size: int, stored: torch.dtype, how: str) -> None:
    """It computes with the values in the dtype of compute, which are rounded once."""
    kind = NF4()
    original = seeded(lambda: nn.Sequential(Adapted(stored), Adapted(stored)), kind, lambda *_: False)
    plain = original().bfloat16() if how == "param_dtype" else original()
    for name, p in original().named_parameters():
        if is_base(name, p):
            values = kind.dequantize(kind.quantize(p), stored).to(plain.get_parameter(name).dtype)
            plain.get_parameter(name).data.copy_(values)
    x = Turn(0, 0, 1).tensor(2, 5, WIDTH).to(torch.bfloat16 if how == "param_dtype" else stored)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        expected = plain(x)
    expected.float().square().mean().backward()
    gradients = [p.grad.float().flatten() for p in plain.parameters() if p.requires_grad]
    policy = ShardingPolicy(quantize=kind, param_dtype=torch.bfloat16 if how == "param_dtype" else None)

    def body(group: ThreadCommunicator) -> tuple[Tensor, dict[str, Tensor]]:
        model = zero3.shard(models[group.rank], Adapted, policy=policy, process_group=process_group(group))
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            output = model(x)
        output.float().square().mean().backward()
        with zero3.full_gradients(model) as full:
            return output, {name: value.clone() for name, value in full.items()}

    models = [original() for _ in range(world_size)]
    for output, full in run_ranks(world_size, body):
        assert output.equal(expected)
        for found, mine in zip(full.values(), gradients, strict=True):
            torch.testing.assert_close(found.float().flatten(), mine, rtol=2e-2, atol=1e-3)


class Wide(nn.Module):
    """Frozen matrices of 1 MB in fp32, and few activations. One way for linear layers, one for experts."""

    WIDTH = 512

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(6)])
        self.experts = nn.Parameter(torch.randn(2, self.WIDTH, self.WIDTH) / 20) if experts else None
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(self.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if self.experts is None else torch.tanh(x @ self.experts[0].t()) @ self.experts[1]


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_quantized_matrices_exist_one_at_a_time(experts: bool, autocast: bool, checkpointed: bool) -> None:
    """In forward and in backward; none between them. Beside it are intermediate results of a slice of 2**20 elements at most."""
    model = zero3.Zero3Layer(Wide(experts), policy=ShardingPolicy(quantize=NF4()))
    x, memory = torch.randn(3, Wide.WIDTH), LiveBytes()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)).float().sum()

    loss().backward()
    losses: list[Tensor] = []
    with memory:
        forward = memory.peak_of(lambda: losses.append(loss()))
        between = memory.now
        backward = memory.peak_of(losses.pop().backward)
    one, base = 4 * Wide.WIDTH**2, 6 * NF4().nbytes((Wide.WIDTH, Wide.WIDTH)) + experts * NF4().nbytes((2, Wide.WIDTH, Wide.WIDTH))
    assert one < forward - base < 2.7 * one  # a matrix in fp32, or half of that in bf16; its values before the scales in fp32; codes
    assert one < backward - base < 2.7 * one
    assert between - base < 0.1 * one


@WORLDS
def test_quantized_layers_travel_as_bytes(world_size: int) -> None:
    """One message a gather, which holds the scales too, and twice a step; at rest each rank holds its share of these bytes."""
    kind = NF4()

    def body(group: ThreadCommunicator) -> None:
        model = in_sequence(models[group.rank], process_group(group), ShardingPolicy(quantize=kind))
        chunks = [chunk for state in states_of(model) for chunk in state.chunks if chunk.read_only]
        nbytes = sum(kind.nbytes(shape) for shape in ((INNER, WIDTH), (WIDTH, INNER)))
        assert [chunk.shard.nbytes for chunk in chunks] == [-(-nbytes // world_size)] * 3
        before = len(group.log)
        model(torch.randn(2, 5, WIDTH, dtype=torch.float64)).sum().backward()
        gathers = [c for c in group.log[before:] if c.kind == "all_gather" and c.dtype == torch.uint8]
        assert [c.numel for c in gathers] == ([world_size * -(-nbytes // world_size)] * 5 if world_size > 1 else [])
        stored = zero3.report(model).chunks
        assert stored["frozen nf4(64, double)"] == sum(chunk.shard.nbytes for chunk in chunks)
        assert "frozen uint8" not in stored
        assert zero3.report(model).parameters == sum(p.numel() for p in blocks().parameters())

    models = [blocks() for _ in range(world_size)]
    run_ranks(world_size, body)


@WORLDS
def test_full_params_show_quantized_values(world_size: int) -> None:
    kind = NF4()
    expected = seeded(blocks, kind, is_base)().state_dict()

    def body(group: ThreadCommunicator) -> None:
        model = by_shard(models[group.rank], process_group(group), ShardingPolicy(quantize=kind))
        for _ in range(2):
            with zero3.full_params(model):
                for name, values in expected.items():
                    found = dict(model.named_parameters())[name]
                    assert type(found) is nn.Parameter
                    assert found.equal(values)
        sharded_losses(model)
        values = zero3.full_state_dict(model, rank0_only=False)
        assert all(values[name].equal(expected[name]) for name, p in blocks().named_parameters() if is_base(name, p))
        read_only = r"'up.weight' of layer '0' \(Adapted\) \(nf4\(64, double\)\).*read-only"
        with pytest.raises(RuntimeError, match=read_only), zero3.full_params(model, writeback=True):
            pass

    models = [seeded(blocks, kind, lambda *_: False)() for _ in range(world_size)]
    run_ranks(world_size, body)


@WORLDS
def test_load_full_state_dict_quantizes_what_has_changed(world_size: int) -> None:
    """What a dict leaves out keeps its bytes: quantising dequantised values again would change them."""
    kind = NF4()
    given = {name: torch.randn_like(values) for name, values in blocks().state_dict().items() if name.startswith(("0.", "1.down"))}
    expected = seeded(blocks, kind, is_base)().state_dict()
    for name, values in given.items():
        expected[name] = kind.dequantize(kind.quantize(values), values.dtype) if "up.w" in name or "down.w" in name else values

    def body(group: ThreadCommunicator) -> None:
        model = in_sequence(models[group.rank], process_group(group), ShardingPolicy(quantize=kind))
        loss = model(torch.randn(2, 5, WIDTH, dtype=torch.float64)).sum()
        zero3.load_full_state_dict(model, given if group.rank == 0 else None, strict=False)
        found = zero3.full_state_dict(model, rank0_only=False)
        assert all(found[name].equal(values) for name, values in expected.items())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        sharded_losses(model)

    models = [seeded(blocks, kind, lambda *_: False)() for _ in range(world_size)]
    run_ranks(world_size, body)


def test_torch_func_in_resident_on_a_quantized_base() -> None:
    kind = NF4()
    plain = seeded(blocks, kind, is_base)()
    model = in_sequence(seeded(blocks, kind, lambda *_: False)(), None, ShardingPolicy(quantize=kind))
    x = torch.randn(WIDTH, dtype=torch.float64)
    with zero3.resident(model):
        found = torch.func.grad(lambda x: model(x).sum())(x)
        many = torch.func.vmap(model)(torch.stack([x, x]))
    assert found.equal(torch.func.grad(lambda x: plain(x).sum())(x))
    torch.testing.assert_close(many, torch.stack([plain(x)] * 2))
