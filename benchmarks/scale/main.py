"""Bytes on one rank of N, from 1 to 1024, against the ZeRO paper's table 1 and against FSDP2, for models of up to a trillion parameters.

    python benchmarks/scale/main.py --help

One process plays rank 0 of N and trains one step: real code, tensors without memory (zero3 on the meta device, FSDP2 on
torch's fake tensors), collectives that do nothing. Mixed precision with Adam: fp32 chunks, computation in bf16. The paper
keeps 2 + 2 + K bytes a parameter with K = 12 (Rajbhandari et al., ZeRO, 2020, table 1); here it is 4 + 4 + 8, the same sum.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
from torch import Tensor, nn

from benchmarks.common.alone import rank_zero_of
from benchmarks.common.counters import LiveBytes
from benchmarks.common.model import Size, batch, layers, loss_of
from benchmarks.common.ranks import alone
from benchmarks.common.report import leave, markdown, new_figure, progress, save
from benchmarks.common.systems import fsdp2
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential
from zero3.build.host import ThisMachine
from zero3.comm.streams import Done, Lanes, Pending, lanes_for

MODELS = {
    "7.5B": Size(width=4096, depth=35, heads=32, vocabulary=51200, sequence=8, batch=1),
    "128B": Size(width=10240, depth=101, heads=80, vocabulary=51200, sequence=8, batch=1),
    "1T": Size(width=25600, depth=127, heads=128, vocabulary=51200, sequence=8, batch=1),
    "tiny": Size(width=64, depth=2, heads=2, vocabulary=128, sequence=8, batch=1),
}
BYTES = 16  # a parameter, in mixed precision with Adam
PARTS = ("parameters", "gradients", "optimizer")


class Moments(torch.optim.Optimizer):
    """Adam's memory without its bias correction, which reads a number that tensors without memory don't have."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["exp_avg"].lerp_(parameter.grad, 0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            parameter.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-1e-3)


class Absent(ThisMachine):
    """Rank 0's communicator in a group whose other ranks are not there; nothing is moved. (torch's has none for meta tensors.)"""

    rank = shard_rank = replica = channel = 0
    on_paper = True

    def __init__(self, world_size: int) -> None:
        self.world_size = self.shards = world_size
        self.takes_pieces, self.tags_messages = False, True

    def all_gather(self, full: Tensor, shard: Tensor, bounds: object = None) -> Pending:
        return Done()

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: object = None) -> Pending:
        return Done()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None: ...

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: object = None) -> Pending:
        return Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        return [payload] * self.world_size

    def duplicate(self) -> Absent:
        return self

    def lanes(self, device: torch.device) -> Lanes:
        return lanes_for(device)

    def same_ranks(self, other: object) -> bool:
        return self is other


def by_zero3(size: Size, ranks: int) -> dict[str, int]:
    group, policy = Absent(ranks), ShardingPolicy(param_dtype=torch.bfloat16)
    with LiveBytes() as live, torch.device("meta"):
        model = Zero3Sequential([Zero3Layer(module, device="meta", policy=policy, process_group=group) for module in layers(size)])
        for layer in model:
            for chunk in layer._state.chunks:
                chunk.unloaded.clear()  # values never come
        return one_step(model, Moments(model.get_trainable_chunk()), size, live)


def by_fsdp2(size: Size, ranks: int) -> dict[str, int]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    with rank_zero_of(ranks) as transfers:
        mesh = init_device_mesh("cpu", (ranks,))  # its ranks are real numbers
        transfers.replace()
        with FakeTensorMode(), LiveBytes() as live:
            model = fsdp2(layers(size), "sgd", param_dtype=torch.bfloat16, mesh=mesh).model
            return one_step(model, Moments(model.parameters()), size, live)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, size: Size, live: LiveBytes) -> dict[str, int]:
    """Two steps: what stands after the second, and the most that was alive in it. Few tokens, so that activations weigh little."""
    for step in range(2):
        live.restart()
        ids, labels = batch(size, step, 0)
        loss_of(model, ids.to(torch.get_default_device()), labels.to(torch.get_default_device())).backward()
        optimizer.step()
        if not step:
            optimizer.zero_grad()
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    held = dict(zip(PARTS, (sum(map(nbytes, each)) for each in (parameters, gradients, states)), strict=True))
    return held | {"state": sum(held.values()), "peak": live.peak}


