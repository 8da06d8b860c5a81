"""Lives on the simulated device have the digests that the file keeps. All of them: `python -m tests.pairs.digest`."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("name", ["device: stage 2", "device: joinable uneven"])
def test_a_life_on_the_device_has_the_digests_that_are_kept(name: str) -> None:
    import json

    from tests.device.digest import found_on_device
    from tests.pairs.digest import FILE, difference, misfit

    kept = json.loads(FILE.read_text())
    if said := misfit(kept):
        pytest.skip(said)
    assert not difference(kept["lives"][name], found_on_device(name))
