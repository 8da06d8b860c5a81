"""What the parts of a chunk, and the stages of a gradient's way, promise each other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import accounts_of, chunks_of
from tests.support.models import mlp, rows
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from zero3 import NF4, ShardingPolicy
from zero3.comm.errors import NamingFailures, Subject
from zero3.comm.streams import HostLane, Lanes
from zero3.core.account import Account
from zero3.core.chunk import Plain
from zero3.core.flow import Add, Average, Flow, ReduceScatter
from zero3.core.gradient_buffer import GradientBuffer
from zero3.core.layout import ChunkLayout, GradientLayout
from zero3.core.reached import Reached
from zero3.core.ticket import Ticket
from zero3.stores.files import Files, PutAway
from zero3.stores.resting import Home


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what no cycle holds is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Taking:
    """An account of one rank's chunk, which notes what lands."""

    def __init__(self) -> None:
        shard = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        layout = ChunkLayout.build([("w", (4,))], 1)
        at = SimpleNamespace(layout=layout)
        self.chunk = SimpleNamespace(layout=layout, at=at, shard=shard, device=shard.device, parts=[])
        self.among = SimpleNamespace(averaged_over=1)
        self.landed: list[tuple[Tensor, Tensor | None]] = []

    def land(self, landed: Tensor, exact: Tensor | None, reached: Reached | None) -> None:
        assert reached is None
        self.landed.append((landed, exact))


def started(account: Any, *behind: Any) -> Ticket:
    buffer = GradientBuffer(GradientLayout(account.chunk.layout, 0), torch.float32, account.chunk.device, torch.ones(0))
    buffer.add(0, torch.full((4,), 1 + 2**-12))
    flow = Flow(ReduceScatter(None, torch.float32), Average(torch.bfloat16, mean=True), *behind, typed=lambda part, gradient: gradient)
    group: Any = SimpleNamespace(takes_pieces=False, rank=0, world_size=1)
    gradient = flow.take_room(account, group, buffer)
    names = NamingFailures(group, "reducing", Subject("layer 'a'"))
    return flow.start(gradient, Lanes(HostLane(), HostLane()), names)


def far_store(kind: str, tmp_path: Path) -> tuple[Any, ...]:
    store: Any = SimpleNamespace(to_copy_into=lambda numel, dtype: torch.empty(numel, dtype=dtype))
    if kind == "here":
        return (Add(),)
    return (Home(store), Add()) if kind == "pinned" else (Home(store), PutAway(Files(str(tmp_path), far=True)))


@pytest.mark.parametrize("kind", ["here", "pinned", "files"])
def test_a_sum_that_is_wider_than_the_gradient_comes_to_the_end_of_every_way(kind: str, tmp_path: Path) -> None:
    """Micro-batches are added up in it."""
    account = Taking()
    started(account, *far_store(kind, tmp_path)).wait()
    ((landed, exact),) = account.landed
    assert landed.dtype == torch.bfloat16 and exact is not None
    assert exact.dtype == torch.float32 and bool((exact == 1 + 2**-12).all())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("kind", ["here", "pinned"])
