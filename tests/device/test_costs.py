"""What an operator counts for in the log: kernels as torch's build for CUDA has them, operations, bytes. Each rule by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

HALF, WORD = 2, 4  # bytes of bf16, of fp32


class Counted(NamedTuple):
    kernels: int
    flops: float = 0
    nbytes: float | None = None  # None: not held here


@pytest.fixture(autouse=True)
def dry() -> Iterator[None]:
    from tests.device import simulated

    simulated.C.set_dry(True)
    yield
    simulated.C.log(False)
    simulated.C.take_log()
    simulated.C.set_dry(False)


def entries_of(run: Callable[[], Any]) -> list[Any]:
    from tests.device import simulated
    from tests.device.clock import Entry

    simulated.C.take_log()
    simulated.C.log(True)
    made = run()
    simulated.C.log(False)
    del made
    return [Entry(*each) for each in simulated.C.take_log()]


def counted(run: Callable[[], Any], *names: str) -> Counted:
    """Of all kernels, or of those whose names have one of these in them."""
    found = [entry for entry in entries_of(run) if entry.kind == "k" and (not names or any(name in entry.name for name in names))]
    return Counted(*(sum(getattr(entry, key) for entry in found) for key in ("kernels", "flops", "nbytes")))


def of(*shape: int, dtype: str = "bfloat16", **more: Any) -> Any:
    import torch

    return torch.empty(*shape, dtype=getattr(torch, dtype), device="cuda", **more)


def ids(*shape: int) -> Any:
    return of(*shape, dtype="long")


def heads(tokens: int = 32, **more: Any) -> Any:
    return of(2, 4, tokens, 16, **more)


def attention(columns: int = 32, **more: Any) -> Callable[[], Any]:
    from torch.nn.functional import scaled_dot_product_attention

    return lambda: scaled_dot_product_attention(heads(), heads(columns), heads(columns), **more)


def backward_of(run: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: run().sum().backward()


def rules() -> dict[str, tuple[Callable[[], Any], Counted]]:
    import torch
    from torch.nn import functional

    wide, pairs = of(64, dtype="float32"), 32 * 33 / 2
    ones, many = [of(8) for _ in range(3)], [of(8) for _ in range(150)]
    large = [of(320 * 65536)]
    square, cube = of(32, 64), of(5, 32, 64)
    return {
        "mm": (lambda: square @ of(64, 16), Counted(1, 2 * 32 * 64 * 16, HALF * (32 * 64 + 64 * 16 + 32 * 16))),
        "bmm": (lambda: cube @ of(5, 64, 16), Counted(1, 5 * 2 * 32 * 64 * 16, HALF * 5 * (32 * 64 + 64 * 16 + 32 * 16))),
        "addmm": (lambda: functional.linear(square, of(16, 64), of(16)), Counted(1, 2 * 32 * 64 * 16)),
        "one reads two and writes one": (lambda: wide + wide, Counted(1, 0, 3 * 64 * WORD)),
        "in place: reads, and writes what it read": (lambda: wide.mul_(2), Counted(1, 0, 2 * 64 * WORD)),
        "zeros only write": (lambda: wide.zero_(), Counted(1, 0, 64 * WORD)),
        "a copy casts": (lambda: wide.copy_(of(64)), Counted(1, 0, 64 * (WORD + HALF))),
        "an expanded tensor has what it has": (lambda: of(64, 64) + of(1).expand(64, 64), Counted(1, 0, 2 * 64 * 64 * HALF + HALF)),
        "views": (lambda: square.view(64, 32).t()[1:], Counted(0, 0, 0)),
        "flash attention": (attention(), Counted(1, 2 * 2 * 8 * 32 * 32 * 16)),
        "flash attention, causal": (attention(is_causal=True), Counted(1, 2 * 2 * 8 * pairs * 16)),
        "an embedding": (lambda: functional.embedding(ids(10), of(1000, 64)), Counted(1, 0, 2 * 10 * 64 * HALF)),
        "rows": (lambda: of(1000, 64).index_select(0, ids(10)), Counted(1, 0, 2 * 10 * 64 * HALF)),
        "rows are added in place": (lambda: square.index_add_(0, ids(4), of(4, 64)), Counted(1, 0, 3 * 4 * 64 * HALF)),
        "rows are added": (lambda: square.index_add(0, ids(4), of(4, 64)), Counted(2)),
        "the largest": (lambda: square.topk(2), Counted(4)),
        "a list in one kernel": (lambda: torch._foreach_mul_(ones, 2.0), Counted(1, 0, 3 * 2 * 8 * HALF)),
        "110 tensors of one list in a kernel": (lambda: torch._foreach_mul_(many, 2.0), Counted(2)),
        "64 of two lists": (lambda: torch._foreach_add_(many, many), Counted(3)),
        "320 blocks of 65536 elements": (lambda: torch._foreach_mul_(large, 2.0), Counted(1)),
        "more": (lambda: torch._foreach_mul_([of(320 * 65536 + 1)], 2.0), Counted(2)),
        "lists of two dtypes: one by one": (lambda: torch._foreach_mul_([*ones, wide], 2.0), Counted(4)),
        "norms of a list": (lambda: torch._foreach_norm(ones), Counted(3)),
        "copies of a list": (lambda: torch._foreach_copy_(ones, [of(8) for _ in range(3)]), Counted(1, 0, 3 * 2 * 8 * HALF)),
        "FSDP2's copy in": (lambda: torch._chunk_cat([square, square], 0, 2), Counted(1, 0, 2 * 2 * 32 * 64 * HALF)),
        "FSDP2's copy out": (
            lambda: torch.split_with_sizes_copy(square, [16, 48], 1, out=[of(32, 16), of(32, 48)]),
            Counted(1, 0, 2 * 32 * 64 * HALF),
        ),
        "RMSNorm": (lambda: functional.rms_norm(square, (64,), of(64)), Counted(1)),
        "a convolution": (lambda: functional.conv1d(of(2, 3, 16, dtype="float32"), of(4, 3, 5, dtype="float32")), Counted(1)),
    }  # fmt: skip


def test_kernels_are_counted_as_cuda_has_them() -> None:
    wrong = {}
    for name, (run, expected) in rules().items():
        found = counted(run)
        if found != (expected if expected.nbytes is not None else expected._replace(nbytes=found.nbytes)):
            wrong[name] = found, expected
    assert not wrong


def test_backward_of_attention_is_five_products_in_three_kernels() -> None:
    def step() -> None:
        from torch.nn.functional import scaled_dot_product_attention

        query, key, value = (heads(requires_grad=True) for _ in range(3))
        scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    found = counted(step, "attention_backward")
    assert found[:2] == (3, 5 * 2 * 8 * (32 * 33 / 2) * 16)


def test_backward_of_an_rms_norm_is_two_kernels() -> None:
    from torch.nn.functional import rms_norm

    run = backward_of(lambda: rms_norm(of(32, 64, requires_grad=True), (64,), of(64, requires_grad=True)))
    assert counted(run, "rms_norm").kernels == 1 + 2
    assert counted(run, "rms_norm", "pow", "mean", "rsqrt", "mul").kernels == 1 + 2


def test_backward_of_an_embedding_sorts() -> None:
    from torch.nn.functional import embedding

    def run() -> None:
        embedding(ids(10), of(1000, 64, requires_grad=True)).backward(of(10, 64))

    assert counted(run, "embedding_dense_backward")[::2] == (14, 1000 * 64 * HALF + 3 * 10 * 64 * HALF)


def test_a_loss_reads_few_of_the_logits() -> None:
    from torch.nn.functional import cross_entropy

    def step() -> None:
        cross_entropy(of(10, 1000, dtype="float32", requires_grad=True), ids(10)).backward()

    assert counted(step, "nll_loss_forward")[::2] == (1, 64 * 10)
    assert counted(step, "nll_loss_backward")[::2] == (2, 10 * 1000 * WORD)


@pytest.mark.parametrize("tensors", [1, 36, 37])
def test_fused_adamw_takes_36_tensors_in_a_kernel(tensors: int) -> None:
    """Four lists: parameters, gradients, two moments. It reads four, and writes three."""
    import torch

    parameters = [of(8, dtype="float32", requires_grad=True) for _ in range(tensors)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)
    optimizer.step()
    found = counted(optimizer.step, "_fused_adamw_")
    assert found.kernels == -(-tensors // 36)
    assert found.nbytes == pytest.approx(7 * 8 * WORD * tensors, rel=0.2)  # and the steps' numbers


def test_an_operator_for_which_the_host_waits_is_a_kernel_too() -> None:
    """And the wait has the line of Python that asked for it."""
    import torch

    entries = entries_of(lambda: torch.nonzero(of(8)))
    assert [entry.name for entry in entries if entry.kind == "k"] == ["aten::nonzero"]
    waits = [entry.name for entry in entries if entry.kind == "h"]
    assert waits and all("test_costs.py:" in wait for wait in waits)
