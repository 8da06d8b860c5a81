"""Rank 1 ends in the middle of training. Rank 0 does not see it; a watchdog ends the process, as NCCL's does.

python -m tests.device.lost_peer
"""

from tests.device import simulated

import torch  # isort: skip

from tests.device.ranks import run_ranks  # isort: skip
from tests.device.training import Me, scratch, sgd, sharded, train  # isort: skip


def body(rank: int) -> None:
    me = Me(rank, 2, torch.device("cuda", rank), None, scratch())
    model = sharded(me)
    optimizer = sgd(model)
    train(model, me, 2, optimizer)
    if rank == 0:
        print("rank 0 goes on alone", flush=True)
        torch.stack([each.float().sum() for each in train(model, me, 2, optimizer)]).tolist()
        print("rank 0 was not told", flush=True)


if __name__ == "__main__":
    simulated.schedule("random")
    simulated.C.set_watchdog(True)
    run_ranks(2, body)