def nbytes(tensor: Tensor) -> int:
    return getattr(tensor, "_local_tensor", tensor).nbytes


MEASURED = {"zero3": by_zero3, "FSDP2": by_fsdp2}


def table(results: dict[str, Any]) -> str:
    gigabyte = 1e9
    rows = []
    for model, entry in results.items():
        for ranks, by_system in entry["ranks"].items():
            formula = BYTES * entry["parameters"] / ranks
            row = [model, ranks, f"{formula / gigabyte:.4g}"]
            for found in by_system.values():
                row += [f"{found['state'] / gigabyte:.4g}", f"{found['state'] / formula - 1:+.2%}", f"{found['peak'] / gigabyte:.4g}"]
            rows.append(row)
    measured = next(iter(next(iter(results.values()))["ranks"].values()))
    systems = [f"{name}{what}" for name in measured for what in (" GB", " - formula", ", peak of a step GB")]
    return markdown(["model", "N", "16 bytes x parameters / N, GB", *systems], rows)


def draw(results: dict[str, Any], ranks: int, path: Path) -> None:
    """As the paper's figure 1: parameters, gradients and optimizer state on one rank, by stage of ZeRO, and as measured."""
    made = new_figure(5 * len(results), 3, columns=len(results))
    if made is None:
        return
    figure, axes = made
    for plot, (model, entry) in zip(axes if len(results) > 1 else [axes], results.items(), strict=True):
        count = entry["parameters"] / 1e9
        paper = {"baseline": (1, 1, 1), "$P_{os}$": (1, 1, ranks), "$P_{os+g}$": (1, ranks, ranks), "$P_{os+g+p}$": (ranks,) * 3}
        bars = {name: [2 * count / a, 2 * count / b, 12 * count / c] for name, (a, b, c) in paper.items()}
        bars |= {f"{s}, measured": [found[part] / 1e9 for part in PARTS] for s, found in entry["ranks"][ranks].items()}
        start = [0.0] * len(bars)
        for index, (part, color) in enumerate(zip(PARTS, ("C0", "C1", "C2"), strict=True)):
            values = [bar[index] for bar in bars.values()]
            plot.barh(list(bars), values, left=start, color=color, label=part)
            start = [a + b for a, b in zip(start, values, strict=True)]
        for row, total in enumerate(start):
            plot.text(total, row, f" {total:.4g} GB", va="center", fontsize=8)
        plot.set(title=f"{model} parameters, N = {ranks}", xlabel="GB a rank", xlim=(0, 1.25 * max(start)))
        plot.invert_yaxis()
        plot.legend(fontsize=8, loc="lower right")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=["7.5B", "128B", "1T"], choices=list(MODELS), metavar="MODEL", help=", ".join(MODELS)
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024], metavar="N", help="default: %(default)s")
    parser.add_argument("--figure-ranks", type=int, default=64, metavar="N", help="N of the picture; default: %(default)s, the paper's")
    parser.add_argument(
        "--systems", nargs="+", default=list(MEASURED), choices=list(MEASURED), metavar="SYSTEM", help="zero3, FSDP2 (slow)"
    )
    parser.add_argument("--output", type=Path, help="a folder for the table, all that was measured, and a picture")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for model in args.models:
        results[model] = {"parameters": MODELS[model].parameters, "ranks": {}}
        for ranks in args.ranks:
            progress(f"{model} parameters on {ranks} ranks")
            results[model]["ranks"][ranks] = {name: alone(MEASURED[name], MODELS[model], ranks) for name in args.systems}
            leave(args.output, "scale", {"results": results}, table(results))
    print(table(results))
    if args.output:
        draw(results, args.figure_ranks if args.figure_ranks in args.ranks else args.ranks[-1], args.output / "scale.png")


if __name__ == "__main__":
    main()
