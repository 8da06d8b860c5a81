"""What goes wrong on a GPU, and what the user sees: no memory at any allocation, a kernel that fails late, a peer that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.device.test_order import on_host, run
from tests.device.test_parity import assert_same
from tests.device.training import Me, in_sequence, loss_of, sgd, sharded, values

STEPS = 4
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _recovered() -> Iterator[None]:
    from tests.device import simulated

    yield
    simulated.recover()


def _steps(me: Me, model: nn.Module, before: Callable[[int], None] = lambda step: None, *, guarded: bool = False) -> list[Tensor]:
    """Trains; a step that fails is made again, once."""
    optimizer = sgd(model)
    for step in range(STEPS):
        before(step)
        for _ in range(2):
            try:
                if guarded:
                    with zero3.step_guard(model) as found:
                        loss_of(model, me, step).backward()
                    if found.failed:
                        continue
                else:
                    loss_of(model, me, step).backward()
                zero3.clip_grad_norm_(model, 1.0)
                break
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return on_host(values(model))


def _allocations_of_a_step(make: Callable[[Me], nn.Module]) -> int:
    from tests.device import simulated

    def body(me: Me) -> int:
        model = make(me)
        counts = []
        _steps(me, model, lambda step: counts.append(simulated.C.allocations(me.device.index)))
        return counts[2] - counts[1]

    return int(min(run(2, body)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [sharded, in_sequence])
def test_out_of_memory_on_all_ranks_at_any_allocation(make: Callable[..., nn.Module]) -> None:
    """The step is made again and is right, and nothing stays behind."""
    from tests.device import simulated

    simulated.schedule("random", 1, progress=0.2)
    expected = run(2, lambda me: _steps(me, make(me)))
    count = _allocations_of_a_step(make)
    assert count > 50

    for number in range(1, count, max(1, count // 8)):

        def body(me: Me, number: int = number) -> tuple[list[Tensor], int]:
            model = make(me)
            held = []

            def fail(step: int) -> None:
                torch.cuda.synchronize(me.device)
                held.append(torch.cuda.memory_allocated(me.device))
                if step == 1:
                    simulated.C.fail_allocation(me.device.index, number)

            return _steps(me, model, fail), held[3] - held[1]

        found = run(2, body)
        assert_same([tensors for tensors, _ in found], expected)
        assert all(grown <= 512 for _, grown in found), f"allocation {number} of {count}: {found}"  # one answer of a comparison, on its way


def _allocations_of_a_guard(me: Me) -> int:
    from tests.device import simulated

    model, counts = sharded(me), []
    for step in range(2):  # the first guard learns
        counts.append(simulated.C.allocations(me.device.index))
        with zero3.step_guard(model):
            loss_of(model, me, step).backward()
    return int(simulated.C.allocations(me.device.index) - counts[1])


@pytest.mark.slow
def test_out_of_memory_on_one_rank_inside_step_guard_drops_the_micro_batch_on_all() -> None:
    from tests.device import simulated

    simulated.schedule("random", 2, progress=0.2)
    expected = run(2, lambda me: _steps(me, sharded(me), guarded=True))
    count = min(run(2, _allocations_of_a_guard))
    for number in [1, 2, *range(3, count, count // 4), count - 1, count]:  # the last two are those of the exchange at the end

        def body(me: Me, number: int = number) -> list[Tensor]:
            def fail(step: int) -> None:
                if step == 1 and me.rank == 1:
                    simulated.C.fail_allocation(me.device.index, number)

            return _steps(me, sharded(me), fail, guarded=True)

        assert_same(run(2, body), expected)


def _error_of(body: Callable[[], object]) -> Exception | None:
    try:
        body()
    except Exception as error:
        return error
    return None


def test_a_kernel_that_fails_late_is_told_as_such() -> None:
    """torch's own error comes from some later call, whichever that is. zero3 does not take it for a lost peer."""
    from tests.device import simulated

    simulated.schedule("random", 3, progress=0.5)
    for number in (1, 10, 40, 90, 150):

        def body(me: Me, number: int = number) -> Any:
            model = sharded(me)
            if me.rank == 0:
                simulated.C.fail_kernel(me.device.index, number)
            return [_error_of(lambda: _steps(me, model)), _error_of(lambda: loss_of(model, me, 9).item())]

        mine, other = run(2, body)
        for error in mine:  # such a device is lost: the process has to start anew
            assert isinstance(error, torch.AcceleratorError), error
            assert "a kernel failed some time before this call" in str(error)
            assert "another rank" not in str(error)
        assert "no stream can go on" in str(other[0])  # on a GPU the other ranks wait, until NCCL's watchdog ends them
        simulated.recover()


@pytest.mark.slow
def test_a_lost_peer_ends_the_process_by_the_watchdog() -> None:
    command = [sys.executable, "-m", "tests.device.lost_peer"]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200)
    assert run.returncode == -signal.SIGABRT, run.stderr
    assert run.stdout.splitlines() == ["rank 0 goes on alone"]
    assert "watchdog" in run.stderr and "(1 of 2 ranks have started it)" in run.stderr


def test_torchs_grad_scaler_is_refused_for_gradients_on_the_host() -> None:
    """It copies the scale to the host, and does not wait for the copy."""
    from tests.device import simulated

    simulated.schedule("demand", 1)

    def body(me: Me) -> None:
        model = sharded(me, offload="cpu")
        scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
        scaler.scale(loss_of(model, me, 0)).backward()
        with pytest.raises(RuntimeError, match=r"rest in host memory.*use zero3\.GradScaler"):
            scaler.step(sgd(model))

    run(2, body)


def test_gradients_on_the_host_take_no_memory_of_the_device() -> None:
    """Nor do chunks: after a step the device holds what it held before the model was made."""
    from tests.device import simulated

    simulated.schedule("demand", 1)
    simulated.left_behind()  # it would be freed in between

    def body(me: Me) -> tuple[int, int, int]:
        begin = torch.cuda.memory_allocated(me.device)
        model = sharded(me, offload="cpu")
        made = torch.cuda.memory_allocated(me.device) - begin
        for step in range(3):
            loss_of(model, me, step).backward()
        chunks = sum(chunk.nbytes for chunk in zero3.get_trainable_chunk(model))
        return made, torch.cuda.memory_allocated(me.device) - begin, chunks

    for made, after, chunks in run(2, body):
        assert made < chunks
        assert after < chunks
