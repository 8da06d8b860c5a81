"""Stock trainers and ours, side by side: random models, rows of uneven lengths, and what they log."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, TrainingArguments

from tests.support.processes import Rank

WORDS = 64
SIZES = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}


@contextmanager
def launched(rank: Rank) -> Iterator[None]:
    """As torchrun leaves a process: environment variables, and no state of accelerate's from an earlier run."""
    from accelerate.state import AcceleratorState, GradientState

    set_here = {"RANK": str(rank.number), "LOCAL_RANK": str(rank.number), "WORLD_SIZE": str(rank.world_size)}
    set_here |= {"LOCAL_WORLD_SIZE": str(rank.world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    before = {key: os.environ.get(key) for key in set_here}
    os.environ.update(set_here)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other libraries, about each other
            transformers.logging.set_verbosity_error()
            yield
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "pad_token_id": 0, **options}))


def gpt2(resid_pdrop: float = 0.0) -> Any:
    """With biases and LayerNorms, which weight decay leaves out, and a tied head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}
    return AutoModelForCausalLM.from_config(GPT2Config(**sizes, resid_pdrop=resid_pdrop, embd_pdrop=0.0, attn_pdrop=0.0))


def lora() -> Any:
    """A LoRA model whose adapters do something from the start, beside a module that is trained and saved whole."""
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


MODELS = {"Llama": llama, "GPT-2": gpt2, "LoRA": lora}


def rows(count: int, seed: int = 0, length: int | None = None) -> list[dict[str, list[int]]]:
    """Of uneven lengths, or all of `length`; the first half of each is a prompt, which is not learned."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        drawn = int(torch.randint(4, 13, (), generator=generator))
        ids = torch.randint(1, WORDS, (length or drawn,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]})
    return found


def collate(examples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(each["input_ids"]) for each in examples)

    def padded(key: str, value: int) -> Tensor:
        return torch.tensor([each[key] + [value] * (longest - len(each[key])) for each in examples])

    ids = padded("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": padded("labels", -100)}


def arguments(directory: Any, kind: Callable[..., Any] = TrainingArguments, **options: Any) -> Any:
    chosen = {
        "output_dir": str(directory), "use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "max_steps": 6, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "seed": 5, "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(**{**chosen, **options})


def logged(trainer: Any, *keys: str) -> list[tuple[float, ...]]:
    return [tuple(entry[key] for key in keys) for entry in trainer.state.log_history if all(key in entry for key in keys)]


def trainer_of(ours: bool, model: Any, directory: Any, count: int = 32, **options: Any) -> Any:
    """Stock `Trainer`, or ours. `options`: of the training arguments, but for `callbacks`, `policy` and what else a Trainer takes."""
    own = {
        key: options.pop(key)
        for key in ("callbacks", "policy", "layers", "optimizers", "compute_metrics", "model_init", "sequence_parallel", "chunked_head")
        if key in options
    }
    if ours:
        from zero3.integrations.transformers import Zero3Trainer as Kind
    else:
        from transformers import Trainer as Kind  # type: ignore[assignment]
    data = {"train_dataset": rows(count), "eval_dataset": rows(7, seed=1), "data_collator": collate}
    return Kind(model=model, args=arguments(directory, **options), **data, **own)
