"""Hugging Face's models on the simulated device: the numbers are those of the CPU, and no order of streams changes a bit."""

from __future__ import annotations

import pytest

from tests.device.huggingface import HUGGING_FACE
from tests.device.test_parity import SETTINGS, Setting, assert_same, in_any_order, in_order, on_cpu

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")  # of what older versions of it need


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_in_order_the_numbers_are_those_of_the_cpu(name: str) -> None:
    tolerance = 1e-3 if "bf16" in name else 1e-6  # the CPU's attention is another kernel than the device's plain operators
    assert_same(in_order(HUGGING_FACE[name]), on_cpu(HUGGING_FACE[name]), tolerance)


@pytest.mark.parametrize("setting", SETTINGS[1:5], ids=str)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_no_order_of_streams_changes_a_bit(name: str, setting: Setting) -> None:
    expected = in_order(HUGGING_FACE[name])
    assert_same(in_any_order(HUGGING_FACE[name], setting), expected)
