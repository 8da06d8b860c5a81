"""What a mixture of experts sends in a step: experts gathered, or at home while tokens travel.

    python benchmarks/experts/main.py --help

Two tables. Bytes: eight ranks as threads train one block of each model, with its own width, numbers of experts and of a token's experts;
bytes that a rank sends are counted, and multiplied by layers and tokens. (An expert's inner width is small: no byte of a token's depends
on it.) Beside it what distinct pairs of a token and another rank need. `--link`: two processes in network namespaces, joined by a cable of
that rate (root, iproute2), with 25 of 26 M parameters in experts: milliseconds, bytes and live memory beside FSDP2, which gathers all.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
from torch import Tensor, nn

from benchmarks.common.report import markdown, median, progress, write
from benchmarks.experts.models import Mixture

MODELS = {
    "Qwen3-30B-A3B": Mixture(48, 128, 8, 2048, 3 * 2048 * 768),
    "Mixtral 8x7B": Mixture(32, 8, 2, 4096, 3 * 4096 * 14336),
    "gpt-oss-20b": Mixture(24, 32, 4, 2880, 3 * 2880 * 2880 + 3 * 2880),
    "gpt-oss-120b": Mixture(36, 128, 4, 2880, 3 * 2880 * 2880 + 3 * 2880),
}
ROUTINGS = ("balanced", "one rank")


class Experts(nn.Module):
    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, inner) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / inner**0.5)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        order = index.view(-1).argsort()
        counts = index.view(-1).bincount(minlength=self.num_experts).tolist()
        parts = [
            torch.relu(rows @ up) @ down
            for rows, up, down in zip(hidden.index_select(0, order // index.shape[1]).split(counts), self.up, self.down, strict=True)
            if len(rows)
        ]
        made = torch.cat(parts) * weights.view(-1).index_select(0, order)[:, None]
        return torch.zeros_like(hidden).index_add(0, order // index.shape[1], made.to(hidden.dtype))


class Block(nn.Module):
    """Experts behind a router; `routing` may send all tokens to the experts of the first rank."""

    def __init__(self, experts: int, width: int, used: int, inner: int, dense: int = 0) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.dense = nn.Sequential(nn.Linear(width, dense), nn.ReLU(), nn.Linear(dense, width)) if dense else None
        self.experts, self.used, self.only = Experts(experts, width, inner), used, 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.dense is None else x + self.dense(x)
        scores = self.router(x)
        weights, index = scores.softmax(-1).topk(self.used)
        if self.only:
            index = index % self.only
        self.seen.append(index.detach())
        return x + self.experts(x, index, weights.to(x.dtype))


def counted(shape: Mixture, ranks: int, tokens: int, routing: str) -> tuple[float, float]:
    """Bytes that the busiest rank sends in a step of one block, and those that distinct pairs need."""
    import zero3
    from benchmarks.experts.threads import CountingRank, on_threads

    def body(rank: CountingRank) -> tuple[float, float]:
        model = nn.ModuleList([Block(shape.experts, shape.width, shape.used, 4)]).to(torch.bfloat16)
        if routing == "one rank":
            model[0].only = -(-shape.experts // ranks)
        holder = nn.Sequential(*model)
        zero3.shard(holder, [holder[0]], policy=zero3.ShardingPolicy(expert_parallel=True), process_group=rank)
        state = torch.Generator().manual_seed(rank.rank)
        x = torch.randn(tokens, shape.width, generator=state).to(torch.bfloat16).requires_grad_()
        holder(x).float().square().mean().backward()
        index = holder[0].module.seen[0]
        per = -(-shape.experts // ranks)
        owners = torch.zeros(tokens, ranks, dtype=torch.bool).scatter_(1, index // per, True)
        owners[:, rank.rank] = False
        need = int(owners.sum()) * ((2 * shape.width + shape.used) * 2 + 4 * shape.used)  # there, and gradients back
        theirs = rank.exchange(owners.sum(0).to(torch.int64).numpy().tobytes(), torch.device("cpu"))
        came = sum(int(torch.frombuffer(bytearray(each), dtype=torch.int64)[rank.rank]) for each in theirs)
        need += came * ((2 * shape.width + shape.used) * 2)  # results back, and gradients
        return rank.sent["tokens"], need

    torch.manual_seed(0)
    found = on_threads(ranks, body)
    busiest = max(range(ranks), key=lambda rank: found[rank][0])
    return found[busiest]


def bytes_table(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    results, rows = {}, []
    for name in args.models:
        shape = MODELS[name]
        scale = shape.layers * args.of / args.tokens
        for routing in ROUTINGS:
            progress(f"{name}, {routing}")
            sent, need = counted(shape, args.ranks, args.tokens, routing)
            gathered = shape.gathered(args.ranks, 2)
            results[f"{name}, {routing}"] = {"sent": sent * scale, "need": need * scale, "gathered": gathered}
            cells = [f"{each / 1e9:.1f}" for each in (gathered, sent * scale)]
            rows.append([name, routing, *cells, f"{sent / need:.3f}"])
    columns = ["model", "routing", "experts gathered, GB", "at home, GB", "x what distinct pairs need"]
    head = f"{args.ranks} ranks, {args.of} tokens a rank, bf16: sent by the busiest rank in a step, for experts\n\n"
    return results, head + markdown(columns, rows)


# -- a link of a given rate

LINKED = {"experts": 24, "width": 256, "used": 2, "inner": 512, "dense": 384}
SYSTEMS = ("zero3, experts at home", "zero3, experts gathered", "FSDP2, experts gathered")


def train(rank: int, ranks: int, system: str, steps: int, tokens: int) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import zero3
    from benchmarks.common.counters import LiveBytes, send_by_sockets, sent_bytes
    from benchmarks.fabric.network import INTERFACE

    send_by_sockets()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(**LINKED) for _ in range(4)))
    with LiveBytes() as live:
        if system.startswith("zero3"):
            zero3.shard(model, [*model], policy=zero3.ShardingPolicy(expert_parallel="home" in system))
            parameters: Any = zero3.get_trainable_chunk(model)
        else:
            for block in model:
                fully_shard(block)
            fully_shard(model)
            parameters = model.parameters()
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)

        def step(number: int) -> None:
            state = torch.Generator().manual_seed(ranks * number + rank)
            model(torch.randn(tokens, LINKED["width"], generator=state)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        live.restart()
        step(1)
        peak = live.peak
    seconds, worked, sent = [], [], []
    for number in range(steps):
        dist.barrier()
        began, before, busy = time.perf_counter(), sent_bytes(INTERFACE), time.process_time()
        step(2 + number)
        worked.append(time.process_time() - busy)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
        sent.append(sent_bytes(INTERFACE) - before)
    return {"seconds": seconds, "worked": worked, "sent": sent, "peak": peak}


def linked(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from benchmarks.common.ranks import on_ranks
    from benchmarks.fabric.network import INTERFACE, NoNetwork, cable

    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    found: dict[str, dict[str, list[Any]]] = {system: {"seconds": [], "worked": [], "sent": [], "peak": []} for system in SYSTEMS}
    try:
        with cable() as link:
            link.set_rate(args.link)
            for repetition in range(args.repetitions):
                for system in SYSTEMS:
                    progress(f"repetition {repetition + 1} of {args.repetitions}: {system}")
                    reports = on_ranks(2, train, system, args.steps, args.linked_tokens, namespaces=link.names)
                    for what in ("seconds", "worked", "sent"):
                        found[system][what] += [max(pair) for pair in zip(*(each[what] for each in reports), strict=True)]
                    found[system]["peak"].append(max(each["peak"] for each in reports))
    except NoNetwork as error:
        raise SystemExit(f"no cable: {error}") from None
    rows = []
    slowest = median(found[SYSTEMS[-1]]["seconds"])
    for system, each in found.items():
        seconds = median(each["seconds"])
        cells = [f"{seconds * 1e3:.0f}", f"{seconds / slowest:.2f}", f"{median(each['worked']) * 1e3:.0f}"]
        rows.append([system, *cells, f"{median(each['sent']) / 1e6:.1f}", f"{max(each['peak']) / 1e6:.0f}"])
    head = f"2 ranks, {args.link:g} Gbit/s, {args.linked_tokens} tokens a rank, 25 of 26 M parameters in experts, fp32\n\n"
    return found, head + markdown(["system", "ms a step", "x FSDP2", "of a core, ms", "MB sent by a rank", "peak of live MB"], rows)


def main() -> None:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS], help="of the table of bytes (default: all)")
    parser.add_argument("--ranks", type=int, default=8, help="threads (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank, that are sent and counted (default: %(default)s)")
    parser.add_argument("--of", type=int, default=8192, help="tokens of a rank that the table is for (default: %(default)s)")
    parser.add_argument("--link", type=float, metavar="GBIT", help="measures on a cable of that rate, too")
    parser.add_argument("--linked-tokens", type=int, default=256, help="of a rank, there (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a repetition there (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=2, help="there (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the tables, and all that was measured, as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results, table = bytes_table(args)
    everything: dict[str, Any] = {"bytes": results}
    if args.link is not None:
        everything["link"], second = linked(args)
        table += f"\n\n{second}"
    write(args.output, "experts", everything, table)


if __name__ == "__main__":
    main()
