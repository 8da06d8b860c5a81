"""The weights of a sharded model, tensor by tensor: zero3.stream_weights beside FSDP2's `full_tensor()` one by one, as TRL synchronises.

    python benchmarks/engines/main.py --output results               a minute: 160 M parameters, 2 ranks
    python benchmarks/engines/main.py --layers 2 --repetitions 1     short

Each rank is a process, which has both models. Repetitions alternate between the systems, so that a noisy machine is noisy to both.
A consumer takes one number of each tensor. Live bytes are those of storages that operations have made, on a rank whose peers are
not there (torch's `fake` backend), so that the memory of transfers is not counted. `parked` moves a trained
model's chunks, gradients and AdamW's state to a file: the bytes of their storages before and inside are counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3
from benchmarks.common.alone import rank_zero_of
from benchmarks.common.counters import LiveBytes
from zero3.access import states_of


def model_of(layers: int, width: int, vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2816 * width // 1024, "num_attention_heads": 16, "num_key_value_heads": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocabulary, num_hidden_layers=layers))


def by_fsdp2(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.full_tensor()


def fully_sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in [*model.model.layers, model.model.embed_tokens, model.lm_head]:
        fully_shard(layer)
    return fully_shard(model)


def consumed(stream: Iterator[Any]) -> int:
    nbytes = 0
    for item in stream:
        for _, tensor in item if isinstance(item, list) else [item]:
            tensor.view(-1)[0].item()
            nbytes += tensor.nbytes
    return nbytes


def streams_of(model: Any, options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Any]]]:
    megabytes = options.bucket_megabytes
    return {
        "zero3.stream_weights": lambda: zero3.stream_weights(model),
        f"zero3.stream_weights, max_bytes={megabytes} MiB": lambda: zero3.stream_weights(model, max_bytes=megabytes << 20),
        "zero3.stream_weights, dtype=bfloat16": lambda: zero3.stream_weights(model, dtype=torch.bfloat16),
        "zero3.stream_weights, both": lambda: zero3.stream_weights(model, dtype=torch.bfloat16, max_bytes=megabytes << 20),
    }


def living(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes, on one rank whose peers are not there, and take no memory."""
    with rank_zero_of(options.ranks):
        model = zero3.shard(model_of(options.layers, options.width, options.vocabulary))
        live = {}
        for name, start in streams_of(model, options).items():
            with LiveBytes() as counted:
                for chunk in model.parameters():
                    chunk.data.view(-1)  # which is seen
                counted.restart()
                before = counted.now
                consumed(start())
            live[name] = counted.peak - before
        tensors = [tensor.nbytes for _, tensor in zero3.stream_weights(model)]
        layer = max(state.chunks.full_nbytes() for state in states_of(model))
        return {"live": live, "layer": layer, "largest": max(tensors), "nbytes": sum(tensors)}


def rank_main(rank: int, store: str, options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}/meeting", rank=rank, world_size=options.ranks, timeout=timedelta(minutes=5)
    )
    shape = options.layers, options.width, options.vocabulary
    ours, theirs = zero3.shard(model_of(*shape)), fully_sharded(model_of(*shape))
    systems = {"FSDP2, full_tensor() one by one": lambda: by_fsdp2(theirs), **streams_of(ours, options)}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    processor: dict[str, list[float]] = {name: [] for name in systems}
    for repetition in range(options.repetitions + 1):
        for name, start in systems.items():
            dist.barrier()
            begun, used = time.perf_counter(), time.process_time()
            consumed(start())
            if repetition:  # the first one allocates
                seconds[name].append(time.perf_counter() - begun)
                processor[name].append(time.process_time() - used)
    found = {"seconds": seconds, "processor": processor, "parked": parking(ours, store)}
    if rank == 0:
        Path(store, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def parking(model: Any, store: str) -> dict[str, float]:
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=1e-4)
    ids = torch.arange(16).view(1, -1)
    for step in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        if not step:
            optimizer.step()
            optimizer.zero_grad()
    held = [*model.parameters(), *(p.grad.as_subclass(Tensor) for p in model.parameters())]
    held += [value for state in optimizer.state.values() for value in state.values()]
    before, begun = sum(t.untyped_storage().nbytes() for t in held), time.perf_counter()
    with zero3.parked(model, optimizer, to=store):
        inside = sum(t.untyped_storage().nbytes() for t in held)
    return {"before": before, "inside": inside, "seconds": time.perf_counter() - begun}


def table(found: dict[str, Any], options: argparse.Namespace) -> str:
    first, megabytes = next(iter(found["seconds"])), 1 << 20
    base, least = (statistics.median(found[what][first]) for what in ("seconds", "processor"))
    lines = [
        f"{found['nbytes'] / megabytes:.0f} MiB of weights, {options.ranks} ranks, one thread each, medians of {options.repetitions}. "
        f"The largest layer has {found['layer'] / megabytes:.1f} MiB, the largest tensor {found['largest'] / megabytes:.1f}.",
        "",
        "| | seconds | x FSDP2 | processor seconds | x FSDP2 | live bytes above the chunks, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, each in found["seconds"].items():
        median, worked = statistics.median(each), statistics.median(found["processor"][name])
        live = f"{found['live'][name] / megabytes:.1f}" if name in found["live"] else ""
        lines.append(f"| {name} | {median:.2f} | {median / base:.2f} | {worked:.2f} | {worked / least:.2f} | {live} |")
    parked = found["parked"]
    lines += [
        "",
        f"parked: {parked['before'] / megabytes:.0f} MiB of chunks, gradients and state, and inside "
        f"{100 * parked['inside'] / parked['before']:.2f} % of them. There and back: {parked['seconds']:.1f} s.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a directory for engines.md and engines.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        mp.start_processes(rank_main, (store, options), options.ranks, start_method="fork")  # type: ignore[no-untyped-call]
        found = {**json.loads(Path(store, "found.json").read_text()), **living(options)}
    text = table(found, options)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "engines.md").write_text(f"{text}\n")
        (options.output / "engines.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
