"""Scenarios and lives in schedules drawn at random, for MINUTES: no order of streams may change a number.

python -m tests.device.soak MINUTES [--seed N]

By turns: scenarios, and models of the ordering fuzzer, have to give every bit of execution in order; the state machine, and triples of
capabilities (tests/pairs), have to agree with plain torch. hypothesis draws the lives, and prints the shortest that it finds if one fails;
the seed is for scenarios and triples.
"""

from tests.device import simulated

import argparse  # isort: skip
import logging  # isort: skip
import os  # isort: skip
import random  # isort: skip
import sys  # isort: skip
import time  # isort: skip
import traceback  # isort: skip
from collections import Counter  # isort: skip

import torch  # isort: skip
import transformers  # isort: skip
from hypothesis import HealthCheck, settings  # isort: skip

from tests.device.huggingface import HUGGING_FACE  # isort: skip
from tests.device.lives import machines, models  # isort: skip
from tests.device.scenarios import SCENARIOS  # isort: skip
from tests.pairs.exceptions import triple  # isort: skip
from tests.pairs.rows import ROWS  # isort: skip
from tests.device.test_pairs import lead  # isort: skip
from tests.device.test_parity import Setting, assert_same, in_any_order, in_order  # isort: skip

ALL = SCENARIOS | HUGGING_FACE
AT_ONCE = 10  # in a turn
drawn = settings(max_examples=AT_ONCE, stateful_step_count=20, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def scenarios(dice: random.Random) -> None:
    for _ in range(AT_ONCE):
        name, policy, memory = dice.choice(list(ALL)), dice.choice(list(simulated.POLICIES)), dice.choice(["strict", "exact"])
        setting = Setting(policy, memory, dice.randrange(10**6), dice.choice([0.0, 0.05, 0.3]), dice.choice([0, 1]))
        expected = in_order(ALL[name])
        try:
            assert_same(in_any_order(ALL[name], setting), expected)
        except BaseException as error:
            error.add_note(f"{name}, {setting!r}")
            raise


def triples(dice: random.Random) -> None:
    for _ in range(AT_ONCE):
        names, seed = triple(dice, [name for name, row in ROWS.items() if row.streams]), dice.randrange(10**6)
        try:
            lead(names, seed)
        except BaseException as error:
            error.add_note(f"{names}, seed {seed}")
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    transformers.logging.disable_progress_bar()
    dice, turns, failed = random.Random(arguments.seed), Counter[str](), 0
    kinds = {"scenarios": lambda: scenarios(dice), "lives of the state machine": lambda: machines(drawn), "models": lambda: models(drawn)}
    kinds |= {"triples of capabilities": lambda: triples(dice)}
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end:
        kind = list(kinds)[turns.total() % len(kinds)]
        turns[kind] += 1
        try:
            kinds[kind]()
        except Exception:
            failed += 1
            traceback.print_exc()
            simulated.recover()
    runs = ", ".join(f"{AT_ONCE * count} {kind}" for kind, count in turns.items())
    print(f"seed {arguments.seed}: {runs} on the simulated device; {failed} turns failed")
    return int(failed > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads of ranks that are stuck
