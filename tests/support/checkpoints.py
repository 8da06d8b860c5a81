"""What tests of checkpoints share: a model with one of everything that is odd, optimizers, and short runs of both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group

WORDS, WIDTH = 7, 5


class Block(nn.Module):
    """A linear map without its bias's gradient, a 0-dim parameter, an empty one, one that nobody uses, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.bias.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.idle = nn.Parameter(torch.randn(3))
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.randn(2, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.gain * torch.tanh(self.linear(x)[..., self.order]) + self.empty.sum()


class Odd(nn.Module):
    """Three blocks between an embedding and a readout that are tied, and a norm that is left to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def content_of(checkpoint: Path) -> Any:
    """Of its manifest."""
    return json.loads((checkpoint / "manifest.json").read_text())


def rewrite(checkpoint: Path, content: dict[str, Any]) -> None:
    """Makes it the manifest's content, with the hash that belongs to it."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    (checkpoint / "manifest.json").write_text(json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def odd() -> Odd:
    """The same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Odd().double()


Layers = Callable[[str, nn.Module], bool]
LAYERS: dict[str, Layers | None] = {
    "blocks": None,
    "maps": lambda name, module: isinstance(module, nn.Linear) and "blocks" in name,
    "blocks and maps": lambda name, module: isinstance(module, Block) or (isinstance(module, nn.Linear) and "blocks" in name),
}
LINEAR: Layers = lambda name, module: isinstance(module, nn.Linear)  # noqa: E731

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]
# all of torch.optim that work element by element, with options that make them keep all that they can
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, capturable lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], *, zeros: bool = False) -> list[float]:
    """All ranks take the same words, so that a plain model can follow. `zeros`: a missing gradient counts as zeros, as in DeepSpeed."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        words = torch.randint(WORDS, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if zeros and p.grad is None):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        losses.append(loss.item())
    return losses


def reached(found: dict[str, Any]) -> dict[str, Any]:
    """Without the state of what no gradient ever reached: torch has none; where it shares a chunk it is as an optimizer begins it."""
    return {**found, "state": {name: of for name, of in found["state"].items() if not name.endswith(".idle")}}


def plain(optimizer: str, build: Callable[[], nn.Module] = odd) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    return model, OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])


def on_ranks(
    world_size: int,
    body: Callable[[Any, torch.optim.Optimizer, ThreadCommunicator], Any],
    *,
    optimizer: str = "AdamW",
    layers: str | Layers = "blocks",
    build: Callable[[], nn.Module] = odd,
    timeout: float = 60.0,
) -> list[Any]:
    """`body(model, optimizer, group)` on every rank, for a fresh sharded model; what each returned."""
    models = [build() for _ in range(world_size)]  # here: threads share one random generator

    def rank(group: ThreadCommunicator) -> Any:
        model = zero3.shard(models[group.rank], LAYERS[layers] if isinstance(layers, str) else layers, process_group=process_group(group))
        return body(model, OPTIMIZERS[optimizer](zero3.get_trainable_chunk(model)), group)

    return run_ranks(world_size, rank, timeout)


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    """Dicts, lists, numbers and tensors, of the same types, dtypes and bits."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor), what
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
        assert torch.equal(found.detach().reshape(-1).view(torch.uint8), expected.detach().reshape(-1).view(torch.uint8)), what
    elif isinstance(expected, dict):
        assert isinstance(found, dict) and found.keys() == expected.keys(), f"{what}: {list(found)} instead of {list(expected)}"
        for key in expected:
            assert_same(found[key], expected[key], f"{what}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected), what
        for index, item in enumerate(expected):
            assert_same(found[index], item, f"{what}[{index}]")
    else:
        assert type(found) is type(expected) and found == expected, f"{what}: {found!r} instead of {expected!r}"


def resumed(
    path: Path,
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module, ThreadCommunicator], tuple[nn.Module, Any]],  # the sharded model, and its optimizer or optimizers
    train: Callable[[nn.Module, Any, range], object],
) -> dict[str, Tensor]:
    """The full state dict after three steps on two ranks, a checkpoint, and two steps on three ranks."""

    def body(steps: range, load: bool) -> Callable[[ThreadCommunicator], dict[str, Tensor]]:
        models = [build() for _ in range(3)]

        def rank(group: ThreadCommunicator) -> dict[str, Tensor]:
            model, optimizer = shard(models[group.rank], group)
            if load:
                zero3.load_checkpoint(path, model, optimizer)
            train(model, optimizer, steps)
            zero3.save_checkpoint(path, model, optimizer)
            return zero3.full_state_dict(model)

        return rank

    run_ranks(2, body(range(3), load=False))
    return run_ranks(3, body(range(3, 5), load=True))[0]
