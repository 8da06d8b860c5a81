"""A process group that is destroyed is gone: its threads would abort the process at its end, if they still held a tensor then."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATER = ["torch.distributed.nn", "transformers.modeling_utils"]

SCRIPT = """
import weakref

import torch.distributed as dist
import zero3

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
import {module}
dist.destroy_process_group()
assert group() is None
"""


@pytest.mark.slow
def test_libraries_that_are_imported_later_do_not_keep_it() -> None:
    scripts = [SCRIPT.format(module=module) for module in LATER]
    runs = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True) for script in scripts]
    errors = [run.communicate(timeout=200)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
