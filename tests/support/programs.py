"""Programs, run as users run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_QUIET = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def printed_by(*command: object, directory: Path = ROOT) -> str:
    """What a command prints, which has to end well."""
    done = subprocess.run(
        [str(part) for part in command], env=os.environ | _QUIET, cwd=directory, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def printed_by_two(script: Path, *arguments: object, directory: Path = ROOT) -> str:
    """What a script prints on two processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return printed_by(*launcher, script, *arguments, directory=directory)
