"""Is what would be published whole? Takes the wheel and the source distribution that `make package` has built.

The source distribution has to hold every file that is tracked, and its own tests have to run from it; the wheel every file of
the package, and it has to work where nothing but it and torch can be seen.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUICK = ["test_policy", "core/test_layout"]
WHERE = "import zero3; print(zero3.__file__, zero3.__version__)"
MADE_BY_BUILD = re.compile(r"PKG-INFO|setup\.cfg|zero3\.egg-info/.*")


def main(folder: Path) -> None:
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with tempfile.TemporaryDirectory() as place:
        unpacked, installed = Path(place, "source"), Path(place, "wheel")
        with tarfile.open(source) as archive:
            names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
            archive.extractall(unpacked, filter="data")
        compare(source, {name for name in names if not MADE_BY_BUILD.fullmatch(name)}, tracked_files())
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".dist-info/" not in name]
            archive.extractall(installed)
        compare(wheel, set(names), {name for name in tracked_files() if name.startswith("zero3/")})
        where, version = python(["-c", WHERE], installed, Path(place)).split()
        if not where.startswith(place) or not wheel.name.startswith(f"zero3-{version}-") or source.name != f"zero3-{version}.tar.gz":
            raise SystemExit(f"{wheel.name} and {source.name} hold version {version}, from {where}")
        (inside,) = unpacked.iterdir()
        python(["-m", "pytest", "-q", "--collect-only"], inside, inside)  # every test finds what it imports
        tests = [f"tests/{name}.py" for name in QUICK]
        print(f"from {source.name}:", python(["-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], inside, inside).splitlines()[-1])
    print(f"{source.name} and {wheel.name} are whole")


def tracked_files() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


def compare(archive: Path, found: set[str], expected: set[str]) -> None:
    if found != expected:
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        raise SystemExit(
            f"{archive.name} lacks {missing or 'nothing'} (MANIFEST.in?), and has {unexpected or 'nothing'} that is not tracked"
        )


def python(arguments: list[str], package: Path, folder: Path) -> str:
    """What a process prints that sees `package` before all that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(package)}
    done = subprocess.run([sys.executable, "-B", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed in {folder}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist", help="where they are (default: dist)")
    main(parser.parse_args().folder)
