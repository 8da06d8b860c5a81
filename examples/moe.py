"""Trains a mixture of experts, spread over all processes: experts stay with their owners, and tokens travel.

    torchrun --nproc-per-node 2 examples/moe.py                                   a small Qwen3-MoE, made here
    torchrun --nproc-per-node 8 examples/moe.py --model DIR --text FILE           your model, your text
    torchrun --nproc-per-node 8 examples/moe.py --gathered                        experts gathered as all else, to compare

Everything but the experts is cut over all ranks as ever. The output has the model, for `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Sequence

import zero3
from finetuning.jobs import fill, model_on_meta, new_parser, policy_of, rows, save, train
from finetuning.ranks import join_ranks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__ or "", output="experts", lr=3e-3)
    parser.add_argument("--gathered", action="store_true", help="gather the experts of each layer, in place of sending tokens")
    options = parser.parse_args(arguments)
    small = {"intermediate_size": 96, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    with join_ranks(options.device) as ranks:
        policy = policy_of(options.device, expert_parallel=not options.gathered)
        model = zero3.shard(model_on_meta(options, "qwen3_moe", **small), device=ranks.device, policy=policy)
        fill(model, options)
        if ranks.rank == 0:
            print(zero3.report(model))
        train(model, rows(options, ranks.device, ranks.rank), options, ranks)
        save(model, options.output, options, ranks)


if __name__ == "__main__":
    main()
