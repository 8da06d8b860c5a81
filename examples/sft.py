"""Fine-tunes a language model on chats (supervised fine-tuning), spread over all processes: TRL's SFTTrainer with zero3.

    torchrun --nproc-per-node 2 examples/sft.py                                    a small model and chats, made here
    torchrun --nproc-per-node 8 examples/sft.py --model DIR --data chats.jsonl     your model, your chats
    torchrun ... --model DIR --data chats.jsonl                                    with images: rows have `images`, names of files
    torchrun ... --model DIR --data DIR --lora 16 --merge                          LoRA adapters, and the model with them merged
    torchrun ... --model DIR --data DIR --lora 16 --quantize nf4                   adapters on a model in four bits (QLoRA)
    torchrun ... --model DIR --data DIR --offload /local/scratch                   more than memory holds: state in files
    torchrun ... --resume                                                          goes on where it was killed, if it was
    torchrun ... --resume --fast-output /local/sft                                 and saves to each host's own disk, too, more often
    torchrun --nnodes 4 ...                                                        several hosts: see examples/launch/

Only the answers are learned. `--model` is a Hugging Face directory with a tokenizer, or a processor
where chats have images. Each process reads its own slices of the
weights, so that the model needs to fit nowhere. The output has the model (or the adapters), for `from_pretrained`; loss.png; and
checkpoints that any number of processes can go on from.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero3
from finetuning.options import HelpFormatter

MISSING = None
try:
    import peft
    import transformers
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    from finetuning import data
    from finetuning.chats import TEMPLATE, last_answer, load_chats, made_chats, prompts_of, small_config, small_tokenizer
    from finetuning.fast import STATE, FastCheckpoints, GoesOn, step_of
    from finetuning.pictures import drawn_chats, small_processor, small_vision_config
except ImportError as error:
    MISSING, SFTTrainer, TrainerCallback = error, object, object  # which `--help` does without
    GoesOn = type("GoesOn", (), {})  # a class cannot have one base twice

VOCABULARY = 1024


class Trainer(GoesOn, SFTTrainer):
    """All that sharding takes is Zero3Mixin, of which GoesOn is one."""


class MuonAndAdamW:
    """Muon for the matrices of blocks, AdamW for the rest. A trainer makes one, and calls it with the sharded model."""

    def __call__(self, model: Any, **settings: Any) -> list[torch.optim.Optimizer]:
        def choose(name: str, info: zero3.ParamInfo) -> dict[str, Any]:
            return {"whole": info.ndim == 2 and "embed" not in name and "lm_head" not in name}

        made: list[torch.optim.Optimizer] = []
        for group in zero3.param_groups(model, choose):  # Muon needs whole matrices: each lies on one rank
            if group["whole"]:
                made.append(torch.optim.Muon([group], adjust_lr_fn="match_rms_adamw", **settings))
            else:
                made.append(torch.optim.AdamW([group], **settings))
        return made


def new_parser() -> argparse.ArgumentParser:
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=examples, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face directory of a causal model; without it a small Llama is made")
    add("--data", type=Path, metavar="PATH", help="chats: a jsonl or parquet file, a directory of them, or one of `datasets`")
    add("--held-out", type=float, metavar="X", default=0.05, help="share of the chats that is not trained on, but evaluated")
    add("--output", type=Path, metavar="DIR", default=Path("sft"), help="for the model or adapters, loss.png, checkpoints")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    add("--fp32", action="store_true", help="compute in float32; otherwise bf16, over float32 masters, where there is a GPU")
    add("--report-to", nargs="*", metavar="NAME", default=[], help="tensorboard, wandb and what else transformers reports to")
    add("--timeout", type=int, metavar="SECONDS", default=1800, help="how long a process waits for others before it fails")

    add = parser.add_argument_group("training").add_argument
    add("--epochs", type=float, metavar="N", help="times that each chat is seen (default: 10 for the small model, 3 with --model)")
    add("--steps", type=int, metavar="N", default=-1, help="optimizer steps, whatever the epochs say")
    add("--batch-size", type=int, metavar="N", default=4, help="chats a process and backward pass")
    add("--accumulate", type=int, metavar="N", default=1, help="backward passes a step")
    add("--max-length", type=int, metavar="N", default=1024, help="tokens; longer chats are cut off")
    add("--packing", action="store_true", help="put several chats into each sequence of --max-length")
    add("--lr", type=float, metavar="X", help="peak learning rate (default: 2e-3 for the small model, 2e-5 with --model, 2e-4 with --lora)")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: Muon for the matrices of blocks, AdamW for the rest")
    add("--checkpointing", action="store_true", help="activation checkpointing: less memory, a third more time")
    add("--offload", metavar="WHERE", help="let chunks, gradients and moments rest in the host's memory (cpu), or in files in a directory")
    add("--seed", type=int, metavar="N", default=0, help="of fresh weights, order and dropout")

    add = parser.add_argument_group("LoRA").add_argument
    add("--lora", type=int, metavar="R", help="train adapters of rank R on a frozen model")
    add("--quantize", choices=("nf4", "int8"), help="store the frozen model's linear layers in four bits, or in eight")
    add("--lora-alpha", type=int, metavar="N", help="their scale, over R (default: 2 R)")
    add("--lora-dropout", type=float, metavar="X", default=0.0, help="before them")
    add("--lora-targets", nargs="+", metavar="NAME", help="modules that get them (default: all linear ones but the head)")
    add("--merge", action="store_true", help="write the model with the adapters merged, too: layer by layer")

    add = parser.add_argument_group("evaluation and checkpoints").add_argument
    add("--every", type=int, metavar="N", default=50, help="steps between evaluations, each with a checkpoint; two are kept, and the best")
    add("--patience", type=int, metavar="N", help="end after N evaluations that were no better")
    add("--samples", type=int, metavar="N", default=2, help="held-out chats that are answered at each evaluation")
    add("--fast-output", type=Path, metavar="DIR", help="save there too: a directory on each host's own disk; the next host gets a copy")
    add("--fast-every", type=int, metavar="N", default=10, help="steps between those")
    add("--run", metavar="NAME", help="the name of this run, where directories hold several (default: torchrun's, or a new one)")
    add("--resume", action="store_true", help="go on from the newest whole checkpoint, with any number of processes; without one, begin")
    return parser


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser()
    options = parser.parse_args(arguments)
    if options.lr is None:
        options.lr = 2e-3 if options.model is None else 2e-5 if options.lora is None else 2e-4
    options.epochs = options.epochs or (10 if options.model is None else 3)
    if options.quantize is not None and options.lora is None:
        parser.error("argument --quantize: what is quantised does not train, so it needs --lora")
    for name in ("batch_size", "accumulate", "max_length", "every", "fast_every", "lora", "lora_alpha", "patience"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"argument --{name.replace('_', '-')}: {value} is not a positive number")
    if not 0 < options.held_out < 1:
        parser.error(f"argument --held-out: {options.held_out} is no share between 0 and 1")
    if options.model is not None and not options.model.is_dir():
        parser.error(f"argument --model: {options.model} is no directory")
    if options.merge and (options.lora is None or options.model is None):
        parser.error("argument --merge: it merges the adapters of --lora into --model")
    return options


def training_arguments(options: argparse.Namespace, tokenizer: Any, form: str) -> SFTConfig:
    bf16 = options.device == "cuda" and not options.fp32
    return SFTConfig(
        output_dir=str(options.output / "checkpoints"), use_cpu=options.device == "cpu", bf16=bf16, report_to=options.report_to,
        ddp_timeout=options.timeout, seed=options.seed, num_train_epochs=options.epochs, max_steps=options.steps,
        per_device_train_batch_size=options.batch_size, per_device_eval_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate, max_length=options.max_length, packing=options.packing, eval_packing=False,
        learning_rate=options.lr, lr_scheduler_type="cosine", warmup_steps=0.1, gradient_checkpointing=options.checkpointing,
        eval_strategy="steps", save_strategy="steps", eval_steps=options.every, save_steps=options.every, save_total_limit=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", logging_steps=5, assistant_only_loss=form == "messages",
        completion_only_loss=form == "prompt" or None, dataloader_pin_memory=options.device == "cuda",
    )  # fmt: skip


def load_model(options: argparse.Namespace, device: torch.device, bf16: bool, sees: Any = None) -> Any:
    """A sharded model. None of the processes ever holds all of one that is read from a directory. `sees`: the processor of chats with
    images.
    """
    low, wide = torch.bfloat16, torch.float32
    policy = zero3.ShardingPolicy(param_dtype=low, reduce_dtype=wide, output_dtype=wide) if bf16 else zero3.ShardingPolicy()
    if options.quantize is not None:
        policy = replace(policy, quantize={"nf4": zero3.NF4(), "int8": zero3.Int8()}[options.quantize])
    policy = replace(policy, offload=options.offload)
    kind = AutoModelForCausalLM if sees is None else transformers.AutoModelForImageTextToText
    if options.model is None:
        transformers.set_seed(options.seed)
        config = small_config(VOCABULARY) if sees is None else small_vision_config(VOCABULARY, sees.image_token_id)
        model = kind.from_config(config)
        return zero3.shard(add_adapters(model, options), device=device, policy=policy)
    frozen = low if bf16 and options.lora is not None else wide
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.from_pretrained(options.model), dtype=frozen)
    model = zero3.shard(add_adapters(model, options), device=device, policy=policy)
    try:
        zero3.load_pretrained(model, options.model)
    except ValueError as error:
        raise SystemExit(f"--model {options.model}: {error}") from None
    model.config._name_or_path = str(options.model)  # adapters remember what they are for
    return model


def add_adapters(model: Any, options: argparse.Namespace) -> Any:
    if options.lora is None:
        return model
    how = {"lora_alpha": options.lora_alpha or 2 * options.lora, "lora_dropout": options.lora_dropout}
    targets = options.lora_targets or "all-linear"
    transformers.set_seed(options.seed)
    try:
        model = peft.get_peft_model(model, peft.LoraConfig(r=options.lora, target_modules=targets, task_type="CAUSAL_LM", **how))
    except ValueError as error:
        raise SystemExit(f"--lora-targets {targets}: {error}") from None
    model.peft_config["default"].base_model_name_or_path = str(options.model)
    for module in model.modules():  # peft leaves adapters as empty as the model: they get their values here
        if isinstance(module, peft.tuners.lora.LoraLayer) and options.model is not None:
            module.lora_A.to_empty(device="cpu").float()
            module.lora_B.to_empty(device="cpu").float()
            module.reset_lora_parameters("default", init_lora_weights=True)
    return model


def has_images(chats: Any) -> bool:
    return chats is not None and "images" in chats.column_names


def load_tokenizer(options: argparse.Namespace, chats: Dataset) -> Any:
    """Or the processor, if the chats have images."""
    sees = has_images(chats)
    if options.model is None:
        return (small_processor if sees else small_tokenizer)(chats, VOCABULARY)
    found = data.load_tokenizer(options.model, transformers.AutoProcessor if sees else transformers.AutoTokenizer)
    found.chat_template = found.chat_template or TEMPLATE
    tokenizer = getattr(found, "tokenizer", found)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return found


def answers_apart(chats: Dataset, tokenizer: Any) -> tuple[Dataset, str]:
    """The chats as TRL learns answers from them: whole where the template tells which tokens are an answer, else the last answer."""
    if "messages" not in chats.column_names:
        return chats, "prompt"
    try:
        if has_generation_markers(tokenizer.chat_template) or get_training_chat_template(tokenizer) is not None:
            return chats, "messages"
    except ValueError:  # a template that TRL does not know
        pass
    apart = chats.map(_last_apart, remove_columns=["messages"])
    return apart, "prompt"


def _last_apart(row: dict[str, Any]) -> dict[str, Any]:
    place = last_answer(row["messages"]) or 0
    return {"prompt": row["messages"][:place], "completion": row["messages"][place : place + 1]}


class Samples(TrainerCallback):
    """At each evaluation, what the model answers. All processes generate; the first one prints."""

    def __init__(self, prompts: list[list[dict[str, str]]]) -> None:
        self.prompts = prompts

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **others: Any) -> None:
        for prompt in self.prompts:
            how = {"add_generation_prompt": True, "tokenize": True, "return_tensors": "pt", "return_dict": True}
            ids = processing_class.apply_chat_template(prompt, **how)
            made = model.generate(**ids.to(args.device), max_new_tokens=48, do_sample=False, use_cache=True)
            answer = processing_class.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
            if state.is_world_process_zero:
                asked = prompt[-1]["content"]
                asked = asked if isinstance(asked, str) else " ".join(part.get("text") or f"<{part['type']}>" for part in asked)
                print(f"  {asked!r} -> {answer!r}", flush=True)


def draw_losses(history: list[dict[str, float]], path: Path) -> None:
    """Both losses over the steps: of the batches that were trained on, and of the held-out chats."""
    import matplotlib

    matplotlib.use("Agg")  # pictures go to files: no screen is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for key, label, style in (("loss", "trained on", "-"), ("eval_loss", "held out", "o-")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per token of an answer)", title="Supervised fine-tuning")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None, *, pictures: bool = False) -> None:
    """`pictures`: without --data, the chats that are made have some."""
    options = parse_options(arguments)
    if MISSING is not None:
        raise SystemExit(f"this example needs more than torch and zero3 ({MISSING}): pip install 'zero3[trl,examples]'")
    made = drawn_chats if pictures else made_chats
    chats = made() if options.data is None else load_chats(options.data)
    tokenizer = load_tokenizer(options, chats)
    chats, form = answers_apart(chats, tokenizer)
    parts = chats.train_test_split(test_size=max(1, round(options.held_out * len(chats))), seed=options.seed)
    config = training_arguments(options, tokenizer, form)  # joins the process group
    model = load_model(options, config.device, config.bf16, tokenizer if has_images(chats) else None)
    callbacks = [Samples(prompts_of(parts["test"], options.samples))]
    if options.patience is not None:
        callbacks.append(EarlyStoppingCallback(options.patience))
    if options.fast_output is not None:
        callbacks.append(FastCheckpoints(options.fast_output, options.fast_every, options.run, frozen=options.lora is None))
    data = {"train_dataset": parts["train"], "eval_dataset": parts["test"], "processing_class": tokenizer}
    muon = (MuonAndAdamW, {"lr": options.lr}) if options.optimizer == "muon" else None
    trainer = Trainer(model=model, args=config, callbacks=callbacks, optimizer_cls_and_kwargs=muon, **data)
    if not (len(trainer.train_dataset) and len(trainer.eval_dataset)):
        raise SystemExit(f"--max-length {options.max_length}: no chat has an answer within it")
    saved = list(Path(config.output_dir).glob(f"checkpoint-*/{STATE}")) if options.resume else []  # it is written last
    with_disks = options.resume and options.fast_output is not None
    fast = zero3.latest_checkpoint(options.fast_output, model=model, run=options.run) if with_disks else None
    before = trainer.evaluate()["eval_loss"] if not saved and fast is None else None
    if fast is not None and all(step_of(fast) > step_of(state.parent) for state in saved):
        trainer.train_from(fast)
    else:
        trainer.train(resume_from_checkpoint=bool(saved))
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(options.output))
    if options.merge:
        zero3.save_merged(model, options.output / "merged")
    first, alone = trainer.is_world_process_zero(), not dist.is_initialized()
    if not alone:
        dist.barrier()
        dist.destroy_process_group()
    if first:
        draw_losses(trainer.state.log_history, options.output / "loss.png")
        if options.merge:
            tokenizer.save_pretrained(options.output / "merged")
        begin = f"{before:.4f} before, " if before is not None else ""
        print(f"\nheld-out loss: {begin}{after:.4f} after {trainer.state.global_step} steps")
        print(f"{options.output}: {', '.join(sorted(os.listdir(options.output)))}")


if __name__ == "__main__":
    main()
