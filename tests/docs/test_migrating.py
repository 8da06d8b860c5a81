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


def section(title: str) -> list[tuple[str, list[str]]]:
    """The rows of a section: the cell on the left, and the code on the right."""
    rows = [
        line.strip("| ").split(" | ")
        for line in PAGE.partition(f"## {title}")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| ")
    ]
    return [(cells[0], re.findall(r"`([^`]+)`", cells[1])) for cells in rows[1:]]


def run_trainer(rank: Rank) -> list[tuple[str, float, str]]:
    """Each row of the Trainer, for one step: the row, the loss of that step, and what the model says of itself."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from tests.support.trainers import arguments, collate, launched, llama, logged, rows
    from zero3.integrations.transformers import Zero3Trainer

    def train(of_trainer: str = "", of_arguments: str = "", model: Any = None) -> tuple[float, str]:
        names = {"zero3": zero3, "Zero3Trainer": Zero3Trainer, "LlamaDecoderLayer": LlamaDecoderLayer, "model": model or llama()}
        names["arguments"] = arguments(rank.scratch, max_steps=1, **eval(f"dict({of_arguments})", names))
        names |= {"given": {"train_dataset": rows(8), "data_collator": collate}}
        trainer = eval(f"Zero3Trainer(model=model, args=arguments, **given, {of_trainer})", names)
        trainer.train()
        assert isinstance(trainer.model.model.layers[0], (zero3.Zero3Layer, LlamaDecoderLayer))
        checkpointed = " checkpointed" if trainer.model.is_gradient_checkpointing else ""
        return logged(trainer, "loss")[0][0], str(zero3.report(trainer.model)).rpartition(" ShardingPolicy")[2] + checkpointed

    found = []
    with launched(rank):
        path = rank.scratch / "base"
        if rank.number == 0:
            llama().save_pretrained(path)
        for left, spans in section("From the Trainer's"):
            if "cpu_ram_efficient_loading" in left:
                with eval(spans[0], {"torch": torch}):
                    model = llama()
                for span in spans[1:]:
                    eval(span, {"zero3": zero3, "model": model, "path": path})
                outcome = train(model=model)
            elif left == "`bf16=True`":
                outcome = train("", "bf16=True")
            elif spans and spans[0].startswith("Zero3Trainer("):
                assert spans[0] == "Zero3Trainer(model=model, args=arguments, ...)"
                outcome = train()
            else:
                own = spans[:1] if "TrainingArguments" not in spans else []
                outcome = train(*own, of_arguments="" if own else "".join(spans[:1]))
            found.append((left, *outcome))
    return found


@pytest.mark.slow
def test_every_row_of_the_trainer_trains() -> None:
    first, second = on_ranks(2, run_trainer, process_group=False)
    assert [row[0] for row in first] == [row[0] for row in second] and len(first) == 9
    losses = {left: loss for left, loss, _ in first}
    bf16 = losses.pop("`bf16=True`")
    assert max(losses.values()) - min(losses.values()) < 1e-5 and abs(bf16 - min(losses.values())) < 0.05
    policies = {left: policy for left, _, policy in first}
    chosen = {  # what differs from nothing chosen
        "shard_grad_op": "reshard_after_forward=False", "offload": "offload='cpu'", "activation_checkpointing": "checkpointed",
        "bf16=True": "param_dtype=torch.bfloat16",
    }  # fmt: skip
    for word, says in chosen.items():
        (row,) = [left for left in policies if word in left]
        assert says in policies[row], policies[row]


def run_torchtune(rank: Rank, port: str) -> list[tuple[str, dict[str, str]]]:
    """Each command of torchtune's section, with two steps: the files that it has left, and their hashes."""
    import contextlib
    import hashlib
    import io
    import json
    import runpy
    import sys

    from tests.support.trainers import launched, llama

    base, chats = rank.scratch / "DIR", rank.scratch / "chats.jsonl"
    with launched(rank), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", port)
        patch.syspath_prepend(str(ROOT / "examples"))
        if rank.number == 0:
            from finetuning.data import byte_tokenizer

            llama(vocab_size=256).save_pretrained(base)
            byte_tokenizer().save_pretrained(base)
            shown = re.findall(r"```json\n(.*?)\n```", PAGE)[0]
            assert json.loads(shown)["messages"][0]["role"] == "user"
            chats.write_text(f"{shown}\n" * 40)
        (whole,) = [span for _, spans in section("From torchtune") for span in spans if span.startswith("torchrun")]
        launch, _, options = whole.partition(" examples/sft.py ")
        assert launch == "torchrun --nproc-per-node 2"
        more = [span.removeprefix("examples/sft.py ") for _, spans in section("From torchtune") for span in spans if "--" in span[:20]]
        found = []
        for number, added in enumerate(["", *(each for each in more if not each.startswith("torchrun"))]):
            output = rank.scratch / f"out{number}"
            few = f"--device cpu --steps 2 --every 2 --samples 0 --output {output}"
            given = options.replace("DIR", str(base)).replace("chats.jsonl", str(chats))
            patch.setattr(sys, "argv", ["sft.py", *f"{given} {added} {few}".split()])
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(str(ROOT / "examples" / "sft.py"), run_name="__main__")
            files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in output.glob("*model*.safetensors")}
            found.append((added, files))
        return found


@pytest.mark.slow
def test_every_command_of_torchtune_trains() -> None:
    pytest.importorskip("trl", reason="the example's packages are not installed: pip install 'zero3[trl,examples]'")
    import socket

    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    found = on_ranks(2, run_torchtune, port, process_group=False)[0]
    model, adapters = ["model.safetensors"], ["adapter_model.safetensors"]
    wanted = [("", model), ("--lora 16", adapters), ("--lora 16 --quantize nf4", adapters), ("--packing", model)]
    assert [(added, list(files)) for added, files in found] == wanted
    assert len({digest for _, files in found for digest in files.values()}) == 4, "no option is without effect"


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
