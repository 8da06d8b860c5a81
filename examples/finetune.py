"""Fine-tunes a causal language model whose parameters, gradients and optimizer state are spread over all processes.

    torchrun --nproc-per-node 2 examples/finetune.py                            a small model, made here
    torchrun --nproc-per-node 8 examples/finetune.py --model DIR --text FILE    your model, your text
    torchrun ... --model DIR --text FILE --lora 16 --dtype bf16                 LoRA adapters on a frozen model
    torchrun ... --model DIR --text FILE --lora 16 --dtype bf16 --quantize nf4  the frozen model in four bits
    torchrun ... --model DIR --text FILE --offload /local/scratch               more than memory holds: chunks and moments in files
    torchrun ... --checkpoint-every 50 --resume                                 goes on where it was killed, if it was
    python examples/finetune.py                                                 one plain process, to compare

Sharding is one line: in `finetuning/neox.py` for GPT-NeoX, which is cut into layers there so that it can be seen how that is
done, and in `finetuning/any_model.py` for every other model, which stays as it is. The rest is what any training script has.
The losses depend on the seed and on the sizes, but not on the number of processes: `--batch-size` counts the sequences of all
of them together.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import zero3
from finetuning.options import options_of

MISSING = None
try:
    from tqdm import tqdm
    from transformers import GPTNeoXConfig, PreTrainedConfig, PreTrainedTokenizerBase

    from finetuning import data
    from finetuning.any_model import AnyModel
    from finetuning.causal_lm import CausalLM, check_output, load_config
    from finetuning.neox import NeoX, small_config
    from finetuning.ranks import Ranks, join_ranks
    from finetuning.report import Memory, Summary, draw_losses, live_memory, peak_memory, table
except ModuleNotFoundError as error:
    MISSING = error.name  # which `--help` does without


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    return options_of(arguments, __doc__ or "")


def open_model(options: argparse.Namespace, config: PreTrainedConfig, ranks: Ranks) -> CausalLM:
    """The model of `--model`, or a new one; sharded, on every rank."""
    by_hand = isinstance(config, GPTNeoXConfig) and not options.shard and options.lora is None
    return NeoX(options, config, ranks) if by_hand else AnyModel(options, config, ranks)


def make_optimizer(model: CausalLM, options: argparse.Namespace) -> torch.optim.Optimizer:
    settings = {"lr": options.lr, "weight_decay": options.weight_decay}
    if options.optimizer == "adamw":
        return torch.optim.AdamW(zero3.get_trainable_chunk(model.sharded), **settings)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ModuleNotFoundError:
        raise SystemExit("--optimizer adamw_8bit needs bitsandbytes: pip install bitsandbytes") from None
    # it quantises its moments in blocks of 256 elements: no cut between ranks may lie inside one
    made: torch.optim.Optimizer = AdamW8bit(zero3.param_groups(model.sharded, lambda name, info: {"align": 256}), **settings)
    return made


def finetune(options: argparse.Namespace, ranks: Ranks) -> Summary:
    """The whole job: read, shard, measure, train, measure again, save."""
    torch.manual_seed(options.seed)
    check_output(options.output, adapters=options.lora is not None)
    text = data.load_text(options.text)
    config, tokenizer = load_config_and_tokenizer(options, text, ranks)
    check_sizes(options, config, ranks)
    training_tokens, held_out_tokens = data.split_tokens(tokenizer, text)
    batches = data.held_out_batches(held_out_tokens, options.batch_size // options.accumulate, options.sequence_length, options.held_out)

    model = open_model(options, config, ranks)
    if ranks.rank == 0:
        print(zero3.report(model.sharded), file=sys.stderr)
    optimizer = make_optimizer(model, options)
    optimizer = zero3.offload_optimizer(optimizer)  # its state rests where the chunks do, with --offload

    texts: dict[str, str] = {}
    loss_before = evaluate(model, batches, ranks)
    if options.generate:
        texts["before"] = generate(model, tokenizer, options)
    run = train(model, optimizer, training_tokens, options, ranks)
    loss_after = evaluate(model, batches, ranks)
    if options.generate:
        texts["after"] = generate(model, tokenizer, options)

    model.save(options.output, tokenizer)
    return Summary(
        world_size=ranks.world_size,
        held_out_loss_before=loss_before,
        held_out_loss_after=loss_after,
        tokens_per_second=run.tokens_per_second,
        memory_per_rank=[Memory(*each) for each in ranks.all(astuple(run.memory))],
        memory_of_one_process=model.memory_of_one_process,
        peak_memory_per_rank=[peak for (peak,) in ranks.all([peak_memory(ranks.device)])],
        losses=run.losses,
        texts=texts,
    )


def load_config_and_tokenizer(options: argparse.Namespace, text: str, ranks: Ranks) -> tuple[PreTrainedConfig, PreTrainedTokenizerBase]:
    """Those of `--model`, or new ones. A new tokenizer is rank 0's, so that no two ranks can have learnt different ones."""
    if options.model is not None:
        return load_config(options.model), data.load_tokenizer(options.model)
    learnt = data.train_bpe(text, options.vocabulary) if ranks.rank == 0 else ""
    tokenizer = data.make_tokenizer(ranks.from_first(learnt))
    return small_config(len(tokenizer), options.width, options.blocks, options.heads), tokenizer


def check_sizes(options: argparse.Namespace, config: PreTrainedConfig, ranks: Ranks) -> None:
    """Ends the program with advice, on every rank alike, if the sizes do not fit together."""
    parts = ranks.world_size * options.accumulate
    if options.batch_size % parts:
        dealt = f"{ranks.world_size} processes, --accumulate {options.accumulate}"
        raise SystemExit(f"--batch-size {options.batch_size} can't be dealt out evenly ({dealt}): take a multiple of {parts}")
    positions = getattr(config.get_text_config(), "max_position_embeddings", math.inf)
    if options.sequence_length > positions:
        raise SystemExit(f"--sequence-length {options.sequence_length}: the model has only {positions} positions")


