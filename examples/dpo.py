"""Trains a model on preferences (DPO), spread over all processes: TRL's DPOTrainer with zero3.

    torchrun --nproc-per-node 2 examples/dpo.py                                    a small model and preferences, made here
    torchrun --nproc-per-node 8 examples/dpo.py --model DIR --data pairs.jsonl     your model, your preferences
    torchrun ... --model DIR --data pairs.jsonl --lora 16                          adapters; the model without them is the reference

`--data` is a jsonl file whose lines have `prompt`, `chosen` and `rejected`. Without `--lora`, a second sharded model is the
reference. The output has the model, or the adapters, for `from_pretrained`.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

MISSING = None
try:
    import peft
    import transformers
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    from finetuning.chats import small_config, small_tokenizer
    from finetuning.data import load_tokenizer
    from zero3.integrations.transformers import Zero3Mixin
except ImportError as error:
    MISSING, DPOTrainer = error, object  # which `--help` does without
    Zero3Mixin = type("Zero3Mixin", (), {})  # a class cannot have one base twice

VOCABULARY = 512


class Trainer(Zero3Mixin, DPOTrainer):
    """That is all that sharding takes."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face directory of a causal model; without it a small Llama is made")
    add("--data", type=Path, metavar="FILE", help="jsonl with prompt, chosen and rejected")
    add("--output", type=Path, metavar="DIR", default=Path("dpo"), help="for the model or adapters (default: dpo)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    add("--steps", type=int, metavar="N", default=60, help="optimizer steps (default: 60)")
    add("--batch-size", type=int, metavar="N", default=4, help="pairs a process and step")
    add("--lr", type=float, metavar="X", help="learning rate (default: 1e-3 for the small model, 1e-6 with --model, 1e-4 with --lora)")
    add("--beta", type=float, metavar="X", default=0.1, help="how near it stays to the reference: the larger, the nearer")
    add("--lora", type=int, metavar="R", help="train adapters of rank R on a frozen model")
    options = parser.parse_args(arguments)
    if options.lr is None:
        options.lr = 1e-3 if options.model is None else 1e-6 if options.lora is None else 1e-4
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data belong together: without both, a small model and preferences are made")
    return options


def preferences(path: Path | None) -> Dataset:
    """Made here: an answer in a sentence is preferred to a bare number."""
    if path is not None:
        return Dataset.from_list([json.loads(line) for line in path.read_text().splitlines() if line.strip()])
    pairs = [(n % 17, n // 17) for n in range(17 * 12)]
    rows = [(f"What is {a} and {b}?", f" It is {a + b}.", f" {a + b}") for a, b in pairs]
    return Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in rows])


def load(options: argparse.Namespace, data: Dataset) -> tuple[Any, Any]:
    if options.model is not None:
        return AutoModelForCausalLM.from_pretrained(options.model), load_tokenizer(options.model)
    transformers.set_seed(0)
    chats = [{"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]} for row in data]
    return AutoModelForCausalLM.from_config(small_config(VOCABULARY)), small_tokenizer(Dataset.from_list(chats), VOCABULARY)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    if MISSING is not None:
        raise SystemExit(f"{MISSING}: pip install 'zero3[trl,examples]'")
    chosen = DPOConfig(
        output_dir=str(options.output), use_cpu=options.device == "cpu", bf16=options.device == "cuda", max_steps=options.steps,
        per_device_train_batch_size=options.batch_size, learning_rate=options.lr, beta=options.beta, logging_steps=5, report_to=[],
        save_strategy="no", gradient_checkpointing=False, dataloader_pin_memory=options.device == "cuda",
    )  # fmt: skip
    data = preferences(options.data)
    model, tokenizer = load(options, data)
    adapters = None if options.lora is None else peft.LoraConfig(r=options.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    reference = copy.deepcopy(model) if adapters is None else None  # it is sharded, too
    given = {"train_dataset": data, "processing_class": tokenizer, "peft_config": adapters}
    trainer = Trainer(model=model, ref_model=reference, args=chosen, **given)
    trainer.train()
    trainer.save_model()
    margins = [entry["rewards/margins"] for entry in trainer.state.log_history if "rewards/margins" in entry]
    if trainer.accelerator.is_main_process:
        print(f"margin of the preferred answers: {margins[0]:.3f} at first, {margins[-1]:.3f} at last")


if __name__ == "__main__":
    main()
