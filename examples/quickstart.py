"""Trains a small transformer in shards, saves it, and loads it into a new model. It needs torch and zero3 alone.

    torchrun --nproc-per-node 8 examples/quickstart.py     8 GPUs: a process each, over NCCL
    torchrun --nproc-per-node 2 examples/quickstart.py     no GPU: two CPU processes, over gloo
    python examples/quickstart.py                          one process

Each process draws the same batches and takes its share, so the losses are the same for any number of processes that divides 24.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import zero3

WORDS, LENGTH, WIDTH, HEADS, BLOCKS, BATCH = 31, 24, 64, 4, 4, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.project, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))  # [batch, length, 3, heads, width]
        mixed = scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequences(draws: torch.Generator) -> Tensor:
    """Word ids `[BATCH, LENGTH + 1]`: each sequence counts on from some word by 1, 2, 3 or 4. The model has to find out by which."""
    begin, stride = torch.randint(WORDS, (BATCH, 1), generator=draws), torch.randint(1, 5, (BATCH, 1), generator=draws)
    return (begin + stride * torch.arange(LENGTH + 1)) % WORDS


def mean_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def join_processes() -> torch.device:
    """Joins the processes that torchrun started. Each has a GPU of its own, or computes on the CPU where there is none."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    return device


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: 100)")
    parser.add_argument(
        "--output", type=Path, default=Path("quickstart-run"), help="for the checkpoint and weights.pt (default: quickstart-run)"
    )
    options = parser.parse_args(arguments)

    device = join_processes()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = slice(rank, None, world_size)  # of each batch

    # On GPUs parameters travel and compute in bf16. Their fp32 masters stay in the chunks, and gradients are added up in fp32.
    mixed = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if device.type == "cuda" else zero3.ShardingPolicy()

    torch.manual_seed(0)
    model = zero3.shard(Transformer(), device=device, policy=policy)  # in place; rank 0's values win
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=3e-3)
    if rank == 0:
        print(zero3.report(model))

    draws = torch.Generator().manual_seed(1)
    for step in range(1, options.steps + 1):
        loss = mean_loss(model, sequences(draws)[share].to(device))
        loss.backward()  # gradients are the mean over ranks
        zero3.clip_grad_norm_(model, 1.0)  # by the norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        if step % 25 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item():.4f} on rank 0's share")

    zero3.save_checkpoint(options.output / f"step-{options.steps}", model, optimizer, extra={"step": options.steps}, keep_last=2)

    with torch.device("meta"):  # nothing is allocated
        loaded = Transformer()
    loaded = zero3.shard(loaded, device=device, policy=policy)
    extra = zero3.load_checkpoint(options.output / f"step-{options.steps}", loaded)  # any number of ranks can load it

    held_out = sequences(torch.Generator().manual_seed(2)).to(device)
    with torch.no_grad():
        losses = [mean_loss(each, held_out).item() for each in (model, loaded)]
    weights = zero3.full_state_dict(loaded)  # on rank 0: plain names and shapes, for the unsharded Transformer
    if rank == 0:
        torch.save(weights, options.output / "weights.pt")
        print(f"held-out loss {losses[0]:.4f}; of the model loaded from step {extra['step']}: {losses[1]:.4f}")

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
