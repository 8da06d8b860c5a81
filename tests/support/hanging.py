"""Training in which a rank gets stuck at a chosen place, and what `python -m zero3 hang` says of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero3
from zero3.diagnose.hang import Verdict, first_of, models_in

PLACES = {  # where a rank stops: the layer and the direction that have to be named; None: outside of the model
    "data loader": (None, None),
    "first forward": ("'0' (Stops)", "forward"),
    "forward": ("'1' (Stops)", "forward"),
    "last forward": ("'2' (Stops)", "forward"),
    "backward": ("'1' (Stops)", "backward"),
    "optimizer": (None, "step"),
    "before a save": (None, None),
    "in a save": (None, None),
}
NUMBERS = {"first forward": 0, "forward": 1, "last forward": 2, "backward": 1}  # of layers
STEPS, STUCK = 4, 2
PATIENCE = 50.0  # seconds


class _Gate(torch.autograd.Function):
    """Calls something when a gradient passes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, then: Callable[[], None]) -> Tensor:
        ctx.then = then
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.then()
        return gradients[0], None


class Stops(nn.Linear):
    then: Callable[[str], None] = staticmethod(lambda direction: None)

    def forward(self, x: Tensor) -> Tensor:
        self.then("forward")
        return super().forward(_Gate.apply(super().forward(x), lambda: self.then("backward")))


class Config:
    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def to_json_string(self) -> str:
        self._then()
        return "{}"


class Stepping(torch.optim.SGD):
    then: Callable[[], None] = staticmethod(lambda: None)

    def step(self, closure: Any = None) -> Any:
        self.then()
        return super().step(closure)


def train(directory: Path, place: str, stop: Callable[[], None] | None, *, group: Any = None, device: str = "cpu") -> list[Tensor]:
    """`stop` is called on the rank that is to stop, at the place, in the third step."""
    generator = torch.Generator().manual_seed(1)  # the default one is shared by threads
    model = nn.Sequential(*(Stops(4, 4) for _ in range(3)))
    for p in model.parameters():
        nn.init.normal_(p, std=0.3, generator=generator)
    zero3.shard(model, Stops, process_group=group, device=device)
    optimizer = Stepping(zero3.get_trainable_chunk(model), 0.01)
    for step in range(STEPS):
        now = stop if step == STUCK else None

        def at(where: str, now: Callable[[], None] | None = now) -> None:
            if now is not None and where == place:
                now()

        for number, block in enumerate(model):
            inner = getattr(block, "module", block)
            inner.then = lambda direction, n=number: at(place) if NUMBERS.get(place) == n and direction in place else None
        optimizer.then = lambda: at("optimizer")
        at("data loader")
        model(torch.randn(2, 4, generator=generator).to(device)).sum().backward()
        optimizer.step()
        at("before a save")
        if place.endswith("a save"):
            model.config = Config(lambda: at("in a save"))
            zero3.save_checkpoint(directory / "saved", model)
        optimizer.zero_grad()
    return [chunk.detach().cpu().clone() for chunk in zero3.get_trainable_chunk(model)]


def behind(rings: Path, rank: int) -> Verdict:
    """What is told while the rank is stuck, as soon as the others have come as far as they can without it."""
    deadline, damaged = time.monotonic() + PATIENCE, dict[str, str]()
    while True:
        found = first_of(models_in(rings, damaged))[0]
        assert not damaged
        if found["verdict"] == "behind" and found["behind"] == [rank]:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody was told to wait for rank {rank}: {found}")
        time.sleep(0.005)
