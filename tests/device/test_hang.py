"""`python -m zero3 hang` where hosts run ahead of their devices, as on NCCL: no transfer fails, and nobody is told by an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.device.test_order import run
from tests.device.training import Me
from tests.support.hanging import PLACES, behind, train

PLACED = [place for place in PLACES if not place.endswith("a save")]


@pytest.mark.parametrize("place", PLACED)
def test_hang_on_a_device_names_the_rank_and_its_layer(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.device import simulated

    monkeypatch.setenv("ZERO3_RING_DIR", str(tmp_path / "rings"))
    simulated.schedule("random", 1, progress=0.2)
    found: list[dict[str, Any]] = []

    def body(me: Me) -> None:
        stop = (lambda: found.append(behind(tmp_path / "rings", 1))) if me.rank == 1 else None
        train(tmp_path, place, stop, device=str(me.device))

    run(2, body)
    assert (found[0]["layer"], found[0]["direction"]) == PLACES[place]
    assert all(each["completed"] is None for each in found[0]["ranks"].values()), "the host has waited for none"
