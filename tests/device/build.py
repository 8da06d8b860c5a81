"""Builds the simulated device with g++, once for each torch, each Python and each state of the sources."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

SOURCES = sorted((Path(__file__).resolve().parent / "src").iterdir())
_HEADERS = [
    path for path in (sysconfig.get_path("include"), sysconfig.get_config_var("INCLUDEPY")) if path and (Path(path) / "Python.h").exists()
]


def missing() -> str:
    """Why the device can't be built here, or ""."""
    if sys.platform != "linux":
        return "the simulated device is for Linux"
    if shutil.which("g++") is None:
        return "g++ is missing, which builds the simulated device"
    if not _HEADERS:
        return "Python.h is missing, with which the simulated device is built (Debian: python3-dev)"
    if re.search(r"^(cuda|hip)\b[^=]*= ['\"]", (_torch() / "version.py").read_text(), re.M):
        return "this torch has a CUDA of its own: the simulated device needs torch's CPU build"
    return ""


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def build() -> Path:
    """The extension's path. It must not import torch, which asks for its CUDA hooks once."""
    where = str(_torch())  # it is linked with the libraries there
    parts = [version("torch"), where, sys.version, *(source.read_text() for source in SOURCES)]
    digest = hashlib.sha256("".join(parts).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero3-tests"
    target = home / f"device-{digest}.so"
    if not target.exists():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            made = Path(scratch) / target.name
            subprocess.run(_command(made), check=True)
            made.replace(target)  # whoever builds it beside us makes the same file
    return target


def _command(target: Path) -> list[str]:
    torch = _torch()
    include = [torch / "include", torch / "include/torch/csrc/api/include", _HEADERS[0]]
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_simulated", "-DUSE_DISTRIBUTED", "-DUSE_C10D"]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    source = next(source for source in SOURCES if source.suffix == ".cpp")
    return ["g++", *flags, *(f"-I{path}" for path in include), str(source), "-o", str(target), *libraries]


if __name__ == "__main__":
    print(missing() or build())
