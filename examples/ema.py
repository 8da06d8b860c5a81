"""Trains a small classifier in shards, keeps a moving average of its weights, and evaluates both.

    torchrun --nproc-per-node 2 examples/ema.py
    python examples/ema.py                          one plain process, to compare

The average is kept of the chunks: each rank averages its slice, with torch's own function, and nothing is sent. To evaluate with
it, the chunks' values are swapped for the average's. The average takes as much memory as the trainable chunks do. Buffers (the
statistics of a batch norm) are not averaged.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import zero3
from finetuning.ranks import join_ranks


class Average:
    """An exponential moving average of a sharded model's trainable parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.chunks = zero3.get_trainable_chunk(model)
        self.values = [chunk.detach().clone() for chunk in self.chunks]
        self.update_values = get_ema_multi_avg_fn(decay)

    def update(self) -> None:
        self.update_values(self.values, [chunk.detach() for chunk in self.chunks], 0)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for chunk, value in zip(self.chunks, self.values, strict=True):
            kept = chunk.clone()
            chunk.copy_(value)
            value.copy_(kept)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="optimizer steps (default: 400)")
    parser.add_argument("--decay", type=float, default=0.98, metavar="X", help="of the average, a step (default: 0.98)")
    parser.add_argument("--lr", type=float, default=0.7, metavar="X", help="high, so that single weights are noisy (default: 0.7)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="points a step, of all processes together (default: 16)")
    return parser.parse_args(arguments)


def points(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points `[count, 2]` of two spirals, and which of them each belongs to, wrong for one in ten."""
    turn, label = 4 * torch.rand(count, generator=generator), torch.randint(2, (count,), generator=generator)
    angle = turn + torch.pi * label
    wrong = torch.rand(count, generator=generator) < 0.1
    return torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1), torch.where(wrong, 1 - label, label)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    with join_ranks("cpu") as ranks:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(2, 64), nn.Tanh()), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 2)]
        model = zero3.Zero3Sequential([zero3.Zero3Layer(layer) for layer in layers])
        optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=options.lr)
        average, draws = Average(model, options.decay), torch.Generator().manual_seed(1)
        for _ in range(options.steps):
            x, label = points(options.batch_size, draws)
            mine = slice(ranks.rank, None, ranks.world_size)
            nn.functional.cross_entropy(model(x[mine]), label[mine]).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()

        @torch.no_grad()
        def held_out_loss() -> float:
            x, label = points(2000, torch.Generator().manual_seed(2))
            return nn.functional.cross_entropy(model(x), label).item()

        losses = {"last weights": held_out_loss()}
        with average.swapped_in():
            losses["averaged weights"] = held_out_loss()
        losses["last weights again"] = held_out_loss()
        if ranks.rank == 0:
            for name, loss in losses.items():
                print(f"held-out loss with the {name}: {loss:.4f}")


if __name__ == "__main__":
    main()
