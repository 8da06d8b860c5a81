"""Processes and hosts that die, come or are cut off: torchrun starts the others anew, and the losses stay those of an undisturbed run.

An agent of torchrun stands for a host; the first of two holds the store by which they meet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.fabric.network import INTERFACE, Cable, NoNetwork, cable
from tests.examples.test_finetune_resume import EVERY, SIZES, STEPS, arguments, run
from tests.support.agents import QUICK, ROOT, SCRIPT, Agent, Agents, free_port
from tests.support.processes import on_ranks

pytest.importorskip("transformers", reason="the example's packages are not installed: pip install 'zero3[examples]'")

pytestmark = pytest.mark.timeout(300)  # up to five processes start, import and train, one after another
TEXT = ["--text", ROOT / "README.md"]  # short: a tokenizer is learnt from it in each attempt
TIMEOUT = 10  # seconds
CUT_OFF = re.compile(  # the second in torch's debug mode
    rf"RuntimeError: rank [01] of 2: summing up the norm of the gradients failed: .*(Timed out waiting {TIMEOUT}000ms|monitoredBarrier)"
)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two processes that nobody disturbs."""
    output = tmp_path_factory.mktemp("undisturbed")
    losses = on_ranks(2, run, [arguments(output, *TEXT)], None, fresh=True, join_timeout=200)[0][0]
    assert len(losses) == STEPS
    return losses


def disturbed(how: str, directory: Path, *options: object) -> list[object]:
    """The end of torchrun's command line."""
    return [SCRIPT, how, directory, *SIZES, *TEXT, "--output", directory / "run", "--checkpoint-every", EVERY, "--resume", *options]


def summary(directory: Path) -> dict[str, object]:
    return json.loads((directory / "run" / "summary.json").read_text())


def attempts(agent: Agent) -> list[str]:
    return re.findall(r"^attempt: (.*)$", agent.printed(), re.MULTILINE)


@pytest.mark.slow
def test_a_process_is_killed_in_a_save_and_in_a_step(expected: list[float], tmp_path: Path) -> None:
    """While it writes the second checkpoint, then in the eighth step: the same bits."""
    with Agents(tmp_path) as agents:
        agent = agents.start("host", "--standalone", "--nproc-per-node", 2, "--max-restarts", 2, *disturbed("kills", tmp_path))
        assert agent.wait() == 0, agent.printed()
    assert attempts(agent) == ["2 processes, from None", "2 processes, from step-3", "2 processes, from step-6"]
    assert summary(tmp_path)["losses"] == expected


def start_host(agents: Agents, end: int, address: str, port: int, script: list[object], **options: str) -> Agent:
    name = ["host", "guest"][end]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address}:{port}", "--rdzv-id", "test", "--max-restarts", 1]
    return agents.start(
        name, "--nnodes", "1:2", "--nproc-per-node", 1, *meeting, "--rdzv-conf", f"is_host={1 - end},{QUICK}", *script, **options
    )


@pytest.mark.slow
def test_a_second_host_joins_and_dies(expected: list[float], tmp_path: Path) -> None:
    """One process, then two, then one again: each goes on from the newest checkpoint, with the same sequences in each step."""
    port, script = free_port(), ["--local-addr", "127.0.0.1", *disturbed("membership", tmp_path)]
    with Agents(tmp_path) as agents:
        host = start_host(agents, 0, "127.0.0.1", port, script)
        agents.wait_for((tmp_path / "run" / "checkpoints" / "step-3").exists)
        guest = start_host(agents, 1, "127.0.0.1", port, script, GUEST="yes")
        assert guest.wait() == -9, guest.printed()
        assert host.wait() == 0, host.printed()
    assert attempts(host) == ["1 processes, from None", "2 processes, from step-3", "1 processes, from step-6"]
    assert summary(tmp_path)["losses"] == pytest.approx(expected, rel=1e-4)


@pytest.fixture
def link() -> Iterator[Cable]:
    with ExitStack() as exits:
        try:
            made = exits.enter_context(cable())
        except NoNetwork as error:
            pytest.skip(str(error))
        yield made


@pytest.mark.slow
def test_a_host_is_cut_off(expected: list[float], tmp_path: Path, link: Cable) -> None:
    """In silence: nobody is told that the cable is cut. Both are told when their timeout ends, and the one with the store goes on."""
    with Agents(tmp_path) as agents:
        host, guest = (
            start_host(
                agents, end, link.addresses[0], 29500,
                ["--local-addr", link.addresses[end], *disturbed("cable", tmp_path, "--timeout", TIMEOUT)],
                network=link.names[end], interface=INTERFACE,
            )
            for end in range(2)
        )  # fmt: skip
        agents.wait_for(lambda: all((tmp_path / f"held-{rank}").exists() for rank in range(2)))
        link.cut(1)
        (tmp_path / "cut").touch()
        # The guest's agent is not waited for: it asks for the store until its connection is given up, in a quarter of an hour.
        agents.wait_for(lambda: all(CUT_OFF.search(agent.printed()) for agent in (host, guest)), seconds=TIMEOUT + 30)
        assert host.wait() == 0, host.printed()
    assert attempts(host) == ["2 processes, from None", "1 processes, from step-3"]
    assert summary(tmp_path)["losses"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_a_killed_process_goes_on_from_the_fast_directory(expected: list[float], tmp_path: Path) -> None:
    """Killed in the save after the second step, and in the sixth step: at most the step under way is lost."""
    fast = ["--fast-output", tmp_path / "disk", "--fast-every", 1]
    with Agents(tmp_path) as agents:
        agent = agents.start("host", "--standalone", "--nproc-per-node", 2, "--max-restarts", 2, *disturbed("kills", tmp_path, *fast))
        assert agent.wait() == 0, agent.printed()
    assert attempts(agent) == ["2 processes, from None", "2 processes, from step-1", "2 processes, from step-5"]
    assert summary(tmp_path)["losses"] == expected


@pytest.mark.slow
def test_a_host_is_lost_with_its_disk(expected: list[float], tmp_path: Path, link: Cable) -> None:
    """Two hosts that do not see each other's disks: the one that is left has a copy of the other's part, of the last whole step."""
    fast = [["--fast-output", tmp_path / f"disk{end}", "--fast-every", 1] for end in range(2)]
    with Agents(tmp_path) as agents:
        host, guest = (
            start_host(
                agents, end, link.addresses[0], 29500,
                ["--local-addr", link.addresses[end], *disturbed("lost", tmp_path, *fast[end])],
                network=link.names[end], interface=INTERFACE, **({"GUEST": "yes"} if end else {}),
            )
            for end in range(2)
        )  # fmt: skip
        assert guest.wait() == -9, guest.printed()
        assert host.wait() == 0, host.printed()
    assert not (tmp_path / "disk1").exists()
    assert attempts(host) == ["2 processes, from None", "1 processes, from step-4"]
    assert summary(tmp_path)["losses"] == pytest.approx(expected, rel=1e-4)
