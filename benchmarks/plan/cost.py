"""What a plan takes: the command of a process of its own, from config.json alone.

    python -m benchmarks.plan.cost

Time is by the clock, and by the processor: on a machine that others use the second says more. Memory is the process's peak.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time

from benchmarks.common.report import markdown
from benchmarks.plan.table import MODELS

SETUPS = (
    ("8B", ["--ranks", "1024"]),
    ("70B", ["--ranks", "1024"]),
    ("70B", ["--ranks", "1024", "--gpu", "h100", "--link", "400Gbit"]),
    ("70B", ["--ranks", "1024", "--memory", "80GB", "--checkpointing"]),
    ("70B", ["--ranks", "8", "--lora", "16", "--quantize", "nf4", "--checkpointing"]),
)


def cost(directory: str, options: list[str]) -> tuple[float, float, float]:
    """Seconds by the clock and by the processor, and the peak of resident memory in GB."""
    command = [sys.executable, "-W", "ignore", "-m", "zero3", "plan", directory, "--dtype", "bf16", *options]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 2):
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - begin, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    rows = []
    for name, options in SETUPS:
        with tempfile.TemporaryDirectory() as directory:
            MODELS[name]().save_pretrained(directory)
            seconds, processor, memory = cost(directory, options)
        print(name, *options, f"{seconds:.1f} {processor:.1f} {memory:.2f}", file=sys.stderr, flush=True)
        rows.append([name, f"`{' '.join(options)}`", f"{seconds:.1f}", f"{processor:.1f}", f"{memory:.2f}"])
    print(markdown(["model", "options", "seconds", "of the processor", "GB"], rows))


if __name__ == "__main__":
    main()
