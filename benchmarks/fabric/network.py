"""Two network namespaces joined by a cable of a given rate: communication there costs time, and little CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

INTERFACE = "zero3"  # the cable's end, in each namespace


class NoNetwork(RuntimeError):
    """Namespaces can't be made here; the text says why."""


class Cable:
    """Joins the namespaces of two ranks; `names` are theirs, `addresses` what they have on it."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.addresses = [f"10.77.0.{end + 1}" for end in range(len(names))]

    def set_rate(self, gigabits: float) -> None:
        """Each direction carries that much a second, from now on (a token bucket of 1/4 ms, at least one large packet)."""
        burst = max(128 * 1024, int(gigabits * 1e9 / 8 / 4000))
        for name in self.names:
            limits = ["rate", f"{gigabits * 1000:.0f}mbit", "burst", str(burst), "latency", "50ms"]
            _ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limits)

    def cut(self, end: int) -> None:
        """From now on nothing arrives, and nobody is told: as when a switch dies. `end`: whose interface goes down."""
        _ip("-n", self.names[end], "link", "set", INTERFACE, "down")


@contextmanager
def cable() -> Iterator[Cable]:
    """Two namespaces of this process, gone afterwards.

    Raises:
        NoNetwork: not root, no iproute2, or a kernel that forbids it.
    """
    if os.geteuid() != 0:
        raise NoNetwork("network namespaces need root: run this as root (sudo), or in a container of your own")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoNetwork(f"the command {tool!r} is missing: install iproute2")
    names = [f"zero3-{os.getpid()}-{end}" for end in range(2)]
    link, made = Cable(names), []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip("link", "add", INTERFACE, "netns", names[0], "type", "veth", "peer", "name", INTERFACE, "netns", names[1])
        for end, name in enumerate(names):
            _ip("-n", name, "address", "add", f"{link.addresses[end]}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", name, "link", "set", interface, "up")
        yield link
    finally:
        for name in made:
            _ip("netns", "delete", name)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoNetwork(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip() or done.stdout.strip()}")
