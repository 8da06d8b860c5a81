"""Runs scenarios on the simulated device under the name that torch keeps for other makers' devices, and prints a digest of each.

python -m tests.device.other_name shard bf16 ...
"""

import os

if __name__ == "__main__":
    os.environ["ZERO3_DEVICE"] = "privateuseone"
from tests.device import simulated

import hashlib  # isort: skip
import sys  # isort: skip
from pathlib import Path  # isort: skip

import torch  # isort: skip

from tests.device.ranks import run_ranks  # isort: skip
from tests.device.scenarios import SCENARIOS  # isort: skip
from tests.device.training import Me, scratch  # isort: skip


def digest(ranks: list[list[torch.Tensor]]) -> str:
    return hashlib.sha256(repr([[each.tolist() for each in tensors] for tensors in ranks]).encode()).hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    ones = torch.ones(4, 4, device=simulated.TYPE, dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones).cpu()  # see `_first_bf16` in test_parity.py
    for name in sys.argv[1:]:
        for policy in ("demand", "random"):
            simulated.schedule(policy, 1, progress=0.1)
            directory = scratch()

            def body(rank: int, name: str = name, directory: Path = directory) -> list[torch.Tensor]:
                me = Me(rank, 2, torch.device(simulated.TYPE, rank), None, directory)
                return [each.cpu() for each in SCENARIOS[name](me)]

            print(name, policy, digest(run_ranks(2, body)), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
