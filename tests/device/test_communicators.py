"""Groups, and the communicators behind them: subgroups, a second one for reductions, and two at work at once."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device.scenarios import SCENARIOS
from tests.device.test_order import on_host, run
from tests.device.test_parity import Setting, assert_same, in_any_order, in_order
from tests.device.training import Me, sharded, train

pytestmark = pytest.mark.slow


def test_a_split_of_a_bound_group_waits_for_ranks_that_are_not_in_it() -> None:
    """Why `separate_backup_group` refuses it: this is torch's own."""
    from tests.device import simulated

    simulated.C.set_patience(1.0)

    def body(me: Me) -> str:
        if me.rank == 2:
            return ""
        with pytest.raises(RuntimeError) as raised:
            dist.new_group([0, 1], use_local_synchronization=True)
        return str(raised.value)

    try:
        assert all("waits for all 3 ranks" in text for text in run(3, body, bind=True)[:2])
    finally:
        simulated.C.set_patience(300.0)
        simulated.recover()


@pytest.mark.parametrize("bind", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_subgroup(bind: bool, separate: bool) -> None:
    """Two of three ranks train. A second communicator of a bound subgroup is refused by name, before anybody waits."""
    from tests.device import simulated

    simulated.schedule("random", 3)

    def body(me: Me) -> Any:
        me.group = dist.new_group([0, 1])
        if me.rank == 2:
            return None
        if bind and separate:
            with pytest.raises(ValueError, match=f"rank {me.rank}: separate_backup_group=True, .* has 2 of 3 ranks, but devices are bound"):
                train(sharded(me, separate_backup_group=separate), me)
            return None
        return on_host(train(sharded(me, separate_backup_group=separate), me))

    found = run(3, body, bind=bind)
    if not (bind and separate):
        assert_same(found[:2], in_order(SCENARIOS["shard"]))


def test_a_second_communicator_waits_as_long_as_the_first() -> None:
    """torch gives a new group its default, 10 minutes."""

    def body(me: Me) -> list[float]:
        model = sharded(me, separate_backup_group=True)
        train(model, me, 1)
        groups = list(dist.distributed_c10d._world.pg_map)
        return [group._get_backend(me.device).options._timeout.total_seconds() for group in groups]

    assert run(2, body) == [[60.0, 60.0]] * 2  # as `run_ranks` has asked


def test_a_second_communicator_goes_with_its_model() -> None:
    def body(me: Me) -> list[int]:
        counts = [len(dist.distributed_c10d._world.pg_map)]
        for _ in range(2):
            model = sharded(me, separate_backup_group=True)
            train(model, me, 1)
            counts.append(len(dist.distributed_c10d._world.pg_map))
            del model
            gc.collect()
        return [*counts, len(dist.distributed_c10d._world.pg_map)]

    assert run(2, body) == [[1, 2, 2, 1]] * 2


@pytest.mark.parametrize("bind", [False, True])
def test_ranks_without_data_in_a_subgroup(bind: bool) -> None:
    from tests.device import simulated

    simulated.schedule("random", 3)

    def body(me: Me) -> Any:
        me.group = dist.new_group([0, 1])
        return None if me.rank == 2 else on_host(list(SCENARIOS["uneven_inputs"](me)))

    assert_same(run(3, body, bind=bind)[:2], in_order(SCENARIOS["uneven_inputs"]))


# -- two communicators at work at once, on devices that hold only one waiting collective: CUDA promises no more.
# With one communicator every scenario runs there: `room=1` in test_parity.py.


@pytest.mark.parametrize("policy", ["compute", "demand"])
def test_ranks_without_data_hear_of_collectives_through_the_same_communicator(policy: str) -> None:
    """Through another one, an announcement on one rank and a reduction on the other would wait for each other."""
    scenario = SCENARIOS["uneven_inputs"]
    for seed in range(3):
        assert_same(in_any_order(scenario, Setting(policy, "exact", seed, 0.2, room=1)), in_order(scenario))


@pytest.mark.parametrize("circle", [False, True])
def test_ranks_that_begin_collectives_of_two_groups_in_different_orders_are_told(circle: bool) -> None:
    """Also where streams could go on: on another day each device could hold the collective that the other one waits for."""
    from tests.device import simulated

    def body(me: Me) -> str:
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        tensors = [torch.ones(2, device=me.device) for _ in groups]
        try:
            for number in (1, 0) if circle and me.rank else (0, 1):
                with torch.Stream(me.device):
                    dist.all_reduce(tensors[number], group=groups[number])
            torch.accelerator.synchronize(me.device)
        except RuntimeError as error:
            return str(error)
        return ""

    simulated.schedule("random", 1)
    told = "".join(run(2, body))
    simulated.recover()
    assert ("ranks begin collectives in different orders: device" in told) == circle, told


def _error_where_there_is_little_room(seed: int, **policy: Any) -> str:
    from tests.device import simulated

    simulated.schedule("random", seed, progress=0.3)
    simulated.C.set_room(1)
    try:
        run(2, lambda me: train(sharded(me, separate_backup_group=True, **policy), me) and None)
    except RuntimeError as error:
        return str(error)
    finally:
        simulated.recover()
    return ""


@pytest.mark.parametrize("policy", [{"prefetch_depth": 0}, {"stage": 1}, {"stage": 2}, {"reshard_after_forward": False}], ids=str)
def test_two_communicators_are_safe_where_no_gather_meets_a_reduction(policy: dict[str, Any]) -> None:
    assert [_error_where_there_is_little_room(seed, **policy) for seed in range(4)] == [""] * 4


@pytest.mark.parametrize("policy", [{}, {"prefetch_depth": 2}, {"transactional": True}], ids=str)
def test_two_communicators_may_wait_for_each_other(policy: dict[str, Any]) -> None:
    """NCCL's authors warn of it. So `separate_backup_group` is off by default."""
    found = [error for seed in range(4) if (error := _error_where_there_is_little_room(seed, **policy))]
    assert found
    assert all("no stream can go on" in text and "1 of 2 ranks have started it" in text for text in found)


def test_in_order_a_stream_waits_for_another_without_the_host() -> None:
    """Python's collector of cycles, in one rank's thread, may end the lanes of another rank's model."""
    from tests.device import simulated

    simulated.schedule(eager=True)
    comes = threading.Event()

    def body(me: Me) -> float:
        total = torch.ones(1, device=me.device)
        dist.all_reduce(total)  # the first one makes the communicator, and for that the hosts meet
        if me.rank == 1:
            comes.set()
        else:
            comes.wait()
            lane = torch.Stream(torch.device("cuda", 1))
            for _ in range(100):  # one of them comes while the other rank's stream is in the middle of its sum
                torch.accelerator.current_stream(torch.device("cuda", 1)).wait_stream(lane)
                time.sleep(1e-3)
        dist.all_reduce(total)
        return total.item()

    assert run(2, body) == [4, 4]


def _experts_where_there_is_room_for(count: int, seed: int) -> str:
    from tests.device import simulated

    scenario = SCENARIOS["experts_at_home_prefetch"]
    simulated.schedule("random", seed, progress=0.3)
    simulated.C.set_room(count)
    try:
        run(2, lambda me: on_host(list(scenario(me))) and None)
    except RuntimeError as error:
        return str(error)
    finally:
        simulated.C.set_room(0)
        simulated.recover()
    return ""


def test_tokens_and_gathers_need_room_for_two() -> None:
    """Ranks begin the transfers of both communicators in one order (the device would tell otherwise), and never three at once."""
    assert [_experts_where_there_is_room_for(2, seed) for seed in range(4)] == [""] * 4
    found = [error for seed in range(6) if (error := _experts_where_there_is_room_for(1, seed))]
    assert found and all("no stream can go on" in text for text in found)
