"""Where streams could come apart: another current device, the user's own streams, subgroups, two communicators at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.device.scenarios import SCENARIOS
from tests.device.test_parity import assert_same, in_order
from tests.device.training import WIDTH, Block, Me, Stack, built, in_sequence, loss_of, scratch, sgd, sharded, train

pytestmark = pytest.mark.slow

POLICIES = ("random", "lanes", "compute", "demand")


def run(world_size: int, body: Callable[[Me], Any], **options: Any) -> list[Any]:
    from tests.device.ranks import run_ranks

    device_of, directory = options.get("device_of", lambda rank: rank), scratch()
    return run_ranks(world_size, lambda rank: body(Me(rank, world_size, torch.device("cuda", device_of(rank)), None, directory)), **options)


def on_host(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


# -- the device of the model is not the current device


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["shard", "prefetch_depth_2"])
def test_device_argument_alone_says_where_the_model_computes(policy: str, name: str) -> None:
    from tests.device import simulated

    expected = in_order(SCENARIOS[name])
    simulated.schedule(policy, 1, progress=0.2)
    found = run(2, lambda me: on_host(list(SCENARIOS[name](me))), device_of=lambda rank: rank + 2, set_device=False)
    assert_same(found, expected)


class Recomputed(nn.Module):
    """Layers in layers, called inside of checkpoints: a recomputation calls them with tensors of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Outer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x.view(x.shape)).tanh())


@pytest.mark.parametrize("ranks", [(), (0,), (1,), (0, 1)])
def test_ranks_may_have_made_other_numbers_of_graph_nodes(ranks: tuple[int, ...]) -> None:
    """A device has a thread of its own for backward, and a thread numbers its nodes alone: no number is compared with another thread's."""
    from tests.device import simulated
    from zero3.core.backward import Backward

    simulated.schedule(eager=True)
    entered: dict[int, list[str]] = {0: [], 1: []}

    def step(me: Me) -> None:
        one = torch.ones((), requires_grad=True)
        made = [one * 1 for _ in range(3000)] if me.rank in ranks else []
        model = zero3.shard(built(Recomputed), [Outer, Block], device=me.device)
        for number in range(2):
            (loss_of(model, me, number) + loss_of(model, me, 5)).backward()
            model.zero_grad()
        del made

    real = Backward._before

    def noted(backward: Any, trace: Any, call: Any, *gradients: Any) -> None:
        entered[torch.accelerator.current_device_index()].append(call.layer.label)
        real(backward, trace, call)

    with patch.object(Backward, "_before", noted):
        run(2, step)
    assert entered[0] == entered[1]
    assert set(Counter(entered[0]).values()) == {4}  # two steps of two forwards


def test_a_layer_around_layers_computes_where_they_do() -> None:
    """It has no tensor of its own that could tell."""
    from tests.device import simulated

    simulated.schedule("random", 1)

    def around(me: Me, device: torch.device | None) -> list[Tensor]:
        inner = nn.Sequential(*[zero3.Zero3Layer(built(Block, number), device=me.device) for number in range(2)])
        return on_host(train(zero3.Zero3Layer(inner, device=device), me))

    found, expected = run(2, lambda me: around(me, None)), run(2, lambda me: around(me, me.device))
    assert_same(found, expected)


def test_profile_measures_on_the_device_of_the_model() -> None:
    from tests.device import simulated

    simulated.schedule("random", 2)

    def body(me: Me) -> list[float]:
        def hold_up(*_: Any) -> None:
            with torch.cuda.device(me.device):
                torch.cuda._sleep(20_000_000)  # 10 ms

        model = in_sequence(me)
        model[1].module.register_forward_pre_hook(hold_up)
        train(model, me, 1)
        with zero3.profile(model) as profile:
            train(model, me, 1)
        return [layer.compute_ms for layer in profile.layers if layer.label.startswith("layer '1'")]

    found = run(2, body, device_of=lambda rank: rank + 2, set_device=False)
    assert all(len(times) == 1 and times[0] >= 10 for times in found), found


def test_lanes_have_high_priority() -> None:
    from tests.device import simulated

    before = [len(simulated.C.priorities(device)) for device in range(2)]
    run(2, lambda me: train(sharded(me), me, 1) and None)
    for device in range(2):
        assert simulated.C.priorities(device)[before[device] :] == [-1, -1]


# -- a stream of the user's own


def _on_a_side_stream(me: Me, *, side: bool, model_too: bool = False, backward: bool = True, step: bool = False) -> list[Tensor]:
    other, default = torch.cuda.Stream(me.device), torch.cuda.current_stream(me.device)

    def there(yes: bool) -> Any:
        return torch.cuda.stream(other) if side and yes else nullcontext()

    with there(model_too):
        model = sharded(me)
    default.wait_stream(other)
    optimizer, losses = sgd(model), []
    for number in range(3):
        other.wait_stream(default)
        with there(True):
            loss = loss_of(model, me, number)
        if not backward:
            default.wait_stream(other)
        with there(backward):
            loss.backward()
        if not step:
            default.wait_stream(other)
        with there(step):
            zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        default.wait_stream(other)
        losses.append(loss.detach())
    return on_host([*losses, *zero3.full_state_dict(model, rank0_only=False).values()])


