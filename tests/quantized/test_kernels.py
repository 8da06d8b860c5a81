"""Another library's kernel is used if it has the bits of our own code, and only then. (bitsandbytes itself: test_bitsandbytes.py.)"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zero3 import NF4
from zero3.quantized import codec as codecs
from zero3.quantized.codec import NF4_VALUES

CPU = torch.device("cpu")


def right(codes: Tensor, scales: Tensor, block_size: int, kind: str, shape: list[int], dtype: torch.dtype) -> Tensor:
    """As bitsandbytes' operation: one row."""
    assert (kind, shape, codes.dtype) == ("nf4", [2 * codes.numel()], torch.uint8), "bitsandbytes refuses others"
    values = torch.tensor(NF4_VALUES)[torch.stack([codes >> 4, codes & 15], 1).int().view(-1)]
    return (values * scales.repeat_interleave(block_size)[: values.numel()]).to(dtype)[None]


def rounded_twice(*args: Any) -> Tensor:
    return right(*args[:-1], torch.bfloat16).to(args[-1])


def absent(*args: Any) -> Tensor:
    raise NotImplementedError("there is no kernel for this device")


def installed(monkeypatch: pytest.MonkeyPatch, decode: Callable[..., Tensor], module: Callable[[str], object] = ModuleType) -> None:
    monkeypatch.setattr(codecs, "find_spec", lambda name: name)
    monkeypatch.setattr(codecs, "import_module", module)
    monkeypatch.setattr(torch.ops, "bitsandbytes", SimpleNamespace(dequantize_4bit=SimpleNamespace(default=decode)), raising=False)


@pytest.mark.parametrize("block_size", [32, 64, 256, 1024])
@pytest.mark.parametrize(("decode", "used"), [(right, True), (rounded_twice, False), (absent, False)])
def test_a_kernel_is_used_if_it_has_the_same_bits(
    decode: Callable[..., Tensor], used: bool, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randn(31, 66, generator=torch.Generator().manual_seed(0))
    kind = NF4(block_size)
    quantized = kind.quantize(values)
    monkeypatch.setattr(codecs, "find_spec", lambda name: None)
    expected = kind.dequantize(quantized, torch.float32)
    calls: list[Any] = []
    installed(monkeypatch, lambda *args: calls.append(args) or decode(*args))  # type: ignore[func-returns-value]
    codec = kind.codec(CPU)
    tried = len(calls)
    assert codec.dequantize(quantized, torch.float32).equal(expected)
    assert (len(calls) > tried) == used


def test_there_is_no_kernel_for_long_blocks_and_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, right)
    assert codecs.nf4_kernel(2048, CPU, right) is None
    assert codecs.nf4_kernel(64, torch.device("meta"), right) is None
    assert torch.version.cuda is not None or codecs.nf4_kernel(64, torch.device("cuda"), right) is None


def test_a_library_that_can_not_be_imported_is_named_and_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> object:
        raise OSError(f"lib{name}.so: cannot open shared object file")

    installed(monkeypatch, right, broken)
    with caplog.at_level(logging.WARNING, "zero3"):
        assert NF4().dequantize(NF4().quantize(torch.ones(64)), torch.float32).equal(torch.ones(64))
    assert "without bitsandbytes" in caplog.text
    assert "cannot open shared object file" in caplog.text
