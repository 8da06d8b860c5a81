"""Rearrangements of transformers and torch are followed element by element, on a map of where each one lies in the files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import core_model_loading as loading

from tests.huggingface.test_conversions import not_yet
from zero3.huggingface import index_maps
from zero3.huggingface.index_maps import IndexMap, Joined, TracedTensor, Untraceable, Whole, traced

# Operations of transformers' as they are written there; shapes by pattern; targets.
OPERATIONS: dict[str, tuple[dict[str, list[tuple[int, ...]]], list[str]]] = {
    "Chunk(0)": ({"a": [(6, 4)]}, ["x", "y", "z"]),
    "Chunk(1)": ({"a": [(2, 5)]}, ["x", "y", "z"]),  # unequal
    "Concatenate(0)": ({"a": [(2, 3)], "b": [(4, 3)]}, ["x"]),
    "Concatenate(1)": ({"a": [(2, 3, 2)], "b": [(2, 1, 2)]}, ["x"]),
    "Interleave(0)": ({"a": [(6, 2)]}, ["x"]),
    "Interleave(1, inverse=True)": ({"a": [(2, 6, 3)]}, ["x"]),
    "Interleave(1), Chunk(1)": ({"a": [(3, 8)]}, ["x", "y"]),
    "MergeModulelist(0)": ({"a": [(2, 3)] * 3}, ["x"]),
    "MergeModulelist(0), Concatenate(1)": ({"a": [(2, 3)] * 3, "b": [(4, 3)] * 3}, ["x"]),
    "MergeModulelist(1)": ({"a": [(2, 3)] * 4}, ["x"]),
    "SplitModulelist(0)": ({"a": [(3, 1, 4)]}, ["x.*.w"]),
    "Transpose(0, 1)": ({"a": [(3, 5)]}, ["x"]),
    "Transpose(1, 2)": ({"a": [(2, 3, 4)]}, ["x"]),
    "PermuteForRope()": ({"a": [(8, 3)]}, ["x"]),
    "PermuteForRope(inverse=True)": ({"a": [(8,)]}, ["x"]),  # of a bias
    "Conv3dToLinear(2, (1, 2, 2))": ({"a": [(3, 2, 1, 2, 2)]}, ["x"]),
    "LinearToConv3d(2, (1, 2, 2))": ({"a": [(3, 8)]}, ["x"]),
    "ErnieFuseAndSplitTextVisionExperts(0, 1)": ({"a": [(2, 3)] * 4, "b": [(1, 3)] * 4}, ["x", "y"]),
    "ErnieSplitAndDecoupleTextVisionExperts(0, 1)": ({"a": [(2, 4, 3)], "b": [(2, 4, 3)]}, ["x.*", "y.*"]),
}


class _Config:
    num_attention_heads = 2


def converted(operations: list[Any], given: dict[str, list[Tensor]], targets: list[str]) -> dict[str, Tensor]:
    made: Any = {pattern: list(tensors) for pattern, tensors in given.items()}
    for operation in operations:
        made = operation.convert(made, source_patterns=list(given), target_patterns=targets, config=_Config(), model=None)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def filled(index_map: IndexMap[Tensor]) -> Tensor:
    """Element by element, and by ranges: the same."""
    numbers, at = index_map.locate(torch.arange(index_map.numel))
    values = [index_map.sources[number].reshape(-1)[place] for number, place in zip(numbers.tolist(), at.tolist(), strict=True)]
    one_by_one = torch.stack(values).view(index_map.shape)
    for start in range(index_map.numel):
        for stop in (start + 1, (start + index_map.numel) // 2 + 1, index_map.numel):
            parts = [run.source.reshape(-1)[run.at : run.at + run.length] for run in index_map.extents(start, stop)]
            assert torch.equal(torch.cat(parts), one_by_one.reshape(-1)[start:stop]), (start, stop)
    return one_by_one


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("at_once", [1 << 18, 3])
def test_each_operation_of_transformers_is_followed(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes of index maps is what it makes of tensors."""
    monkeypatch.setattr(index_maps, "_AT_ONCE", at_once)
    shapes, targets = OPERATIONS[name]
    numbers = iter(range(1000, 100000, 1000))
    given = {
        pattern: [torch.arange(torch.Size(shape).numel()).view(shape) + next(numbers) for shape in column]
        for pattern, column in shapes.items()
    }
    try:
        operations = eval(f"[{name}]", dict(vars(loading)))
        expected = converted(operations, given, targets)
    except (NameError, TypeError, AttributeError) as reason:
        not_yet(f"can't: {reason}")
    traces = {pattern: [traced(Whole(value, value.shape), value.dtype) for value in column] for pattern, column in given.items()}
    found = converted(operations, traces, targets)  # type: ignore[arg-type]
    assert found.keys() == expected.keys() and len(found) >= len(targets)
    for key, value in expected.items():
        trace = found[key]
        assert isinstance(trace, TracedTensor) and tuple(trace.shape) == tuple(value.shape)
        assert torch.equal(filled(trace.index_map), value), key


