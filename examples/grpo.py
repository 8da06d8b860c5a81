"""Trains a small model by what it generates (GRPO), spread over all processes: a loop written by hand.

    torchrun --nproc-per-node 2 examples/grpo.py                       two minutes on two CPU processes
    torchrun --nproc-per-node 2 examples/grpo.py --steps 20            short

The model is shown a digit, and answers with four tokens. The reward is the share of them that are the digit after the one before:
1 -> 2 3 4 5. Nobody shows it an answer. Each process answers its own digits, several times each, with the whole model in memory
(`zero3.resident`). Better answers than the group's mean become likelier, worse ones less likely. The output has reward.png, and
the model for `from_pretrained`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import zero3

MISSING = None
try:
    import transformers
except ImportError as error:
    MISSING = error

DIGITS, LENGTH = 10, 4
SIZES = {"vocab_size": DIGITS, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, metavar="N", default=150, help="optimizer steps (default: 150)")
    add("--digits", type=int, metavar="N", default=8, help="digits that each process answers in a step (default: 8)")
    add("--answers", type=int, metavar="N", default=16, help="answers to each of them: a group (default: 16)")
    add("--lr", type=float, metavar="X", default=2e-3, help="learning rate (default: 2e-3)")
    add("--output", type=Path, metavar="DIR", default=Path("grpo"), help="for reward.png and the model (default: grpo)")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    add("--seed", type=int, metavar="N", default=0, help="of the weights, the digits and the answers")
    options = parser.parse_args(arguments)
    if min(options.steps, options.digits, options.answers - 1) < 1:
        parser.error("--steps and --digits are at least 1, --answers at least 2: one answer is no better than its group's mean")
    return options


def rewards(texts: Tensor) -> Tensor:
    """`[B, 1 + LENGTH]`, each a digit and its answer -> `[B]`: the share of tokens that follow the one before."""
    return (texts[:, 1:] == (texts[:, :-1] + 1) % DIGITS).float().mean(1)


def answered(model: Any, digits: Tensor) -> Tensor:
    """Samples. Ranks may generate at their own pace, since each has the whole model meanwhile."""
    with zero3.resident(model), torch.no_grad():
        texts: Tensor = model.generate(digits, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=True, top_k=0)
    return texts


def loss_of(model: Any, texts: Tensor, advantages: Tensor) -> Tensor:
    scores = model(input_ids=texts[:, :-1]).logits.log_softmax(-1)
    likelihood = scores.gather(-1, texts[:, 1:, None]).squeeze(-1)
    return -(likelihood * advantages[:, None]).mean()


def train(model: Any, options: argparse.Namespace, rank: int) -> Iterator[float]:
    """Yields the mean reward over all processes, step by step."""
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=options.lr)
    torch.manual_seed(1000 * options.seed + rank)  # every process has other digits, and other answers
    for _ in range(options.steps):
        digits = torch.randint(DIGITS, (options.digits, 1), device=options.device).repeat_interleave(options.answers, 0)
        texts = answered(model, digits)
        reward = rewards(texts)
        group = reward.view(options.digits, options.answers)
        advantages = ((group - group.mean(1, keepdim=True)) / (group.std(1, keepdim=True) + 1e-4)).flatten()
        loss_of(model, texts, advantages).backward()
        zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = reward.mean()
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        yield mean.item()


def draw(found: Sequence[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(found, linewidth=1)
    axes.axhline(1 / DIGITS, linestyle="--", color="gray", label="by chance")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02), title="What it earns by answers that nobody has shown it")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    if MISSING is not None:
        raise SystemExit(f"{MISSING}: pip install 'zero3[transformers,examples]'")
    if launched := "RANK" in os.environ:
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank = dist.get_rank() if launched else 0
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.manual_seed(options.seed)
    config = transformers.LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = zero3.shard(transformers.LlamaForCausalLM(config), device=options.device)
    found: list[float] = []
    for reward in train(model, options, rank):
        found.append(reward)
        if rank == 0 and (len(found) % 10 == 0 or len(found) == options.steps):
            print(f"step {len(found):4}   mean reward {reward:.2f}", flush=True)
    zero3.save_pretrained(model, options.output)
    if rank == 0:
        draw(found, options.output / "reward.png")
        tenth = max(1, len(found) // 10)
        first, last = sum(found[:tenth]) / tenth, sum(found[-tenth:]) / tenth
        print(f"mean reward: {first:.2f} at first, {last:.2f} at last; by chance {1 / DIGITS:.2f}. {options.output}/reward.png")
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
