"""Stories: what one rank does in a step, in its order, as a line of text.

    g2  all-gather of layer 2      f2  layer 2 computes in forward       x  ranks compare what they are about to do
    r2  reduce-scatter of layer 2  b2  layer 2 computes in backward      |  between forward and backward

A collective stands where it is issued. So `g1 f0` is a prefetch: layer 1 travels while layer 0 computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import Collective, ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

WIDTHS = (4, 6, 5, 7, 3)  # of four layers with 30, 35, 42 and 24 parameters: a size names its layer
SLOTS = 2  # of each layer: its weight and its bias
LETTERS = {"all_gather": "g", "reduce_scatter": "r", "exchange": "x", "scatter": "s", "broadcast": "b", "all_reduce": "a"}


class Block(nn.Module):
    """A linear layer that writes into the story when it computes. `reentrant`: recompute it in backward (None: do not)."""

    def __init__(self, number: int, log: list[Any], reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTHS[number], WIDTHS[number + 1])
        self.number, self.log, self.reentrant = number, log, reentrant
        self.uses_parameters = True

    def compute(self, x: Tensor) -> Tensor:
        self.log.append(f"f{self.number}")
        x = self.linear(x) if self.uses_parameters else x.sum(-1, keepdim=True).expand(*x.shape[:-1], self.linear.out_features)
        if x.requires_grad:
            x.register_hook(lambda grad: self.log.append(f"b{self.number}"))
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x) if self.reentrant is None else checkpoint(self.compute, x, use_reentrant=self.reentrant)


class Container(nn.Module):
    """A model of one's own around layers. `reentrant`: a checkpoint around each."""

    def __init__(self, layers: list[Zero3Layer], calls: tuple[int, ...] = (0, 1, 2, 3), reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.calls, self.reentrant = calls, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for number in self.calls:
            layer = self.layers[number]
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Embracing(Container):
    """An outer layer with parameters of its own."""

    def __init__(self, layers: list[Zero3Layer]) -> None:
        super().__init__(layers)
        self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.own(x))


@dataclass
class Teller:
    """One rank's model, and its story since it was last told."""

    communicator: ThreadCommunicator
    names: dict[tuple[str, int, torch.dtype], str] = field(default_factory=dict)

    def blocks(self, reentrant: bool | None = None, frozen: tuple[int, ...] = ()) -> list[Block]:
        torch.manual_seed(0)
        blocks = [Block(number, self.communicator.log, reentrant) for number in range(4)]
        for number in frozen:
            blocks[number].requires_grad_(False)
        return blocks

    def wrap(self, module: nn.Module, name: str, policy: ShardingPolicy) -> Zero3Layer:
        layer = Zero3Layer(module, process_group=self.communicator, policy=policy)
        for chunk in layer._state.chunks:
            kind = "" if len(layer._state.chunks) == 1 else "t" if chunk.shard.requires_grad else "f"
            layout = chunk.layout
            trailers = layout.world_size * len(layout.slots)  # what a reduction has behind each slice
            for letter, numel in (("g", layout.padded_numel), ("s", layout.padded_numel), ("r", layout.padded_numel + trailers)):
                self.names[letter, numel, chunk.shard.dtype] = f"{name}{kind}"
        return layer

    def sequential(self, blocks: list[Block], **policy: Any) -> Zero3Sequential:
        return Zero3Sequential([self.wrap(block, str(block.number), ShardingPolicy(**policy)) for block in blocks])

    def story(self) -> str:
        log: list[Any] = self.communicator.log
        log, self.communicator.log[:] = list(log), []
        return " ".join(entry if isinstance(entry, str) else self._word(entry) for entry in log)

    def _word(self, entry: Collective) -> str:
        letter = LETTERS[entry.kind]
        return letter + self.names.get((letter, entry.numel, entry.dtype), "")

    def step(self, model: nn.Module, *, input_needs_grad: bool = False) -> str:
        output = model(torch.randn(2, 4, requires_grad=input_needs_grad))
        self.communicator.log.append("|")  # type: ignore[arg-type]
        output.sum().backward()
        return self.story()


def told(body: Callable[[Teller], Any], world_size: int = 2) -> Any:
    """What `body` returns, if it is the same on all ranks."""
    results = run_ranks(world_size, lambda communicator: body(Teller(communicator)))
    assert all(result == results[0] for result in results), "ranks differ"
    return results[0]


def steps_of(make: Callable[[Teller], nn.Module], world_size: int = 2, **options: Any) -> tuple[str, str]:
    """The first step and a later one, which is the same from the second on."""

    def body(teller: Teller) -> list[str]:
        model = make(teller)
        teller.story()
        return [teller.step(model, **options) for _ in range(4)]

    first, *later = told(body, world_size)
    assert set(later) == {later[0]}
    return first, later[0]


def bytes_of(transfers: list[Any]) -> dict[str, int]:
    """Bytes of full buffers by kind of collective."""
    totals: dict[str, int] = {}
    for entry in transfers:
        if isinstance(entry, Collective):
            totals[entry.kind] = totals.get(entry.kind, 0) + entry.numel * entry.dtype.itemsize
    return totals
