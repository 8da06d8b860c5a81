"""Trains LoRA adapters on a frozen model, spread over all processes: peft's adapters, and a loop of your own.

    torchrun --nproc-per-node 2 examples/lora.py                                  a small model, made here
    torchrun --nproc-per-node 8 examples/lora.py --model DIR --text FILE          your model, your text
    torchrun --nproc-per-node 8 examples/lora.py --model DIR --text FILE --merge  and the model with the adapters merged

For chats, `examples/sft.py --lora 16` does the same with TRL. Adapters are put on before sharding. They are gathered once a step, all
together. The output has the adapters, for peft's `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Sequence

import zero3
from finetuning.jobs import fill, model_on_meta, new_parser, policy_of, rows, save, tokenizer_of, train
from finetuning.ranks import join_ranks


def main(arguments: Sequence[str] | None = None, quantize: object = None, description: str = __doc__ or "") -> None:
    parser = new_parser(description, output="adapters", lr=3e-3)
    parser.add_argument("--rank", type=int, metavar="R", default=16, help="of the adapters")
    parser.add_argument("--merge", action="store_true", help="write the model with the adapters merged, too")
    options = parser.parse_args(arguments)
    import peft  # --help does without

    with join_ranks(options.device) as ranks:
        model = model_on_meta(options)
        lora = peft.LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)  # freezes all else
        model = zero3.shard(model, device=ranks.device, policy=policy_of(options.device, quantize=quantize))
        fill(model, options)
        if ranks.rank == 0:
            print(zero3.report(model))
        train(model, rows(options, ranks.device, ranks.rank), options, ranks)
        save(model, options.output, options, ranks)  # the adapters alone
        if options.merge:
            zero3.save_merged(model, options.output / "merged")
            if ranks.rank == 0:
                tokenizer_of(options).save_pretrained(options.output / "merged")


if __name__ == "__main__":
    main()
