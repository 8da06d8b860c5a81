"""`pytest -k WORD` finds the tests of WORD: of a public name, a choice of the policy, or what of torch meets a sharded model.

Read from the sources, so that it holds for a part of the tests too: pytest's -k looks, without regard to case, into the names of
tests, their parameters' ids, and the names of their files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import zero3

TESTS = Path(__file__).parent
POLICY = [field.name for field in fields(zero3.ShardingPolicy)]
OPTIONS = [
    "consolidate_state_dict",
    "error_if_nonfinite",
    "extra",
    "keep_last",
    "max_shard_size",
    "norm_type",
    "overlap_with_ddp",
    "parameters_as_bucket_view",
    "whole",
    "writeback",
]
OF_TORCH = [
    "add_param_group",
    "autocast",
    "autograd_grad",
    "checkpoint",
    "clip_grad_norm_",
    "closure",
    "compile",
    "create_graph",
    "DDP",
    "deepcopy",
    "double",
    "FSDP2",
    "inference_mode",
    "Join",
    "load_state_dict",
    "LSTM",
    "meta",
    "named_parameters",
    "no_grad",
    "pickle",
    "register_forward_hook",
    "register_hook",
    "requires_grad",
    "retain_graph",
    "set_to_none",
    "share_memory",
    "state_dict",
    "zero_grad",
]
ELSEWHERE = [
    "accelerator",
    "bf16",
    "DPO",
    "fp16",
    "frozen",
    "GRPO",
    "Llama",
    "LoRA",
    "Muon",
    "peft",
    "safetensors",
    "SFT",
    "tied",
    "trainer",
]
ELSEWHERE += ["transformers", "TRL"]


def strings_and_names(node: ast.AST) -> Iterator[str]:
    """What ids are made of: of a table its keys."""
    parts = [key for key in node.keys if key is not None] if isinstance(node, ast.Dict) else [node]
    for each in (each for part in parts for each in ast.walk(part)):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value
        elif isinstance(each, ast.Name):
            yield each.id


def names_of_tests() -> Iterator[set[str]]:
    """Of every test the words that -k looks into, but for its folders."""
    for path in sorted(set(TESTS.rglob("test_*.py")) - {Path(__file__)}):
        body = ast.parse(path.read_text()).body
        tables = {
            target.id: set(strings_and_names(statement.value))
            for statement in body
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None
            for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
            if isinstance(target, ast.Name)
        }
        for function in body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test"):
                written = {word for decorator in function.decorator_list for word in strings_and_names(decorator)}
                ids = written.union(*(tables[word] for word in written if word in tables))  # parametrize("name", CASES)
                yield {word.lower() for word in {path.stem, function.name, *ids}}


FOUND = list(names_of_tests())


@pytest.mark.parametrize("word", sorted({*zero3.__all__, *POLICY, *OPTIONS, *OF_TORCH, *ELSEWHERE}))
def test_pytest_k_finds_tests_by(word: str) -> None:
    assert any(word.lower() in name for names in FOUND for name in names), f"no test is named after {word}: pytest -k {word} finds none"
