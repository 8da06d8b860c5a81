"""Which values are the same but for rounding, where what was changed while a layer stayed fetched is undone."""

from __future__ import annotations

import torch

from zero3 import pinning


def test_values_are_the_same_but_for_rounding() -> None:
    floats, numbers = torch.tensor([1.0, -3.0, torch.nan]), torch.tensor([2**30, 1])
    for found, expected, same in (
        (floats.clone(), floats, True),
        (floats * (1 + 1e-7), floats, True),
        (floats * (1 + 1e-4), floats, False),
        (floats.double(), floats, False),
        (floats[:2], floats, False),
        (numbers.clone(), numbers, True),
        (numbers + torch.tensor([1, 0]), numbers, False),
        (torch.empty(0), torch.empty(0), True),
    ):
        assert pinning._but_for_rounding(found, expected) is same, (found, expected)
