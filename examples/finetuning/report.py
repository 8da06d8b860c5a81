"""What a run says about itself: memory, the closing table, the picture of its losses, and a summary for programs."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

matplotlib.use("Agg")  # pictures go to files: no screen is needed

from matplotlib import pyplot

__all__ = ["Memory", "Summary", "draw_losses", "live_memory", "memory_of_one_process", "peak_memory", "table"]


@dataclass(frozen=True)
class Memory:
    """Bytes that stay allocated from step to step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass
class Summary:
    """A run in numbers. `summary.json` holds it under these names."""

    world_size: int
    held_out_loss_before: float
    held_out_loss_after: float
    tokens_per_second: float
    memory_per_rank: list[Memory]
    memory_of_one_process: Memory
    peak_memory_per_rank: list[int]
    losses: list[float]
    texts: dict[str, str] = field(default_factory=dict)  # "before" and "after", if asked for

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def live_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> Memory:
    """What this rank holds, counted by the storages that are really there. Call it while there are gradients."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return Memory(_storage_bytes(parameters), _storage_bytes(gradients), _storage_bytes(state))


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def memory_of_one_process(model: nn.Module) -> Memory:
    """What a single process would hold: every parameter, and for a trainable one its gradient and AdamW's two moments."""
    everything = sum(parameter.nbytes for parameter in model.parameters())
    trainable = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return Memory(everything, trainable, 2 * trainable)


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has held so far: of its GPU, or else of the machine's memory, Python and torch included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def table(summary: Summary) -> str:
    """The closing table."""
    before, after = summary.held_out_loss_before, summary.held_out_loss_after
    lines = [
        f"trained on         {_ranks(summary)}",
        f"held-out loss      {before:.4f} before, {after:.4f} after ({after - before:+.4f})",
        f"tokens per second  {summary.tokens_per_second:,.0f} over all ranks",
        "",
        f"{'memory, MB':<14}{'parameters':>12}{'gradients':>12}{'optimizer':>12}{'total':>12}{'share':>9}{'peak':>9}",
    ]
    alone = summary.memory_of_one_process
    lines.append(_memory_row("one process", alone, alone) + f"{'':>9}")
    for rank, (memory, peak) in enumerate(zip(summary.memory_per_rank, summary.peak_memory_per_rank, strict=True)):
        lines.append(_memory_row(f"rank {rank}", memory, alone) + f"{peak / 1e6:>9,.0f}")
    return "\n".join(lines)


def _ranks(summary: Summary) -> str:
    return f"{summary.world_size} rank{'s' if summary.world_size > 1 else ''}"


def _memory_row(name: str, memory: Memory, alone: Memory) -> str:
    sizes = (memory.parameters, memory.gradients, memory.optimizer, memory.total)
    return f"{name:<14}" + "".join(f"{size / 1e6:>12,.2f}" for size in sizes) + f"{memory.total / alone.total:>9.1%}"


def draw_losses(summary: Summary, path: Path) -> None:
    """The loss of every step, and the held-out loss before and after."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(summary.losses) + 1)
    axes.plot(steps, summary.losses, color="tab:blue", linewidth=1, label="training, each step")
    ends = (0, len(summary.losses)), (summary.held_out_loss_before, summary.held_out_loss_after)
    axes.plot(*ends, "o", color="tab:orange", label="held-out, before and after")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=f"Fine-tuning on {_ranks(summary)}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
