"""Lives of models on the simulated device: those of tests/core/test_stateful.py and tests/core/test_ordering_fuzz.py, in any schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from torch import Tensor

from tests.core import test_ordering_fuzz as fuzz
from tests.core.test_random_programs import Node, build, set_rank
from tests.core.test_stateful import Life
from tests.device import simulated
from tests.device.ranks import BACKEND, run_ranks, threads_as_ranks
from tests.device.test_parity import assert_same
from tests.device.training import values
from tests.support.crew import Crew, Member
from zero3.comm.process_group import GroupCommunicator

schedules = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(simulated.POLICIES)),
        "seed": st.integers(0, 10**6),
        "progress": st.sampled_from([0.0, 0.05, 0.3]),
        "memory": st.sampled_from(["strict", "exact"]),
    }
)
rooms = st.sampled_from([0, 1])  # collectives that a device can hold at once, 0 for any number: one communicator needs room for one


class _DeviceCrew(Crew):
    """Each rank has a device, and a communicator on "nccl"."""

    def __init__(self, world_size: int) -> None:
        self._end = ExitStack()
        self._joined = self._end.enter_context(threads_as_ranks(world_size))
        super().__init__(world_size)

    @contextmanager
    def joined(self, me: Member, rank: int) -> Iterator[None]:
        me.device = torch.device(simulated.TYPE, rank)
        with self._joined(rank, rank):
            me.group = GroupCommunicator(torch.distributed.group.WORLD, BACKEND, me.device)
            me.group.log = []
            yield

    def dismiss(self) -> None:
        super().dismiss()
        self._end.close()


class LifeOnDevice(Life):
    hire = _DeviceCrew

    @initialize(schedule=schedules, room=rooms)
    def choose(self, schedule: dict[str, Any], room: int) -> None:
        simulated.schedule(**schedule)
        simulated.C.set_room(room)

    def teardown(self) -> None:
        super().teardown()
        simulated.recover()


def _led(nodes: tuple[Node, ...], policy: Any, shard: Any, actions: Sequence[fuzz.Action]) -> list[list[Tensor]]:
    """The values of a model's parameters after its life, on each of two ranks."""
    models = [build(nodes) for _ in range(2)]  # here: threads share one random generator

    def body(rank: int) -> list[Tensor]:
        device = torch.device(simulated.TYPE, rank)
        with device:  # for layers without a tensor
            model = shard(models[rank].to(device), None, policy)
        set_rank(model, rank)
        fuzz.lead(model, actions)
        return [value.cpu() for value in values(model)]

    return run_ranks(2, body)


def _in_any_order(
    nodes: tuple[Node, ...], policy: Any, shard: Any, actions: Sequence[fuzz.Action], schedule: dict[str, Any], room: int
) -> None:
    simulated.schedule(eager=True)
    expected = _led(nodes, policy, shard, actions)
    simulated.schedule(**schedule)
    simulated.C.set_room(0 if policy.separate_backup_group else room)
    try:
        assert_same(_led(nodes, policy, shard, actions), expected)
    finally:
        simulated.recover()


def machines(drawn: settings) -> None:
    """Draws lives of the state machine: they agree with plain torch on the CPU."""
    run_state_machine_as_test(LifeOnDevice, settings=drawn)


def models(drawn: settings) -> None:
    """Draws models of the ordering fuzzer and their lives: their bits are those of execution in order."""
    drawn(given(**fuzz.lives, schedule=schedules, room=rooms)(_in_any_order))()
