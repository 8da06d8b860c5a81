"""Every line of code on the right-hand sides of docs/migrating.md runs, on two processes, in the place that its row means."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.programs import ROOT

pytest.importorskip("transformers")
PAGE = (ROOT / "docs" / "migrating.md").read_text()
TABLES = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|") and not re.match(r"[|\s-]+$", line)]
ROWS = [cells for cells in TABLES if cells[1].strip() != "zero3"]  # without headers
FILLED = {  # rows that leave something to the reader
    "zero3.shard(model, policy=lambda name, module: ...)": "zero3.shard(model, policy=lambda name, module: policy)",
    "zero3.param_groups(model, lambda name, info: {...})": "zero3.param_groups(model, lambda name, info: {'weight_decay': 0.1})",
    "zero3.set_trainable(model, lambda name, info: ...)": "zero3.set_trainable(model, lambda name, info: 'head' not in name)",
    "zero3.ShardingPolicy(ignored=lambda name, info: ...)": "zero3.ShardingPolicy(ignored=lambda name, info: info.ndim == 1)",
    "zero3.save_checkpoint(path, model, optimizer, extra=...)": "zero3.save_checkpoint(path, model, optimizer, extra={'step': 3})",
    "zero3.shard(model, policy=zero3.ShardingPolicy(ignored=...))": "zero3.shard(model, policy=zero3.ShardingPolicy(ignored=None))",
    "zero3.materialize(model, init=...)": "zero3.materialize(model, init=lambda module: None)",
    "zero3.ShardingPolicy(stage=...)": "zero3.ShardingPolicy(stage=2)",
    "zero3.ShardingPolicy(prefetch_depth=...)": "zero3.ShardingPolicy(prefetch_depth=2)",
    "model.generate(...)": "model.generate(ids, max_new_tokens=2)",
    'zero3.GradScaler("cuda")': 'zero3.GradScaler("cpu")',
    'torch.distributed.init_process_group("nccl")': "torch.distributed.is_initialized()",
    'torch.device("meta")': 'torch.device("meta")',
}
WORDS = {"torchrun", "torch.save", "zero3.shard", "zero3.param_groups", "zero3.save_pretrained", "DataLoader", "TrainingArguments"}
TRAINERS = re.compile(r"Zero3Trainer|^\w+=|^--|examples/|python -m|^torchrun|torch\.utils")  # their tests stand below, or elsewhere


def code_of(cells: list[str]) -> list[str]:
    spans = re.findall(r"`([^`]+)`", cells[1])
    return [span for span in spans if span not in WORDS and not TRAINERS.search(span)]


SPANS = list(dict.fromkeys(span for cells in ROWS for span in code_of(cells)))


class Block(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return x


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 11}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def where(span: str, scratch: Path) -> dict[str, Any]:
    """What a line meets in a script that comes to it."""
    torch.manual_seed(0)
    model: Any = llama() if re.search("pretrained|checkpointing|generate", span) else Words()
    ids, policy, path = torch.randint(11, (2, 4)), zero3.ShardingPolicy(), scratch / str(SPANS.index(span))
    names: dict[str, Any] = {
        "torch": torch, "zero3": zero3, "AdamW": torch.optim.AdamW, "Join": Join, "Block": Block, "model": model, "policy": policy,
        "device": torch.device("cpu"), "path": path, "ids": ids, "batch": ids, "max_norm": 1.0, "accumulation_steps": 2,
        "client_state": {"epoch": 1}, "mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)),
    }  # fmt: skip
    if "ddp" in span:
        names["ddp"] = DistributedDataParallel(model)
        chosen = {"overlap_with_ddp": True} if "hook" in span else {}
        names["optimizer"] = zero3.ZeroRedundancyOptimizer(names["ddp"].parameters(), torch.optim.AdamW, lr=1e-3, **chosen)
        return names
    if "load_pretrained" in span and torch.distributed.get_rank() == 0:
        model.save_pretrained(path)
    if "replicas_only" in span:
        names["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    torch.distributed.barrier()
    if not span.startswith(("zero3.shard(", "model.gradient", "block.")):
        zero3.shard(model, process_group=names["mesh"])
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model)) if zero3.is_sharded(model) else None
    found = model(ids)
    loss = (found if isinstance(found, Tensor) else found.logits).sum()
    if not re.search(r"loss|offload_optimizer", span):
        loss.backward()
    if optimizer is not None and "offload" not in span:
        optimizer.step()
        if re.search("param_groups|set_trainable", span):
            optimizer.zero_grad()
    if "load_checkpoint" in span:
        zero3.save_checkpoint(path, model, optimizer)
    if "load_full" in span:
        wanted = zero3.full_optimizer_state_dict(model, optimizer) if "optimizer" in span else zero3.full_state_dict(model)
        names["state"] = wanted
    if "uneven" in span:
        names |= {"uneven": zero3.joinable(model, lambda: None), "update": lambda: None}
    module = model.blocks[0] if isinstance(model, Words) else None
    names |= {"optimizer": optimizer, "module": module, "block": module, "loss": loss, "loss_sum": loss, "num_tokens": torch.tensor(8)}
    names |= {
        "layers": list(model.blocks) if isinstance(model, Words) else [],
        "schedule": optimizer and torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    return names


def run(rank: Rank) -> list[str]:
    wrong = []
    for span in SPANS:
        code = FILLED.get(span, span)
        for name in re.findall(r"(\w+_dtype)=\.\.\.", code):
            code = code.replace(f"{name}=...", f"{name}=torch.bfloat16")
        code = code.replace("cast_forward_inputs=...", "cast_forward_inputs=False")
        assert "..." not in code, f"{span}: say in FILLED what stands there"
        code = f"{code} pass" if code.endswith(":") else code
        names = where(span, rank.scratch)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of other libraries, about themselves
                exec(compile(code, span, "exec"), names)
        except Exception as error:
            wrong.append(f"{span}: {type(error).__name__}: {error}")
        torch.distributed.barrier()
    return wrong


def test_every_span_of_migrating_is_code() -> None:
    assert len(SPANS) > 55
    for span in SPANS:
        ast.parse(f"{span} pass" if span.endswith(":") else span)


@pytest.mark.slow
def test_every_right_hand_side_of_migrating_runs() -> None:
    assert on_ranks(2, run, debug="OFF") == [[], []]  # torch's own checks end DDP's processes on gloo


def test_what_migrating_gives_a_trainer_is_taken(tmp_path: Path) -> None:
    """Rows of the Trainer: keywords of `Zero3Trainer`, and of TrainingArguments. Those of torchtune: options of the recipe."""
    import inspect

    from transformers import TrainingArguments

    from zero3.integrations.transformers import Zero3Trainer

    ours = set(inspect.signature(Zero3Trainer).parameters) | set(inspect.signature(TrainingArguments).parameters)
    section = PAGE.partition("## From the Trainer's")[2].partition("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    given = {name for row in rows for name in re.findall(r"`(\w+)=", row.split(" | ")[1])}
    assert len(rows) == 10 and given == {"policy", "layers", "gradient_checkpointing"} and given <= ours
    source = (ROOT / "examples" / "sft.py").read_text()
    options = set(re.findall(r"(?<!-)--[a-z-]+\b", PAGE.partition("## From torchtune")[2].partition("\n## ")[0])) - {
        "--nproc-per-node",
        "--nproc",
    }
    assert {"--model", "--data", "--lora", "--quantize", "--packing"} <= options
    assert not [option for option in options if f'"{option}"' not in source]
