"""What lanes and their kin do on the host, by themselves."""

from __future__ import annotations

import torch

from zero3.comm.streams import OnHost


def test_a_copy_of_what_is_on_the_host_is_made_at_once() -> None:
    given = torch.arange(3)
    copied = OnHost(given)
    assert copied.ready() and torch.equal(copied.tensor(), given)
    given.zero_()
    assert copied.tensor().tolist() == [0, 1, 2], "a copy"
