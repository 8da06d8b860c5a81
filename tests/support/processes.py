"""Ranks as processes on gloo over the loopback: what threads can't show (real transfers, deaths, timeouts).

    values = on_ranks(2, body, argument)          # body(rank, argument) on each rank, what each returned, in rank order
    outcomes = try_on_ranks(2, body, argument)    # the same, errors and deaths included

`body` is a function of a test module. Each run has a process group of its own; the processes are reused from run to
run, and replaced after one that left them in doubt (a timeout, a death) or that asked for `fresh` ones.
"""

from __future__ import annotations

import atexit
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
# so that a rank starts in 0.1 s and not in 3 (an optimizer's first step imports dynamo)
_PRELOAD = ["torch.distributed", "torch._dynamo", "pytest"]
_PRELOAD_TRAINERS = ["transformers.trainer", "peft"]
_PRELOAD_MODELS = ["transformers.models.auto.modeling_auto", "transformers.models.gpt_neox.modeling_gpt_neox"]


PROMPT = 30.0  # seconds: far more than any error takes that waits for no timeout, and far less than the group's timeout


class Rank(NamedTuple):
    """What a body is told. `scratch` is a directory that all ranks of the run share, deleted after it."""

    number: int
    world_size: int
    scratch: Path


@dataclass(frozen=True)
class Outcome:
    """How one rank's body ended: `error` is the exception's type name, "killed" for a process that died, "" if it returned."""

    value: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""
    seconds: float = 0.0


class RankFailed(Exception):
    pass


class _Job(NamedTuple):
    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    rank: Rank
    group_timeout: float
    debug: str
    process_group: bool
    last: bool  # the process ends with it, so that its connections close


class _Worker:
    def __init__(self) -> None:
        device = ["tests.device.simulated"] if "tests.device.simulated" in sys.modules else []  # first, because it comes before torch
        models = _PRELOAD_MODELS if "transformers" in sys.modules else []
        trainers = _PRELOAD_TRAINERS if "tests.support.trainers" in sys.modules else []
        _CONTEXT.set_forkserver_preload([*device, *_PRELOAD, *models, *trainers])  # before the first one
        self.connection, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, job: _Job) -> None:
        self.connection.send_bytes(pickle.dumps(job))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


_idle: list[_Worker] = []


def on_ranks(world_size: int, body: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
    """What `body(rank, *arguments)` returned on each rank; RankFailed, with every rank's traceback, if one raised."""
    outcomes = try_on_ranks(world_size, body, *arguments, **options)
    if any(outcome.error for outcome in outcomes):
        raise RankFailed("\n".join(f"rank {r}: {o.error or 'ended well'}: {o.text}\n{o.trace}" for r, o in enumerate(outcomes)))
    return [outcome.value for outcome in outcomes]


def try_on_ranks(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    fresh: bool = False,
    group_timeout: float = 60.0,
    join_timeout: float = 250.0,
    debug: str = "DETAIL",
    process_group: bool = True,
) -> list[Outcome]:
    """How `body(rank, *arguments)` ended on each rank.

    Args:
        fresh: new processes, which end with the body: for bodies that kill ranks or wait for others to notice.
        group_timeout: seconds after which a collective that the others don't join raises.
        join_timeout: seconds after which every rank is killed and TimeoutError raised.
        debug: torch's distributed debug level. DETAIL turns mismatched collectives into errors.
        process_group: False leaves it to the body to make one, or none.
    """
    workers = [_Worker() for _ in range(world_size)] if fresh else [_idle.pop() if _idle else _Worker() for _ in range(world_size)]
    scratch = Path(tempfile.mkdtemp(prefix="ranks-"))
    reusable = False
    try:
        for number, worker in enumerate(workers):
            worker.send(_Job(body, arguments, Rank(number, world_size, scratch), group_timeout, debug, process_group, fresh))
        outcomes = _collect(workers, join_timeout)
        reusable = not fresh and all(outcome.error != "killed" for outcome in outcomes)
        return outcomes
    finally:
        for worker in workers:
            if reusable:
                _idle.append(worker)
            else:
                worker.kill()
        shutil.rmtree(scratch, ignore_errors=True)


def _collect(workers: list[_Worker], join_timeout: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + join_timeout
    waiting: dict[Any, int] = {worker.connection: number for number, worker in enumerate(workers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for number in waiting.values():
                os.kill(workers[number].process.pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
            raise TimeoutError(f"ranks {sorted(waiting.values())} are stuck after {join_timeout} s; their stacks are on stderr")
        for connection in ready:
            number = waiting.pop(connection)
            try:
                outcomes[number] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                workers[number].process.join(5)
                outcomes[number] = Outcome(error="killed", text=f"exit code {workers[number].process.exitcode}")
    return [outcomes[number] for number in range(len(workers))]


@atexit.register
def _end_all() -> None:
    while _idle:
        _idle.pop().kill()


def _serve(connection: Connection) -> None:
    """The life of a rank's process: one job after another, until the other end is closed."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    faulthandler.register(signal.SIGUSR1)
    gc.freeze()  # what the server of forks imported: else every collection below walks through all of it
    while True:
        try:
            job: _Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(pickle.dumps(_run(job)))
        if job.last:
            return


def _run(job: _Job) -> Outcome:
    began = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if job.process_group:
                start_group(job.rank, job.group_timeout, job.debug)
            began = time.monotonic()  # the body's
            value = job.body(job.rank, *job.arguments)
            pickle.dumps(value)
            return Outcome(value, seconds=time.monotonic() - began)
    except BaseException as error:
        trace = traceback.format_exc()
        return Outcome(None, type(error).__name__, str(error), trace, time.monotonic() - began)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # the last reference to the group closes its connections


def start_group(rank: Rank, timeout: float = 60.0, debug: str = "DETAIL", name: str = "rendezvous") -> None:
    """A gloo group of all ranks, as the default one.

    Ranks begin to connect together, since `timeout` may be less than what a process needs to start on a busy machine. And
    they leave together: were one done, and gone, while another still connects, gloo would call that one's connection lost.
    """
    dist.set_debug_level(getattr(dist.DebugLevel, debug))
    store = dist.FileStore(str(rank.scratch / name), rank.world_size)
    _meet(store, rank, "before")
    dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.world_size, timeout=datetime.timedelta(seconds=timeout))
    _meet(store, rank, "after")


def _meet(store: dist.Store, rank: Rank, where: str) -> None:
    """Waits for all ranks; for ever, if one does not come: then the run's own time limit ends it."""
    if store.add(f"{where}: ranks", 1) == rank.world_size:
        store.set(f"{where}: all", "")
    while not store.check([f"{where}: all"]):
        time.sleep(0.001)


def in_child(use: Callable[[], object]) -> str:
    """What it raised in a forked child; "" if it returned."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        told = ""
        try:
            use()
        except BaseException as error:
            told = f"{type(error).__name__}: {error}" if isinstance(error, RuntimeError) else traceback.format_exc()
        os.write(writer, told.encode()[:60000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as said:
        told = said.read()
    os.waitpid(child, 0)
    return told
