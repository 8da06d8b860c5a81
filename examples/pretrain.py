"""Trains a language model from scratch, spread over all processes: it is built without values, sharded, and drawn layer by layer.

    torchrun --nproc-per-node 2 examples/pretrain.py                              a small Llama on text that comes with Python
    torchrun --nproc-per-node 8 examples/pretrain.py --model DIR --text FILE      the sizes of DIR/config.json, fresh values, your text

No process ever holds the whole model. The values are those that one process would draw with the same seed. `--model` needs a config.json
and a tokenizer; its weights are not read. The output has the model, for `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import zero3
from finetuning.jobs import model_on_meta, new_parser, policy_of, rows, save, train
from finetuning.ranks import join_ranks


def main(arguments: Sequence[str] | None = None) -> None:
    options = new_parser(__doc__ or "", output="pretrained", lr=3e-3).parse_args(arguments)
    with join_ranks(options.device) as ranks:
        model = model_on_meta(options)
        model = zero3.shard(model, device=ranks.device, policy=policy_of(options.device))
        torch.manual_seed(options.seed)
        zero3.materialize(model)  # one layer in memory at a time
        if ranks.rank == 0:
            print(zero3.report(model))
        train(model, rows(options, ranks.device, ranks.rank), options, ranks)
        save(model, options.output, options, ranks)


if __name__ == "__main__":
    main()
