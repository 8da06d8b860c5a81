"""Mixed precision: gathered and computed in one dtype, reduced in another, stored and updated in a third.

The reference is a plain module whose parameters are cast by hand, once a forward, and whose gradients are added up over
ranks by hand, in the dtype that the policy names. On two ranks the bits must be the same.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import zero3
from tests.support.ordering import EchoCommunicator, FakeDevice
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential
from zero3.access import states_of
from zero3.core.casting import cast

WIDTH = 6
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def blocks(dtype: torch.dtype = FP32) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(3))).to(dtype)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.float().pow(2).mean()


def trained_by_hand(policy: ShardingPolicy, world_size: int, steps: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    model = blocks(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    compute, reduce = policy.param_dtype or dtype, policy.reduce_dtype or policy.param_dtype or dtype
    losses = []
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for rank in range(world_size):
            cast = {name: p.detach().to(compute).requires_grad_() for name, p in model.named_parameters()}
            loss = loss_of(functional_call(model, cast, batch(step, rank).to(compute)))
            losses.append(loss.item())
            for name, gradient in zip(cast, torch.autograd.grad(loss, list(cast.values())), strict=True):
                sums[name] = sums[name] + gradient.to(reduce) if name in sums else gradient.to(reduce)
        for name, parameter in model.named_parameters():
            parameter.grad = sums[name].to(dtype) / world_size
        optimizer.step()
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def in_layers(model: nn.Module, group: ThreadCommunicator | None, policy: ShardingPolicy) -> Zero3Sequential:
    return Zero3Sequential([Zero3Layer(child, policy=policy, process_group=group) for child in model.children()])


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "policy"),
    [
        (FP32, ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32)),
        (FP32, ShardingPolicy(param_dtype=BF16)),
        (FP32, ShardingPolicy(param_dtype=FP16, reduce_dtype=FP32)),
        (FP32, ShardingPolicy(param_dtype=BF16, reduce_dtype=BF16, reshard_after_forward=False, prefetch_depth=0)),
        (FP32, ShardingPolicy(reduce_dtype=BF16)),
        (FP64, ShardingPolicy(param_dtype=FP32, reduce_dtype=FP64)),
    ],
    ids=str,
)
def test_param_dtype_and_reduce_dtype_train_as_a_plain_module_with_the_same_casts(
    dtype: torch.dtype, policy: ShardingPolicy, world_size: int
) -> None:
    losses, parameters = trained_by_hand(policy, world_size, 4, dtype)

    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor], list[Any]]:
        model = in_layers(fresh[group.rank], group if world_size > 1 else None, policy)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=0.05)
        seen = []
        for step in range(4):
            loss = loss_of(model(batch(step, group.rank)))
            loss.backward()
            seen.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return seen, zero3.full_state_dict(model, rank0_only=False), group.log

    fresh = [blocks(dtype) for _ in range(world_size)]
    results = run_ranks(world_size, body)
    for rank, (seen, found, _) in enumerate(results):
        assert seen == losses[rank::world_size]
        for name, value in parameters.items():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], value), name


def test_param_dtype_halves_the_bytes_that_travel() -> None:
    def bytes_of(policy: ShardingPolicy) -> dict[str, int]:
        def body(group: ThreadCommunicator) -> list[Any]:
            model = in_layers(fresh[group.rank], group, policy)
            group.log.clear()
            loss_of(model(batch(0, group.rank))).backward()
            return list(group.log)

        fresh = [blocks(), blocks()]
        moved: dict[str, int] = {}
        for entry in run_ranks(2, body)[0]:
            if entry.kind in ("all_gather", "reduce_scatter"):
                moved[entry.kind] = moved.get(entry.kind, 0) + entry.numel * entry.dtype.itemsize
        return moved

    plain, both = bytes_of(ShardingPolicy()), bytes_of(ShardingPolicy(param_dtype=BF16))
    gathers = bytes_of(ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32))
    assert both == {kind: nbytes // 2 for kind, nbytes in plain.items()}
    assert gathers == {"all_gather": plain["all_gather"] // 2, "reduce_scatter": plain["reduce_scatter"]}


def test_a_shardingpolicy_of_its_own_keeps_norms_in_full_precision() -> None:
    """As FSDP2 has it: norms are layers of their own, which compute in fp32 and hand bf16 on."""
    seen: dict[str, tuple[torch.dtype, ...]] = {}

    def policy_of(name: str, module: nn.Module) -> ShardingPolicy:
        if isinstance(module, nn.LayerNorm):
            return ShardingPolicy(param_dtype=FP32, output_dtype=BF16)
        return ShardingPolicy(param_dtype=BF16, output_dtype=FP32 if name == "" else None)

    def body(group: ThreadCommunicator) -> tuple[Tensor, dict[str, Tensor]]:
        model = fresh[group.rank]
        zero3.shard(model, [nn.LayerNorm, *model.children()], policy=policy_of, process_group=group)
        for block in model.children():
            linear, norm = block.module[0], block.module[1].module
            linear.register_forward_hook(lambda m, a, out: seen.__setitem__("linear", (m.weight.dtype, a[0].dtype, out.dtype)))
            norm.register_forward_hook(lambda m, a, out: seen.__setitem__("norm", (m.weight.dtype, a[0].dtype, out.dtype)))
        output = model(batch(0, group.rank))
        loss_of(output).backward()
        return output.detach(), {}

    fresh = [blocks(), blocks()]
    outputs = [output for output, _ in run_ranks(2, body)]
    assert seen == {"linear": (BF16, BF16, BF16), "norm": (FP32, FP32, FP32)}
    x, plain = batch(0, 0).to(BF16), blocks()
    for block in plain:
        linear, norm, gelu = (part for part in block)  # type: ignore[attr-defined]
        x = nn.functional.linear(x, linear.weight.to(BF16), linear.bias.to(BF16))
        x = gelu(norm(x.float()).to(BF16))
    assert outputs[0].dtype == FP32
    assert torch.equal(outputs[0], x.float())


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.base = nn.Linear(WIDTH, WIDTH, dtype=BF16).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.Parameter(torch.tensor([7, 9]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.adapter(x) * (self.steps[1] - self.steps[0])


def test_param_dtype_leaves_a_frozen_chunks_dtype_under_adapters() -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = Zero3Layer(fresh[group.rank], policy=ShardingPolicy(param_dtype=BF16), process_group=group)
        stored = {name: chunk.dtype for name, chunk in layer.named_parameters()}
        assert stored == {"frozen_chunk_bfloat16": BF16, "trainable_chunk": FP32, "frozen_chunk_int64": torch.int64}
        group.log.clear()
        layer(batch(0, group.rank)).float().sum().backward()
        assert {entry.dtype for entry in group.log if entry.kind == "all_gather"} == {BF16, torch.int64}
        (chunk,) = layer.get_trainable_chunk()
        assert chunk.grad is not None
        assert chunk.grad.dtype == FP32

    fresh = [Adapted(), Adapted()]
    run_ranks(2, body)


# -- outside compute, values are those that are stored


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_params_writeback_and_full_state_dict_show_what_is_stored(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        policy = ShardingPolicy(param_dtype=BF16)
        model = in_layers(fresh[group.rank], group if world_size > 1 else None, policy)
        output = model(batch(0, 0))  # buffers are in use
        with zero3.full_params(model, writeback=True):
            for name, parameter in model.named_parameters():
                assert parameter.dtype == FP32
                assert torch.equal(parameter, plain[name])
                parameter.data.mul_(1.001)  # lost in bf16
            with pytest.raises(RuntimeError, match=r"param_dtype=torch\.bfloat16\. Use `with zero3\.resident"):
                model(batch(0, 0))
            with pytest.raises(RuntimeError, match="leave one before"), zero3.resident(model):
                pass
        with zero3.resident(model):
            assert {p.dtype for p in model.parameters()} == {BF16}
            with pytest.raises(RuntimeError, match="leave one before"), zero3.full_params(model):
                pass
            inside = model(batch(1, 0)).detach()
        assert torch.equal(inside, model(batch(1, 0)).detach())
        saved = zero3.full_state_dict(model, rank0_only=False)
        assert all(torch.equal(saved[name], value * 1.001) for name, value in plain.items())
        zero3.load_full_state_dict(model, plain)
        assert torch.equal(model(batch(0, 0)), output)
        loss_of(model(batch(0, 0))).backward()
        assert all(p.grad is not None and p.grad.dtype == FP32 for p in model.get_trainable_chunk())

    plain = {name: value.detach().clone() for name, value in blocks().named_parameters()}
    fresh = [blocks() for _ in range(world_size)]
    run_ranks(world_size, body)


def test_a_graph_from_before_full_params_still_has_its_weights() -> None:
    def body(group: ThreadCommunicator, look: bool) -> list[Tensor]:
        model = in_layers(blocks(), group, ShardingPolicy(param_dtype=BF16))
        loss = loss_of(model(batch(0, group.rank)))
        if look:
            with zero3.full_params(model):
                pass
        loss.backward()
        return [chunk.grad.clone() for chunk in model.get_trainable_chunk() if chunk.grad is not None]

    torch.manual_seed(0)
    with torch.random.fork_rng():
        undisturbed = run_ranks(1, lambda group: body(group, False))
        disturbed = run_ranks(1, lambda group: body(group, True))
    assert len(undisturbed[0]) == 3
    assert all(torch.equal(a, b) for a, b in zip(disturbed[0], undisturbed[0], strict=True))


# -- edges


@dataclass
class Given:
    x: Tensor
    mask: Tensor
    note: str = ""


class Edges(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []

    def forward(self, given: Given, pair: tuple[Tensor, int], *, more: dict[str, Any]) -> OrderedDict[str, Any]:
        self.seen = [given.x.dtype, given.mask.dtype, pair[0].dtype, more["deep"][0].dtype, more["name"]]
        return OrderedDict(out=self.linear(given.x), mask=given.mask, given=given, n=pair[1])


def test_param_dtype_and_output_dtype_cast_floating_tensors_wherever_they_lie() -> None:
    layer = Zero3Layer(Edges(), policy=ShardingPolicy(param_dtype=BF16, output_dtype=FP64))
    x = torch.ones(2, WIDTH, requires_grad=True)
    given, mask = Given(x, torch.ones(2, dtype=torch.bool), "n"), torch.ones(2, dtype=torch.bool)
    output = layer(given, (x, 3), more={"deep": [x], "name": "more"})
    assert layer.seen == [BF16, torch.bool, BF16, BF16, "more"]
    assert given.x is x
    assert type(output) is OrderedDict
    assert (output["out"].dtype, output["given"].x.dtype, output["mask"].dtype, output["n"]) == (FP64, FP64, torch.bool, 3)
    assert torch.equal(output["mask"], mask)
    output["out"].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == FP32


def test_param_dtype_leaves_containers_without_floats_what_they_are() -> None:
    """The caller may look for what the module has put into them."""
    plain: list[Any] = [{"a": torch.arange(3), "b": [1, "x"]}, [torch.ones(2, dtype=BF16)], (None, 2), Given(torch.arange(2), None)]
    for value in plain:
        assert cast(value, BF16) is value
    mixed = {"floats": torch.ones(2), "others": plain[0]}
    found = cast(mixed, BF16)
    assert found["floats"].dtype == BF16 and found["others"] is plain[0] and mixed["floats"].dtype == FP32


def test_cast_forward_inputs_false_leaves_inputs_alone() -> None:
    layer = Zero3Layer(Edges(), policy=ShardingPolicy(param_dtype=BF16, cast_forward_inputs=False))
    x = torch.ones(2, WIDTH)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(Given(x, x), (x, 3), more={"deep": [x], "name": ""})
    assert layer.seen[0] == FP32


# -- sums


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_add_up_in_the_reduce_dtype(world_size: int) -> None:
    """bf16 chunks, fp32 sums: rounded once, although `chunk.grad` is bf16. Eight bits of mantissa would lose the small ones."""
    scales = [1.0, *[2.0**-10] * 64]

    def body(group: ThreadCommunicator) -> Tensor:
        policy = ShardingPolicy(reduce_dtype=FP32)
        layer = Zero3Layer(nn.Linear(1, 2, bias=False, dtype=BF16), policy=policy, process_group=group if world_size > 1 else None)
        (chunk,) = layer.get_trainable_chunk()
        for round_ in range(2):
            for scale in scales:
                layer(torch.full((1, 1), scale, dtype=BF16)).sum().backward()
            assert chunk.grad is not None
            assert chunk.grad.dtype == BF16
            assert chunk.grad.float().unique().item() == torch.tensor(sum(scales)).to(BF16).item(), round_
            if round_ == 0:
                chunk.grad.zero_()  # somebody's change counts: what the sum was rounded from is forgotten
        first = chunk.grad.clone()
        chunk.grad.mul_(2)
        layer(torch.full((1, 1), 1.0, dtype=BF16)).sum().backward()
        assert torch.equal(chunk.grad, 2 * first + 1)
        layer.zero_grad()
        assert chunk.grad is None
        return first

    assert sum(scales) == 1.0625
    run_ranks(world_size, body)


def test_fp16_sums_do_not_overflow_where_the_mean_does_not() -> None:
    def body(group: ThreadCommunicator) -> None:
        layer = Zero3Layer(nn.Linear(1, 4, bias=False), policy=ShardingPolicy(param_dtype=FP16), process_group=group)
        layer(torch.full((1, 1), 20000.0)).sum().backward()  # four of them are too much
        (chunk,) = layer.get_trainable_chunk()
        assert chunk.grad is not None
        assert chunk.grad.tolist() == [20000.0]

    run_ranks(4, body)


# -- what is told


def test_model_dtype_is_that_of_the_master_copy() -> None:
    policy = ShardingPolicy(param_dtype=BF16)
    model = in_layers(blocks(), None, policy)
    assert model.dtype == model[0].dtype == FP32
    assert "param_dtype=torch.bfloat16" in repr(policy)
    assert Zero3Layer(nn.ReLU()).dtype == torch.get_default_dtype()


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_dtypes_that_can_not_be_computed_in_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a torch.dtype or None, found 'bf16'"):
        ShardingPolicy(**{name: "bf16"})
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.bool):
        with pytest.raises(ValueError, match=f"{name} must be a floating dtype of 16 bits or more, found {dtype}"):
            ShardingPolicy(**{name: dtype})


def test_a_policy_for_shard_is_a_shardingpolicy_or_gives_one() -> None:
    for wrong in ("bf16", lambda name, module: "bf16"):
        with pytest.raises(TypeError, match=r"policy must be a zero3\.ShardingPolicy"):
            zero3.shard(blocks(), nn.Linear, policy=wrong)  # type: ignore[arg-type]


# -- on a device


@pytest.mark.parametrize("reduce_dtype", [BF16, FP32, FP64])
def test_casts_have_no_race_and_allocate_on_the_compute_stream(fake_device: FakeDevice, reduce_dtype: torch.dtype) -> None:
    group = EchoCommunicator()
    policy = ShardingPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    model = in_layers(blocks(), group, policy)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for _ in range(2):
            loss_of(model(batch(0, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
    fake_device.notice_freed()
    assert fake_device.races == []
    assert fake_device.allocations_on_lanes == []


def test_states_know_their_bytes() -> None:
    model = in_layers(blocks(), None, ShardingPolicy(param_dtype=BF16))
    elements = sum(p.numel() for p in blocks()[0].parameters())
    assert states_of(model)[0].full_nbytes() == 2 * elements


def test_fp16_with_a_gradscaler_skips_and_steps_as_torchs_does() -> None:
    """A scale that overflows at first: the same steps are skipped, by all ranks, and the others have the same bits."""
    world_size, steps, policy = 2, 6, ShardingPolicy(param_dtype=FP16, reduce_dtype=FP32)
    scales: list[float] = []
    plain = blocks()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    for step in range(steps):
        sums: dict[str, Tensor] = {}
        for rank in range(world_size):
            cast = {name: p.detach().to(FP16).requires_grad_() for name, p in plain.named_parameters()}
            loss = scaler.scale(loss_of(functional_call(plain, cast, batch(step, rank).to(FP16))))
            for name, gradient in zip(cast, torch.autograd.grad(loss, list(cast.values())), strict=True):
                sums[name] = sums[name] + gradient.float() if name in sums else gradient.float()
        for name, parameter in plain.named_parameters():
            parameter.grad = sums[name] / world_size
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())

    def body(group: ThreadCommunicator) -> tuple[list[float], dict[str, Tensor]]:
        model = in_layers(fresh[group.rank], group, policy)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=0.05)
        scaler, found = zero3.GradScaler("cpu", init_scale=2.0**18), []
        for step in range(steps):
            scaler.scale(loss_of(model(batch(step, group.rank)))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(scaler.get_scale())
        return found, zero3.full_state_dict(model, rank0_only=False)

    fresh = [blocks() for _ in range(world_size)]
    assert scales[0] < 2.0**18, "nothing was skipped"
    assert scales[-1] == scales[-2], "nothing was stepped"
    for found, values in run_ranks(world_size, body):
        assert found == scales
        for name, parameter in plain.named_parameters():
            assert torch.equal(values[name], parameter), name