@pytest.mark.parametrize(
    "options",
    [{}, {"model_too": True, "step": True}, {"backward": False}],
    ids=["forward and backward", "all", "forward alone"],
)
def test_a_side_stream_of_the_user(options: dict[str, bool]) -> None:
    """With exact memory: strict memory calls plain torch wrong too, where several streams compute."""
    from tests.device import simulated

    simulated.schedule(eager=True)
    expected = run(2, lambda me: _on_a_side_stream(me, side=False))
    for seed, policy in enumerate(POLICIES):
        simulated.schedule(policy, seed, progress=0.1, memory="exact")
        assert_same(run(2, lambda me: _on_a_side_stream(me, side=True, **options)), expected)


# -- the host


@pytest.mark.parametrize("make", [sharded, in_sequence])
def test_a_steady_step_never_makes_the_host_wait(make: Callable[..., nn.Module]) -> None:
    from tests.device import simulated

    simulated.schedule("random", 5)

    def body(me: Me) -> None:
        model = make(me)
        optimizer = sgd(model)
        batches = [me.tensor(step, 5, 16) for step in range(5)]
        for step, x in enumerate(batches):
            steady.wait()
            if me.rank == 0:
                torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
            steady.wait()
            model(x).pow(2).mean().backward()
            zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    steady = threading.Barrier(2)
    try:
        run(2, body)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_forward_under_offload_never_makes_the_host_wait() -> None:
    """Neither a first micro-batch nor one after it: between forward and backward whoever asks for chunks' values waits."""
    from tests.device import simulated

    def body(me: Me) -> list[tuple[list[str], int]]:
        model = sharded(replace(me, offload="cpu"), compare_every=100)
        optimizer, found = sgd(model), []
        for number in range(9):
            simulated.C.waits(), simulated.C.event_waits()  # those so far
            loss = loss_of(model, me, number)
            [chunk.requires_grad and chunk.grad is None for chunk in model.parameters()]
            if number % 3 == 0:
                optimizer.zero_grad()
            found.append((simulated.C.waits(), simulated.C.event_waits()))
            loss.backward()
            if number % 3 == 2:
                optimizer.step()
        return found[3:]

    simulated.schedule("random", 5)
    assert run(1, body) == [[([], 0)] * 6]


def test_plain_torch_is_the_control_for_side_streams() -> None:
    """Strict memory's false alarm: plain torch on a side stream reads memory that no GPU would have handed out yet."""
    from tests.device import simulated

    def body(me: Me) -> list[Tensor]:
        other, default = torch.cuda.Stream(me.device), torch.cuda.current_stream(me.device)
        model = built(lambda: Stack(Block)).to(me.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            other.wait_stream(default)
            with torch.cuda.stream(other):
                loss_of(model, me, step).backward()
            default.wait_stream(other)
            optimizer.step()
            optimizer.zero_grad()
        return on_host([p.detach() for p in model.parameters()])

    simulated.schedule(eager=True)
    expected = run(1, body)
    for seed, policy in enumerate(POLICIES):
        simulated.schedule(policy, seed, memory="exact")
        assert_same(run(1, body), expected)


def test_report_under_offload_tells_the_pinned_memory_that_torch_takes() -> None:
    from tests.device import simulated

    def body(me: Me) -> tuple[int, int]:
        before = simulated.C.pinned()
        report = zero3.report(model := sharded(replace(me, offload="cpu")))
        taken = simulated.C.pinned() - before
        train(model, me, 2)
        assert simulated.C.pinned() - before >= taken
        return taken, sum(report.chunks.values()) + report.gradients

    simulated.schedule("random", 1)
    simulated.left_behind()  # it would be given back meanwhile
    [(taken, told)] = run(1, body)
    assert taken == told


@pytest.mark.parametrize("where", ["cpu", "files"])
def test_clipping_of_gradients_on_the_host_waits_for_the_norm_alone(where: str) -> None:
    from tests.device import simulated

    simulated.schedule("random", 1)
    together = threading.Barrier(2)

    def body(me: Me) -> list[str]:
        model = sharded(replace(me, offload="cpu" if where == "cpu" else me.directory))
        optimizer = zero3.offload_optimizer(sgd(model))
        for step in range(3):
            loss_of(model, me, step).backward()
            if together.wait() == 0:
                simulated.C.waits()  # those so far
            together.wait()
            zero3.clip_grad_norm_(model, 1e-3)
            together.wait()
            waits = list(simulated.C.waits()) if me.rank == 0 else []
            together.wait()
            optimizer.step()
            optimizer.zero_grad()
        return waits

    assert run(2, body)[0] == 2 * ["copy_ to host"]
