"""What long sequences take: peak live bytes of a step, and its seconds, over lengths of sequences.

    python benchmarks/long/main.py --help
    python benchmarks/long/main.py --counted          bytes alone, as plans count them, without computing
    python benchmarks/long/main.py --plan             what a plan says of 8 B at 128 K and 512 K tokens

Each way has all of those before it, and the same model: plain sharding; the head by chunks; tiles; activations in a file; parts of
sequences over two ranks. Without parts each rank has a sequence of its own. Bytes are one rank's, above those at rest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.common.counters import LiveBytes
from benchmarks.common.ranks import on_ranks
from benchmarks.common.report import MEGABYTE, markdown, median, progress, write

WAYS = ("plain", "+ chunked head", "+ tiles", "+ offloaded", "+ sp = 2")
SIZES = {"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 2}
TILE = 512
OF_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 1 << 20,
}  # fmt: skip
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "+ chunked head": {"chunked_head": True},
    "+ tiles": {"chunked_head": True, "tile": 4096},
    "+ sp = 8": {"chunked_head": True, "tile": 4096, "sequence_parallel": 8},
}


def measure(rank: int, world_size: int, way: int, length: int, scratch: str, steps: int) -> tuple[float, float]:
    """The peak in MB above what is at rest, and seconds a step."""
    import transformers

    import zero3

    with LiveBytes() as live:
        torch.manual_seed(0)
        sizes = {**SIZES, "max_position_embeddings": length}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        parts = way >= 4
        mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("dp_shard", "sp")) if parts else None
        zero3.shard(model, process_group=mesh)
        for layer in model.model.layers if way >= 2 else ():
            zero3.tile(layer.mlp, TILE)
        around = zero3.offload_activations(scratch) if way >= 3 else nullcontext()
        ids = torch.randint(SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0 if parts else rank))

        def step(ids: Tensor = ids) -> None:
            model.zero_grad()
            with around:
                loss, tokens = loss_of(model, ids, way)
            loss.backward() if tokens is None else zero3.backward(loss, tokens, model)

        step(ids[:, : 2 * TILE])  # orders are learned
        live.restart()
        rest = live.now
        begin = perf_counter()
        step()
        counted, peak = perf_counter() - begin, live.peak - rest
    seconds = []
    for _ in range(steps):
        dist.barrier()
        begin = perf_counter()
        step()
        seconds.append(perf_counter() - begin)
    return peak / MEGABYTE, median(seconds or [counted])


def loss_of(model: Any, ids: Tensor, way: int) -> tuple[Tensor, Tensor | None]:
    """With parts: the sum, and the number of tokens."""
    import zero3

    if way == 0:
        return model(input_ids=ids, labels=ids, use_cache=False).loss, None
    if way < 4:
        return zero3.causal_lm_loss(model, input_ids=ids, labels=ids, use_cache=False), None
    part = zero3.split_sequence(model, {"input_ids": ids, "labels": ids})
    return zero3.causal_lm_loss(model, reduction="sum", **part), (part["shift_labels"] != -100).sum()


def counted(way: int, length: int) -> float:
    """What `measure` measures, as a plan counts it, without computing. Plans know of no activations in a file."""
    import transformers

    import zero3

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, max_position_embeddings=length))
    options: dict[str, Any] = {"chunked_head": way >= 1, "tile": TILE if way >= 2 else None, "sequence_parallel": 2 if way >= 4 else 1}
    plan = zero3.plan(model, ranks=2, sequence=length, device="cpu", optimizer=torch.optim.SGD, **options)
    peak = max(moment.peak for moment in plan.moments if "optimizer" not in moment.phase)
    return (peak - 2 * plan.trainable * 4 // 2) / MEGABYTE  # at rest: chunks, and their gradients of the last step


def plans(say: Callable[[str], None]) -> str:
    """The causes of the peak on each of 8 ranks of 80 GB, blocks checkpointed, bf16 over float32 masters."""
    import transformers

    import zero3

    policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**OF_8B)).to(torch.bfloat16)
    rows = []
    for length in (1 << 17, 1 << 19):
        for name, options in PLANS.items():
            say(f"{name}, {length} tokens")
            found = zero3.plan(
                model, ranks=8, sequence=length, checkpointing=True, policy=policy, master_dtype=torch.float32, **options
            )  # fmt: skip
            causes = [f"{found.by_cause[cause] / 2**30:.1f}" for cause in CAUSES]
            rows.append([f"{length // 1024} K", name, *causes, f"{found.peak_bytes / 2**30:.1f}"])
    return markdown(["tokens", "way", *(cause.replace("_", " ") for cause in CAUSES), "peak GiB"], rows)


CAUSES = ("chunks", "optimizer", "full_buffers", "gradients", "activations", "logits", "transfers")


def draw(lengths: Sequence[int], peaks: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for way, values in peaks.items():
        axes.plot(lengths, values, marker="o", label=way)
    axes.set(xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel="MB above what is at rest", xticks=lengths)
    axes.set_xticklabels([f"{length // 1024} K" for length in lengths])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1 << power for power in range(10, 16)], metavar="N")
    parser.add_argument("--steps", type=int, default=3, help="timed, each way (default: %(default)s; 0: the one whose bytes are counted)")
    parser.add_argument("--scratch", type=Path, default=tempfile.gettempdir(), help="where activations go (default: %(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--counted", action="store_true", help="compute nothing, and print what plans count, but for activations in a file")
    parser.add_argument("--plan", action="store_true", help="print the plans of 8 B alone")
    parser.add_argument("--output", type=Path, metavar="DIR", help="for the table's numbers, as JSON")
    args = parser.parse_args()
    if args.plan:
        print(plans(progress))
        return
    ways = {number: way for number, way in enumerate(WAYS) if not args.counted or way != "+ offloaded"}
    peaks: dict[str, list[float]] = {way: [] for way in ways.values()}
    rows = []
    for length in args.lengths:
        row = [f"{length}"]
        for number, way in ways.items():
            progress(f"{length} tokens, {way}")
            if args.counted:
                peak, took = counted(number, length), ""
            else:
                peak, seconds = on_ranks(2, measure, number, length, str(args.scratch), args.steps)[0]
                took = f", {seconds:.2f} s"
            peaks[way].append(peak)
            row.append(f"{peak:.1f} MB{took}")
        rows.append(row)
    if args.picture is not None:
        draw(args.lengths, peaks, args.picture)
    write(args.output, "long", {"lengths": args.lengths, "peaks": peaks}, markdown(["tokens", *ways.values()], rows))


if __name__ == "__main__":
    main()
