"""Trains on several hosts: the model is cut over the GPUs of a host, and repeated on each host (HSDP).

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --max-restarts 3 examples/several_hosts.py
    torchrun --nproc-per-node 2 examples/several_hosts.py --hosts 2               two processes, each of which plays a host

Gathers stay inside a host. Between hosts a rank sums its slice of the gradients alone, once a step. Run the line on every host, with
the same directories; `examples/launch/` has such lines for Slurm, Kubernetes and SkyPilot. It goes on from the newest whole checkpoint,
if there is one, with any number of hosts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zero3
from finetuning.jobs import fill, model_on_meta, new_parser, plain_loss, policy_of, rows, save
from finetuning.options import positive
from finetuning.ranks import join_ranks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = new_parser(__doc__ or "", output="hosts", lr=3e-3)
    parser.add_argument("--hosts", type=positive, metavar="N", help="replicas of the model (default: as torchrun says)")
    parser.add_argument("--every", type=positive, metavar="N", default=20, help="steps between checkpoints")
    options = parser.parse_args(arguments)
    with join_ranks(options.device) as ranks:
        hosts = options.hosts or ranks.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh(options.device, (hosts, ranks.world_size // hosts), mesh_dim_names=names) if ranks.world_size > 1 else None
        model = model_on_meta(options)
        model = zero3.shard(model, device=ranks.device, policy=policy_of(options.device), process_group=mesh)
        optimizer: Any = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=options.lr)
        begun = 0
        if (found := zero3.latest_checkpoint(options.output / "checkpoints", model=model)) is not None:
            begun = zero3.load_checkpoint(found, model, optimizer)["step"]
        else:
            fill(model, options)
        batches = rows(options, ranks.device, ranks.rank)
        loss: Tensor | None = None
        for step in range(1, options.steps + 1):
            batch = next(batches)  # drawn for steps that are done, too: a run that goes on sees what it would have seen
            if step <= begun:
                continue
            loss = plain_loss(model, batch)
            zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % options.every == 0 or step == options.steps:
                path = options.output / "checkpoints" / f"step-{step}"
                zero3.save_checkpoint(path, model, optimizer, extra={"step": step}, keep_last=2)
                mean = ranks.mean(loss)
                if ranks.rank == 0:
                    print(f"step {step}: loss {mean:.4f}, saved in {path}", flush=True)
        if loss is None and ranks.rank == 0:
            print(f"step {begun}: all steps were done")
        save(model, options.output / "model", options, ranks)


if __name__ == "__main__":
    main()
