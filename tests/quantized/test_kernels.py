"""A kernel is used if it has the bits of our own code, and only then. (Of bitsandbytes: test_bitsandbytes.py; of Triton: test_fused.py.)"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zero3 import MXFP4, NF4, Float8, Int8
from zero3.quantized import codec as codecs
from zero3.quantized import kernels
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


# -- Triton's, for which others stand in: on the device, that of a GPU or the simulated one


class StandIn:
    """The module of kernels, by torch's operations on all elements at once."""

    def __init__(self, error: float = 0.0, *, knows: bool = True) -> None:
        self.error, self._knows, self.calls = error, knows, 0

    def knows(self, codes: torch.dtype) -> bool:
        return self._knows

    def decode_tiles(self, kind: kernels.Tiles, quantized: Any, start: int, out: Tensor) -> None:
        place = torch.arange(start, start + len(out), device=out.device)
        row, column = place // kind.columns, place % kind.columns
        band = row // kind.rows * -(-kind.rows // kind.height) + row % kind.rows // kind.height
        block = band * -(-kind.columns // kind.width) + column // kind.width
        values = quantized.codes.float()[start : start + len(out)]
        self._write(values * quantized.scales.index_select(0, block), out)

    def decode_pairs(self, kind: kernels.FourBits, quantized: Any, start: int, out: Tensor) -> None:
        place = torch.arange(start, start + len(out), device=out.device)
        pairs = quantized.codes.index_select(0, place // 2).int()
        codes = (pairs >> torch.where(place % 2 == 0, kind.first, 4 - kind.first)) & 15
        block = place // kind.size
        scales = quantized.scales.index_select(0, block)
        if kind.scales is not None:
            scales = kind.scales.index_select(0, scales.int())
        if quantized.scale_scales is not None:
            common = quantized.scale_scales.index_select(0, block // quantized.scales_together)
            scales = scales.mul(common).add(quantized.offset)
        self._write(kind.values.index_select(0, codes.int()) * scales, out)

    def _write(self, values: Tensor, out: Tensor) -> None:
        self.calls += 1
        if math.isinf(self.error):
            raise RuntimeError("no compiler")
        out.copy_(values + self.error)


def stands_in(monkeypatch: pytest.MonkeyPatch, module: StandIn) -> None:
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(kernels, "import_module", lambda name: module)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


AT_REST = [NF4(), NF4(double_quant=False), MXFP4(), MXFP4(transposed=True), Int8(), Float8(), Float8(block=(9, 5))]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", AT_REST, ids=lambda kind: kind.name)
def test_a_gpu_s_kernel_is_used_if_it_has_the_same_bits(
    kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = torch.device("cuda")
    quantized = kind.quantize(torch.randn(4, 30, 66, generator=torch.Generator().manual_seed(0)).to(device))
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    expected = kind.dequantize(quantized, torch.float32).cpu()
    for module, used, says in (
        (StandIn(), True, ""),
        (StandIn(knows=False), False, ""),
        (StandIn(error=1e-3), False, f"{kind.name} goes by torch's operations, not by Triton's kernels: their results differ"),
        (StandIn(error=math.inf), False, f"{kind.name} goes by torch's operations, not by Triton's kernels: no compiler"),
    ):
        stands_in(monkeypatch, module)
        caplog.clear()
        codec = kind.codec(device)
        tried = module.calls
        assert codec.dequantize(quantized, torch.float32).cpu().equal(expected)
        assert (module.calls > tried) == used
        assert says in caplog.text and (says or not caplog.text)
