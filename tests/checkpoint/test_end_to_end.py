"""The whole road, in processes: built on meta, loaded, sharded, trained, killed, resumed by more ranks, saved, loaded by others.

The same road as commands is in docs/checkpoints.md.
"""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.processes import Rank, on_ranks, try_on_ranks
from tests.support.reference import Turn

peft = pytest.importorskip("peft")

LLAMA = ARCHITECTURES["Llama"]
STEPS, EVERY, KILLED = 6, 2, 5


def adapted(model: Any) -> Any:
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for half in (module.lora_A, module.lora_B):
                half.to_empty(device="cpu")
                half["default"].weight.data = (
                    torch.randn(half["default"].weight.shape, generator=generator, device="cpu", dtype=torch.float64) / 4
                )
    return model


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    LLAMA.loss(model, Turn(0, number, 1))  # all ranks read the same, so that one process can follow
    optimizer.step()


def travel(rank: Rank, base: str, run: str, lora: bool, killed: int | None) -> Tensor:
    """What every process of a training script does, the first time and when it is started again."""
    from transformers import AutoConfig, AutoModelForCausalLM

    warnings.simplefilter("ignore", FutureWarning)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.float64)
        model = adapted(model) if lora else model
    model = zero3.shard(model, device="cpu")
    zero3.load_pretrained(model, base)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
    latest = zero3.latest_checkpoint(f"{run}/checkpoints")
    done = zero3.load_checkpoint(latest, model, optimizer)["step"] if latest is not None else 0
    for number in range(done, STEPS):
        if number == killed and rank.number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer, number)
        if (number + 1) % EVERY == 0:
            path = f"{run}/checkpoints/{number + 1}"
            zero3.save_checkpoint(path, model, optimizer, extra={"step": number + 1}, frozen=not lora, keep_last=2)
    zero3.save_pretrained(model, f"{run}/final", max_shard_size="6KB")
    with torch.no_grad():
        return model.eval()(**LLAMA.inputs(Turn(0, 99, 1))).logits


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "all parameters"])
def test_from_load_pretrained_to_save_pretrained_by_way_of_checkpoints(lora: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base, run = tmp_path / "base", tmp_path / "run"
    LLAMA.build().save_pretrained(base)
    killed, other = try_on_ranks(2, travel, str(base), str(run), lora, KILLED, fresh=True)
    assert killed.error == "killed" and other.error, killed.text  # the other one does not go on alone
    assert zero3.latest_checkpoint(run / "checkpoints") == run / "checkpoints" / "4"
    logits = on_ranks(3, travel, str(base), str(run), lora, None, fresh=True)

    found = AutoModelForCausalLM.from_pretrained(base if lora else run / "final", dtype=torch.float64)
    if lora:
        found = peft.PeftModel.from_pretrained(found, run / "final")
    expected = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    expected = adapted(expected) if lora else expected
    optimizer = torch.optim.AdamW([p for p in expected.parameters() if p.requires_grad], lr=0.01)
    for number in range(STEPS):
        step(expected, optimizer, number)
    inputs = LLAMA.inputs(Turn(0, 99, 1))
    with torch.no_grad():
        theirs, reference = found.eval()(**inputs).logits, expected.eval()(**inputs).logits
    for each in logits:
        assert torch.equal(each, theirs), "loaded by transformers and peft: the same bits"
    assert torch.allclose(theirs, reference, rtol=0, atol=1e-10), "as if one process had never been disturbed"