def test_a_ticket_that_nobody_waits_for_holds_nothing_in_a_cycle(kind: str, tmp_path: Path) -> None:
    account = Taking()
    ticket, seen = started(account, *far_store(kind, tmp_path)), weakref.ref(account)
    del account
    assert seen() is not None
    del ticket
    assert seen() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_gather_whose_start_fails_fills_no_full_buffer(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """At stage 2 it would be trusted from the next forward on."""
    x, put = rows(3).float(), Plain.put
    failing: set[int] = set()

    def fails(self: Plain, chunk: Any, room: Any) -> Tensor:
        own = put(self, chunk, room)
        if chunk.index in failing:
            failing.remove(chunk.index)
            raise error("the start of a gather")
        return own

    monkeypatch.setattr(Plain, "put", fails)

    def body(group: ThreadCommunicator) -> tuple[Tensor, Tensor]:
        def double(model: nn.Module) -> None:
            with torch.no_grad():
                for chunk in zero3.get_trainable_chunk(model):
                    chunk.mul_(2)

        policy = ShardingPolicy(stage=2, param_dtype=torch.bfloat16)
        right, model = (zero3.shard(mlp().float(), nn.Linear, policy=policy, process_group=process_group(group)) for _ in range(2))
        double(right)
        model(x)
        double(model)
        group.exchange(b"", x.device)
        failing.add(group.rank)
        group.exchange(b"", x.device)
        with pytest.raises(error):
            model(x)
        group.exchange(b"", x.device)
        return right(x), model(x)

    for expected, found in run_ranks(2, body):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_of_two_loads_inside_full_params_the_second_one_counts(world_size: int, inference: bool) -> None:
    """For quantised parameters too, whose values are shown beside their codes. `inference`: they are first shown in inference mode."""

    torch.manual_seed(0)  # here: threads would draw from one generator
    loads = [{f"0.{name}": torch.randn_like(value) for name, value in nn.Linear(64, 64).state_dict().items()} for _ in range(2)]

    def body(group: ThreadCommunicator) -> Tensor:
        layer = nn.Linear(64, 64).requires_grad_(False)
        model = zero3.shard(nn.Sequential(layer), nn.Linear, policy=ShardingPolicy(quantize=NF4()), process_group=process_group(group))
        with ExitStack() as stack:
            with torch.inference_mode(inference):
                stack.enter_context(zero3.full_params(model))
            for load in loads:
                zero3.load_full_state_dict(model, load)
        return zero3.full_state_dict(model, rank0_only=False)["0.weight"]

    second = loads[1]["0.weight"]
    expected = NF4().dequantize(NF4().quantize(second), second.dtype)
    assert all(torch.equal(found, expected) for found in run_ranks(world_size, body))


def test_kept_gradients_stay_where_memory_runs_out_before_they_are_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mlp()
    plain(rows(3)).pow(2).mean().backward()
    real, failing = Average.take_room, [True, True]

    def take_room(self: Average, *args: Any) -> None:
        if failing:
            failing.pop()
            raise RuntimeError("out of memory")
        real(self, *args)

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(mlp(), nn.Linear, process_group=process_group(group))
        with zero3.no_sync(model):
            model(rows(3)).pow(2).mean().backward()
        group.exchange(b"", torch.device("cpu"))
        if group.rank == 0:
            monkeypatch.setattr(Average, "take_room", take_room)
        group.exchange(b"", torch.device("cpu"))
        with pytest.raises(RuntimeError, match="out of memory"):
            zero3.reduce_gradients(model)
        group.exchange(b"", torch.device("cpu"))
        zero3.reduce_gradients(model)
        with zero3.full_gradients(model) as gradients:
            return {name: value.clone() for name, value in gradients.items()}

    for found in run_ranks(2, body):
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("quantize", [None, NF4()])
def test_a_deleted_model_is_freed_at_once(quantize: NF4 | None) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    model[0].requires_grad_(False)
    model = zero3.shard(model, nn.Linear, policy=ShardingPolicy(quantize=quantize, param_dtype=torch.bfloat16))
    model(torch.randn(2, 64)).sum().backward()
    seen: list[Any] = [weakref.ref(chunk) for chunk in chunks_of(model)]
    seen += [weakref.ref(account) for account in accounts_of(model)]
    assert all(isinstance(each(), Account) or hasattr(each(), "full") for each in seen)
    seen += [weakref.ref(module) for module in (model, model[0].module, model[1].module)]
    del model
    assert not [each() for each in seen if each() is not None]


def test_memory_that_runs_out_for_a_gather_does_so_before_the_gather_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def room(*given: Any) -> None:
        raise RuntimeError("out of memory")

    layer = zero3.Zero3Layer(nn.Linear(3, 3), policy=ShardingPolicy(param_dtype=torch.bfloat16))
    monkeypatch.setattr(Plain, "room", room)
    with pytest.raises(RuntimeError, match="out of memory"):
        layer(torch.ones(2, 3))
    assert not layer._state.log.entries, "the other ranks would wait for this one's part"
