"""Digests of lives on the simulated device, in order, for `python -m tests.pairs.digest`: names come in, and lines of JSON go out."""

from tests.device import simulated

import json  # isort: skip
import logging  # isort: skip
import os  # isort: skip
import shutil  # isort: skip
import sys  # isort: skip
from collections import defaultdict  # isort: skip
from collections.abc import Callable, Iterator  # isort: skip
from contextlib import contextmanager  # isort: skip
from typing import Any  # isort: skip
from unittest.mock import patch  # isort: skip

import torch  # isort: skip
import torch.distributed as dist  # isort: skip
from torch.utils._pytree import tree_leaves  # isort: skip

from tests.device.test_pairs import launch  # isort: skip
from tests.device.training import scratch  # isort: skip
from tests.pairs.digest import Digests, digest_of, rows_of  # isort: skip
from tests.pairs.life import Life  # isort: skip

MOVING = ("all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
MOVING += ("all_to_all_single", "all_reduce", "scatter", "broadcast")


@contextmanager
def listening() -> Iterator[dict[int, list[Any]]]:
    """Inside, what each rank asks of torch.distributed is noted. Autograd's thread of a device is that rank's too."""
    logs = defaultdict(list)

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            tensors = [(each.numel(), each.dtype) for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)]
            logs[torch.accelerator.current_device_index()].append((name, dist.get_world_size(options.get("group")), tensors))
            return function(*arguments, **options)

        return call

    with patch.multiple(dist, **{name: noted(name, getattr(dist, name)) for name in MOVING if hasattr(dist, name)}):
        yield logs


def found_on_device(name: str) -> Digests:
    simulated.schedule(eager=True)
    folder = scratch()
    try:
        with listening() as logs:
            return digest_of(Life(rows_of(name), epochs=2), launch, folder, lambda one: (list(logs[one.rank]), []))
    finally:
        simulated.recover()
        shutil.rmtree(folder)


def main() -> None:
    torch.set_num_threads(1)
    logging.disable()
    for name in sys.stdin.read().splitlines():
        try:
            answer = [name, found_on_device(name), ""]
        except Exception as error:
            answer = [name, "", f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of ranks that are stuck
