"""One small training run, told twice: by plain torch on the whole batch, and by ranks that each take a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import zero3

WORDS, WIDTH, BATCH, LENGTH = 13, 7, 12, 5  # 12 sentences: a whole number for 1, 2, 3 and 4 ranks


class Block(nn.Module):
    """A residual block of odd sizes, with a scalar among its parameters."""

    def __init__(self, hidden: int, gain: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.full(gain, 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(gelu(self.up(self.norm(x))))


def odd_model(dtype: torch.dtype = torch.float32, seed: int = 0, gain: tuple[int, ...] = ()) -> list[nn.Module]:
    """An embedding, three blocks, a readout: the modules that become layers. `gain`: the shape of the blocks' scalar."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        readout = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
        blocks = [Block(11, gain), Block(3, gain), Block(17, gain)]
        return [module.to(dtype) for module in (nn.Embedding(WORDS, WIDTH), *blocks, readout)]


def sentences(step: int) -> Tensor:
    """Words `[BATCH, LENGTH]` of one step."""
    return torch.randint(WORDS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[Tensor], Tensor], words: Tensor) -> Tensor:
    logits = model(words[:, :-1])
    return cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


class Optimizer(NamedTuple):
    """A kind of optimizer with its options: pickles, unlike a lambda."""

    kind: str
    options: dict[str, Any]

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.kind)(parameters, **self.options)


# Adam can't see a gradient of the wrong scale, so SGD comes first; its steps are big, so that errors would grow
SGD = Optimizer("SGD", {"lr": 0.3, "momentum": 0.9})
ADAMW = Optimizer("AdamW", {"lr": 0.01})


@dataclass
class Run:
    """What a training run left: a loss a step, the gradients of every step, the parameters at the end."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train_plain(modules: list[nn.Module], optimizer: Optimizer, steps: int = 10) -> Run:
    """Single-process torch on the whole batch."""
    model, run = nn.Sequential(*modules), Run()
    steps_of = optimizer.build(p for p in model.parameters() if p.requires_grad)
    for step in range(steps):
        loss = loss_of(model, sentences(step))
        loss.backward()
        run.losses.append(loss.item())
        run.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        steps_of.step()
        steps_of.zero_grad()
    run.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def train_sharded(
    model: nn.Module, optimizer: Optimizer, rank: int, world_size: int, steps: int = 10, forward: Callable[[Tensor], Tensor] | None = None
) -> Run:
    """The same on one rank's part of the batch. `gradients` are this rank's pieces: see `joined`."""
    run = Run()
    steps_of = optimizer.build(zero3.get_trainable_chunk(model))
    for step in range(steps):
        loss = loss_of(forward or model, sentences(step)[rank::world_size])
        loss.backward()
        run.losses.append(loss.item())
        run.gradients.append(gradient_pieces(model, rank))
        steps_of.step()
        steps_of.zero_grad()
    run.parameters = zero3.full_state_dict(model)
    return run


def gradient_pieces(model: nn.Module, rank: int) -> dict[str, Tensor]:
    """This rank's part of each parameter's gradient, flat; parts of one parameter join in rank order."""
    pieces = {}
    prefixes = {layer: name + "." if name else "" for name, layer in model.named_modules() if isinstance(layer, zero3.Zero3Layer)}
    for layer in prefixes:
        for chunk in layer._state.chunks:
            if chunk.shard.requires_grad:
                gradient = chunk.shard.grad.as_subclass(Tensor)
                for piece in chunk.layout.pieces(rank):
                    length = piece.stop - piece.start
                    pieces[prefixes[layer] + piece.slot.name] = gradient[piece.offset : piece.offset + length].clone()
                assert not gradient[piece.offset + length :].any(), "padding must stay zero" if chunk.layout.pieces(rank) else ""
    return pieces


def joined(runs: list[Run]) -> Run:
    """The ranks' runs as one: mean loss, whole gradients (flat), rank 0's parameters."""
    whole = Run(parameters=runs[0].parameters)
    whole.losses = [sum(losses) / len(runs) for losses in zip(*(run.losses for run in runs), strict=True)]
    for pieces in zip(*(run.gradients for run in runs), strict=True):
        names = dict.fromkeys(name for mine in pieces for name in mine)
        whole.gradients.append({name: torch.cat([mine[name] for mine in pieces if name in mine]) for name in names})
    return whole


def assert_same_bits(found: Run, expected: Run) -> None:
    assert found.losses == expected.losses
    for mine, theirs in zip([*found.gradients, found.parameters], [*expected.gradients, expected.parameters], strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name].flatten(), theirs[name].flatten()), name


def difference(found: Run, expected: Run) -> float:
    """The largest relative difference of a loss, of a step's gradients as one vector, of the parameters as one vector."""
    errors = [abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True)]
    for mine, theirs in _compared(found, expected):
        a, b = torch.cat([mine[name] for name in theirs]), torch.cat(list(theirs.values()))
        errors.append(((a - b).norm() / b.norm()).item())
    return max(errors)


def difference_by_tensor(found: Run, expected: Run) -> float:
    """The same for each tensor by itself, against its largest element: where a small one can't hide behind the rest.

    Rounding alone makes 1e-5 of it in fp32 (a scalar's gradient is a sum that cancels), so it is for fp64.
    """
    errors = []
    for mine, theirs in _compared(found, expected):
        errors += [((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs]
    return max(errors)


def _compared(found: Run, expected: Run) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    for mine, theirs in zip([*found.gradients, found.parameters], [*expected.gradients, expected.parameters], strict=True):
        assert mine.keys() == theirs.keys()
        yield tuple({name: value.flatten().double() for name, value in tensors.items()} for tensors in (mine, theirs))
