"""torchrun's agents, one a host, on this machine: what they print goes to a file, and they end with the test."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "disturbed.py"

# A host that is silent for 5 s is dead; one that comes is waited for 1 s.
QUICK = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"

# Else the store outlives the processes, and those of the next attempt may find the addresses of the last (pytorch issue 135712).
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Agent:
    """A running torchrun. `network`: the network namespace that it lives in, by name."""

    def __init__(self, log: Path, arguments: list[str], environment: dict[str, str], network: str) -> None:
        place = ["ip", "netns", "exec", network] if network else []
        self._log = log
        with log.open("w") as file:
            command = [*place, sys.executable, "-m", "torch.distributed.run", *arguments]
            self.process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)

    def wait(self, seconds: float = 250) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun still runs after {seconds:.0f} s:\n{self.printed()}") from None

    def printed(self) -> str:
        return self._log.read_text(errors="replace")


class Agents:
    """Starts agents; whatever still runs at the end is ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._agents: dict[str, Agent] = {}

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        running = [agent.process for agent in self._agents.values() if agent.process.poll() is None]
        for process in running:
            process.terminate()  # torchrun ends its workers then
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(self, name: str, *arguments: object, network: str = "", interface: str = "lo", **environment: str) -> Agent:
        own = {"GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        given = [str(argument) for argument in arguments]
        agent = Agent(self._directory / f"{name}.log", given, {**os.environ, **own, **OWN_STORES, **environment}, network)
        self._agents[name] = agent
        return agent

    def wait_for(self, happened: Callable[[], bool], seconds: float = 250) -> None:
        """Until it has happened, or an agent has ended before."""
        deadline = time.monotonic() + seconds
        while not happened():
            ended = [name for name, agent in self._agents.items() if agent.process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{agent.printed()}" for name, agent in self._agents.items())
                raise AssertionError(f"it has not happened; ended: {ended}\n{logs}")
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