class Run(NamedTuple):
    """What training leaves behind, beside the trained model."""

    losses: list[float]  # of every step, mean over all ranks
    tokens_per_second: float
    memory: Memory  # of this rank, after the last step


def train(model: CausalLM, optimizer: torch.optim.Optimizer, tokens: Tensor, options: argparse.Namespace, ranks: Ranks) -> Run:
    """An ordinary training loop. Sharding shows in one line only: the norm to clip by is that of all ranks together."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_factor, steps=options.steps, warm_up=options.warm_up))
    draws = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed + ranks.rank)  # for dropout, which should differ between ranks
    losses = resume(model, optimizer, schedule, draws, options) if options.resume else []
    begun, speed, start = len(losses), 0.0, time.perf_counter()
    model.sharded.train()
    interval = 0.2 if sys.stderr.isatty() else 10
    with tqdm(total=options.steps, initial=begun, unit="step", disable=ranks.rank > 0, mininterval=interval) as progress:
        for step in range(begun + 1, options.steps + 1):
            optimizer.zero_grad()
            step_loss = torch.zeros((), device=ranks.device)
            batch = data.training_batch(tokens, options.batch_size, options.sequence_length, draws)
            for windows in batch.chunk(options.accumulate):
                loss = loss_of(model, windows, ranks) / options.accumulate
                loss.backward()
                step_loss += loss.detach()
            zero3.clip_grad_norm_(model.sharded, options.max_norm)
            optimizer.step()
            schedule.step()
            losses.append(ranks.mean(step_loss))
            speed = (step - begun) * options.batch_size * options.sequence_length / (time.perf_counter() - start)
            peak = peak_memory(ranks.device) / 1e6
            progress.set_postfix_str(f"loss {losses[-1]:.3f}, {speed:,.0f} tokens/s, peak {peak:,.0f} MB", refresh=False)
            progress.update()
            slow = options.checkpoint_every is not None and step % options.checkpoint_every == 0
            fast = options.fast_output is not None and step % options.fast_every == 0
            if slow or fast:
                extra = {"losses": losses, "schedule": schedule.state_dict(), "draws": draws.get_state(), "step": step}
                frozen = options.lora is None  # what adapters are for is in the directory of --model
                path = (options.checkpoint_dir if slow else options.fast_output) / "-".join(filter(None, (options.run, f"step-{step}")))
                # each host's own disk is fast, and goes with the host: so the next host has a copy
                tier = {} if slow else {"local": True, "replicas": 1}
                zero3.save_checkpoint(path, model.sharded, optimizer, extra=extra, frozen=frozen, keep_last=2, run=options.run, **tier)
    return Run(losses, speed, live_memory(model.sharded, optimizer))


def resume(
    model: CausalLM,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    draws: torch.Generator,
    options: argparse.Namespace,
) -> list[float]:
    """The losses so far, with everything as it was after the last of them; none if there is no checkpoint."""
    if options.fast_output is None:
        latest = zero3.latest_checkpoint(options.checkpoint_dir, run=options.run)
    else:  # the newest that all hosts together have
        latest = zero3.latest_checkpoint(options.fast_output, options.checkpoint_dir, model=model.sharded, run=options.run)
    if latest is None:
        return []
    extra = zero3.load_checkpoint(latest, model.sharded, optimizer)  # random generators too
    schedule.load_state_dict(extra["schedule"])
    draws.set_state(extra["draws"])
    return extra["losses"]


def learning_rate_factor(step: int, steps: int, warm_up: float) -> float:
    """Rises over the first steps, then falls to zero along a cosine."""
    rising = max(1, round(warm_up * steps))
    if step < rising:
        return (step + 1) / rising
    return (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising))) / 2


def loss_of(model: CausalLM, windows: Tensor, ranks: Ranks) -> Tensor:
    """The mean loss over this rank's rows of `windows` `[batch, length + 1]`, in nats per token."""
    rows = windows[ranks.rank :: ranks.world_size].to(ranks.device)
    logits = model.logits(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.inference_mode()
def evaluate(model: CausalLM, batches: list[Tensor], ranks: Ranks) -> float:
    """The loss on held-out text, in nats per token; the same number on every rank."""
    model.sharded.eval()
    losses = [loss_of(model, windows, ranks) for windows in batches]
    return ranks.mean(torch.stack(losses).mean())


@torch.inference_mode()
def generate(model: CausalLM, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> str:
    """How the model goes on from the text of `--generate`."""
    model.sharded.eval()
    tokens = torch.tensor([tokenizer(options.generate, add_special_tokens=False).input_ids], device=options.device)
    return tokenizer.decode(model.generate(tokens, options.generate_tokens, options.sequence_length)[0])


def present(summary: Summary, output: Path) -> None:
    draw_losses(summary, output / "loss.png")
    summary.save(output / "summary.json")
    for when, text in summary.texts.items():
        print(f"\n--- written {when} training\n{text}")
    print(f"\n{table(summary)}\n\nModel, loss.png and summary.json are in {output}/")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    if MISSING is not None:
        raise SystemExit(f"this example needs the package {MISSING!r}: pip install 'zero3[examples]' brings it")
    with join_ranks(options.device, options.timeout) as ranks:
        summary = finetune(options, ranks)
        if ranks.rank == 0:
            present(summary, options.output)


if __name__ == "__main__":
    main()
