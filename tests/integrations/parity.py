"""The largest differences between trainers over sharded models and the same under DistributedDataParallel, as a table.

python -m tests.integrations.parity        (two gloo processes, tiny random models, fp32)
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.integrations import test_accelerator, test_trainer, test_trl
from tests.support.processes import on_ranks


def difference(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest, relative to the larger of 1 and what is expected."""
    one, other = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    return float((np.abs(one - other) / np.maximum(1, np.abs(other))).max()) if other.size else 0.0


def both(run: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    return on_ranks(2, run, True, *arguments)[0], on_ranks(2, run, False, *arguments, debug="OFF")[0]


def main() -> None:
    print(f"| {'2 processes against DDP':<40} | steps | losses | norms | evaluation |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for name in test_trainer.MODELS:
            found, expected = (
                on_ranks(2, test_trainer.train, ours, name, str(Path(place, name, str(ours))), debug="DETAIL" if ours else "OFF")[0]
                for ours in (True, False)
            )
            told = [difference(found[key], expected[key]) for key in ("losses", "norms", "evaluated")]
            print(f"| Trainer, {name} | {len(found['losses'])} | " + " | ".join(f"{value:.1e}" for value in told) + " |", flush=True)
    for name in test_trl.TRAINERS:
        for lora in (False, True):
            ours, theirs = both(test_trl.train, name, lora)
            steps, reference = np.array(ours["steps"]), np.array(theirs["steps"])
            told = [difference(steps[:, 0], reference[:, 0]), difference(steps[:, 1], reference[:, 1])]
            told.append(difference(ours["evaluated"], theirs["evaluated"]))
            label = f"{name}Trainer, {'LoRA' if lora else 'full'}"
            print(f"| {label} | {len(steps)} | " + " | ".join(f"{value:.1e}" for value in told) + " |", flush=True)
    (ours, _), (theirs, _) = both(test_accelerator.loop)
    steps, reference = np.array(ours), np.array(theirs)
    told = [difference(steps[:, 0], reference[:, 0]), difference(steps[:, 1], reference[:, 1])]
    print(f"| accelerate's loop | {len(steps)} | " + " | ".join(f"{value:.1e}" for value in told) + " | |")


if __name__ == "__main__":
    main()
