"""The files that start the recipe on many hosts: their shells parse, their YAML says what it has to, and two hosts train with them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fabric.network import INTERFACE, NoNetwork, cable
from tests.support.programs import ROOT

pytest.importorskip("trl", reason="the example's packages are not installed: pip install 'zero3[trl,examples]'")
yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "examples" / "launch"
SHELLS = [path.name for path in sorted(FOLDER.iterdir()) if path.suffix in (".sh", ".sbatch")]


def known_options() -> set[str]:
    return set(re.findall(r'add\("(--[\w-]+)"', (ROOT / "examples" / "sft.py").read_text()))


def parses(shell: str) -> None:
    run = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", SHELLS)
def test_a_shell_script_parses_and_names_options_that_exist(name: str) -> None:
    text = (FOLDER / name).read_text()
    parses(text)
    code = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    after = code.partition("examples/sft.py")[2]
    assert set(re.findall(r"(?<!\S)--[\w-]+", after)) <= known_options()
    for script in re.findall(r"examples/[\w/]+\.(?:sh|py)", text):
        assert (ROOT / script).is_file(), script


def test_slurm_says_how_much_it_wants() -> None:
    text = (FOLDER / "slurm.sbatch").read_text()
    wanted = dict(re.findall(r"^#SBATCH --([\w-]+)=(.+)$", text, re.M))
    assert wanted.keys() >= {"nodes", "ntasks-per-node", "gpus-per-node", "time"} and wanted["ntasks-per-node"] == "1"
    assert text.startswith("#!") and text.index("#SBATCH") < text.index("set -euo")


def test_the_train_job_has_what_the_trainer_of_kubeflow_asks_for() -> None:
    job: dict[str, Any] = yaml.safe_load((FOLDER / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    spec = job["spec"]
    assert spec.keys() == {"runtimeRef", "trainer", "runtimePatches"}, "which took the place of podTemplateOverrides in 2.2"
    trainer = spec["trainer"]
    assert trainer.keys() <= {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert all(isinstance(each["value"], str) for each in trainer["env"]) and isinstance(trainer["numNodes"], int)
    script, *options = trainer["args"]
    assert (ROOT / script.removeprefix("/workspace/")).is_file()
    assert {option.partition("=")[0] for option in options} <= known_options()
    (patch,) = spec["runtimePatches"]
    assert patch.keys() == {"manager", "trainingRuntimeSpec"}
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert node["name"] == pod["containers"][0]["name"] == "node" and pod.keys() == {"containers", "volumes"}
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]


def test_the_task_of_skypilot_has_its_fields() -> None:
    task: dict[str, Any] = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert task.keys() == {"name", "workdir", "resources", "num_nodes", "file_mounts", "setup", "run"}
    parses(task["run"])
    line = next(line for line in task["run"].splitlines() if "torchrun_hosts.sh" in line)
    words = shlex.split(line)
    assert {word for word in words if word.startswith("--")} <= known_options()
    assert any(word.startswith(target) for target in task["file_mounts"] for word in words)


# -- what they start

STAND_INS = {
    "scontrol": '[ "$*" = "show hostnames node[7-8]" ] && printf "node7\\nnode8\\n"',
    "srun": '[ "$SRUN_CPUS_PER_TASK" = 32 ] && shift && exec "$@"',  # its one option; as on each host
    "python": 'printf "%s\\n" "$OMP_NUM_THREADS" "$@"',
}


def started(shell: list[str], folder: Path, environment: dict[str, str]) -> tuple[str, Any]:
    """OMP_NUM_THREADS, and the options of torchrun, as torchrun understands them: other programs have stand-ins."""
    from torch.distributed.run import parse_args

    folder.mkdir()
    for name, does in STAND_INS.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (folder / name).chmod(0o755)
    plain = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder)}
    run = subprocess.run(shell, cwd=ROOT, env=plain | environment, capture_output=True, text=True, check=True)
    threads, *arguments = run.stdout.splitlines()
    assert arguments[:2] == ["-m", "torch.distributed.run"]
    return threads, parse_args(arguments[2:])


def test_slurm_starts_one_torchrun_on_each_host(tmp_path: Path) -> None:
    here = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "23456", "SLURM_GPUS_ON_NODE": "4"}
    shell = ["bash", str(FOLDER / "slurm.sbatch"), "--model", "a model", "--lora", "8"]
    threads, options = started(shell, tmp_path / "bin", here | {"SLURM_CPUS_PER_TASK": "32"})
    assert (threads, options.nnodes, options.nproc_per_node, options.rdzv_id) == ("8", "2", "4", "23456")
    assert options.rdzv_endpoint == "node7:23456" and options.rdzv_backend == "c10d" and options.max_restarts == 3
    assert options.training_script == "examples/sft.py"
    assert options.training_script_args[-4:] == ["--model", "a model", "--lora", "8"] and "--resume" in options.training_script_args


def test_skypilot_starts_one_torchrun_on_each_host(tmp_path: Path) -> None:
    task: dict[str, Any] = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    here = {"NODE_IPS": "10.0.0.1\n10.0.0.2", "NUM_GPUS_PER_NODE": "8", "NUM_NODES": "2", "TASK_ID": "t-3", "NODE_RANK": "1"}
    _, options = started(["bash", "-c", task["run"]], tmp_path / "bin", {f"SKYPILOT_{key}": value for key, value in here.items()})
    assert (options.nnodes, options.nproc_per_node, options.rdzv_id, options.rdzv_endpoint) == ("2", "8", "t-3", "10.0.0.1:29400")
    assert options.rdzv_conf.startswith("is_host=0,") and options.training_script_args[-2:] == ["--output", "/data/sft"]


@pytest.mark.slow
def test_two_hosts_train_together_with_torchrun_hosts(tmp_path: Path) -> None:
    """Two network namespaces, which see each other through one cable."""
    try:
        with cable() as link:
            environment = {
                **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "GPUS": "1",
                "HOSTS": "2", "RESTARTS": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "CUDA_VISIBLE_DEVICES": "",
            }  # fmt: skip
            options = ["--device", "cpu", "--steps", "2", "--every", "2", "--samples", "0", "--output", str(tmp_path / "run")]
            script = str(FOLDER / "torchrun_hosts.sh")
            logs = [tmp_path / f"{end}.log" for end in range(2)]
            hosts = []
            for end, name in enumerate(link.names):
                own = {"FIRST": str(1 - end), "ADDRESS": link.addresses[end]}
                command = ["ip", "netns", "exec", name, "bash", script, f"{link.addresses[0]}:29400", *options]
                with logs[end].open("w") as log:
                    hosts.append(subprocess.Popen(command, env=environment | own, stdout=log, stderr=subprocess.STDOUT))
            try:
                codes = [host.wait(270) for host in hosts]
            finally:
                for host in hosts:
                    host.kill()
            assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
            assert "after 2 steps" in "".join(log.read_text() for log in logs)
    except NoNetwork as why:
        pytest.skip(str(why))
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2" / "zero3" / "manifest.json").is_file()
