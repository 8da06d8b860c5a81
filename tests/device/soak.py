"""Scenarios in schedules drawn at random, for MINUTES: every bit has to be that of execution in order.

python -m tests.device.soak MINUTES [--seed N]
"""

from tests.device import simulated

import argparse  # isort: skip
import logging  # isort: skip
import os  # isort: skip
import random  # isort: skip
import sys  # isort: skip
import time  # isort: skip

import torch  # isort: skip

from tests.device.scenarios import SCENARIOS  # isort: skip
from tests.device.test_parity import in_order, on_device  # isort: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    dice, runs, failed = random.Random(arguments.seed), 0, 0
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end:
        name, policy, memory = dice.choice(list(SCENARIOS)), dice.choice(list(simulated.POLICIES)), dice.choice(["strict", "exact"])
        seed, progress = dice.randrange(10**6), dice.choice([0.0, 0.05, 0.3])
        expected = in_order(name)
        simulated.schedule(policy, seed, progress=progress, memory=memory)
        try:
            found = on_device(name)
            same = all(torch.equal(a, b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))
            what = "" if same else "other numbers"
        except Exception as error:
            what = repr(error)
            simulated.recover()
        runs += 1
        if what:
            failed += 1
            print(f"{name}, schedule({policy!r}, {seed}, progress={progress}, memory={memory!r}): {what}", flush=True)
    print(f"seed {arguments.seed}: {runs} runs on the simulated device, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads of ranks that are stuck
