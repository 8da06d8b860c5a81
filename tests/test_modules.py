"""Names of a model's tensors, without the prefixes of torch's wrappers."""

from __future__ import annotations

import pytest

from zero3.modules import own_name


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("_orig_mod.a.weight", "a.weight"),
        ("a._checkpoint_wrapped_module._orig_mod.weight", "a.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("a._orig_mod", "a._orig_mod"),
        ("a._orig_modules.weight", "a._orig_modules.weight"),
    ],
)
def test_only_whole_parts_of_a_name_are_prefixes(name: str, own: str) -> None:
    assert own_name(name) == own
