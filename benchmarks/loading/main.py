"""Loads one checkpoint into a sharded model under several systems, interleaved, and compares time, memory and bytes read.

    python benchmarks/loading/main.py --help

Every (repetition, system) is a fresh group of processes, repetitions outermost, so that a noisy machine is noisy to all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3
from benchmarks.common.counters import count_reads

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM  # elsewhere imported when it is needed: `--help` does without

MEGABYTE = 2**20
HIDDEN = 1024


def make_checkpoint(directory: Path, layers: int) -> int:
    """A Llama with random weights, in several files; its bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32000, num_hidden_layers=layers)).save_pretrained(directory, max_shard_size="300MB")
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def on_meta(directory: str) -> LlamaForCausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig.from_pretrained(directory))


def by_zero3(directory: str) -> nn.Module:
    model = zero3.shard(on_meta(directory))
    zero3.load_pretrained(model, directory)
    return model


def fully_sharded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    from torch.distributed.fsdp import fully_shard

    for layer in [*model.model.layers, model.model.embed_tokens, model.lm_head]:
        fully_shard(layer)
    return fully_shard(model)


def by_from_pretrained(directory: str) -> nn.Module:
    """What most scripts do: the whole model on every rank, then its slices."""
    from transformers import LlamaForCausalLM

    return fully_sharded(LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32))


def by_broadcast(directory: str) -> nn.Module:
    """The whole model on rank 0 only, and torch's own way to deal it out."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from transformers import LlamaForCausalLM

    values = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict() if dist.get_rank() == 0 else {}
    model = fully_sharded(on_meta(directory)).to_empty(device="cpu")
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return with_frequencies(model)


def by_checkpoint_reader(directory: str) -> nn.Module:
    """torch's reader of such directories, into the slices of a model that never was whole."""
    import torch.distributed.checkpoint as dcp

    model = fully_sharded(on_meta(directory)).to_empty(device="cpu")
    dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(path=directory))
    return with_frequencies(model)


def with_frequencies(model: LlamaForCausalLM) -> LlamaForCausalLM:
    model._init_weights(model.model.rotary_emb)  # what to_empty left to chance
    return model


SYSTEMS: dict[str, Callable[[str], nn.Module]] = {
    "zero3.load_pretrained": by_zero3,
    "from_pretrained, FSDP2": by_from_pretrained,
    "from_pretrained on rank 0, FSDP2": by_broadcast,
    "FSDP2, HuggingFaceStorageReader": by_checkpoint_reader,
}


class Memory:
    """The process's growth from here on: all that is resident (VmHWM; mapped files count), and without what is file-backed."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        self._start = self._status("VmRSS")
        self._anonymous_start = self.anonymous = self._anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.anonymous = max(self.anonymous, self._anonymous())

    def stop(self) -> tuple[int, int]:
        self._over.set()
        self._thread.join()
        return self._status("VmHWM") - self._start, max(self.anonymous, self._anonymous()) - self._anonymous_start

    @staticmethod
    def _status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024

    @staticmethod
    def _anonymous() -> int:
        _, resident, shared = Path("/proc/self/statm").read_text().split()[:3]
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def quieten() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def one_rank(rank: int, world_size: int, rendezvous: str, system: str, directory: str, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    quieten()
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
    reads = count_reads()
    on_meta(directory)  # what is imported late is not what we measure
    dist.barrier()
    memory, begin = Memory(), time.perf_counter()
    model = SYSTEMS[system](directory)
    dist.barrier()
    seconds = time.perf_counter() - begin
    resident, anonymous = memory.stop()
    held = sum(p.to_local().nbytes if hasattr(p, "to_local") else p.nbytes for p in model.parameters())
    with torch.no_grad():
        logits = model(torch.arange(8)[None]).logits
    report = {
        "seconds": seconds,
        "resident": resident,
        "anonymous": anonymous,
        "read": sum(reads),
        "held": held,
        "logit": logits[0, -1, 0].item(),
    }
    results.put((rank, report))
    dist.barrier()
    dist.destroy_process_group()


def run(system: str, ranks: int, directory: Path, cold: bool) -> list[dict[str, Any]]:
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (ranks, f"{scratch}/rendezvous", system, str(directory), results)
        mp.start_processes(one_rank, arguments, nprocs=ranks, start_method="spawn")
    reports = dict(results.get() for _ in range(ranks))
    return [reports[rank] for rank in range(ranks)]


def table(reports: dict[str, list[list[dict[str, Any]]]]) -> str:
    """A markdown table: medians over repetitions, the ranks side by side."""
    rows = [
        "| system | seconds (spread) | slices held MB | peak resident MB | peak anonymous MB | bytes read MB | logit |",
        "|---|---|---|---|---|---|---|",
    ]
    for system, repetitions in reports.items():
        seconds = [max(report["seconds"] for report in each) for each in repetitions]

        def by_rank(what: str, repetitions: list[list[dict[str, Any]]] = repetitions) -> str:
            ranks = zip(*repetitions, strict=True)
            return " / ".join(
                f"{statistics.median(report[what] for report in reports_of_rank) / MEGABYTE:.0f}" for reports_of_rank in ranks
            )

        read = by_rank("read") if system.startswith("zero3") else "not counted"
        rows.append(
            f"| {system} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {by_rank('held')} | "
            f"{by_rank('resident')} | {by_rank('anonymous')} | {read} | {repetitions[0][0]['logit']:.6f} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="of 51 MB each, beside 262 MB of embeddings")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache first; else they are in it")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM", help="; ".join(SYSTEMS))
    parser.add_argument("--output", type=Path, help="a JSON file for all that was measured")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    quieten()
    reports: dict[str, list[list[dict[str, Any]]]] = {system: [] for system in args.systems}
    with tempfile.TemporaryDirectory() as directory:
        print(f"a checkpoint of {make_checkpoint(Path(directory), args.layers) / MEGABYTE:.0f} MB", file=sys.stderr, flush=True)
        for repetition in range(args.repetitions):
            for system in args.systems:
                print(f"repetition {repetition + 1} of {args.repetitions}: {system}", file=sys.stderr, flush=True)
                reports[system].append(run(system, args.ranks, Path(directory), args.cold))
    print(table(reports))
    if args.output:
        args.output.write_text(
            json.dumps({"torch": torch.__version__, "layers": args.layers, "ranks": args.ranks, "reports": reports}, indent=1)
        )


if __name__ == "__main__":
    main()
