"""The benchmarks run: tiny, and without a look at their times. What they count must be right all the same."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--width", "32", "--depth", "2", "--heads", "2", "--vocabulary", "64", "--sequence", "8", "--batch", "2"]


def start(name: str, *arguments: str, timeout: float = 280, script: str = "main") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, f"benchmarks/{name}/{script}.py", *arguments]
    # torch's debug level kills DDP's gloo ranks
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout, env=os.environ | {"TORCH_DISTRIBUTED_DEBUG": "OFF"}
    )


def run(name: str, folder: Path, *arguments: str, script: str = "main") -> dict[str, Any]:
    done = start(name, *arguments, "--output", str(folder), script=script)
    assert done.returncode == 0, done.stderr
    name = name if script == "main" else script
    assert (folder / f"{name}.md").read_text().strip() == done.stdout.strip()
    return json.loads((folder / f"{name}.json").read_text())


def pictures(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.png")}


@pytest.mark.parametrize(
    "name",
    [
        "peers",
        "quantised",
        "fabric",
        "overhead",
        "scale",
        "gpu",
        "optimizer",
        "construction",
        "architectures",
        "convergence",
        "offload",
        "experts",
        "engines",
    ],
)
def test_each_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(f"benchmarks.{name}.main")
    monkeypatch.setattr(sys, "argv", ["main.py", "--help"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main.main()
    assert "--output" in capsys.readouterr().out
    assert f"benchmarks/{name}/main.py" in (ROOT / "benchmarks" / name / "README.md").read_text()


@pytest.mark.slow
def test_construction(tmp_path: Path) -> None:
    found = run("construction", tmp_path, *TINY, "--repetitions", "1", "--systems", "FSDP2", "zero3, Zero3Sequential", "zero3, shard")
    for system, (ranks,) in found["systems"].items():
        assert len(ranks) == 2 and all(len(rank["seconds"]) == 2 for rank in ranks), system


@pytest.mark.slow
def test_experts(tmp_path: Path) -> None:
    """What is sent is what distinct pairs of a token and a rank need, and little beside."""
    found = run("experts", tmp_path, "--models", "Mixtral 8x7B", "--ranks", "2", "--tokens", "16")
    for routing, each in found["bytes"].items():
        assert 1.0 <= each["sent"] / each["need"] < 1.05, routing
        assert each["sent"] < each["gathered"] / 10


@pytest.mark.slow
def test_peers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["no communication", "DDP", "FSDP2", "zero3", "zero3 by sockets"]
    counts = ["--repetitions", "1", "--steps", "1", "--warmup", "1", "--check-steps", "2"]
    found = run("peers", tmp_path, *TINY, *counts, "--systems", *names, "DeepSpeed ZeRO-3")
    systems = found["systems"]
    for name in names[1:]:
        check = systems[name]["check"][0]
        for optimizer, losses in found["reference"].items():
            assert check[optimizer] == pytest.approx(losses, abs=5e-6), f"{name}, {optimizer}"
    parameters, layers = 4 * found["parameters"], 4
    assert systems["zero3"]["check"][0]["live_step"] == pytest.approx(3 * parameters / 2, rel=0.03), "a half, and its two moments"
    assert systems["FSDP2"]["check"][0]["live_step"] == pytest.approx(3 * parameters / 2, rel=0.03)
    assert systems["DDP"]["check"][0]["live_step"] > 3 * parameters
    assert not systems["zero3"]["check"][0]["collectives"]
    assert systems["zero3 by sockets"]["check"][0]["collectives"] == {"send": 3 * layers - 1, "recv": 3 * layers - 1}
    if found["own loopback"]:
        sent = {name: systems[name]["runs"][0]["ranks"][0]["sent"][0] / 2 for name in names}
        assert max(sent["no communication"], sent["zero3"]) < 5000 < sent["zero3 by sockets"] < 0.85 * sent["FSDP2"]
    missing = systems["DeepSpeed ZeRO-3"]
    assert missing["runs"] or "not installed" in missing["failed"]
    assert "| DeepSpeed ZeRO-3 |" in (tmp_path / "peers.md").read_text()
    assert pictures(tmp_path) == {"time.png", "memory.png"}


@pytest.mark.slow
def test_fabric(tmp_path: Path) -> None:
    """Runs where it may; elsewhere it must say what it needs."""
    done = start(
        "fabric",
        *TINY,
        *["--width", "64", "--rates", "0.01", "--repetitions", "1", "--steps", "1", "--warmup", "1", "--systems", "zero3", "--output"],
        str(tmp_path),
    )
    if done.returncode:
        assert done.stderr.splitlines()[-1].startswith("benchmarks/fabric: ")
        return
    found = json.loads((tmp_path / "fabric.json").read_text())["found"]
    point = found["zero3"]["0.01"]
    held_up = point["sent"][0] - 128 * 1024  # the rest is the burst that the bucket lets through
    assert held_up > 0 and point["seconds"][0] > 0.8 * held_up * 8 / 1e7, "the link is as slow as it was asked to be"


@pytest.mark.slow
def test_overhead(tmp_path: Path) -> None:
    counts = ["--layers", "4", "--steps", "2", "--repetitions", "1", "--growth-layers", "2", "--growth-ranks", "1024"]
    found = run("overhead", tmp_path, *counts)
    assert set(found["comparison"]) == {"plain torch", "FSDP2", "FSDP1", "zero3"}
    assert set(found["growth"]["ranks"]) == {"1024"}


@pytest.mark.slow
def test_a_ring_and_hang(tmp_path: Path) -> None:
    counts = ["--rounds", "1", "--ranks", "3", "--layers", "4", "--steps", "4"]
    found = run("overhead", tmp_path, *counts, script="ring")
    assert set(found["entry"]) == {"a transfer", "a mark", "the stores alone", "a ring is made"}
    assert all(value > 0 for value in found["entry"].values())
    assert set(found["steps"]) == {"with a ring", "without"}
    assert found["hang"]["lines"] <= 24, "one screen"


@pytest.mark.slow
def test_a_restart(tmp_path: Path) -> None:
    found = run("checkpoint", tmp_path, "--layers", "2", "--rate", "20", script="restart")
    assert found["ratio"]["load"] < 1
    slow = found["found"]["slow"][0]
    assert all(rank["load"][0] >= 0.99 * rank["bytes"] / 10e6 for rank in slow), "each rank has half of the link"
    assert sum(rank["bytes"] for rank in slow) > 2 * 2048 * 2048 * 4 * 3, "parameters and AdamW's state"


@pytest.mark.slow
def test_scale(tmp_path: Path) -> None:
    found = run("scale", tmp_path, *["--models", "tiny", "--ranks", "64"])["results"]["tiny"]
    for ranks, by_system in found["ranks"].items():
        formula = 16 * found["parameters"] / int(ranks)
        assert by_system["zero3"]["state"] == pytest.approx(formula, rel=0.02)
        assert by_system["FSDP2"]["state"] == pytest.approx(formula, rel=0.05)
        assert by_system["zero3"]["peak"] > by_system["zero3"]["state"]


@pytest.mark.slow
def test_gpu_in_smoke_mode(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = run("gpu", tmp_path, "--smoke", "--steps", "1", "--repetitions", "1", "--minutes", "30")
    assert set(found["card"]) == {"plain torch", "FSDP2", "FSDP1", "zero3"} == set(found["host"])
    zero3, fsdp2 = (found["links"][system]["no time"]["nbytes"] for system in ("zero3", "FSDP2"))
    block = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)  # bytes; two blocks, of which the last is gathered once
    assert zero3 == pytest.approx((2 + 3) * block * 7 / 8, rel=0.01)
    assert fsdp2 >= zero3
    assert not found["missing"]
    assert "kernels.png" in pictures(tmp_path)
    assert {"step-NVLink.png", "step-100-Gbit-s.png"} <= pictures(tmp_path)


@pytest.mark.slow
def test_plans_against_a_gpu_in_smoke_mode(tmp_path: Path) -> None:
    case = "mixed, Int8 both ways"
    found = run("gpu", tmp_path, "--smoke", "--steps", "1", "--cases", case, script="planned")
    assert found["smoke"] and not found["failed"] and set(found["cases"]) == {case}
    assert found["cases"][case]["plan"]["peak"] > 0 and found["cases"][case]["measured"]["seconds"] > 0


def test_formats_on_a_gpu_in_smoke_mode(tmp_path: Path) -> None:
    found = run("gpu", tmp_path, "--smoke", script="formats")
    assert found["smoke"] and len(found["rows"]) == 5 + 3 * 3 and all(float(row[3]) > 0 for row in found["rows"])


@pytest.mark.slow
def test_convergence(tmp_path: Path) -> None:
    """Both runs begin with the same weights, of which one rounds."""
    sizes = "--width 32 --blocks 1 --heads 2 --vocabulary 300 --sequence-length 16 --held-out 8"
    counts = ["--steps", "3", "--seeds", "0", "--ways", "exact", "int8 both"]
    found = run("convergence", tmp_path, *counts, "--options", sizes)["found"]
    exact, rounded = (found[way]["0"]["losses"] for way in ("exact", "int8 both"))
    assert len(exact) == 3 and exact != rounded
    assert rounded == pytest.approx(exact, rel=0.02)


@pytest.mark.slow
def test_optimizer(tmp_path: Path) -> None:
    """What goes over the wire is counted: cuts between parameters add nothing, padding and moving do."""
    found = run("optimizer", tmp_path, *TINY, "--repetitions", "1", "--padding-ranks", "2", "8")
    assert {len(action["seconds"]) for action in found["times"].values()} == {1}
    ranks = found["padding"]
    assert 0 < ranks["2"][0] < ranks["8"][0] and 1 <= ranks["2"][1] < ranks["8"][1]


@pytest.mark.slow
def test_offload(tmp_path: Path) -> None:
    """A model three times as large as what may be allocated: it trains in files alone, with the losses of a run without a limit."""
    size = ["--width", "256", "--depth", "24", "--heads", "2", "--vocabulary", "64", "--sequence", "8", "--batch", "1"]
    done = start("offload", "memory", *size, "--steps", "2", "--output", str(tmp_path), "--scratch", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "memory.json").read_text())
    for system in ("zero3, files", "zero3, files, in backward"):
        assert found[system]["losses"] == found["zero3, no limit"]["losses"], done.stdout
        assert max(row[1] for row in found[system]["samples"]) - found[system]["begin"] < found["allowed"]
    assert all("in step 1" in found[system]["died"] for system in ("zero3", "FSDP2")) and "died" in found["plain torch"]


@pytest.mark.slow
def test_offload_counts(tmp_path: Path) -> None:
    """No chunk, gradient or moment is in anonymous memory, nothing else takes more, and a step brings each in once."""
    done = start("offload", "counts", *TINY, "--output", str(tmp_path), "--scratch", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "counts.json").read_text())
    files, memory = found["zero3, files"], found["zero3"]
    assert files["resting"] == 0 < memory["resting"] and files["others"] <= 1.05 * memory["others"]
    assert files["moved"] == files["size"] == found["zero3, files, clipped"]["moved"]
