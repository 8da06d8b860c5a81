"""Is what would be published whole? Takes the wheel and the source distribution that `make package` has built.

The source distribution has to hold every file that is tracked, and its own tests have to run from it; the wheel every file of
the package, and it has to work where nothing but it and torch can be seen. Both are built again from a copy, and have to be the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import shutil
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
    settle(source)
    again(folder)
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


def when() -> int:
    """The time of all files in what is published, in seconds: the commit's."""
    shown = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(shown.stdout)


def settle(source: Path) -> None:
    """Rewrites a source distribution without what is this machine's: times, owners, the order of its files."""
    content, at = io.BytesIO(), when()
    with tarfile.open(source) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname, member.pax_headers = at, 0, 0, "", "", {}
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    source.write_bytes(gzip.compress(content.getvalue(), mtime=at))


def again(folder: Path) -> None:
    """Builds both from a copy in another place, whose files have other times."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "copy")
        for name in tracked_files():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(when())}
        building = [sys.executable, "-m", "build", "--no-isolation", "--outdir", place]
        subprocess.run(building, cwd=copy, env=environment, stdout=subprocess.DEVNULL, check=True)
        settle(*Path(place).glob("*.tar.gz"))
        for built in (path for path in folder.iterdir() if path.suffix in (".gz", ".whl")):
            if built.read_bytes() != Path(place, built.name).read_bytes():
                raise SystemExit(f"{built.name} is not the same when it is built again")


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
