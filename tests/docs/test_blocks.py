"""The blocks of code of docs/meshes.md and docs/long.md, and the factory of docs/integrations.md, run as they stand there, on the CPU
and on four processes in place of GPUs and hosts. Their numbers are those of plain torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import WORDS, arguments, collate, launched, llama, rows

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.slow


def block_of(page: str, number: int, **places: str) -> str:
    code: str = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)[number]
    for old, new in (('"cuda"', '"cpu"'), *places.items()):
        assert old in code or old == '"cuda"', f"{page} does not say {old} any more"
        code = code.replace(old, new)
    return code


def apart(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def mesh(rank: Rank) -> float:
    def batch_of(number: int, step: int) -> Any:
        return collate(rows(2, seed=10 * step + number))

    names = {"torch": torch, "zero3": zero3, "model": llama(), "loss_of": lambda model, batch: model(**batch).loss, "device": "cpu"}
    names["micro_batches"] = [batch_of(rank.number, step) for step in range(3)]
    exec(block_of("meshes.md", 0, **{"hosts, gpus = 4, 8": "hosts, gpus = 2, 2"}), names)
    plain = llama()
    for number in range(4):
        for step in range(3):
            (plain(**batch_of(number, step)).loss / 4).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    torch.optim.AdamW(plain.parameters(), lr=1e-5).step()
    return apart(zero3.full_state_dict(names["model"], rank0_only=False), plain.state_dict())


def head(rank: Rank) -> float:
    model, batch = zero3.shard(llama()), collate(rows(3, seed=rank.number))
    names = {"zero3": zero3, "model": model, "batch": batch, "targets": functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]}
    first, _, rest = block_of("long.md", 0).partition("\n")
    expected, found = model(**batch).loss, []
    for code in (first, rest):
        exec(code, names)
        found.append(abs(float(names["loss"].detach() - expected.detach())))
    return max(found)


def parts(rank: Rank) -> float:
    def batch_of(group: int, step: int) -> Any:
        return collate(rows(3, seed=10 * step + group))

    names = {"zero3": zero3, "model": llama(num_attention_heads=4), "ranks": 4}
    names["loader"] = [batch_of(rank.number // 2, step) for step in range(2)]
    exec(block_of("long.md", 1, **{"(ranks // 8, 8)": "(ranks // 2, 2)"}), names)
    plain, total, tokens = llama(num_attention_heads=4), torch.zeros(()), 0
    for batch in (batch_of(group, step) for group in range(2) for step in range(2)):
        labels = batch.pop("labels")[:, 1:]
        logits = plain(**batch).logits[:, :-1]
        total = total + functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1), reduction="sum")
        tokens += int((labels != -100).sum())
    torch.autograd.backward(total / tokens)
    with zero3.full_gradients(names["model"]) as found:
        return apart(found, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("body", [mesh, head, parts], ids=lambda body: body.__name__)
def test_a_block_has_the_numbers_of_plain_torch(body: Any) -> None:
    assert max(on_ranks(4, body)) < 1e-6


def factory(rank: Rank) -> list[bool]:
    """Whether each group is Muon's."""
    from zero3.integrations.transformers import Zero3Trainer

    with launched(rank):
        names: dict[str, Any] = {"torch": torch, "zero3": zero3, "Zero3Trainer": Zero3Trainer, "model": llama(), "examples": rows(16)}
        names["arguments"] = arguments(rank.scratch)
        exec(block_of("integrations.md", 1), names)
        names["trainer"].data_collator = collate
        names["trainer"].train()
        return ["momentum" in group for group in names["trainer"].optimizer.param_groups]


def test_the_factory_of_integrations_trains() -> None:
    assert on_ranks(2, factory) == [[True, False]] * 2