REARRANGEMENTS: dict[str, Any] = {
    "flatten": lambda x: x.flatten(),
    "flatten the middle": lambda x: x.flatten(1, 2),
    "flatten the end": lambda x: x.flatten(-2),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "unsqueeze at the end": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.squeeze(),
    "squeeze one": lambda x: x.squeeze(-3),
    "squeeze what is longer": lambda x: x.squeeze(0),
    "transpose": lambda x: x.transpose(0, -1),
    "t": lambda x: x[0][0].t(),
    "t of a vector": lambda x: x[0][0][0].t(),
    "permute": lambda x: x.permute(3, 0, 1, 2),
    "permute by a list": lambda x: x.permute([1, -1, 0, 2]),
    "the whole": lambda x: x[...],
    "from the end": lambda x: x[-1],
    "select": lambda x: x.select(-1, -2),
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "unbind": lambda x: x.unbind(2)[1],
    "split": lambda x: x.split(2, -1)[1],
    "split by sizes": lambda x: x.split([1, 3], 3)[1],
    "chunk": lambda x: x.chunk(3, 3)[1],
    "cat": lambda x: torch.cat([x, x], -1),
    "stack": lambda x: torch.stack([x, x], -1),
    "view": lambda x: x.contiguous().view(-1, 6).reshape((4, 6)),
}


@pytest.mark.parametrize("name", REARRANGEMENTS)
def test_each_rearrangement_of_torch_is_followed(name: str) -> None:
    value = torch.arange(24).view(2, 1, 3, 4)
    expected, found = (REARRANGEMENTS[name](x) for x in (value, traced(Whole(value, value.shape), value.dtype)))
    assert isinstance(found, TracedTensor) and tuple(found.shape) == tuple(expected.shape)
    assert torch.equal(filled(found.index_map), expected)


def test_what_is_no_rearrangement_is_not_followed() -> None:
    trace = traced(Whole("a", (2, 3)), torch.float32)
    for compute in (
        lambda: trace * 2,
        lambda: trace.to(torch.float16),
        lambda: torch.linalg.norm(trace),
        lambda: trace[trace > 0],
        lambda: trace.view(torch.int32),
        lambda: traced(Whole("a", (2, 4)), torch.bfloat16).view(torch.float32),
    ):
        with pytest.raises(Untraceable, match="not known here"):
            compute()
    with pytest.raises(ValueError, match=r"tensors \(2, 3\), \(2, 2\) can't be joined along dimension 0"):
        Joined([trace.index_map, Whole("b", (2, 2))], 0)
    with pytest.raises(ValueError, match="nothing to join"):
        Joined([], 0)
    with pytest.raises(ValueError, match=r"no dimension 2 in \(2, 3\)"):
        torch.cat([trace], 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: x.narrow(2, 0, 1),
        lambda x: x.narrow(1, 1, 3),
        lambda x: x.permute(0, 0),
        lambda x: x.reshape(4, -1),
        lambda x: x.split([1, 1], 1),
        lambda x: x.select(0, 2),
    ],
)
def test_a_trace_refuses_what_a_tensor_would(wrong: Any) -> None:
    """In torch's own words."""
    found = []
    for x in (torch.zeros(2, 3, device="meta"), traced(Whole("a", (2, 3)), torch.float32)):
        with pytest.raises((RuntimeError, IndexError)) as raised:
            wrong(x)
        found.append(str(raised.value))
    assert found[0] == found[1]
