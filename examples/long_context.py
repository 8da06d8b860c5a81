"""Trains on long sequences, spread over all processes: each has a part of every sequence, and the loss is made without logits.

    torchrun --nproc-per-node 2 examples/long_context.py                                     a small Llama, made here
    torchrun --nproc-per-node 8 examples/long_context.py --model DIR --text FILE --length 131072 --sp 8

`--sp` ranks share a sequence (default: all). Each block keeps its inputs alone (checkpointing), and its MLP computes --tile tokens at a
time. The output has the model, for `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zero3
from finetuning.jobs import fill, model_on_meta, new_parser, policy_of, rows, save, train
from finetuning.options import positive
from finetuning.ranks import join_ranks


def part_of_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Of this rank's part. Backward takes the mean over the tokens of all parts."""
    part = zero3.split_sequence(model, batch)
    tokens = (part["shift_labels"] != -100).sum()
    total = zero3.causal_lm_loss(model, reduction="sum", **part)
    zero3.backward(total, tokens, model)
    return total / tokens


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__ or "", output="long", lr=3e-3)
    parser.set_defaults(length=512, batch_size=2)
    parser.add_argument("--sp", type=positive, metavar="N", help="ranks that share a sequence (default: all)")
    parser.add_argument("--tile", type=positive, metavar="N", default=2048, help="tokens that an MLP computes at a time")
    options = parser.parse_args(arguments)
    with join_ranks(options.device) as ranks:
        sp = options.sp or ranks.world_size
        mesh = None
        if ranks.world_size > 1:
            mesh = init_device_mesh(options.device, (ranks.world_size // sp, sp), mesh_dim_names=("dp_shard", "sp"))
        model = model_on_meta(options, max_position_embeddings=options.length)
        for block in model.model.layers:
            zero3.tile(block.mlp, options.tile)
        # the second is its name before transformers 5.23
        checkpointing = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        checkpointing({"use_reentrant": False})
        model = zero3.shard(model, device=ranks.device, policy=policy_of(options.device), process_group=mesh).train()
        fill(model, options)
        if ranks.rank == 0:
            print(zero3.report(model))
        torch.manual_seed(options.seed)
        batches = rows(options, ranks.device, ranks.rank // sp)  # the same on all ranks that share a sequence
        train(model, batches, options, ranks, part_of_loss)
        save(model, options.output, options, ranks)


if __name__ == "__main__":
    main()
