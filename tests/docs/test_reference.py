"""The reference, as the docstrings of public names make it: nothing is left out, and every example runs on two ranks."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy

import zero3
from tests.support.processes import Rank, on_ranks

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
RESULTS = (
    "CheckReport", "Comparison", "Difference", "GuardedStep", "JoinableModel", "LayerProfile", "Moment", "Plan", "Profile",
    "QuantizedTensor", "Report", "Saving", "Span", "Transfer",
)  # fmt: skip


def on_the_page(name: str) -> Any:
    """The class of a result, from the module that the page names."""
    found = re.search(rf"^\.\. autoclass:: (zero3\.[\w.]+)\.{name}\b", REFERENCE, re.M)
    assert found is not None, name
    return getattr(importlib.import_module(found.group(1)), name)


PUBLIC: dict[str, Any] = {name: getattr(zero3, name) for name in zero3.__all__}
FUNCTIONS = [name for name, value in PUBLIC.items() if not isinstance(value, type)]
CLASSES = {name: value for name, value in PUBLIC.items() if isinstance(value, type)} | {name: on_the_page(name) for name in RESULTS}


def section(text: str, title: str) -> str:
    """What stands under `title:` in a Google-style docstring; "" if there is no such section."""
    found = re.search(rf"^{title}:\n((?: +.*\n|\n)+)", text + "\n", re.M)
    return textwrap.dedent(found.group(1)).strip() if found else ""


def examples_of(text: str) -> list[str]:
    return [textwrap.dedent(found) for found in re.findall(r"^Example::\n\n((?: +.*\n|\n)+)", text + "\n", re.M)]


def own_members(kind: type) -> list[str]:
    """What a class adds for its users: not what torch's classes have, which torch documents."""
    inherited = {name for base in kind.__mro__[1:] if base.__module__.startswith("torch") for name in vars(base)}
    fields = set(getattr(kind, "__dataclass_fields__", ()))
    added = [name for name in vars(kind) if not name.startswith("_") and name not in inherited and name not in fields]
    return added if not issubclass(kind, zero3.ZeroRedundancyOptimizer) else [*added, "step", "state_dict", "load_state_dict"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_docstring_has_its_sections(name: str) -> None:
    text, function = inspect.getdoc(PUBLIC[name]) or "", inspect.unwrap(PUBLIC[name])
    parameters = [each.name for each in inspect.signature(function).parameters.values()]
    documented = re.findall(r"^(\w+): ", section(text, "Args"), re.M)
    assert documented == parameters
    assert re.search(r"^\w+Error: ", section(text, "Raises"), re.M)
    assert len(examples_of(text)) == 1
    returned = inspect.signature(function).return_annotation
    kind = "Yields" if inspect.isgeneratorfunction(function) else "Returns"
    if returned not in ("None", "Iterator[None]", "AbstractContextManager[None]"):
        assert ":" not in section(text, kind).splitlines()[0], "napoleon would take what stands before the colon for a type"


@pytest.mark.parametrize("name", CLASSES)
def test_a_classs_docstring_has_its_sections(name: str) -> None:
    kind = CLASSES[name]
    text = inspect.getdoc(kind) or ""
    fields = list(getattr(kind, "__dataclass_fields__", ()))
    assert re.findall(r"^(\w+): ", section(text, "Attributes"), re.M)[: len(fields)] == fields
    if name in PUBLIC:
        assert len(examples_of(text)) == 1
        parameters = [each for each in inspect.signature(kind).parameters if each not in fields]
        assert re.findall(r"^(\w+): ", section(text, "Args"), re.M) == parameters
    for member in own_members(kind):
        held = inspect.getattr_static(kind, member)
        assert inspect.getdoc(held.fget if isinstance(held, property) else held), f"{name}.{member} has no docstring"


def test_instances_have_no_attribute_that_is_not_told() -> None:
    """What a constructor sets in plain sight is for users, and stands among the attributes."""
    profile = CLASSES["Profile"]()
    told = re.findall(r"^(\w+): ", section(inspect.getdoc(CLASSES["Profile"]) or "", "Attributes"), re.M)
    assert sorted(name for name in vars(profile) if not name.startswith("_")) == sorted(told)


def test_every_public_name_is_in_the_reference_with_all_of_its_members() -> None:
    for name in FUNCTIONS:
        assert re.search(rf"^\.\. autofunction:: zero3\.{name}$", REFERENCE, re.M), name
    for name, kind in CLASSES.items():
        path = f"zero3.{name}" if name in PUBLIC else f"{kind.__module__}.{name}"
        found = re.search(rf"^\.\. autoclass:: {re.escape(path)}(\(\))?\n((?: +.*\n)*)", REFERENCE, re.M)
        assert found is not None, path
        listed = re.findall(r"\w+", found.group(2).partition(":members:")[2])
        assert set(listed) >= {member for member in own_members(kind) if member not in ("forward", "extra_repr")}, path


def test_what_public_functions_return_is_documented() -> None:
    for name in FUNCTIONS:
        returned = get_type_hints(inspect.unwrap(PUBLIC[name])).get("return")
        kinds = [each for each in (returned, *getattr(returned, "__args__", ())) if isinstance(each, type)]
        for kind in (kind for kind in kinds if kind.__module__.startswith("zero3")):
            assert kind in CLASSES.values(), f"{name} returns a {kind.__name__}"


class Words(nn.Module):
    """Word ids `[batch, length]` to logits `[batch, length, 11]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def encode(self, ids: Tensor) -> Tensor:
        return self.embedding(ids)

    def generate(self, ids: Tensor, max_new_tokens: int) -> Tensor:
        for _ in range(max_new_tokens):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], dim=1)
        return ids


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).pow(2).mean()


def given(rank: Rank, directory: Path, name: str) -> dict[str, Any]:
    """What examples speak of without saying where it comes from."""
    torch.manual_seed(rank.number)
    blocks = [nn.Linear(4, 4) for _ in range(2)]
    in_layers = name in ("Zero3Layer", "Zero3Sequential", "ShardingPolicy")
    model = zero3.shard(Words())
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
    batches = [torch.randn(3, 4) if in_layers else torch.randint(11, (3, 4)) for _ in range(3)]
    names: dict[str, Any] = {
        "torch": torch, "zero3": zero3, "cross_entropy": cross_entropy, "Join": Join, "rank": rank.number, "step": 1,
        "device": torch.device("cpu"), "directory": str(directory / name), "blocks": blocks, "model": model, "plain_model": Words(),
        "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.ConstantLR(optimizer), "loss_of": loss_of, "batches": batches,
        "batch": batches[0], "micro_batches": batches, "token_batches": [(ids, ids) for ids in batches], "prompt": {"ids": batches[0]},
        "weight": torch.randn(8, 8), "prompts": [], "engine": SimpleNamespace(load_weight=lambda name, tensor: None, generate=list),
        "print": lambda *told: None,
    }  # fmt: skip
    if name in ("shard", "load_pretrained", "materialize", "plan", "Cluster"):
        from transformers import AutoModelForCausalLM, LlamaConfig

        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11}
        names |= {"AutoModelForCausalLM": AutoModelForCausalLM, "config": LlamaConfig(**sizes)}
        if rank.number == 0:
            AutoModelForCausalLM.from_config(names["config"]).save_pretrained(names["directory"])
    if name in ("linear_cross_entropy", "causal_lm_loss", "tile", "split_sequence"):
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11}
        labels = {} if name == "linear_cross_entropy" else {"labels": torch.randint(11, (3, 4))}
        names |= {"model": zero3.shard(LlamaForCausalLM(LlamaConfig(**sizes))), "targets": torch.randint(11, (3, 4))}
        names["batch"] = {"input_ids": torch.randint(11, (3, 4)), **labels}
    q = torch.randn(1, 2, 4, 3)
    names |= {"q": q, "k": q, "v": q, "partial": partial, "scaled_dot_product_attention": nn.functional.scaled_dot_product_attention}
    (directory / name).mkdir(parents=True, exist_ok=True)
    return names


def run_examples(rank: Rank, examples: dict[str, str], prepared: dict[str, str]) -> list[str]:
    for name, code in examples.items():
        names = given(rank, rank.scratch, name)
        torch.distributed.barrier()
        for part in (prepared.get(name, ""), code):
            exec(compile(part, f"the example of {name}", "exec"), names)
    return list(examples)


PREPARED = {  # examples that go on from another one's
    "load_checkpoint": "zero3.save_checkpoint(f'{directory}/a', model, optimizer, extra={'schedule': schedule.state_dict()})",
    "load_full_state_dict": "weights = zero3.full_state_dict(model)\nif rank == 0: torch.save(weights, f'{directory}/weights.pt')",
}


@pytest.mark.slow
def test_every_example_runs_on_two_ranks() -> None:
    values: dict[str, Callable[..., Any]] = {**PUBLIC, **CLASSES}
    examples = {name: code for name, value in values.items() for code in examples_of(inspect.getdoc(value) or "")}
    assert set(PUBLIC) <= set(examples)
    for name, code in examples.items():
        ast.parse(code, name)
    assert on_ranks(2, run_examples, examples, PREPARED) == [list(examples)] * 2
