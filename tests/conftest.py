"""How all tests run: one thread a rank, and no claim about how fast this machine is."""

from __future__ import annotations

import gc
import os
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

from tests.device.relay import pytest_runtest_protocol, pytest_runtestloop, pytest_unconfigure
from tests.support.ordering import fake_device

__all__ = ["fake_device", "pytest_runtest_protocol", "pytest_runtestloop", "pytest_unconfigure"]

# Ranks are threads or processes of their own: more threads for each would only take turns on the same cores.
torch.set_num_threads(1)

# Ranks leave their last transfers in files only where a test asks for it: most tests make many models, and read none of them.
os.environ["ZERO3_RING_DIR"] = "0"

settings.register_profile("zero3", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("thorough", settings.get_profile("zero3"), derandomize=False, max_examples=3000)  # --hypothesis-profile thorough
settings.register_profile("no_shrinking", settings.get_profile("zero3"), phases=[Phase.explicit, Phase.generate])  # for tests/mutation
settings.load_profile("zero3")


MANY, VERY_MANY = 4, 100  # cases of a test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-part", metavar="K/N", help="of the tests marked slow, run the K-th of N parts (the first is 0)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_most_of_many(items)
    if (part := config.getoption("slow_part")) is None:
        return
    number, parts = map(int, part.split("/"))
    left = [item for item in items if item.get_closest_marker("slow") is not None and crc32(item.nodeid.encode()) % parts != number]
    config.hook.pytest_deselected(items=left)
    gone = set(left)
    items[:] = [item for item in items if item not in gone]


def mark_most_of_many(items: list[pytest.Item]) -> None:
    """Of a test's many cases a third runs every time, of very many a sixth. The others are slow: what breaks one mostly breaks several."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in (item for item in items if item.get_closest_marker("slow") is None):
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in cases.values():
        if len(each) >= MANY:
            kept = -(-len(each) // (3 if len(each) < VERY_MANY else 6))
            for item in sorted(each, key=lambda item: crc32(item.nodeid.encode()))[kept:]:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """The tests and what they import are here to stay: without this, Python's cycle collector walks through all of it all the time."""
    gc.collect()
    gc.freeze()
