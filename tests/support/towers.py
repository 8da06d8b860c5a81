"""Models with towers, and their lives: what each rank calls in each step, against one plain process with the data of all ranks."""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import Broken

HIDDEN, WORDS, PIXELS = 6, 9, 4
TOWERS = ("body.vision", "body.audio")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.checkpoints: bool | None = None  # whether its checkpoint is reentrant

    def run(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=self.checkpoints) if recomputes(self) else self.run(x)


def again(function: Any, given: Any, reentrant: bool | None) -> Any:
    return checkpoint(function, given, use_reentrant=reentrant)


def recomputes(module: Any) -> bool:
    return module.checkpoints is not None and torch.is_grad_enabled()


class Tower(nn.Module):
    """Blocks, and around them what no layer holds; the last of them takes no part in what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Linear(PIXELS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.checkpoints: bool | None = None  # around each block
        self.goes_on = False  # whether that is around what follows the block, too
        self.first_two = False  # whether one checkpoint is around the first two, and what follows them
        self.fails = False
        self.leaves_out: set[int] = set()

    def forward(self, image: Tensor) -> Tensor:
        states = [self.patch(image)]
        for number, block in enumerate(self.blocks):
            if self.fails and number == 1:
                raise Broken("this picture is broken")
            if number in self.leaves_out:
                continue
            run = self.run_two if self.first_two and number == 1 else partial(self.run_on, block) if self.goes_on else block
            if self.first_two and number == 0:
                continue
            states.append(again(run, states[-1], self.checkpoints) if recomputes(self) else run(states[-1]))
        return self.norm(states[-2])

    def run_on(self, block: Block, x: Tensor) -> Tensor:
        return torch.tanh(block(x)).sin()

    def run_two(self, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[1](self.blocks[0](x).sin()))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, HIDDEN), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.audio, self.language = Tower(), Tower(), Language()
        self.checkpoints: bool | None = None
        # what one checkpoint is around: "a call" of a tower, all "calls", on some ranks "later calls", "everything" after the embedding
        self.around, self.nested = "nothing", False  # whether there are others in it

    def forward(self, words: Tensor, calls: list[tuple[str, Tensor]]) -> Tensor:
        x = self.language.embed(words)
        if self.around == "everything" and recomputes(self):
            return again(partial(self.read, calls), x, self.checkpoints)
        return self.read(calls, x)

    def read(self, calls: list[tuple[str, Tensor]], x: Tensor) -> Tensor:
        hears = self.around == "later calls" and calls and calls[0][0] == "audio"
        if hears:
            x, calls = self.add(calls[0], x), calls[1:]
        together = recomputes(self) and (hears or self.around == "calls")
        see = partial(self.see, calls, recomputes(self) and (self.nested or not together))
        return self.language(again(see, x, self.checkpoints) if together else see(x))

    def see(self, calls: list[tuple[str, Tensor]], alone: bool, x: Tensor) -> Tensor:
        alone = alone and (self.nested or self.around in ("a call", "later calls"))
        for call in calls:
            x = again(partial(self.add, call), x, self.checkpoints) if alone else self.add(call, x)
        return x

    def add(self, call: tuple[str, Tensor], x: Tensor) -> Tensor:
        return x.sin() * getattr(self, call[0])(call[1]).mean(0) + x


class Seeing(nn.Module):
    """It reads words, sees and hears, in the order of `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(HIDDEN, 3)

    def forward(self, words: Tensor, calls: list[tuple[str, Tensor]]) -> Tensor:
        return self.head(self.body(words, calls))


def seeing() -> Seeing:
    return Seeing().double()


Calls = tuple[str, ...]  # of one rank in one micro-batch: which towers it calls, in this order


@dataclass
class TowersLife:
    calls: list[list[list[Calls]]]  # [step][micro-batch][rank]
    policy: zero3.ShardingPolicy = field(default_factory=zero3.ShardingPolicy)
    prepare: Callable[[Seeing], None] = lambda model: None
    fails: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)  # (step, micro-batch) -> (rank, its tower)
    keeps: bool = False  # whether micro-batches but the last are under no_sync
    together: bool = False  # whether the losses of micro-batches are added up before one backward
    clip: float | None = None
    delays: random.Random | None = None
    optional: Any = TOWERS

    @property
    def ranks(self) -> int:
        return len(self.calls[0][0])


def batch(life: TowersLife, step: int, micro: int, rank: int, device: str = "cpu") -> tuple[Tensor, list[tuple[str, Tensor]]]:
    drawn = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    words = torch.randint(WORDS, (3,), generator=drawn)
    pixels = lambda: torch.randn(2, PIXELS, generator=drawn, dtype=torch.float64)  # noqa: E731
    return words.to(device), [(name, pixels().to(device)) for name in life.calls[step][micro][rank]]


def trained(life: TowersLife, model: Seeing) -> dict[str, Tensor]:
    """By one process of plain torch."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.02, weight_decay=0.1)
    for step, micros in enumerate(life.calls):
        for micro in range(len(micros)):
            for rank in range(life.ranks) if (step, micro) not in life.fails else ():
                backward(model(*batch(life, step, micro, rank)).square().sum() / life.ranks)
        if life.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), life.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def backward(loss: Tensor) -> None:
    if loss.requires_grad:
        loss.backward()


def trained_sharded(life: TowersLife, model: Seeing, group: Any = None, rank: int | None = None, device: str = "cpu") -> dict[str, Tensor]:
    """On one rank of several."""
    rank = group.rank if rank is None else rank
    if life.delays is not None:
        delays = random.Random(life.delays.random() + rank)
        group.before = lambda kind: time.sleep(delays.choice([0] * 9 + [0.001]))
    zero3.shard(model, [Block, nn.Embedding], optional=life.optional, policy=life.policy, process_group=group, device=device)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), 0.02, weight_decay=0.1)
    for step, micros in enumerate(life.calls):
        losses: list[Tensor] = []
        for micro in range(len(micros)):
            with zero3.no_sync(model) if life.keeps and micro < len(micros) - 1 else nullcontext(), failing(life, model, step, micro, rank):
                loss = model(*batch(life, step, micro, rank, device)).square().sum()
                losses.append(loss)
                if not life.together:
                    backward(loss)
        if life.keeps and ((step, len(micros) - 1) in life.fails or not loss.requires_grad):  # then no backward has reduced what is kept
            zero3.reduce_gradients(model)
        if life.together:
            backward(sum(losses))  # type: ignore[arg-type]
        if life.clip is not None:
            zero3.clip_grad_norm_(model, life.clip)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(*batch(life, 0, 0, rank, device))
    return {name: p.cpu().clone() for name, p in zero3.full_state_dict(model, rank0_only=False).items()}


@contextmanager
def failing(life: TowersLife, model: Seeing, step: int, micro: int, rank: int) -> Iterator[None]:
    """All ranks raise: the one whose tower fails its own error, the others one that names it."""
    broken, name = life.fails.get((step, micro), (None, ""))
    if broken is None:
        yield
        return
    model.get_submodule(name).fails = rank == broken
    told = ""
    try:
        yield
    except (Broken, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
        error.__traceback__ = None  # Python 3.12 keeps it in a circle here, and with it a checkpoint of torch 2.11 its hooks in this thread
    finally:
        model.get_submodule(name).fails = False
    own, others = "Broken: this picture is broken", f"rank {broken}: its call of {name!r} raised Broken: this picture is broken"
    assert told == own if rank == broken else others in told, told


def check_life(life: TowersLife) -> None:
    from tests.support.ranks import run_ranks

    torch.manual_seed(0)
    model = seeing()
    life.prepare(model)
    models = [copy.deepcopy(model) for _ in range(life.ranks)]  # here: threads share one random generator
    everyone = run_ranks(life.ranks, lambda group: trained_sharded(life, models[group.rank], group), 20)
    expected = trained(life, model)
    for found in everyone:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


# -- what is drawn


def frozen(*parts: str) -> Callable[[Seeing], None]:
    def freeze(model: Seeing) -> None:
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(parts))

    return freeze


def checkpointed(*, reentrant: bool, around: bool) -> Callable[[Seeing], None]:
    def switch_on(model: Seeing) -> None:
        for module in model.modules():
            if isinstance(module, Tower if around else Block):
                module.checkpoints = reentrant

    return switch_on


def around(what: str, *parts: str, reentrant: bool, nested: bool = False) -> Callable[[Seeing], None]:
    """One checkpoint around several layers, of which `parts` are frozen."""

    def switch_on(model: Seeing) -> None:
        frozen(*parts)(model)
        if what == "two blocks":
            for tower in (model.body.vision, model.body.audio):
                tower.checkpoints, tower.first_two = reentrant, True
        elif what == "a block and more":
            for tower in (model.body.vision, model.body.audio):
                tower.checkpoints, tower.goes_on = reentrant, True
        else:
            model.body.checkpoints, model.body.around, model.body.nested = reentrant, what, nested

    return switch_on


PREPARED: dict[str, Callable[[Seeing], None]] = {
    "all trains": lambda model: None,
    "frozen tower": frozen("body.vision"),
    "frozen towers": frozen(*TOWERS),
    "frozen language model": frozen("body.language", "head"),
    "one tower trains": frozen("body.language", "head", "body.audio"),
    "checkpoints in layers": checkpointed(reentrant=False, around=False),
    "reentrant checkpoints in layers": checkpointed(reentrant=True, around=False),
    "checkpoints around layers": checkpointed(reentrant=False, around=True),
    "reentrant checkpoints around layers": checkpointed(reentrant=True, around=True),
    **{
        f"a {'reentrant ' * reentrant}checkpoint around {what}": around(what, reentrant=reentrant)
        for what in ("two blocks", "a block and more", "a call", "calls", "later calls", "everything")
        for reentrant in (False, True)
    },
    "a checkpoint around calls that have their own": around("calls", reentrant=False, nested=True),
    "a checkpoint around everything, and in it around calls": around("everything", reentrant=False, nested=True),
    "a checkpoint around calls of which one is frozen": around("calls", "body.vision", reentrant=False),
    "a reentrant checkpoint around calls of which one is frozen": around("calls", "body.vision", reentrant=True),
}
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole after forward": {"reshard_after_forward": False},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "host memory": {"offload": "cpu"},
    "no prefetch": {"prefetch_depth": 0},
    "far prefetch": {"prefetch_depth": 3},
    "compared": {"compare_every": 1},
    "transactional": {"transactional": True},
}


def drawn_life(seed: int) -> TowersLife:
    dice = random.Random(seed)
    ranks, steps, micros = dice.choice([1, 2, 2, 3, 3, 4]), dice.randint(2, 4), dice.randint(1, 2)
    most = dice.choice([0, 1, 2, 3])

    def calls() -> Calls:
        names = ["vision"] * dice.randint(0, most) + ["audio"] * dice.randint(0, most)
        dice.shuffle(names)
        return tuple(names)

    plan = [[[calls() for _ in range(ranks)] for _ in range(micros)] for _ in range(steps)]
    fails = {
        (step, micro): (rank, f"body.{dice.choice(plan[step][micro][rank])}")
        for step in range(steps)
        for micro in range(micros)
        if dice.random() < 0.2 and ranks > 1 and plan[step][micro][rank := dice.randrange(ranks)]
    }
    together = dice.random() < 0.2
    policy = dice.choice(list(POLICIES.values()))
    return TowersLife(
        plan,
        zero3.ShardingPolicy(**policy),
        dice.choice(list(PREPARED.values())),
        {} if together else fails,
        keeps=not together and dice.random() < 0.3,
        together=together,
        clip=dice.choice([None, 0.5]),
        delays=dice,
    )
